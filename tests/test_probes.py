"""What train learns on envs whose answer is known, and that it learns from real transitions only."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import PROBED, probe_args, read_scalars, small_args
from probe_envs import Logged

FAST = dict(
    num_envs=4, num_steps=32, total_timesteps=40 * 128, learning_rate=3e-3, update_epochs=4, clip_vloss=False, gamma=0.5
)

ROLLOUTS = [*((name, 32) for name in PROBED), ("ppo", 1)]  # scripts, and steps of a rollout; the loops are alike


def trained(script, env_name, **options):
    """Train on a probe env, and return the values and the likeliest actions as functions of the observation."""
    args = probe_args(script, env_name, **FAST | options)
    run_dir = script.train(args)
    envs = script.make_envs(args, 1)
    agent = script.Agent(envs, args)
    script.load_checkpoint(run_dir / "checkpoint.pt", agent)
    envs.close()

    @torch.no_grad()
    def value(obs: float) -> float:
        return agent.get_value(torch.tensor([[obs]])).item()

    @torch.no_grad()
    def share_of_bit_1(obs: float) -> float:
        action, *_ = agent.get_action_and_value(torch.full((200, 1), obs))
        return (action.reshape(200, -1)[:, 0] > 0).float().mean().item()

    return value, share_of_bit_1


def test_value_of_a_constant_reward(probed_script):
    """Catches: a value loss that does not train the critic."""
    value, _ = trained(probed_script, "ConstantReward")
    assert value(0) == pytest.approx(1, abs=0.05)


def test_value_of_the_observation(probed_script):
    """Catches: values that belong to other observations than their own."""
    value, _ = trained(probed_script, "ObservationValue")
    assert value(1) == pytest.approx(1, abs=0.1)
    assert value(-1) == pytest.approx(-1, abs=0.1)


@pytest.mark.parametrize("options", [{}, dict(gae=False), dict(gae_lambda=0.0)], ids=str)
def test_value_over_two_steps(probed_script, options):
    """Catches: a discount that is lost or applied twice, and an episode's end that is bootstrapped."""
    value, _ = trained(probed_script, "TwoSteps", **options)
    assert value(0) == pytest.approx(0.5, abs=0.08)
    assert value(1) == pytest.approx(1, abs=0.08)


def test_policy_from_reward(probed_script):
    """Catches: advantages of the wrong sign, or that belong to other actions."""
    _, share_of_bit_1 = trained(probed_script, "PolicyFromReward")
    assert share_of_bit_1(0) > 0.9


def test_policy_from_observation(probed_script):
    """Catches: actions that are stored beside other observations than those they answered."""
    value, share_of_bit_1 = trained(probed_script, "PolicyFromObservation")
    assert share_of_bit_1(1) > 0.9
    assert share_of_bit_1(-1) < 0.1
    assert min(value(1), value(-1)) > 0.7


@pytest.mark.parametrize(("probed_script", "num_steps"), [*ROLLOUTS, ("ppo", 5)], indirect=["probed_script"])
def test_value_of_an_endless_task_under_a_time_limit(probed_script, num_steps):
    """Catches: a time limit that is treated as a failure; the last step of a rollout included."""
    # 1 / (1 - 0.8) = 5; with no bootstrap at the limit the mean over the five steps would be 2.8
    options = dict(gamma=0.8, num_steps=num_steps, total_timesteps=80 * 4 * num_steps)
    if num_steps < 32:
        options |= dict(total_timesteps=250 * 4 * num_steps, num_minibatches=1)
    value, _ = trained(probed_script, "Endless", **options)
    assert value(0) == pytest.approx(5, abs=0.4)


@pytest.mark.parametrize(("probed_script", "num_steps"), ROLLOUTS, indirect=["probed_script"])
def test_a_truncated_episode_is_bootstrapped_at_its_final_observation(probed_script, num_steps):
    """Catches: the value of the next episode's start in the place of the final observation's."""
    options = dict(num_steps=num_steps)
    if num_steps == 1:
        options |= dict(total_timesteps=400 * 8, num_envs=8, num_minibatches=1)
    value, _ = trained(probed_script, "FinalObservation", **options)
    assert value(1) == pytest.approx(1, abs=0.1)
    assert value(-1) == pytest.approx(0.5, abs=0.1)  # 0.2 from the next episode's start


def test_returns_and_lengths_are_exact(probed_script):
    """Catches: episodes that are a step too long or short, or whose statistics begin before them."""
    args = probe_args(probed_script, "ThreeSteps", num_envs=3, num_steps=16, total_timesteps=480)
    run_dir = probed_script.train(args)
    scalars = read_scalars(run_dir)
    for tag in ("charts/episodic_return", "charts/episodic_length"):
        assert scalars[tag] == [(48 * i, 3.0) for i in range(1, 11)]


def test_every_episode_is_counted_once(probed_script):
    """Catches: an episode's statistics lost, counted twice, taken of another env, or logged at another step."""
    Logged.log.clear()
    batch = 3 * 16
    run_dir = probed_script.train(
        probe_args(probed_script, "Logged", num_envs=3, num_steps=16, total_timesteps=5 * batch)
    )
    expected = {"charts/episodic_return": [], "charts/episodic_length": []}
    running = np.zeros((3, 2))
    for iteration in range(5):
        ended = []
        for step, (_, _, reward, _, terminated, truncated) in enumerate(
            Logged.log[iteration * batch : (iteration + 1) * batch]
        ):
            running[step % 3] += reward, 1
            if terminated or truncated:
                ended.append(running[step % 3].copy())
                running[step % 3] = 0
        for tag, mean in zip(expected, np.mean(ended, axis=0)):
            expected[tag].append(((iteration + 1) * batch, pytest.approx(mean, abs=1e-5)))
    scalars = read_scalars(run_dir)
    assert {tag: scalars[tag] for tag in expected} == expected


def test_what_is_learnt_from_is_what_happened(probed_script, monkeypatch):
    """Catches: transitions that no env made, as NEXT_STEP autoreset adds at each episode's end, shifted arrays, and
    log-probabilities of another policy than the one that acted, as after a move of the statistics."""
    Logged.log.clear()
    args = probe_args(probed_script, "Logged", num_envs=3, num_steps=16, total_timesteps=3 * 48)
    rollouts, queries, acted_on, logprobs, logprobs_after = [], [], [], [], []
    compute_gae, look = probed_script.compute_gae, probed_script.Agent.get_action_and_value
    act = getattr(probed_script.Agent, "get_action", None)  # where log-probabilities and values come after the rollout

    def spy_gae(rewards, values, next_values, terminations, dones, *discounts):
        rollouts.append([x.clone().numpy() for x in (rewards, values, next_values, terminations, dones)])
        return compute_gae(rewards, values, next_values, terminations, dones, *discounts)

    def spy_look(self, obs, *rest, **options):
        result = look(self, obs, *rest, **options)
        if not torch.is_grad_enabled():  # of one step, or of a whole rollout
            queries.extend(zip(*(x.clone().unflatten(0, (-1, 3)).numpy() for x in (obs, result[0], result[3]))))
            logprobs_after.extend(result[1].unflatten(0, (-1, 3)).numpy())
        return result

    def spy_act(self, obs):
        action = act(self, obs)
        acted_on.append(obs.clone().numpy())
        logprobs.append(look(self, obs, action)[1].clone().numpy())
        return action

    monkeypatch.setattr(probed_script, "compute_gae", spy_gae)
    monkeypatch.setattr(probed_script.Agent, "get_action_and_value", spy_look)
    if act:
        monkeypatch.setattr(probed_script.Agent, "get_action", spy_act)
    run_dir = probed_script.train(args)
    assert len(Logged.log) == args.total_timesteps == len(queries) * args.num_envs
    assert probed_script.load_checkpoint(run_dir / "checkpoint.pt")["global_step"] == len(Logged.log)

    if act:
        np.testing.assert_array_equal(acted_on, [obs for obs, _, _ in queries])
        np.testing.assert_allclose(logprobs, logprobs_after, rtol=1e-4, atol=1e-6)  # of the policy that acted

    # (T, N) arrays of what the envs saw, for each of the three iterations
    log = iter(Logged.log)
    for iteration, (rewards, values, next_values, terminations, dones) in enumerate(rollouts):
        for t in range(args.num_steps):
            obs, actions, query_values = queries[iteration * args.num_steps + t]
            np.testing.assert_array_equal(values[t], query_values)
            for n in range(args.num_envs):
                before, action, reward, _, terminated, truncated = next(log)
                assert obs[n] == before
                sent = np.clip(actions[n], -1, 1) if actions.dtype == np.float32 else actions[n]  # a Box is clipped
                np.testing.assert_array_equal(sent, action)
                assert rewards[t, n] == reward
                assert (terminations[t, n], dones[t, n]) == (terminated, terminated or truncated)
                if t + 1 < args.num_steps and not dones[t, n]:
                    assert next_values[t, n] == values[t + 1, n]


@pytest.mark.parametrize("script", ["ppo_lstm", "ppo_atari", "ppo_atari_lstm"], indirect=True)
def test_what_is_learnt_from_is_what_the_envs_gave(script, monkeypatch):
    """Catches: an end that does not stop the recursion, and a minibatch whose rows are of several steps. (That its
    observations, actions and memory belong together, the ratio says, which is 1 at first.)"""
    make_envs, compute_gae, compute_gradients = script.make_envs, script.compute_gae, script.compute_gradients
    steps, rollouts, minibatches = [], [], []

    class Logging(gym.vector.VectorWrapper):
        def step(self, actions):
            obs, rewards, terminations, truncations, infos = self.env.step(actions)
            steps.append([x.copy() for x in (actions, rewards, terminations, truncations)])
            return obs, rewards, terminations, truncations, infos

    def spy_gae(rewards, values, next_values, terminations, dones, *discounts):
        advantages, returns = compute_gae(rewards, values, next_values, terminations, dones, *discounts)
        rollouts.append([x.clone().numpy() for x in (rewards, terminations, dones, advantages, values, returns)])
        return advantages, returns

    def spy_gradients(agent, minibatch, args):
        columns = minibatch[1], *minibatch[3:6]  # actions, advantages, values, returns
        minibatches.extend(zip(*(x.flatten().tolist() for x in columns)))
        return compute_gradients(agent, minibatch, args)

    monkeypatch.setattr(script, "make_envs", lambda *given: Logging(make_envs(*given)))
    monkeypatch.setattr(script, "compute_gae", spy_gae)
    monkeypatch.setattr(script, "compute_gradients", spy_gradients)
    games = "atari" in script.__name__  # of 100 steps
    changes = dict(num_steps=104, total_timesteps=416) if games else dict(env_id="probe_envs:Logged-v0")
    args = small_args(script, **changes, update_epochs=1, seed=3)
    script.train(args)

    shape = args.num_iterations, args.num_steps, args.num_envs
    actions, env_rewards, env_terminations, truncations = (np.stack(x).reshape(shape) for x in zip(*steps))
    rewards, terminations, dones, *columns = (np.stack(x) for x in zip(*rollouts))
    assert truncations.any()
    assert games or env_terminations.any()
    assert env_rewards.any()
    np.testing.assert_array_equal(rewards, np.sign(env_rewards) if games else env_rewards)
    np.testing.assert_array_equal(terminations, env_terminations)
    np.testing.assert_array_equal(dones, env_terminations | truncations)
    rows = zip(*(x.flatten().tolist() for x in (actions, *columns)))
    assert sorted(minibatches) == sorted(rows)
