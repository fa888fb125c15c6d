"""The scripts as libraries: import, train, evaluate, repeatedly in one process."""

import importlib
from pathlib import Path

import numpy as np
import torch
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


def test_resume_by_args_goes_on_with_the_runs_arguments(script):
    """Catches: train(Args(resume=folder)) that silently goes on with the defaults."""
    run_dir = script.train(small_args(script, gamma=0.9, learning_rate=1e-3))
    steps = 6 * small_args(script).batch_size
    assert script.train(script.Args(resume=str(run_dir), total_timesteps=steps)) == run_dir
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert (state["args"]["gamma"], state["args"]["learning_rate"]) == (0.9, 1e-3)
    assert (state["args"]["num_envs"], state["global_step"]) == (small_args(script).num_envs, steps)


def test_numbers_of_numpy_are_plain_in_a_checkpoint(script):
    """Catches: a sweep over np.logspace whose checkpoints cannot be read, hours later."""
    plain = dict(learning_rate=1e-4, gamma=0.5, seed=2, num_envs=2, norm_adv=True, exp_name="sweep")
    sweep = dict(learning_rate=np.logspace(-4, -3, 2)[0], gamma=np.float32(0.5), seed=np.arange(3)[2])
    sweep |= dict(num_envs=np.int64(2), norm_adv=np.bool_(True), exp_name=np.str_("sweep"))
    state = script.load_checkpoint(script.train(small_args(script, **sweep)) / "checkpoint.pt")
    assert {name: (state["args"][name], type(state["args"][name])) for name in plain} == {
        name: (value, type(value)) for name, value in plain.items()
    }


def test_a_default_given_on_the_command_line_holds(launcher):
    """Catches: a value of the command line that is taken for not given, because it is the script's default."""
    ppo = importlib.import_module("ppo")
    run_dir = ppo.train(small_args(ppo, gamma=0.9))
    process = launcher.run("ppo", "--resume", str(run_dir), "--gamma", "0.99", "--total-timesteps", "192")
    assert process.returncode == 0, process.stderr
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["args"]["gamma"] == 0.99
