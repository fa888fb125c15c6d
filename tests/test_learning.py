"""Scripts learn CartPole; the slowest tests there are."""

import re

import pytest
from conftest import flags

# after so many steps, the mean return of the likeliest actions is at least (seeds 1 to 3: 301 to 442, and 116 to 141;
# without memory the LSTM's task gives 50); benchmark/results has the whole curves
LEARNS_CARTPOLE = {"ppo": (40_000, 200), "ppo_lstm": (30_000, 80)}


@pytest.mark.parametrize("name", LEARNS_CARTPOLE)
def test_cartpole(name, launcher):
    """Catches: whatever the other tests do not, if it keeps an agent from learning; the LSTM sees no velocities."""
    steps, least = LEARNS_CARTPOLE[name]
    result = launcher.run(name, *flags(total_timesteps=steps, eval_episodes=20, deterministic=True, torch_threads=1))
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"evaluation: mean return ([\d.]+)", result.stdout).group(1)) >= least
