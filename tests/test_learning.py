"""Scripts solve CartPole; the slowest tests there are."""

import re

import pytest
from conftest import flags, run_script

# the scripts that are to solve CartPole with their defaults: the mean return that says so, with the likeliest actions
SOLVES_CARTPOLE = {"ppo": 475, "ppo_lstm": 400}


def evaluated_mean(name: str, **arguments) -> float:
    """Train as a user does, then play 20 episodes; return their mean return."""
    options = dict(eval_episodes=20, deterministic=True, torch_threads=1)
    result = run_script(name, *flags(**options | arguments), timeout=600)
    assert result.returncode == 0, result.stderr
    return float(re.search(r"evaluation: mean return ([\d.]+)", result.stdout).group(1))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", SOLVES_CARTPOLE)
def test_cartpole(name, seed):
    """Catches: whatever the other tests do not, if it keeps an agent from learning; the LSTM sees no velocities."""
    assert evaluated_mean(name, seed=seed) >= SOLVES_CARTPOLE[name]


def test_cartpole_without_velocities_needs_a_memory():
    """Catches: a task that ppo_lstm.py would solve without its LSTM."""
    assert evaluated_mean("ppo", env_id="probe_envs:CartPoleHidden-v0", total_timesteps=100_000) < 150
