"""Scripts learn CartPole; the slowest tests there are."""

import re

import pytest
from conftest import flags, run_script

# after so many steps, the mean return of the likeliest actions is at least (seeds 1 to 3: 301 to 442, and 116 to 141;
# without memory the LSTM's task gives 50); benchmark/results has the whole curves
LEARNS_CARTPOLE = {"ppo": (40_000, 200), "ppo_lstm": (30_000, 80)}


def evaluated_mean(name: str, **arguments) -> float:
    """Train as a user does, then play 20 episodes; return their mean return."""
    options = dict(eval_episodes=20, deterministic=True, torch_threads=1)
    result = run_script(name, *flags(**options | arguments), timeout=600)
    assert result.returncode == 0, result.stderr
    return float(re.search(r"evaluation: mean return ([\d.]+)", result.stdout).group(1))


@pytest.mark.parametrize("name", LEARNS_CARTPOLE)
def test_cartpole(name):
    """Catches: whatever the other tests do not, if it keeps an agent from learning; the LSTM sees no velocities."""
    steps, least = LEARNS_CARTPOLE[name]
    assert evaluated_mean(name, total_timesteps=steps) >= least
