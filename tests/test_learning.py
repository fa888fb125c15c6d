"""ppo.py solves CartPole with its defaults; the slowest test there is, so that the seeds run beside each other."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import flags, run_script

SEEDS = [1, 2, 3]
# the scripts that are to solve CartPole, and what they need besides their defaults
SOLVES_CARTPOLE = {"ppo": {}}


@pytest.mark.parametrize("name", SOLVES_CARTPOLE)
def test_cartpole(name):
    """Catches: whatever the other tests do not, if it keeps an agent from learning; mean return 475 means solved."""

    def train(seed: int) -> float:
        arguments = SOLVES_CARTPOLE[name] | dict(seed=seed, eval_episodes=20, torch_threads=1)
        result = run_script(name, *flags(**arguments), timeout=600)
        assert result.returncode == 0, result.stderr
        return float(re.search(r"evaluation: mean return ([\d.]+)", result.stdout).group(1))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        means = list(pool.map(train, SEEDS))
    assert min(means) >= 475, means
