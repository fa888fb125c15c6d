"""Which spaces a script takes, whatever their dtype; and which columns of the observations it hides."""

import contextlib
import copy
import importlib
import os
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SCRIPTS, small_args
from gymnasium.spaces import Box, Discrete, MultiDiscrete

REFUSED = {"Int32Box": Box(0, 5, (2,), np.int32), "ScalarBox": Box(-1, 1, (), np.float32)}
UINT8 = {"Uint8Discrete": Discrete(3, dtype=np.uint8)}
FLOATS = {"Float16Box": Box(-1, 1, (2,), np.float16), "Float64Box": Box(-1, 1, (2,), np.float64)}

WIDE = {"WideBox": Box(-0.1, 0.1, (2, 3), np.float32)}
SHIFTED = {
    "ppo": ("ShiftedDiscrete", Discrete(2, start=5, dtype=np.int32)),
    "ppo_lstm": ("ShiftedDiscrete", Discrete(2, start=5, dtype=np.int32)),
    "ppo_multidiscrete": ("ShiftedMultiDiscrete", MultiDiscrete([2, 3], start=[5, 7], dtype=np.uint8)),
}


class Walk(gym.Env):
    """Random observations, episodes of five steps; an action that its space does not hold is an error."""

    observation_space = Box(-5, 5, (3,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        assert action in self.action_space, repr(action)
        return self.np_random.normal(size=3).astype(np.float32), float(np.sum(action)), self.steps == 5, False, {}


for name, space in (REFUSED | FLOATS | UINT8 | WIDE | dict(SHIFTED.values())).items():
    gym.register(f"{name}-v0", entry_point=Walk, kwargs=dict(action_space=space))


def logprobs_of_first_minibatches(monkeypatch, script, args) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train; return the new and the old log-probabilities of each iteration's first minibatch."""
    calls, ppo_loss = [], script.ppo_loss

    def spy(new_logprobs, old_logprobs, *rest):
        calls.append((new_logprobs.detach().clone(), old_logprobs.clone()))
        return ppo_loss(new_logprobs, old_logprobs, *rest)

    monkeypatch.setattr(script, "ppo_loss", spy)
    script.train(args)
    assert len(calls) == args.num_iterations * args.update_epochs * args.num_minibatches
    return calls[:: args.update_epochs * args.num_minibatches]


@pytest.mark.parametrize("space", REFUSED)
@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_lstm"])
def test_boxes_that_are_no_vectors_of_floats_are_refused(name, space):
    """Catches: integer actions that are samples rounded to 0, and 0-d actions, that crash or train nonsense."""
    script = importlib.import_module(name)
    with pytest.raises(script.UserError, match=f"^{space}-v0 has .* and {re.escape(str(REFUSED[space]))}, not"):
        script.train(small_args(script, env_id=f"{space}-v0"))
    assert os.listdir() == []


@pytest.mark.parametrize("space", FLOATS)
@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_lstm"])
def test_actions_are_stored_as_sampled(monkeypatch, name, space):
    """Catches: actions rounded to the env's dtype, whose log-probability is not that of the action sampled."""
    script = importlib.import_module(name)
    args = small_args(script, env_id=f"{space}-v0")
    for new, old in logprobs_of_first_minibatches(monkeypatch, script, args):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["ppo", "ppo_lstm"])
def test_uint8_actions(monkeypatch, name):
    """Catches: actions stored in the env's dtype, by which torch cannot index."""
    script = importlib.import_module(name)
    args = small_args(script, env_id="Uint8Discrete-v0")
    for new, old in logprobs_of_first_minibatches(monkeypatch, script, args):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-5)


def test_an_id_without_version_hides_the_velocities():
    """Catches: velocities shown to the agent, for the env's id was looked up as it was typed."""
    script = importlib.import_module("ppo_lstm")
    envs = script.make_envs(small_args(script, env_id="CartPole"), 2)
    obs, _ = envs.reset(seed=[1, 2])
    seen = [obs]
    for _ in range(30):  # past an episode's end: what follows it is hidden, too
        seen.append(envs.step(np.ones(2, int))[0])
    envs.close()
    seen = np.concatenate(seen)
    assert (seen[:, [1, 3]] == 0).all()
    assert (seen[:, [0, 2]] != 0).all()


@pytest.mark.parametrize("name", SHIFTED)
def test_actions_count_from_the_start_of_their_space(name):
    """Catches: an env that is given actions that it does not have."""
    script, (space, _) = importlib.import_module(name), SHIFTED[name]
    script.train(small_args(script, env_id=f"{space}-v0"))  # the env refuses any other action


@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_lstm"])
def test_the_agent_sees_the_bounds_of_actions(name):
    """Catches: bounds that a wrapper made infinite; finite ones are mapped to -1 .. 1."""
    script = importlib.import_module(name)
    with contextlib.closing(script.make_envs(small_args(script, env_id="WideBox-v0"), 2)) as envs:
        assert envs.single_action_space == Box(-1, 1, WIDE["WideBox"].shape, np.float32)


DTYPES = {Discrete: np.int32, MultiDiscrete: np.uint8, Box: np.float16}


@pytest.mark.parametrize(
    ("name", "changes"), [*((name, {}) for name in SCRIPTS), ("ppo_lstm", dict(env_id="Pendulum-v1"))]
)
def test_envs_get_actions_of_their_dtype(name, changes, monkeypatch):
    """Catches: actions of torch's dtype, int64 or float32, given to envs that have another one."""
    script = importlib.import_module(name)
    make_envs, given = script.make_envs, set()

    class Narrow(gym.vector.VectorWrapper):
        def __init__(self, envs):
            super().__init__(envs)
            self.single_action_space = copy.copy(envs.single_action_space)
            self.single_action_space.dtype = np.dtype(DTYPES[type(self.single_action_space)])

        def step(self, actions):
            given.add((type(self.single_action_space), actions.dtype.type))
            return self.env.step(actions)

    monkeypatch.setattr(script, "make_envs", lambda *given: Narrow(make_envs(*given)))
    args = small_args(script, num_steps=8, total_timesteps=16, update_epochs=1, **changes)
    script.train(args)
    assert given <= DTYPES.items()
    assert len(given) == 1
