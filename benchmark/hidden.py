"""CartPole without velocities as an env, for a script without a memory: `--env-id hidden:CartPoleHidden-v1`."""

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

VISIBLE = np.array([1, 0, 1, 0], np.float32)  # position, velocity, angle, angular velocity


class CartPoleHidden(CartPoleEnv):
    """CartPole whose observation has zeros for velocities, as ppo_lstm.py shows it to its agent."""

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs * VISIBLE, info

    def step(self, action):
        obs, *rest = super().step(action)
        return obs * VISIBLE, *rest


gym.register("CartPoleHidden-v1", CartPoleHidden, max_episode_steps=500)
