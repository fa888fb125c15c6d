"""The scripts as libraries: import, train, evaluate, repeatedly in one process."""

from pathlib import Path

import numpy as np
from conftest import SMALL, flags, same_parameters, small_args


def test_two_trainings_in_a_row_are_those_of_two_processes(script, launcher):
    """Catches: a run that depends on what ran before it in the same process."""
    runs = [script.train(small_args(script, seed=seed, exp_name="here")) for seed in (3, 4)]
    for seed, run_dir in zip((3, 4), runs):
        arguments = SMALL[script.__name__] | dict(seed=seed, exp_name="there")
        process = launcher.run(script.__name__, *flags(**arguments))
        assert process.returncode == 0, process.stderr
        (other_dir,) = Path("runs").glob(f"*__there__{seed}__*")
        assert same_parameters(run_dir, other_dir)


def test_numbers_of_numpy_are_plain_in_a_checkpoint(script):
    """Catches: a sweep over np.logspace whose checkpoints cannot be read, hours later."""
    plain = dict(learning_rate=1e-4, gamma=0.5, seed=2, num_envs=2, norm_adv=True, exp_name="sweep")
    sweep = dict(learning_rate=np.logspace(-4, -3, 2)[0], gamma=np.float32(0.5), seed=np.arange(3)[2])
    sweep |= dict(num_envs=np.int64(2), norm_adv=np.bool_(True), exp_name=np.str_("sweep"))
    state = script.load_checkpoint(script.train(small_args(script, **sweep)) / "checkpoint.pt")
    assert {name: (state["args"][name], type(state["args"][name])) for name in plain} == {
        name: (value, type(value)) for name, value in plain.items()
    }
