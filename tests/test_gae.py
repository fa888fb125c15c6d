"""compute_gae, which is the same in every script (see test_consistency.py), against slow and obvious definitions."""

import itertools

import numpy as np
import pytest
import torch

import ppo

T, N, GAMMA = 23, 5, 0.9


def definition(rewards, values, next_values, terminations, dones, gamma, lam):
    """GAE eq. 16 in O(T²): the sum of (gamma * lambda)^k delta_{t+k}, up to the first done."""
    advantages = np.zeros_like(rewards)
    for t, n in np.ndindex(*rewards.shape):
        for k, s in enumerate(range(t, len(rewards))):
            next_value = 0.0 if terminations[s, n] else next_values[s, n]
            delta = rewards[s, n] + gamma * next_value - values[s, n]
            advantages[t, n] += (gamma * lam) ** k * delta
            if dones[s, n]:
                break
    return advantages


def random_rollout(p_terminated: float, p_truncated: float, seed: int = 0) -> dict[str, np.ndarray]:
    """A rollout of random numbers; terminated and truncated may meet."""
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, T, N))
    terminations = rng.random((T, N)) < p_terminated
    truncations = rng.random((T, N)) < p_truncated
    return dict(
        rewards=rewards,
        values=values,
        next_values=next_values,
        terminations=terminations.astype(float),
        dones=(terminations | truncations).astype(float),
    )


def run(rollout, gamma=GAMMA, lam=0.95):
    tensors = {name: torch.as_tensor(array) for name, array in rollout.items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    advantages, returns = ppo.compute_gae(**tensors, gamma=gamma, gae_lambda=lam)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors), "an input was changed"
    return advantages.numpy(), returns.numpy()


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize(("p_terminated", "p_truncated"), [(0, 0), (0.2, 0), (0, 0.2), (0.2, 0.2), (1, 0), (0, 1)])
def test_equals_the_definition(p_terminated, p_truncated, lam):
    """Catches: any off-by-one in the recursion, and a mask that does the other mask's job."""
    for seed in range(3):
        rollout = random_rollout(p_terminated, p_truncated, seed)
        advantages, returns = run(rollout, lam=lam)
        expected = definition(**rollout, gamma=GAMMA, lam=lam)
        np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(returns, expected + rollout["values"], rtol=1e-12, atol=1e-12)


def test_lambda_1_is_the_return_less_the_value():
    """Catches: a discount that is applied once too often, or a bootstrap of the wrong value."""
    rollout = random_rollout(0.1, 0.1)
    going_on = rollout["dones"][:-1] == 0  # there, the next observation's value is the next stored one
    rollout["next_values"][:-1][going_on] = rollout["values"][1:][going_on]
    _, returns = run(rollout, lam=1.0)
    for t, n in np.ndindex(T, N):
        expected, discount = 0.0, 1.0
        for s in range(t, T):
            expected += discount * rollout["rewards"][s, n]
            discount *= GAMMA
            if rollout["dones"][s, n] or s == T - 1:
                expected += 0.0 if rollout["terminations"][s, n] else discount * rollout["next_values"][s, n]
                break
        assert returns[t, n] == pytest.approx(expected, abs=1e-12)


def test_lambda_0_is_the_td_error():
    """Catches: lambda that is read as 1 - lambda, or not at all."""
    rollout = random_rollout(0.2, 0.2)
    advantages, _ = run(rollout, lam=0.0)
    target = rollout["rewards"] + GAMMA * rollout["next_values"] * (1 - rollout["terminations"])
    np.testing.assert_allclose(advantages, target - rollout["values"], atol=1e-12)


@pytest.mark.parametrize("t", [0, T // 2, T - 1])
def test_a_truncated_step_bootstraps_and_cuts(t):
    """Catches: a time limit that is treated as a failure, or that lets the next episode's advantages through."""
    rollout = random_rollout(0, 0)
    rollout["dones"][t] = 1
    advantages, _ = run(rollout)
    delta = rollout["rewards"][t] + GAMMA * rollout["next_values"][t] - rollout["values"][t]
    np.testing.assert_allclose(advantages[t], delta, atol=1e-12)
    later = {name: array.copy() for name, array in rollout.items()}
    later["rewards"][t + 1 :] += 100
    np.testing.assert_array_equal(run(later)[0][: t + 1], advantages[: t + 1])


@pytest.mark.parametrize("t", [0, T // 2, T - 1])
def test_terminated_wins(t):
    """Catches: a step that is terminated and at the time limit at once, and bootstrapped all the same."""
    rollout = random_rollout(0, 0)
    rollout["terminations"][t] = rollout["dones"][t] = 1
    advantages, _ = run(rollout)
    np.testing.assert_allclose(advantages[t], rollout["rewards"][t] - rollout["values"][t], atol=1e-12)
    rollout["next_values"][t] = 1e9
    np.testing.assert_array_equal(run(rollout)[0], advantages)


@pytest.mark.parametrize(("terminated", "done"), itertools.product([0, 1], repeat=2))
def test_a_rollout_of_one_step(terminated, done):
    """Catches: a special case for the last step that forgets its masks."""
    one = dict(rewards=2.0, values=3.0, next_values=5.0, terminations=terminated, dones=max(done, terminated))
    advantages, _ = run({name: np.full((1, 1), value, float) for name, value in one.items()}, gamma=0.5)
    assert advantages.item() == (-1.0 if terminated else 1.5)


def test_envs_do_not_mix():
    """Catches: a recursion that carries one env's advantage into another's."""
    rollout = random_rollout(0.1, 0.1)
    advantages, _ = run(rollout)
    permutation = np.random.default_rng(1).permutation(N)
    permuted, _ = run({name: array[:, permutation] for name, array in rollout.items()})
    np.testing.assert_array_equal(permuted, advantages[:, permutation])
