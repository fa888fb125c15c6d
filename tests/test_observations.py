"""Observations that are no vectors: Discrete ones one-hot, Dict and Tuple ones joined."""

import contextlib

import gymnasium as gym
import numpy as np
import pytest
from conftest import small_args
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

SPACES = {
    "Discrete": (Discrete(5), lambda n: n % 5, 5),
    "Dict": (Dict(a=Discrete(2), b=Box(-1, 1, (3,))), lambda n: dict(a=n % 2, b=np.full(3, 0.5, np.float32)), 5),
    "Bool": (Box(0, 1, (3,), bool), lambda n: np.array([n % 2, 1, 0], bool), 3),
    "Tuple": (Tuple([Box(0, 9, (2, 2)), Discrete(2)]), lambda n: (np.eye(2, dtype=np.float32), n % 2), 6),
}


class Observes(gym.Env):
    """Counts its steps, and shows the count by an observation of the given kind."""

    def __init__(self, kind: str, box_actions: bool):
        self.observation_space, self.observe, _ = SPACES[kind]
        self.action_space = Box(-1, 1, (1,)) if box_actions else Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(0), {}

    def step(self, action):
        self.steps += 1
        return self.observe(self.steps), 1.0, self.steps == 7, False, {}


for kind in SPACES:
    for box_actions in (False, True):
        name = f"{kind}{'Box' if box_actions else ''}Observations-v0"
        gym.register(name, entry_point=Observes, kwargs=dict(kind=kind, box_actions=box_actions))


class OwnBuffer(gym.Env):
    """Shows the number of its steps, from 5 on, always in the same array; an episode is cut after three."""

    observation_space = Box(0, 9, (2,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space
        self.shown = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown[:] = 5
        return self.shown, {}

    def step(self, action):
        self.shown += 1
        return self.shown, 1.0, False, bool(self.shown[0] == 8), {}


ACTIONS = {
    "ppo": Discrete(2),
    "ppo_continuous_action": Box(-1, 1, (1,)),
    "ppo_lstm": Discrete(2),
    "ppo_multidiscrete": MultiDiscrete([2, 2]),
}
for name, action_space in ACTIONS.items():
    gym.register(f"OwnBuffer-{name}-v0", entry_point=OwnBuffer, kwargs=dict(action_space=action_space))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("script", ACTIONS, indirect=True)
def test_the_last_observation_is_not_the_next_episodes_first(script, vectorization):
    """Catches: an env that writes into its own array, bootstrapped at a time limit with the value of its reset."""
    args = small_args(script, env_id=f"OwnBuffer-{script.__name__}-v0", vectorization=vectorization)
    with contextlib.closing(script.make_envs(args, 2)) as envs:
        shown = [envs.reset(seed=[1, 2])[0]]
        for _ in range(3):
            actions = np.stack([envs.single_action_space.sample()] * 2)
            obs, _, _, truncations, infos = envs.step(actions)
            shown.append(obs)
        assert truncations.all()
        assert [each[0, 0] for each in shown] == [5, 6, 7, 5]
        np.testing.assert_array_equal(np.stack(infos["final_obs"]), np.full((2, 2), 8))


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("script", ACTIONS, indirect=True)
def test_they_become_vectors(script, kind):
    """Catches: FrozenLake, Taxi and every Dict env refused, or the parts of one mixed up."""
    suffix = "Box" if script.__name__ == "ppo_continuous_action" else ""
    args = small_args(script, env_id=f"{kind}{suffix}Observations-v0", total_timesteps=32)
    with contextlib.closing(script.make_envs(args, 2)) as envs:
        obs, _ = envs.reset(seed=[1, 2])
        space, observe, size = SPACES[kind]
        assert obs.shape == (2, size)
        np.testing.assert_array_equal(obs[0], gym.spaces.flatten(space, observe(0)))
    run_dir = script.train(args)
    assert script.evaluate(run_dir / "checkpoint.pt", 1) == [7.0]


def test_frozen_lake():
    """Catches: a toy text env, the first that many students try, refused."""
    import ppo

    run_dir = ppo.train(small_args(ppo, env_id="FrozenLake-v1"))
    assert set(ppo.evaluate(run_dir / "checkpoint.pt", 3)) <= {0.0, 1.0}
