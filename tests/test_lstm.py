"""The recurrent scripts: the memory's arithmetic, its resets, what it is trained on, and what it is good for."""

import importlib
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SMALL, small_args
from faulty_envs import hook_envs
from gymnasium.spaces import Box, Discrete

import ppo
import ppo_lstm


class Cue(gym.Env):
    """Shows -1 or 1 at the first of five steps; the action at the fifth must match it. Chance is 0.5."""

    observation_space, action_space = Box(-1, 1, (2,), np.float32), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.t = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        last = self.t == 5
        return np.array([0, self.t / 5], np.float32), float(last and action == self.cue), last, False, {}


class Cut(Cue):
    """Never ends but by truncation, at its third step."""

    def step(self, action):
        self.t += 1
        return np.array([0.5, self.t / 5], np.float32), 1.0, False, self.t == 3, {}


gym.register("Cue-v0", Cue)
gym.register("Cut-v0", Cut)


@pytest.fixture(params=["ppo_lstm", "ppo_atari_lstm"])
def recurrent(request):
    """Each recurrent script in turn."""
    return importlib.import_module(request.param)


def random_sequences(script, num_layers=1, num_lstms=1, num_sequences=3, seq_len=70):
    """A memory, inputs (M, S, F), a state, and starts that include step 0, the last one, and consecutive ones."""
    torch.manual_seed(0)
    memory = script.Memory(5, 8, num_layers, num_lstms)
    starts = (torch.rand(num_sequences, seq_len) < 0.1).float()
    starts[0, 0] = starts[1, -1] = starts[2, 5] = starts[2, 6] = 1
    starts[1, 0] = 0
    state = torch.randn_like(memory.initial_state(num_sequences))
    return memory, torch.randn(num_sequences, seq_len, 5), state, starts


@pytest.mark.parametrize("num_lstms", [1, 2])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_sequences_equal_steps(recurrent, num_layers, num_lstms):
    """Catches: a reset that is missed, or misplaced, or a gradient that flows across one, in the sequence pass."""
    memory, x, state, starts = random_sequences(recurrent, num_layers, num_lstms)
    weights = torch.randn(num_lstms, 3, 70, 8)
    features, _ = memory(x.flatten(0, 1), state, starts)
    loss = sum((w.flatten(0, 1) * f).sum() for w, f in zip(weights, features))
    gradients = torch.autograd.grad(loss, list(memory.parameters()))
    steps, s = [], state
    for t in range(70):
        feature, s = memory(x[:, t], s, starts[:, t])
        steps.append(torch.stack(feature))
    by_step = torch.stack(steps, 2)  # (K, M, S, H)
    torch.testing.assert_close(torch.stack(features), by_step.flatten(1, 2), rtol=1e-5, atol=1e-6)
    by_step_gradients = torch.autograd.grad((weights * by_step).sum(), list(memory.parameters()))
    for a, b in zip(gradients, by_step_gradients):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_state_is_zeroed_where_an_episode_starts(recurrent):
    """Catches: a memory of the episode before; a reset by the flag of the outgoing observation."""
    memory, x, state, _ = random_sequences(recurrent)
    fresh, fresh_state = memory(x[:, 0], memory.initial_state(3), torch.zeros(3))
    reset, reset_state = memory(x[:, 0], state, torch.ones(3))
    kept, _ = memory(x[:, 0], state, torch.zeros(3))
    assert torch.equal(fresh[0], reset[0])
    assert torch.equal(fresh_state, reset_state)
    assert not torch.allclose(kept[0], fresh[0])


def test_permuted_envs_give_permuted_results(recurrent):
    """Catches: states that are mixed up between envs."""
    memory, x, state, starts = random_sequences(recurrent)
    order = torch.tensor([2, 0, 1])
    features = memory(x.flatten(0, 1), state, starts)[0][0].unflatten(0, (3, 70))
    permuted = memory(x[order].flatten(0, 1), state[order], starts[order])[0][0].unflatten(0, (3, 70))
    torch.testing.assert_close(features[order], permuted)


def test_lstm_init(recurrent):
    """Catches: torch's uniform default in place of orthogonal weights and zero biases."""
    memory = recurrent.Memory(512, 32, 1, 1)
    for name, parameter in memory.named_parameters():
        if "bias" in name:
            assert not parameter.any()
        else:
            smaller = parameter if parameter.shape[0] < parameter.shape[1] else parameter.T
            torch.testing.assert_close(smaller @ smaller.T, torch.eye(len(smaller)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("recurrent", ["ppo_lstm"], indirect=True)
def test_a_resume_may_cut_sequences_otherwise(recurrent):
    """Catches: a new seq_len judged by the default's num_steps in place of the run's, or not used."""
    run_dir = recurrent.train(small_args(recurrent, num_steps=24, total_timesteps=96))
    with pytest.raises(recurrent.UserError, match="--seq-len must be a divisor"):
        recurrent.saved_args(run_dir, total_timesteps=192, seq_len=7)
    recurrent.train(recurrent.saved_args(run_dir, total_timesteps=192, seq_len=12, num_minibatches=4))
    state = recurrent.load_checkpoint(run_dir / "checkpoint.pt")
    assert (state["args"]["seq_len"], state["args"]["num_steps"], state["iteration"]) == (12, 24, 4)


REPLAYS = [*(("ppo_lstm", seq_len) for seq_len in (0, 1, 2, 8)), ("ppo_atari_lstm", 2)]


@pytest.mark.parametrize(("recurrent", "seq_len"), REPLAYS, indirect=["recurrent"])
def test_replayed_log_probabilities_equal_the_rollouts(recurrent, seq_len, monkeypatch):
    """Catches: a wrong stored state, a sequence out of order, a state not carried from one rollout to the next."""
    ratios, original = [], recurrent.ppo_loss

    def spy(new_logprobs, old_logprobs, advantages, new_values, old_values, *rest):
        ratios.append((new_logprobs - old_logprobs).abs().max().item())
        ratios.append((new_values - old_values).abs().max().item() / (1 + old_values.abs().max().item()))
        return original(new_logprobs, old_logprobs, advantages, new_values, old_values, *rest)

    monkeypatch.setattr(recurrent, "ppo_loss", spy)
    args = SMALL[recurrent.__name__] | dict(seq_len=seq_len, num_steps=32, total_timesteps=192)
    args |= dict(num_minibatches=1, update_epochs=1, learning_rate=1e-2)
    recurrent.train(recurrent.Args(**args))
    assert len(ratios) == 2 * 3
    assert max(ratios) < 1e-4


def test_the_final_observation_is_valued_with_the_state_that_led_to_it(monkeypatch):
    """Catches: the bootstrap of a truncated episode from a state of zeros, or from the next episode's."""
    seen, original = [], ppo_lstm.compute_gae

    def spy(rewards, values, next_values, *rest):
        seen.append(next_values.clone())
        return original(rewards, values, next_values, *rest)

    monkeypatch.setattr(ppo_lstm, "compute_gae", spy)
    args = small_args(ppo_lstm, env_id="Cut-v0", total_timesteps=32, learning_rate=1e-12)
    run_dir = ppo_lstm.train(args)
    agent = ppo_lstm.Agent(ppo_lstm.make_envs(args, 1), args)
    ppo_lstm.load_checkpoint(run_dir / "checkpoint.pt", agent)
    values = []
    for cue in (-1, 1):
        state, starts = agent.memory.initial_state(1), torch.ones(1)
        for obs in ([cue, 0], [0.5, 0.2], [0.5, 0.4]):
            *_, state = agent.get_action_and_value(torch.tensor([obs]), state, starts)
            starts = torch.zeros(1)
        values.append(agent.get_value(torch.tensor([[0.5, 0.6]]), state, starts).item())
    truncated = seen[0][2::3].flatten()  # an episode lasts 3 steps
    distance = torch.stack([(truncated - value).abs() for value in values]).min(0).values
    assert distance.max() < 1e-5
    assert abs(values[0] - values[1]) > 1e-4, "the state makes a difference"


@pytest.fixture
def acts(recurrent, monkeypatch):
    """(state given, starts, state returned) of each call of the policy for one step."""
    calls, original = [], recurrent.Agent.get_action_and_value

    def spy(agent, obs, state, starts, *rest, **options):
        result = original(agent, obs, state, starts, *rest, **options)
        if starts.dim() == 1:
            calls.append((state.clone(), starts.clone(), result[-1].clone()))
        return result

    monkeypatch.setattr(recurrent.Agent, "get_action_and_value", spy)
    return calls


def goes_on(acts) -> bool:
    """Whether each step was given the state that the one before it returned."""
    return all(torch.equal(given, after) for (_, _, after), (given, _, _) in itertools.pairwise(acts))


def test_the_state_goes_on(recurrent, acts, monkeypatch):
    """Catches: a memory that is lost between rollouts or in evaluation, or kept past a restart, a life or a cut."""
    args = small_args(recurrent, exact_resume=True, checkpoint_every=2)
    run_dir = recurrent.train(args)
    assert len(acts) == args.num_iterations * args.num_steps
    assert goes_on(acts)
    assert {0, 2 * args.num_steps} <= {step for step, (_, starts, _) in enumerate(acts) if starts.all()}
    acts.clear()
    dones = [True]

    def end(step, transition):
        transition[2], transition[3] = [step % 5 == 1] | transition[2], [step % 7 == 3] | transition[3]
        dones.extend(transition[2] | transition[3])

    hook_envs(monkeypatch, recurrent, end)
    recurrent.evaluate(run_dir / "checkpoint.pt", 1)
    assert len(acts) > 7
    assert goes_on(acts)
    assert [starts.tolist() for _, starts, _ in acts] == [[float(done)] for done in dones[:-1]]


def test_last_observations_are_valued_with_the_state_after_the_step(recurrent, acts, monkeypatch):
    """Catches: a bootstrap, at a truncation or at the rollout's end, from a state of zeros or from an older one."""
    seen, original = [], recurrent.Agent.get_value

    def spy(agent, obs, state, starts):
        seen.append(all(any(torch.equal(row, after) for after in acts[-1][2]) for row in state))
        return original(agent, obs, state, starts)

    monkeypatch.setattr(recurrent.Agent, "get_value", spy)
    vectors = recurrent is ppo_lstm
    changes = dict(env_id="Cut-v0") if vectors else dict(num_steps=104, total_timesteps=208, update_epochs=1)
    args = small_args(recurrent, **changes)
    recurrent.train(args)
    assert len(seen) > args.num_iterations, "some episodes were truncated"
    assert all(seen)


def test_memory_is_needed_and_there():
    """Catches: a memory that does not learn; a probe that needs none."""
    settings = dict(env_id="Cue-v0", num_envs=8, num_steps=40, learning_rate=3e-3, gamma=0.9, ent_coef=0.003)
    returns = {}
    settings |= dict(num_minibatches=4, update_epochs=5)
    for script, steps, extra in ((ppo_lstm, 12_000, dict(seq_len=40, hidden_size=32)), (ppo, 6_000, {})):
        run_dir = script.train(script.Args(**settings, **extra, total_timesteps=steps))
        returns[script.__name__] = np.mean(script.evaluate(run_dir / "checkpoint.pt", 100))
    assert returns["ppo_lstm"] > 0.95
    assert returns["ppo"] < 0.75


def test_velocities_are_hidden_where_they_are_known():
    """Catches: a default task that needs no memory."""
    hidden = ppo_lstm.make_envs(ppo_lstm.Args(), 2)
    shown = ppo_lstm.make_envs(ppo_lstm.Args(mask_velocity=False), 2)
    for envs in (hidden, shown):
        envs.reset(seed=[1, 2])
    a, b = (envs.step(np.array([0, 1]))[0] for envs in (hidden, shown))
    asked = ppo_lstm.make_envs(ppo_lstm.Args(mask_velocity=True), 2)
    asked.reset(seed=[1, 2])
    assert (asked.step(np.array([0, 1]))[0] == a).all()
    assert (a[:, [0, 2]] == b[:, [0, 2]]).all()
    assert not a[:, [1, 3]].any()
    assert b[:, [1, 3]].all()
    assert ppo_lstm.make_envs(ppo_lstm.Args(env_id="Acrobot-v1"), 1).reset(seed=[1])[0][:, 4:].all()
    with pytest.raises(ppo_lstm.UserError, match=r"the velocities of Acrobot-v1 .*: leave --mask-velocity out"):
        ppo_lstm.make_envs(ppo_lstm.Args(env_id="Acrobot-v1", mask_velocity=True), 1)


@pytest.mark.parametrize(
    ("env_id", "hidden"),
    [
        ("MountainCar-v0", [1]),
        ("MountainCarContinuous-v0", [1]),
        ("Pendulum-v1", [2]),
        ("LunarLander-v3", [2, 3, 5]),
        ("LunarLanderContinuous-v3", [2, 3, 5]),
    ],
)
def test_hidden_are_the_velocities(env_id, hidden):
    """Catches: a table that hides a position, or shows a velocity."""
    seen = []
    for mask in (None, False):
        envs = ppo_lstm.make_envs(ppo_lstm.Args(env_id=env_id, mask_velocity=mask), 1)
        envs.reset(seed=[1])
        envs.action_space.seed(0)
        seen.append(envs.step(envs.action_space.sample())[0][0])
        envs.close()
    assert np.flatnonzero(seen[0] != seen[1]).tolist() == hidden
    assert not seen[0][hidden].any()


def test_an_env_of_the_same_name_is_shown_whole():
    """Catches: numbers hidden that are no velocities, in a user's own CartPole."""
    gym.register("CartPole-v7", entry_point="probe_envs:hidden_cart_pole", kwargs=dict(seen=[1, 1, 1, 1]))
    try:
        envs = ppo_lstm.make_envs(ppo_lstm.Args(env_id="CartPole-v7"), 1)
        assert envs.reset(seed=[1])[0].all()
        with pytest.raises(ppo_lstm.UserError, match="leave --mask-velocity out"):
            ppo_lstm.make_envs(ppo_lstm.Args(env_id="CartPole-v7", mask_velocity=True), 1)
    finally:
        del gym.registry["CartPole-v7"]


def test_rewards_are_raised_to_the_floor_and_scaled(monkeypatch):
    """Catches: options of the rewards that are not used, or that change what is logged."""
    seen, original = [], ppo_lstm.compute_gae
    monkeypatch.setattr(ppo_lstm, "compute_gae", lambda r, *rest: (seen.append(r), original(r, *rest))[1])
    ppo_lstm.train(small_args(ppo_lstm, env_id="Cue-v0", reward_floor=0.5, reward_scale=0.1))
    assert torch.cat(seen).unique().tolist() == pytest.approx([0.05, 0.1])


def test_the_critic_has_a_learning_rate_of_its_own():
    """Catches: parameter groups that leave a parameter out, or twice in."""
    args = small_args(ppo_lstm, shared_lstm=False, critic_learning_rate=1e-12, learning_rate=1e-2)
    run_dir = ppo_lstm.train(args)
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    torch.manual_seed(1)
    agent = ppo_lstm.Agent(ppo_lstm.make_envs(args, 2), args)
    moved = {name for name, value in agent.state_dict().items() if not torch.allclose(value, state["agent"][name])}
    assert {name for name in moved if name.startswith(("critic", "memory.lstms.1"))} == set()
    assert {name.split(".")[0] for name in moved} == {"actor", "actor_hidden", "memory"}
    groups = state["optimizer"]["param_groups"]
    assert sum(len(group["params"]) for group in groups) == len(list(agent.parameters()))
    last = 1 / args.num_iterations  # both fall linearly
    assert [float(group["lr"]) for group in groups] == pytest.approx([1e-2 * last, 1e-12 * last])


@pytest.mark.parametrize("shared", [False, True])
def test_box_actions_and_layers(shared):
    """Catches: an option that does nothing, or only works with the defaults of the others."""
    options = dict(env_id="Pendulum-v1", shared_lstm=shared, num_layers=2, log_std_init=-1.0, learn_log_std=False)
    run_dir = ppo_lstm.train(small_args(ppo_lstm, **options))
    agent = torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]
    assert agent["actor_logstd"].tolist() == [-1.0]
    assert sum(name.endswith("weight_hh_l0") for name in agent) == (1 if shared else 2)
    assert len(ppo_lstm.evaluate(run_dir / "checkpoint.pt", 2)) == 2


@torch.backends.mkldnn.flags(enabled=False)  # whose LSTM in bfloat16 wants AVX-512, without which it is not offered
def test_bfloat16_is_for_sequences_only():
    """Catches: a half precision that reaches the rollout or the last layers, or a flag that does nothing."""
    args = small_args(ppo_lstm, hidden_size=64)
    torch.manual_seed(0)
    agent = ppo_lstm.Agent(ppo_lstm.make_envs(args, 2), args)
    obs, actions, starts = torch.randn(64, 4), torch.randint(2, (64,)), (torch.rand(4, 16) < 0.1).float()
    state = torch.randn_like(agent.memory.initial_state(4))

    def outputs():
        """Of one step with the state after it, of sequences, and the gradients of those."""
        _, *step = agent.get_action_and_value(obs[:4], state, starts[:, 0], actions[:4])
        _, *sequences, _ = agent.get_action_and_value(obs, state, starts, actions)
        agent.zero_grad()
        sum((x**2).sum() for x in sequences).backward()
        return step, sequences + [parameter.grad.clone() for parameter in agent.parameters()]

    steps, exact = outputs()
    agent.bf16 = True
    same_steps, rounded = outputs()
    assert all(torch.equal(a, b) for a, b in zip(steps, same_steps))
    for a, b in zip(exact, rounded):
        assert b.dtype == torch.float32
        assert not torch.equal(a, b)
        assert (a - b).norm() < 0.03 * a.norm()
    value = rounded[2]
    assert not torch.equal(value, value.bfloat16().float())  # as it would be from a layer in bfloat16


def test_log_probability_and_entropy_of_any_shape():
    """Catches: a mean over the components in place of a sum, or an entropy that falls with the standard deviation."""
    args = small_args(ppo_lstm, env_id="test_spaces:WideBox-v0")
    torch.manual_seed(0)
    agent = ppo_lstm.Agent(ppo_lstm.make_envs(args, 4), args)
    agent.actor_logstd.data.uniform_(-1, 1)
    given = torch.randn(4, 3), agent.memory.initial_state(4), torch.ones(4)
    mean, *_ = agent.get_action_and_value(*given, deterministic=True)
    action, logprob, entropy, *_ = agent.get_action_and_value(*given)
    assert action.shape == (4, 2, 3)
    policy = torch.distributions.Independent(torch.distributions.Normal(mean, agent.actor_logstd.exp()), 2)
    torch.testing.assert_close(logprob, policy.log_prob(action))
    torch.testing.assert_close(entropy, policy.entropy())


def test_an_evaluation_takes_the_most_likely_action(recurrent, monkeypatch):
    """Catches: --deterministic that ppo_lstm.py heeds and ppo_atari_lstm.py does not."""
    run_dir = recurrent.train(small_args(recurrent))

    def spy(agent, *args, deterministic=False):
        raise InterruptedError(deterministic)

    monkeypatch.setattr(recurrent.Agent, "get_action_and_value", spy)
    for deterministic in (True, False):
        with pytest.raises(InterruptedError, match=str(deterministic)):
            recurrent.evaluate(run_dir, 1, recurrent.saved_args(run_dir, deterministic=deterministic))
