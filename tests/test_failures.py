"""A single number that is none, and a full disk: the run stops at once; the checkpoint before it stays good."""

import errno
import importlib
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import FOUR_SCRIPTS, PROBED, read_scalars, small_args
from faulty_envs import hook_envs
from gymnasium.spaces import Box, Discrete
from probe_envs import ACTION_SPACES, Probe
from tensorboard.summary.writer.record_writer import RecordWriter


class LargeHalf(gym.Env):
    """Observations are float16: each finite, their sum larger than float16 holds."""

    observation_space, action_space = Box(-60000, 60000, (4,), np.float16), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(4, 20000, np.float16), {}

    def step(self, action):
        return np.full(4, 20000, np.float16), 1.0, bool(self.np_random.random() < 0.2), False, {}


class InfiniteEnd(Probe):
    """Truncated at its fifth step, at an observation that is infinite: no rollout stores it, its value is looked at."""

    def start(self):
        self.steps = 0
        return 0.5

    def step(self, action):
        self.steps += 1
        last = self.steps == 5
        return np.array([np.inf if last else 0.5], np.float32), 1.0, False, last, {}


gym.register("LargeHalf-v0", entry_point=LargeHalf)
for suffix in ACTION_SPACES:
    gym.register(f"InfiniteEnd{suffix}-v0", entry_point=InfiniteEnd, kwargs=dict(actions=suffix))


def all_tensors(value) -> list[torch.Tensor]:
    """Each tensor in a checkpoint."""
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in all_tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def assert_stops(script, monkeypatch, what: int, value: float, at: str) -> None:
    """Put one bad number into what a step of the third iteration returns: the run must stop then, as it should."""
    args = small_args(script, checkpoint_every=1)
    step = {"middle": 2 * args.num_steps + 5, "end": 3 * args.num_steps}[at]

    def spoil(count, transition):
        if count == step:
            transition[what] = np.array(transition[what], np.float32)
            transition[what].flat[1] = value

    hook_envs(monkeypatch, script, spoil)
    places = {"middle": [r"obs\[5, 0, .*1\]", r"rewards\[4, 1\]"]}  # [step, env, ...] in the iteration
    places["end"] = [r"next_obs\[0, .*1\]", rf"rewards\[{args.num_steps - 1}, 1\]"]
    told = f"^{places[at][what]} is not finite after step {2 * args.batch_size};"
    with pytest.raises(FloatingPointError, match=told) as error:
        script.train(args)
    (run_dir,) = Path("runs").absolute().iterdir()
    assert f"the checkpoint in {run_dir} is good" in str(error.value)
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert state["iteration"] == 2
    tensors = all_tensors(state["agent"]) + all_tensors(state["optimizer"])
    assert len(tensors) > 10
    assert all(torch.isfinite(tensor).all() for tensor in tensors)
    assert [step for step, _ in read_scalars(run_dir)["losses/value_loss"]] == [args.batch_size, 2 * args.batch_size]
    hook_envs(monkeypatch, script, None)
    script.train(script.saved_args(run_dir))
    assert script.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 4


@pytest.mark.parametrize(("value", "at"), [(np.inf, "middle"), (-np.inf, "end"), (np.nan, "middle")])
@pytest.mark.parametrize("name", FOUR_SCRIPTS)
def test_one_observation_that_is_no_number(name, monkeypatch, value, at):
    """Catches: an infinity that a tanh or a clip hides from the loss, and that spoils the statistics for ever."""
    assert_stops(importlib.import_module(name), monkeypatch, 0, value, at)


def test_a_last_observation_that_is_no_number(probed_script):
    """Catches: an infinity that no rollout stores, but whose value bootstraps a truncated episode's returns."""
    actions, _ = PROBED[probed_script.__name__]
    with pytest.raises(FloatingPointError, match=r"^final_obs\[\d\]"):
        probed_script.train(small_args(probed_script, env_id=f"InfiniteEnd{actions}-v0"))


@pytest.mark.parametrize(("value", "at"), [(np.inf, "end"), (np.nan, "middle")])
@pytest.mark.parametrize("name", FOUR_SCRIPTS)
def test_one_reward_that_is_no_number(name, monkeypatch, value, at):
    """Catches: an infinity that normalisation or a floor turns into a number, and that spoils the statistics."""
    assert_stops(importlib.import_module(name), monkeypatch, 1, value, at)


@pytest.mark.parametrize("name", ["ppo", "ppo_lstm"])
def test_large_observations_are_numbers(name):
    """Catches: a check by a sum that overflows, in the observations' own dtype, where each is finite."""
    script = importlib.import_module(name)
    script.train(small_args(script, env_id="LargeHalf-v0"))


@pytest.mark.parametrize("written", [0, 5, 30])
def test_a_full_disk_met_by_the_writer_thread(monkeypatch, written):
    """Catches: a log that ends in silence, or a run that hangs, where the log's disk is full."""
    ppo = importlib.import_module("ppo")
    write, calls = RecordWriter.write, []

    def fill_the_disk(writer, data):
        calls.append(data)
        if len(calls) > written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(writer, data)

    monkeypatch.setattr(RecordWriter, "write", fill_the_disk)
    with pytest.raises(OSError, match="No space left on device"):
        ppo.train(small_args(ppo, checkpoint_every=1))
    (run_dir,) = Path("runs").iterdir()
    if written == 30:
        assert 0 < ppo.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] < 4
