"""ppo_continuous_action.py: the Gaussian policy, the running statistics, and what the env and the learner are given."""

import itertools
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import flags, read_scalars, small_args
from gymnasium.spaces import Box

import ppo_continuous_action as script


class Recorder(gym.Env):
    """Keeps the actions that it is given; the reward is 100 a step, an episode 5 steps."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    action_space = Box(-0.1, 0.1, (2, 3), np.float32)
    received: list = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.normal(5.0, 3.0, 3), {}

    def step(self, action):
        self.received.append(np.array(action))
        self.t += 1
        return self.np_random.normal(5.0, 3.0, 3), 100.0, False, self.t == 5, {}


class Unbounded(Recorder):
    """The reward is highest where the action is 0.5; no bounds."""

    action_space = Box(-np.inf, np.inf, (1,), np.float32)

    def step(self, action):
        return np.zeros(3), -float((action[0] - 0.5) ** 2), True, False, {}


gym.register("Recorder-v0", Recorder)
gym.register("Unbounded-v0", Unbounded)


def make_agent(env_id="Recorder-v0") -> script.Agent:
    args = script.Args(env_id=env_id)
    return script.Agent(script.make_envs(args, 1), args)


def test_running_moments_are_those_of_the_whole_stream():
    """Catches: a running variance that forgets the shift between the means of its batches."""
    rng, norm = np.random.default_rng(0), script.RunningNorm((3,))
    batches = [rng.normal(size=(n, 3)) * scale + scale for n, scale in ((5, 1), (1, 100), (300, 7))]
    for batch in batches:
        norm.update(torch.as_tensor(batch))
    stream = np.concatenate(batches)
    np.testing.assert_allclose(norm.mean, stream.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.var, stream.var(0), rtol=1e-12)
    assert norm.count == len(stream)


def test_normalised_observations_are_clipped():
    """Catches: clipping before normalising, or not at all; the variance in place of its root."""
    norm = script.RunningNorm((1,))
    x = torch.tensor([[1e6], [-1e6]])
    assert torch.equal(norm(x), x), "nothing seen: the identity"
    norm.update(torch.tensor([[1.0], [5.0]]))  # mean 3, standard deviation 2
    assert norm(x).flatten().tolist() == [10.0, -10.0]
    assert norm(torch.tensor([[4.0], [1.0]])).flatten().tolist() == pytest.approx([0.5, -1.0])
    loaded = script.RunningNorm((1,))
    loaded.load_state_dict(norm.state_dict())
    assert torch.equal(loaded(x), norm(x)), "a bound that no checkpoint holds"


def test_normalisation_is_exact():
    """Catches: numbers of which float32 leaves nothing, such as the seconds since 1970, normalised in it."""
    norm, x = script.RunningNorm((1,)), torch.tensor([[1.8e9], [1.8e9 + 2]], dtype=torch.float64)
    norm.update(x)
    assert norm(x).flatten().tolist() == pytest.approx([-1.0, 1.0])


def test_the_return_filter():
    """Catches: zeroing at an episode's end before its last reward was added, or not at all."""
    rng = np.random.default_rng(1)
    rewards, dones = rng.normal(size=(9, 2)).astype(np.float32), rng.random((9, 2)) < 0.3
    start = rng.normal(size=2)
    sums, last = script.discount_forward(rewards, dones, start, 0.9)
    for env in range(2):
        total = start[env]
        for t in range(9):
            total = 0.9 * total + rewards[t, env]
            assert sums[t, env] == pytest.approx(total, rel=1e-5)
            total = 0.0 if dones[t, env] else total
        assert last[env] == pytest.approx(total, rel=1e-5)


def test_rewards_are_scaled_by_the_std_of_the_discounted_return(monkeypatch):
    """Catches: another gamma, centred rewards, statistics of the rewards not the returns; a log of scaled rewards."""
    seen, original = [], script.compute_gae
    monkeypatch.setattr(
        script, "compute_gae", lambda rewards, *rest: (seen.append(rewards), original(rewards, *rest))[1]
    )
    run_dir = script.train(small_args(script, env_id="Recorder-v0", gamma=0.5, total_timesteps=32))
    sums = np.array([100, 150, 175, 187.5, 193.75] * 7)[:16]  # of an episode, gamma 0.5, on 2 envs
    np.testing.assert_allclose(seen[0], np.clip(100 / sums.repeat(2).std(), -10, 10), rtol=1e-4)
    assert {value for _, value in read_scalars(run_dir)["charts/episodic_return"]} == {500.0}


def test_the_return_filter_goes_on_from_rollout_to_rollout(monkeypatch):
    """Catches: discounted sums that begin anew in each rollout, so that rewards are scaled up in long episodes."""
    calls, original = [], script.discount_forward

    def spy(rewards, dones, start, gamma):
        result = original(rewards, dones, start, gamma)
        calls.append((start.copy(), result[1].copy()))
        return result

    monkeypatch.setattr(script, "discount_forward", spy)
    script.train(small_args(script))
    assert len(calls) == 4
    for (_, end), (start, _) in itertools.pairwise(calls):
        assert end.all()
        np.testing.assert_array_equal(start, end)


def test_scaled_rewards_are_clipped():
    """Catches: a first reward that is divided by the spread of almost nothing."""
    norm = script.RunningNorm(())
    norm.update(torch.tensor([1.0, 5.0]))
    assert norm.scale(torch.tensor([1e6, -1e6, 3.0])).tolist() == pytest.approx([10.0, -10.0, 1.5])


@pytest.mark.parametrize(("option", "buffer"), [("norm_obs", "obs_norm"), ("norm_reward", "return_norm")])
def test_normalisation_can_be_off(option, buffer):
    """Catches: a switch that does nothing."""
    run_dir = script.train(small_args(script, **{option: False}))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]
    counts = {name: state[f"{name}.count"].item() for name in ("obs_norm", "return_norm")}
    assert counts.pop(buffer) == 0
    assert all(count == 128 for count in counts.values()), "each observation once, final ones not counted"


def test_statistics_are_frozen_in_evaluation_and_saved_with_the_agent():
    """Catches: an agent that plays differently after a save and a load, or the more it is evaluated."""
    args = small_args(script)
    run_dir = script.train(args)
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]
    init, agents = script.Agent.__init__, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Agent, "__init__", lambda self, *given: (agents.append(self), init(self, *given))[1])
        script.evaluate(run_dir / "checkpoint.pt", 2)
    assert all(torch.equal(value, state[name]) for name, value in agents[0].state_dict().items())
    assert state["obs_norm.count"] > 0
    agent = script.Agent(script.make_envs(args, 1), args)
    script.load_checkpoint(run_dir / "checkpoint.pt", agent)
    obs = torch.randn(4, 3) * 5
    before = agent.get_action_and_value(obs, deterministic=True)
    assert script.evaluate(run_dir / "checkpoint.pt", 2) == script.evaluate(run_dir / "checkpoint.pt", 2)
    again = script.Agent(script.make_envs(args, 1), args)
    script.load_checkpoint(run_dir / "checkpoint.pt", again)
    for a, b in zip(before, again.get_action_and_value(obs, deterministic=True)):
        assert torch.equal(a, b)
    assert all(torch.equal(value, state[name]) for name, value in agent.state_dict().items())


def test_log_probability_and_entropy_of_any_shape():
    """Catches: a mean over the components instead of a sum, or a log-probability of the clipped action."""
    agent = make_agent()
    agent.actor_logstd.data.uniform_(-1, 1)
    obs = torch.randn(4, 3)
    action, logprob, entropy, value = agent.get_action_and_value(obs)
    assert action.shape == (4, 2, 3)
    assert logprob.shape == entropy.shape == value.shape == (4,)
    mean, std = (
        agent.actor_mean(agent.obs_norm(obs)).detach().numpy(),
        agent.actor_logstd.exp().detach().numpy().ravel(),
    )
    density = -(((action.flatten(1).numpy() - mean) / std) ** 2) / 2 - np.log(std) - np.log(2 * np.pi) / 2
    np.testing.assert_allclose(logprob.detach(), density.sum(1), rtol=1e-4)
    np.testing.assert_allclose(
        entropy.detach(), np.full(4, (0.5 + np.log(2 * np.pi) / 2 + np.log(std)).sum()), rtol=1e-5
    )
    assert action.abs().max() > 0.1, "sampled beyond the bounds: stored as it is"


def test_the_env_gets_the_clipped_action_and_the_loss_the_sampled_one(monkeypatch):
    """Catches: the log-probability of an action that was never sampled."""
    Recorder.received.clear()
    stored, original = [], script.Agent.get_action_and_value

    def spy(self, obs, action=None, deterministic=False):
        result = original(self, obs, action, deterministic)
        if action is not None:
            stored.append(action.abs().max().item())
        return result

    monkeypatch.setattr(script.Agent, "get_action_and_value", spy)
    script.train(small_args(script, env_id="Recorder-v0"))
    sent = np.abs(np.array(Recorder.received))
    assert sent.max() == pytest.approx(0.1)
    assert max(stored) > 0.5


def test_the_ratio_is_one_at_first(monkeypatch):
    """Catches: statistics that move between the rollout and the update: the old log-probabilities are of others."""
    clipped, original = [], script.ppo_loss

    def spy(new_logprobs, old_logprobs, *rest):
        clipped.append((new_logprobs - old_logprobs).abs().max().item())
        return original(new_logprobs, old_logprobs, *rest)

    monkeypatch.setattr(script, "ppo_loss", spy)
    script.train(small_args(script, update_epochs=1, num_minibatches=1))
    assert len(clipped) == 4
    assert max(clipped) < 1e-5


def test_a_fixed_log_std_stays():
    """Catches: an option for a fixed standard deviation that the optimizer does not know of."""
    run_dir = script.train(small_args(script, learn_log_std=False, log_std_init=-1, learning_rate=0.1))
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]["actor_logstd"].tolist() == [-1.0]
    run_dir = script.train(small_args(script, log_std_init=-1.0, learning_rate=0.1))
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]["actor_logstd"].item() != -1.0


def test_an_optimum_without_bounds_is_found():
    """Catches: a policy gradient of the wrong sign or scale; infinite bounds that make NaN."""
    settings = dict(total_timesteps=20_000, num_envs=4, num_steps=64, num_minibatches=4, learning_rate=3e-3, gamma=0.9)
    settings |= dict(update_epochs=4)
    run_dir = script.train(script.Args(env_id="Unbounded-v0", **settings))
    agent = make_agent("Unbounded-v0")
    script.load_checkpoint(run_dir / "checkpoint.pt", agent)
    action, _, _, _ = agent.get_action_and_value(torch.zeros(1, 3), deterministic=True)
    assert action.item() == pytest.approx(0.5, abs=0.1)
    assert agent.actor_logstd.item() < -0.5


def test_a_discrete_env_is_refused():
    """Catches: a traceback where the user took the wrong script."""
    with pytest.raises(
        script.UserError, match=r"CartPole-v1 has Box.* and Discrete\(2\), not vectors and float actions$"
    ):
        script.make_envs(script.Args(env_id="CartPole-v1"), 1)


def test_mujoco_warns_once(launcher):
    """Catches: the same warning of MuJoCo once for each of 64 envs, and a file of it in the user's folder."""
    process = launcher.run(
        "ppo_continuous_action", *flags(num_envs=4, num_steps=8, num_minibatches=1, total_timesteps=32)
    )
    assert process.returncode == 0, process.stderr
    assert (process.stdout + process.stderr).count("'settotalmass' is deprecated") == 1
    assert not Path("MUJOCO_LOG.TXT").exists()
