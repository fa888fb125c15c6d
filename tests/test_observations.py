"""Observations that are no vectors: Discrete ones one-hot, Dict and Tuple ones joined."""

import contextlib

import gymnasium as gym
import numpy as np
import pytest
from conftest import small_args
from gymnasium.spaces import Box, Dict, Discrete, Tuple

SPACES = {
    "Discrete": (Discrete(5), lambda n: n % 5, 5),
    "Dict": (Dict(a=Discrete(2), b=Box(-1, 1, (3,))), lambda n: dict(a=n % 2, b=np.full(3, 0.5, np.float32)), 5),
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


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("script", ["ppo", "ppo_continuous_action", "ppo_lstm"], indirect=True)
def test_they_become_vectors(script, kind):
    """Catches: FrozenLake, Taxi and every Dict env refused, or the parts of one mixed up."""
    suffix = "Box" if script.__name__ == "ppo_continuous_action" else ""
    args = small_args(script, env_id=f"{kind}{suffix}Observations-v0")
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
