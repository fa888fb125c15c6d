"""One seed, one result; two seeds, nothing in common."""

import itertools
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import FOUR_SCRIPTS, read_scalars, same_parameters, small_args

import ppo


@pytest.fixture
def reset_seeds(script, monkeypatch):
    """The seeds that each vector env of the script is reset with, one list for each env that is made."""
    calls, make_envs = [], script.make_envs

    class Spy(gym.vector.VectorWrapper):
        def __init__(self, envs):
            super().__init__(envs)
            self.seeds = []
            calls.append(self.seeds)

        def reset(self, *, seed=None, options=None):
            assert options is None or "reset_mask" in options
            self.seeds += seed
            return self.env.reset(seed=seed, options=options)

    monkeypatch.setattr(script, "make_envs", lambda *args, **options: Spy(make_envs(*args, **options)))
    return calls


def test_one_seed_one_result(script):
    """Catches: a random stream that the seed does not fix, or that something before the run can move; a seed unused."""
    total = 2 * small_args(script).batch_size
    args = small_args(script, total_timesteps=total)
    first = script.train(args)
    torch.rand(5)
    np.random.seed(123)
    second = script.train(args)
    assert first != second
    assert same_parameters(first, second)
    ours, theirs = read_scalars(first), read_scalars(second)
    for scalars in (ours, theirs):
        del scalars["charts/SPS"]
    assert ours == theirs
    assert not same_parameters(first, script.train(replace(args, seed=2)))


@pytest.mark.parametrize("script", FOUR_SCRIPTS, indirect=True)
def test_evaluation_does_not_disturb_training(script, reset_seeds):
    """Catches: an evaluation that draws from training's random stream, or plays on training's seeds."""
    args = small_args(script, checkpoint_every=2)
    plain = script.train(args)
    evaluated = script.train(small_args(script, checkpoint_every=2, eval_every=2, eval_episodes=1))
    assert same_parameters(plain, evaluated)
    assert len(read_scalars(evaluated)["eval/episodic_return"]) == 2
    training, again, *evaluations = reset_seeds
    assert training == again
    assert len(training) == args.num_envs
    assert len(evaluations) == 2
    assert not set(training) & set(itertools.chain(*evaluations))


def test_seeds_share_no_stream():
    """Catches: seed + i, with which run 1's second env is run 2's first, or its envs draw what its policy draws."""
    keys = [(kind, iteration) for kind in (ppo.TRAINING, ppo.SAMPLING) for iteration in (0, 1, 100)]
    keys.append((ppo.EVALUATION,))
    streams = [
        seed
        for run_seed in range(50)
        for key in keys
        for seed in ppo.env_seeds(small_args(ppo, seed=run_seed), 8, *key)
    ]
    assert len(set(streams)) == len(streams) == 50 * 7 * 8
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in streams)
    few, many = (ppo.env_seeds(small_args(ppo), n, ppo.TRAINING, 0) for n in (2, 8))
    assert few == many[:2]


@pytest.mark.parametrize("script", FOUR_SCRIPTS, indirect=True)
def test_training_uses_the_seeds(script, reset_seeds):
    """Catches: envs that are reset without a seed, or all with the same."""
    args = small_args(script)
    script.train(args)
    script.train(small_args(script, seed=2))
    assert reset_seeds[0] == script.env_seeds(args, args.num_envs, script.TRAINING, 0)
    assert len(set(reset_seeds[0] + reset_seeds[1])) == 2 * args.num_envs


def test_envs_begin_apart(script):
    """Catches: parallel envs that are copies of one another, or that begin alike in each run."""
    starts = []
    for seed in (1, 2):
        args = small_args(script, seed=seed)
        envs = script.make_envs(args, 4)
        obs, _ = envs.reset(seed=script.env_seeds(args, 4, script.TRAINING, 0))
        for _ in range(3):  # games begin with the same picture, but for the no-ops
            obs, *_ = envs.step(np.zeros_like(envs.action_space.sample()))
        starts.append([row.tobytes() for row in obs])
        envs.close()
    assert len(set(starts[0])) > 1
    assert len(set(starts[1])) > 1
    assert starts[0] != starts[1]
