"""Envs as users write them, each odd in one way: `odd_envs:Odd-v0` with env_kwargs {"what": the way}."""

import multiprocessing
import os
import random
import socket
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from probe_envs import ACTION_SPACES

DRAWS = {  # two numbers from 0 to 1, from a source of randomness that is not env.np_random, seeded
    "numpy": lambda env: np.random.rand(2),
    "python": lambda env: [random.random(), random.random()],
    "its observation space": lambda env: env.observation_space.sample(),
    "its action space": lambda env: [sum(env.action_space.sample() / 2.0**k for k in range(1, 24)), 0.0],
    "torch": lambda env: torch.rand(2).numpy(),
    "a wrapper's space": lambda env: np.zeros(2),
    "np_random, which it forgets to seed": lambda env: env.np_random.random(2),
}


class OfTwo(Exception):
    """Cannot be pickled: it is made of two arguments, and keeps one."""

    def __init__(self, first, second):
        super().__init__(first)


def raise_of_two():
    raise OfTwo("out of", "fuel")


def learn():
    x = torch.ones(2, requires_grad=True)
    (x**2).sum().backward()
    return x.grad.numpy() / 4


def seed_all():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


ERRORS = {"sys.exit": sys.exit, "an error of two": raise_of_two}  # in a step in the midst
OBSERVED = DRAWS | {
    "a gradient": lambda env: learn(),
    "drawn at first": lambda env: env.drawn,
    "an old generator": lambda env: env.np_random.rand(2),
    "seeds all": lambda env: np.random.rand(2),
}
BEGINNINGS = {  # what a constructor does besides
    "seeds torch": lambda: torch.manual_seed(0),
    "seeds all": seed_all,
    "moves": lambda: os.chdir(os.sep),
    "slow to make": lambda: (Path(f"{os.getpid()}.made").touch(), time.sleep(2)),
    "exits": sys.exit,
    "finds no server": lambda: socket.create_connection(("127.0.0.1", 9), timeout=5),
}
INFOS = {
    "ragged": lambda t: {"path": np.zeros(t + 1)},
    "mixed": lambda t: {"winner": 1 if t % 2 else "draw"},
    "a dict at times": lambda t: {"x": {"a": 1} if t % 2 else 3},
    "episode": lambda t: {"episode": 7, "_episode": True},
    "final_obs": lambda t: {"final_obs": np.full(2, 9.0)},
    "numbered": lambda t: {3: 1},
    "no dict": lambda t: None,
}
NUMBERS = {
    "arrays": lambda x: np.array([x]),
    "matrices": lambda x: np.array([[x]]),
    "lists": lambda x: [x],
    "tensors": lambda x: torch.tensor(float(x), requires_grad=True),
}
VECTOR = Box(0, 1, (2,), np.float32)
PIXELS = Box(0, 255, (2,), np.uint8)
MISFITS = {  # the space, and what is observed instead
    "fractions for pixels": (PIXELS, lambda: np.array([0.2, 254.9])),
    "below 0 for pixels": (PIXELS, lambda: np.array([-1, 1])),
    "ragged numbers": (VECTOR, lambda: [[0.5], [0.5, 0.5]]),
    "one number for two": (VECTOR, lambda: np.array([0.5], np.float32)),
    "a number for a vector": (VECTOR, lambda: 0.5),
    "a row for a vector": (VECTOR, lambda: np.zeros((1, 2), np.float32)),
    "a fraction for a choice": (Discrete(3), lambda: 1.7),
    "fractions in a part": (Dict(a=PIXELS, b=VECTOR), lambda: dict(a=np.array([0.5, 1.5]), b=np.zeros(2, np.float32))),
    "a part less": (Dict(a=VECTOR, b=VECTOR), lambda: dict(a=np.zeros(2, np.float32))),
}


class Odd(gym.Env):
    """Episodes of 8 steps with a reward of 1 each; a misfit comes from its `since`-th observation on."""

    def __init__(self, what: str, since: int = 0, actions: str = ""):
        self.what, self.since, self.count = what, since, 0
        if what == "drawn at first":
            self.drawn = np.random.rand(2)
        if what == "an old generator":
            self.np_random = np.random.RandomState(0)
        self.observation_space = MISFITS[what][0] if what in MISFITS else Box(0, 1, (2,), np.float32)
        self.action_space = ACTION_SPACES[actions]()
        BEGINNINGS.get(what, lambda: None)()
        if what == "a process":
            self.process = multiprocessing.Process(target=time.sleep, args=(10_000,))
            self.process.start()

    def observe(self):
        self.count += 1
        if self.what in MISFITS:
            return MISFITS[self.what][1]() if self.count > self.since else self.observation_space.sample()
        return np.asarray(OBSERVED[self.what](self) if self.what in OBSERVED else np.zeros(2), np.float32)

    def reset(self, *, seed=None, options=None):
        if self.what not in ("np_random, which it forgets to seed", "an old generator"):
            super().reset(seed=seed)
        self.t = 0
        return self.observe(), INFOS.get(self.what, lambda t: {})(0)

    def step(self, action):
        self.t += 1
        if self.what in ERRORS and self.count == 20:
            ERRORS[self.what]()
        if self.what == "stuck" and self.count == 100:
            sum(range(10**13))  # for hours, and not in Python
        number = NUMBERS.get(self.what, lambda x: x)
        info = INFOS.get(self.what, lambda t: {})(self.t)
        return self.observe(), number(1.0), number(self.t == 8), number(False), info

    def close(self):
        if self.what == "close":
            raise OSError("the window is gone")
        if self.what == "close exits":
            sys.exit()
        if self.what == "a process":
            self.process.terminate()
            self.process.join()


class Learner(Odd):
    """Computes with torch, on as many threads as torch has."""

    def step(self, action):
        torch.ones(512, 512) @ torch.ones(512, 512)
        return super().step(action)


class OldStep(Odd):
    """Its step is that of gym before 0.26."""

    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class NamedEnds(Odd):
    """Says for each of several agents whether its episode ends."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, {"__all__": terminated}, truncated, info


class Own(Odd):
    """Draws from a generator that cannot be set."""

    np_random = property(lambda self: np.random.default_rng(self.count))


class Sampling(gym.ObservationWrapper):
    """Observes samples of a space of its own."""

    def __init__(self, **kwargs):
        super().__init__(Odd(**kwargs))
        self.observation_space = Box(0, 1, (2,), np.float32)

    def observation(self, obs):
        return self.observation_space.sample()


gym.register("Odd-v0", entry_point=Odd)
gym.register("OldStep-v0", entry_point=OldStep)
gym.register("NamedEnds-v0", entry_point=NamedEnds)
gym.register("Own-v0", entry_point=Own)
gym.register("Sampling-v0", entry_point=Sampling)
gym.register("Learner-v0", entry_point=Learner)
