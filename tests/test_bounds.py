"""Box actions: what is finite is mapped to -1 .. 1, where a policy begins; what is infinite stays as it is."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import read_scalars, small_args
from gymnasium.spaces import Box

SCRIPTS = ["ppo_continuous_action", "ppo_lstm"]


class Target(gym.Env):
    """Episodes of 8 steps; the reward is 1 at the middle of the upper half of the action's range, 0 a quarter off."""

    observation_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, low: float, high: float, dtype: str = "float32"):
        self.action_space = Box(low, high, (2,), np.dtype(dtype))
        self.received = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert action in self.action_space, action
        self.received.append(action)
        self.t += 1
        low, high = self.action_space.low, self.action_space.high
        distance = np.abs((action - low) / (high - low) - 0.75).mean()
        return np.zeros(1, np.float32), max(0.0, 1 - 4 * distance), self.t == 8, False, {}


class Mixed(Target):
    """An action of no width, one without an upper bound, one as wide as floats are, and one that is mapped."""

    def __init__(self):
        wide = np.finfo(np.float32).max
        self.action_space = Box(np.float32([2, 0, -wide, 0.7]), np.float32([2, np.inf, wide, 0.9]))
        self.received = []

    def step(self, action):
        assert action in self.action_space, action
        self.received.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Unbounded(Target):
    """Its actions have no bounds, or one."""

    def __init__(self, low: float = -np.inf, high: float = np.inf):
        super().__init__(low, high)

    def step(self, action):
        self.received.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


gym.register("Target-v0", entry_point=Target)
gym.register("NoBounds-v0", entry_point=Unbounded)
gym.register("Mixed-v0", entry_point=Mixed)


@pytest.fixture(params=SCRIPTS)
def box_script(request):
    return __import__(request.param)


def receive(box_script, env_id: str, actions: list[list[float]], **kwargs) -> list:
    """What the env gets of these actions; and the space that the agent sees."""
    text = str(kwargs).replace("'", '"')
    envs = box_script.make_envs(small_args(box_script, env_id=env_id, env_kwargs=text), 1)
    envs.reset(seed=[1])
    for action in actions:
        envs.step(np.array([action], np.float32))
    (env,) = envs.unwrapped.envs
    received, space = np.array(env.unwrapped.received), envs.single_action_space
    envs.close()
    return received, space


@pytest.mark.parametrize(("low", "high"), [(50, 100), (-100, 100), (-0.01, 0.01), (0, 1), (-2, 2)])
def test_finite_bounds_are_mapped(box_script, low, high):
    """Catches: an env whose actions are from 50 to 100 in which every action is 50, since policies begin about 0."""
    received, space = receive(box_script, "Target-v0", [[0, 1], [-1, 0.5], [1.7, -3]], low=low, high=high)
    middle, quarter = (low + high) / 2, (high - low) / 4
    expected = [[middle, high], [low, middle + quarter], [high, low]]
    np.testing.assert_allclose(received, expected, atol=1e-5 * (high - low))
    assert space == Box(-1, 1, (2,), np.float32)


def test_bounds_of_one_are_left_alone(box_script):
    """Catches: rounding in every env of MuJoCo whose actions are from -1 to 1 already."""
    received, _ = receive(box_script, "Target-v0", [[0.3, 0.123456789]], low=-1, high=1)
    assert np.array_equal(received, np.array([[0.3, 0.123456789]], np.float32))


@pytest.mark.parametrize("bounds", [{}, dict(low=-1e10, high=1e10)])
def test_infinite_bounds_stay(box_script, bounds):
    """Catches: a mapping of what has no middle, or of what stands for infinity, to which no action comes near."""
    actions = [[5.0, -7.0]]
    received, space = receive(box_script, "NoBounds-v0", actions, **bounds)
    assert received.tolist() == actions
    assert space.high.tolist() == [bounds.get("high", np.inf)] * 2


def test_each_component_has_bounds_of_its_own(box_script):
    """Catches: NaN where bounds meet, infinity where they are as wide as floats, an action between them that is always
    at one, as another has none, and an action that rounding takes past its bound."""
    received, space = receive(box_script, "Mixed-v0", [[0.5, 3, 4, -1], [-7, -3, -4, 0], [0, 0, 0, 1]])
    np.testing.assert_allclose(received, [[2, 4, 4, 0.7], [2, 0, -4, 0.8], [2, 1, 0, 0.9]], rtol=1e-6)
    assert (space.low[3], space.high[3], space.low[1], space.high[1]) == (-1, 1, -1, np.inf)


@pytest.mark.parametrize(("bound", "middle"), [(dict(low=50), 51), (dict(high=-5), -6)])
def test_a_policy_begins_beside_a_single_bound(box_script, bound, middle):
    """Catches: samples about 0 that are all clipped to a bound far away, so that nothing is ever learnt."""
    received, _ = receive(box_script, "NoBounds-v0", [[0, 0.5], [-3, 3]], **bound)
    beyond = [middle - 3, middle + 3]
    np.testing.assert_allclose(received, [[middle, middle + 0.5], np.clip(beyond, bound.get("low"), bound.get("high"))])


@pytest.mark.parametrize(("low", "high"), [(50, 100), (-0.01, 0.01)])
def test_whatever_the_bounds_training_is_the_same(box_script, low, high):
    """Catches: a learning rate, or an exploration, that is right for -1 to 1 alone: the returns are the same, too."""
    runs = []
    for bounds in ((-1, 1), (low, high)):
        kwargs = str(dict(low=bounds[0], high=bounds[1])).replace("'", '"')
        torch.manual_seed(0)
        runs.append(box_script.train(small_args(box_script, env_id="Target-v0", env_kwargs=kwargs)))
    ours, theirs = (read_scalars(run)["charts/mean_return_100"] for run in runs)
    assert ours == [(step, pytest.approx(value, abs=1e-3)) for step, value in theirs]
    assert ours[-1][1] > 0


def test_float64_bounds(box_script):
    """Catches: an action outside its own space, by a rounding from float32."""
    receive(box_script, "Target-v0", [[1, -1], [0.1, 0.7]], low=50, high=100.1, dtype="float64")
