"""Tiny envs whose optimal values and policies are known in closed form, for tests of what training learns.

They are registered for each action space: `probe_envs:Name-v0` (Discrete), `probe_envs:NameBox-v0` and
`probe_envs:NameMultiDiscrete-v0`. In each space an action amounts to one bit, see `Probe.bit`. Besides, CartPole in two
guises: with a MultiDiscrete action (CartPoleMultiDiscrete-v0) and without its velocities (CartPoleHidden-v0).
"""

from typing import ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Discrete, MultiDiscrete

ACTION_SPACES = {
    "": lambda: Discrete(2),
    "Box": lambda: Box(-1.0, 1.0, (1,), np.float32),
    "MultiDiscrete": lambda: MultiDiscrete([2, 2]),
}


class Probe(gym.Env):
    """An env that is a state machine: `start` returns the first observation, `move` the rest."""

    observation_space = Box(-10.0, 10.0, (1,), np.float32)

    def __init__(self, actions: str = "", render_mode: str | None = None):
        self.action_space = ACTION_SPACES[actions]()
        self.render_mode = render_mode

    def bit(self, action) -> int:
        """The one bit of an action: 1 in Discrete and MultiDiscrete (first part), above 0 in Box."""
        return int(np.ravel(action)[0] > 0)

    def start(self) -> float:
        return 0.0

    def move(self, bit: int) -> tuple[float, float, bool]:
        """Return the next observation, the reward, and whether the episode is terminated."""
        raise NotImplementedError

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.start()
        return np.array([self.obs], np.float32), {}

    def step(self, action):
        self.obs, reward, terminated = self.move(self.bit(action))
        return np.array([self.obs], np.float32), reward, terminated, False, {}


class ConstantReward(Probe):
    """One step, reward 1. V = 1."""

    def move(self, bit):
        return 0.0, 1.0, True


class ObservationValue(Probe):
    """One step, the observation is -1 or 1, and so is the reward. V(o) = o."""

    def start(self):
        return self.np_random.choice([-1.0, 1.0])

    def move(self, bit):
        return 0.0, self.obs, True


class TwoSteps(Probe):
    """Observations 0, then 1; reward 1 at the second step. V(0) = gamma, V(1) = 1."""

    def move(self, bit):
        return self.obs + 1, self.obs, self.obs == 1


class PolicyFromReward(Probe):
    """One step, the reward is the action's bit. Best: always bit 1."""

    def move(self, bit):
        return 0.0, float(bit), True


class PolicyFromObservation(Probe):
    """One step, the observation is -1 or 1, reward 1 for bit 0 at -1 and bit 1 at 1, else -1. Best: V = 1."""

    def start(self):
        return self.np_random.choice([-1.0, 1.0])

    def move(self, bit):
        return 0.0, 1.0 if bit == (self.obs > 0) else -1.0, True


class Endless(Probe):
    """Reward 1 for ever, cut by a time limit of 5 steps which the observation does not tell. V = 1 / (1 - gamma)."""

    def move(self, bit):
        return 0.0, 1.0, False


class FinalObservation(Probe):
    """Observation -1 leads, without reward, to observation 1, where a time limit of one step cuts the episode.

    One episode in four starts at 1, gets reward 1 and terminates: V(1) = 1, so V(-1) = gamma. With the value of the
    next episode's start in the place of the final observation's, V(-1) would be gamma / (4 - 3 * gamma).
    """

    def start(self):
        return self.np_random.choice([-1.0, -1.0, -1.0, 1.0])

    def move(self, bit):
        return 1.0, float(self.obs > 0), bool(self.obs > 0)


class ThreeSteps(Probe):
    """Every episode has 3 steps of reward 1."""

    def move(self, bit):
        return self.obs + 1, 1.0, self.obs == 2


class EverLonger(Probe):
    """Four episodes of 2 steps, then episodes of 1000."""

    episode = -1

    def start(self):
        self.episode += 1
        return 0.0

    def move(self, bit):
        return self.obs + 1, 1.0, self.obs + 1 == (2 if self.episode < 4 else 1000)


class Logged(Probe):
    """The observation counts the steps; episodes of 1, 2, 3, 4, 1, ... steps end by termination and truncation in turn.

    Each transition is appended to Logged.log as (observation, action, reward, next observation, terminated, truncated).
    """

    log: ClassVar[list] = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.episode = None

    def start(self):
        # the seed decides where in the cycle an env begins, so that envs do not end their episodes together
        self.episode = self.np_random.integers(4) if self.episode is None else self.episode + 1
        return 0.0

    def step(self, action):
        before, self.obs = self.obs, self.obs + 1.0
        ended = self.obs == self.episode % 4 + 1
        # rewards of both signs, exact in float32, that do not repeat within an episode or between episodes
        reward = (-1) ** self.episode * (self.obs + self.episode / 4)
        terminated, truncated = ended and self.episode % 2 == 0, ended and self.episode % 2 == 1
        Logged.log.append((before, np.copy(action), reward, self.obs, terminated, truncated))
        return np.array([self.obs], np.float32), reward, terminated, truncated, {}


TIME_LIMITS = {Endless: 5, FinalObservation: 1}

for env_class in Probe.__subclasses__():
    for suffix in ACTION_SPACES:
        gym.register(
            f"{env_class.__name__}{suffix}-v0",
            entry_point=env_class,
            max_episode_steps=TIME_LIMITS.get(env_class),
            kwargs=dict(actions=suffix),
        )


def multi_discrete_cart_pole(**kwargs) -> gym.Env:
    """CartPole that is pushed to the right where both parts of the action agree."""
    return gym.wrappers.TransformAction(
        CartPoleEnv(**kwargs), lambda action: int(action[0] == action[1]), MultiDiscrete([2, 2])
    )


def hidden_cart_pole(seen=(1, 0, 1, 0), **kwargs) -> gym.Env:
    """CartPole whose observation has zeros for velocities."""
    env, seen = CartPoleEnv(**kwargs), np.array(seen, np.float32)
    return gym.wrappers.TransformObservation(env, lambda obs: obs * seen, env.observation_space)


class OwnSpace(CartPoleEnv):
    """CartPole that says besides, in words of any number, what there is to do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = gym.spaces.Dict(
            obs=self.observation_space, mission=gym.spaces.Sequence(gym.spaces.Discrete(9))
        )


gym.register("OwnSpace-v0", entry_point=OwnSpace)
gym.register("CartPoleMultiDiscrete-v0", entry_point=multi_discrete_cart_pole, max_episode_steps=500)
gym.register("CartPoleHidden-v0", entry_point=hidden_cart_pole, max_episode_steps=500)
