"""What can go wrong in an env: hooks into a running script's env, and envs that fail by themselves.

The envs are registered for each action space, like those of probe_envs.py: `faulty_envs:RaisesBox-v0`.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import gymnasium as gym
from gymnasium.vector import VectorWrapper
from probe_envs import ACTION_SPACES, Probe


class HookedEnvs(VectorWrapper):
    """Calls hook(step, transition) after each step; the transition is a list that the hook may change.

    `step` counts from 1 and is that of the rollouts: it goes on where an env is reset.
    """

    def __init__(self, envs, hook):
        super().__init__(envs)
        self.hook, self.count = hook, 0

    def step(self, actions):
        self.count += 1
        transition = list(self.env.step(actions))
        self.hook(self.count, transition)
        return tuple(transition)


def hook_envs(monkeypatch, module, hook) -> None:
    """Call the hook in each vector env that the script makes from now on; None removes an earlier hook."""
    make_envs = getattr(module.make_envs, "original", module.make_envs)

    def make_hooked_envs(*args, **options):
        return HookedEnvs(make_envs(*args, **options), hook)

    make_hooked_envs.original = make_envs
    monkeypatch.setattr(module, "make_envs", make_hooked_envs if hook else make_envs)


class Stop(Exception):
    """Ends a run as a crash would: nothing is saved."""


def crash_at(monkeypatch, module, step: int) -> None:
    """Let the script's next runs crash in the given step of their rollouts."""

    def hook(count, transition):
        if count == step:
            raise Stop

    hook_envs(monkeypatch, module, hook)


class Raises(Probe):
    """Raises in its 20th step."""

    steps = 0

    def move(self, bit):
        self.steps += 1
        if self.steps == 20:
            raise RuntimeError("the gripper is stuck")
        return 0.0, 1.0, self.steps % 5 == 0


class Sleeps(Probe):
    """Its 19th step interrupts the script, its 20th takes an hour, after it wrote its process to the file `asleep`."""

    steps = 0

    def move(self, bit):
        self.steps += 1
        if self.steps == 19:
            with contextlib.suppress(FileExistsError):  # the script's other envs come too late
                Path("interrupted").touch(exist_ok=False)
                os.kill(os.getppid() if multiprocessing.parent_process() else os.getpid(), signal.SIGINT)
        if self.steps == 20:
            Path("asleep").write_text(str(os.getpid()))
            time.sleep(3600)
        return 0.0, 1.0, self.steps % 5 == 0


for env_class in (Raises, Sleeps):
    for suffix in ACTION_SPACES:
        gym.register(f"{env_class.__name__}{suffix}-v0", entry_point=env_class, kwargs=dict(actions=suffix))
