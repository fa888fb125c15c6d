"""MultiDiscrete actions and their masks: against the joint distribution written out, choice by choice."""

import itertools
import json
import math
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import read_scalars, same_parameters, small_args
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import ppo_multidiscrete as script

NVEC = [4, 3, 2]
# valid choices of two envs: of the first component (the unit), and, for each unit, of the others
UNITS = np.array([[1, 0, 1, 0], [0, 1, 0, 0]], bool)
REST = {  # unit -> what it can do: of the second component, of the third
    0: np.array([1, 1, 0, 1, 0], bool),
    1: np.array([0, 1, 1, 1, 1], bool),
    2: np.array([0, 0, 1, 0, 1], bool),
    3: np.array([1, 1, 1, 1, 1], bool),
}


class MaskedEnvs(gym.vector.VectorEnv):
    """Two envs that only tell their spaces and which actions are valid."""

    mask_actions = True

    def __init__(self, obs_shape=(3,)):
        self.num_envs = 2
        self.single_observation_space = Box(-1, 1, obs_shape, np.float32)
        self.single_action_space = MultiDiscrete(NVEC)

    def get_masks(self, units=None):
        rest = np.zeros((2, 5), bool) if units is None else np.stack([REST[int(unit)] for unit in units])
        return np.concatenate([UNITS, rest], 1)


@pytest.fixture
def agent():
    """An agent whose choices are far from uniform."""
    torch.manual_seed(0)
    agent = script.Agent(MaskedEnvs(), small_args(script))
    agent.actor[-1].weight.data.normal_()
    agent.actor[-1].bias.data.normal_()
    return agent


def joint(logits: np.ndarray, mask: np.ndarray) -> dict[tuple[int, ...], float]:
    """The probability of each valid joint action, from the definition: a product of softmaxes over valid choices."""
    weights = np.exp(logits.astype(np.float64)) * mask
    parts = np.split(weights, np.cumsum(NVEC)[:-1])
    parts = [part / part.sum() for part in parts]
    actions = itertools.product(*(range(n) for n in NVEC))
    return {action: math.prod(part[i] for part, i in zip(parts, action)) for action in actions}


def test_log_probability_and_entropy_are_those_of_the_joint_distribution(agent):
    """Catches: components that do not add, a softmax over all columns, and an entropy that counts invalid actions."""
    obs = torch.randn(2, 3)
    masks = np.stack([np.concatenate([UNITS[0], REST[2]]), np.concatenate([UNITS[1], REST[1]])])
    logits = agent.actor(obs).detach().numpy()
    for i in range(2):
        probabilities = joint(logits[i], masks[i])
        assert math.isclose(sum(probabilities.values()), 1)
        assert sum(p == 0 for p in probabilities.values()) > 10
        expected = -sum(p * math.log(p) for p in probabilities.values() if p)
        for action, p in probabilities.items():
            given = torch.tensor([action, action])
            _, logprob, entropy, _ = agent.get_action_and_value(obs, given, torch.tensor(masks))
            assert math.isclose(logprob[i].exp(), p, rel_tol=1e-5, abs_tol=1e-12)
            assert (p == 0) == (logprob[i] < -1e8)
            assert math.isclose(entropy[i], expected, rel_tol=1e-5)


def test_samples_follow_the_joint_distribution_given_the_unit(agent):
    """Catches: the unit's mask used for another unit, a sample that is not one, and a mask that is stored otherwise."""
    counts = {}
    obs = torch.randn(1, 3).expand(2, 3)
    logits = agent.actor(obs[:1]).detach().numpy()[0]
    with torch.no_grad():
        for _ in range(2000):
            action, logprob, _, _ = agent.get_action_and_value(obs)
            for i, unit in enumerate(action[:, 0].tolist()):
                mask = np.concatenate([UNITS[i], REST[unit]])
                assert (agent.masks[i].numpy() == mask).all()
                assert logprob[i] > -100
            first = tuple(action[0].tolist())
            counts[first] = counts.get(first, 0) + 1
    for unit in (0, 2):
        of_unit = {action: p for action, p in joint(logits, np.concatenate([UNITS[0], REST[unit]])).items() if p}
        for action, p in of_unit.items():
            if action[0] == unit:
                assert abs(counts.get(action, 0) / 2000 - p) < 4 * math.sqrt(p * (1 - p) / 2000) + 1e-3
    assert {action[0] for action in counts} == {0, 2}


def test_masks_stay_where_they_are(agent):
    """Catches: CUDA graphs that are recorded anew in every step, for they read the masks at an address."""
    where = agent.masks.data_ptr()
    for _ in range(3):
        agent.get_action_and_value(torch.randn(2, 3))
        assert agent.masks.data_ptr() == where
    assert agent.masks.shape == (2, sum(NVEC))


def test_deterministic_takes_the_best_valid_choice_of_each_component(agent):
    """Catches: an argmax over invalid choices."""
    obs = torch.randn(2, 3)
    logits = agent.actor(obs).detach().numpy()
    action = agent.get_action_and_value(obs, deterministic=True)[0]
    for i, (unit, *others) in enumerate(action.tolist()):
        mask = np.concatenate([UNITS[i], REST[unit]])
        best = [part.argmax() for part in np.split(np.where(mask, logits[i], -np.inf), np.cumsum(NVEC)[:-1])]
        assert [unit, *others] == best


def test_no_gradient_reaches_an_invalid_choice(agent):
    """Catches: a policy that learns from choices which it did not have, and NaN from 0 * log 0."""
    obs = torch.randn(2, 3)
    action, *_ = agent.get_action_and_value(obs)
    masks = agent.masks.clone()
    logits = []
    agent.actor.register_forward_hook(lambda module, inputs, output: (output.retain_grad(), logits.append(output))[1])
    _, logprob, entropy, _ = agent.get_action_and_value(obs, action, masks)
    (logprob.sum() + entropy.sum()).backward()
    (output,) = logits
    assert torch.isfinite(output.grad).all()
    assert (output.grad[~masks] == 0).all()
    assert (output.grad[masks] != 0).sum() > 4


def test_a_component_with_one_choice_teaches_nothing(agent):
    """Catches: an env where nothing can be done whose forced no-op trains the policy."""
    masks = torch.zeros((2, 9), dtype=torch.bool)
    masks[:, [0, 4, 7]] = True  # choice 0 of each component, alone
    obs = torch.randn(2, 3)
    _, logprob, entropy, _ = agent.get_action_and_value(obs, torch.zeros((2, 3), dtype=torch.long), masks)
    assert (logprob == 0).all()
    assert (entropy == 0).all()
    (logprob.sum() + entropy.sum()).backward()
    assert all((p.grad == 0).all() for p in agent.actor.parameters())


def test_without_masks_components_are_independent_categoricals():
    """Catches: --no-mask-actions that is not the plain policy of the reference notebook."""
    envs = MaskedEnvs()
    envs.mask_actions = False
    torch.manual_seed(0)
    agent = script.Agent(envs, small_args(script))
    agent.actor[-1].weight.data.normal_()
    obs = torch.randn(2, 3)
    action, logprob, entropy, _ = agent.get_action_and_value(obs)
    dists = [torch.distributions.Categorical(logits=x) for x in agent.actor(obs).split(NVEC, -1)]
    torch.testing.assert_close(logprob, sum(dist.log_prob(a) for dist, a in zip(dists, action.T)))
    torch.testing.assert_close(entropy, sum(dist.entropy() for dist in dists))


class Grid(gym.Env):
    """A grid of another shape than MicroRTS's; the right action is the position of the only 1."""

    def __init__(self, shape=(7, 9, 2), render_mode=None):
        self.observation_space, self.action_space = Box(0, 1, shape, np.uint8), MultiDiscrete([shape[0], shape[1]])

    def observe(self):
        obs = np.zeros(self.observation_space.shape, np.uint8)
        self.goal = self.np_random.integers(self.action_space.nvec)
        obs[(*self.goal, 0)] = 1
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        reward = float((action == self.goal).mean())
        return self.observe(), reward, True, False, {}


gym.register("Grid-v0", entry_point=Grid)
gym.register("GridTooSmall-v0", entry_point=Grid, kwargs=dict(shape=(4, 9, 2)))


def test_a_grid_of_another_shape_is_learnt():
    """Catches: a CNN whose sizes hold for one map only, or whose cells are put in another order than they were."""
    args = small_args(
        script, env_id="Grid-v0", total_timesteps=8_192, num_envs=8, num_steps=64, num_minibatches=4, learning_rate=2e-3
    )
    run_dir = script.train(args)
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert np.mean([episode_return for episode_return, _ in state["kept"]["recent"]]) > 0.5  # chance: 0.13


def test_grids_that_are_too_small_and_masks_that_nobody_tells_are_refused():
    """Catches: an error from the depth of a convolution, and a flag that is ignored."""
    with pytest.raises(
        script.UserError, match=r"GridTooSmall-v0 has .*, not vectors or grids and MultiDiscrete or Discrete actions"
    ):
        script.make_envs(script.Args(env_id="GridTooSmall-v0"), 2)
    with pytest.raises(script.UserError, match="--mask-actions"):
        script.make_envs(small_args(script, mask_actions=True), 2)


def test_bfloat16_is_close_to_float32(monkeypatch):
    """Catches: a half precision that reaches the heads, or an encoder of another function."""
    torch.manual_seed(0)
    agent = script.Agent(MaskedEnvs((16, 16, 27)), small_args(script, bf16=False))
    obs = (torch.rand(2, 16, 16, 27) < 0.2).to(torch.uint8)
    exact = agent.encode(obs)
    agent.bf16 = True
    rounded = agent.encode(obs)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).norm() < 0.02 * exact.norm()


class Masked(gym.Env):
    """Of 4 and 3 choices two are valid each, others at each step; `invalid` counts those that were taken anyway."""

    observation_space, action_space = Box(0, 1, (7,), np.float32), MultiDiscrete([4, 3])
    invalid = 0

    def observe(self):
        self.valid = np.zeros(7, bool)
        self.valid[self.np_random.choice(4, 2, replace=False)] = True
        self.valid[4 + self.np_random.choice(3, 2, replace=False)] = True
        return self.valid.astype(np.float32)

    def action_masks(self):
        return self.valid

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        invalid = not (self.valid[action[0]] and self.valid[4 + action[1]])
        Masked.invalid += invalid
        return self.observe(), -float(invalid), False, False, {}


gym.register("Masked-v0", entry_point=Masked, max_episode_steps=5)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_env_tells_which_actions_are_invalid(vectorization, monkeypatch):
    """Catches: masks of an env that are not asked for, or are those of another env or of the step before."""
    monkeypatch.setattr(Masked, "invalid", 0)
    logged = small_args(script, env_id="Masked-v0", vectorization=vectorization, eval_episodes=3)
    run_dir = script.train(logged)
    assert Masked.invalid == 0
    assert {value for _, value in read_scalars(run_dir)["charts/episodic_return"]} == {0.0}
    assert script.evaluate(run_dir / "checkpoint.pt", 3) == [0.0] * 3
    script.train(replace(logged, mask_actions=False, vectorization="sync", eval_episodes=0))
    assert Masked.invalid > 20


class Meddler(gym.Env):
    """Rewards are of the action that it is given, which it then may change in place."""

    observation_space, action_space = Box(-1, 1, (3,), np.float32), MultiDiscrete([4, 3])

    def __init__(self, meddles):
        self.meddles = meddles

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(3, np.float32), {}

    def step(self, action):
        reward = float(action.sum())
        if self.meddles:
            action[:] = 0
        return self.np_random.random(3, np.float32), reward, False, False, {}


gym.register("Meddler-v0", entry_point=Meddler, max_episode_steps=5, kwargs=dict(meddles=True))
gym.register("Reader-v0", entry_point=Meddler, max_episode_steps=5, kwargs=dict(meddles=False))


def test_an_env_that_changes_its_action_changes_nothing():
    """Catches: actions that an env changed in place and that are learnt from as if they had been sampled."""
    ours, theirs = (script.train(small_args(script, env_id=env_id)) for env_id in ("Meddler-v0", "Reader-v0"))
    assert same_parameters(ours, theirs)


class OddMasks(gym.Env):
    """A choice of three, then of two; in episodes of 4 steps the first choice is the reward. Its masks are `masks`."""

    def __init__(self, masks, discrete: bool = False, start: int = 0):
        self.masks, self.start, self.render_mode = masks, start, None
        self.observation_space = Box(0, 1, (3,), np.float32)
        self.action_space = Discrete(3, start=start) if discrete else MultiDiscrete([3, 2])

    def action_masks(self):
        return self.masks

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert action in self.action_space, action
        self.t += 1
        return np.zeros(3, np.float32), float(np.ravel(action)[0] - self.start), self.t == 4, False, {}


gym.register("OddMasks-v0", entry_point=OddMasks)
ODD_MASKS = {
    "nothing to choose first": [False, False, False, True, True],
    "nothing to choose last": [True, True, True, False, False],
    "a mask too short": [True, True, True],
    "one for all": [True],
    "a number": True,
    "to be added": [0, -1e9, -1e9, 0, -1e9],
    "a list a component": [[True, True, True], [True, True]],
    "none": None,
}


@pytest.mark.parametrize("masks", ODD_MASKS.values(), ids=ODD_MASKS)
def test_masks_that_are_none(masks):
    """Catches: choice 0 taken where none is valid; one mask broadcast over all choices; -1e9 taken for valid."""
    args = small_args(script, env_id="OddMasks-v0", env_kwargs=json.dumps(dict(masks=masks)))
    with pytest.raises(script.UserError, match=r"action_masks\(\) must give 5 booleans, with a valid choice for each"):
        script.train(args)


@pytest.mark.parametrize("masks", [[0, 1, 0, 1, 1], [0.0, 1.0, 0.0, 1.0, 1.0], [False, True, False, True, True]])
def test_masks_of_numbers(masks):
    """Catches: a mask of zeros and ones refused, as gymnasium's own spaces want it."""
    run_dir = script.train(small_args(script, env_id="OddMasks-v0", env_kwargs=json.dumps(dict(masks=masks))))
    assert {value for _, value in read_scalars(run_dir)["charts/episodic_return"]} == {4.0}


@pytest.mark.parametrize("name", ["ppo", "ppo_lstm"])
def test_other_scripts_do_not_ignore_masks(name):
    """Catches: invalid actions played in silence by a script without masks."""
    other = __import__(name)
    kwargs = json.dumps(dict(masks=[False, True, False], discrete=True))
    with pytest.raises(other.UserError, match=r"masks: ppo_multidiscrete\.py"):
        other.train(small_args(other, env_id="OddMasks-v0", env_kwargs=kwargs))


@pytest.mark.parametrize("start", [0, -5])
def test_one_discrete_choice(start):
    """Catches: masks of Discrete actions, which sb3-contrib has users for, that no script takes; a start lost."""
    kwargs = json.dumps(dict(masks=[False, True, False], discrete=True, start=start))
    run_dir = script.train(small_args(script, env_id="OddMasks-v0", env_kwargs=kwargs, eval_episodes=2))
    scalars = read_scalars(run_dir)
    assert {value for _, value in scalars["charts/episodic_return"]} == {4.0}
    assert scalars["eval/episodic_return"] == [(128, 4.0)]


def test_discrete_without_masks():
    """Catches: an env of ppo.py that learns less as one component."""
    run_dir = script.train(small_args(script, env_id="CartPole-v1", total_timesteps=20_000, num_envs=4, num_steps=128))
    assert read_scalars(run_dir)["charts/mean_return_100"][-1][1] > 40  # 22 at random
