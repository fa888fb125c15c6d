"""What goes wrong in the midst of a run is told, and spoils neither the parameters nor the last checkpoint."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, flags, parameters, read_scalars, small_args
from faulty_envs import hook_envs

import ppo


@pytest.fixture
def agents(script, monkeypatch):
    """The agents that the script makes, and their parameters at the last call of `optimizer.step`."""
    made, Agent = [], script.Agent

    class Spy(Agent):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(script, "Agent", Spy)
    return made


def assert_finite(tensors) -> None:
    assert all(torch.isfinite(tensor).all() for tensor in tensors)


def assert_told(error: FloatingPointError, what: str, step: int) -> None:
    """The error says which number it is, names the last step that is logged, and the folder of the checkpoint."""
    (run_dir,) = Path("runs").absolute().iterdir()
    assert re.match(rf"{what} is not finite after step {step}\b", str(error))
    assert f"the checkpoint in {run_dir} is good" in str(error)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_reward_that_is_no_number(script, monkeypatch, agents, value):
    """Catches: a run that goes on for ten hours with NaN parameters, and saves them over the good ones."""
    args = small_args(script, checkpoint_every=2)

    def spoil(count, transition):
        if count == 2 * args.num_steps + 1:  # in the third iteration
            transition[1] = np.full(args.num_envs, value)

    hook_envs(monkeypatch, script, spoil)
    with pytest.raises(FloatingPointError) as error:
        script.train(args)
    assert_told(error.value, r"rewards\[0, 0\]", 2 * args.batch_size)
    (run_dir,) = Path("runs").iterdir()
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 2
    assert_finite(parameters(run_dir).values())
    assert_finite(agents[0].parameters())
    assert [step for step, _ in read_scalars(run_dir)["losses/value_loss"]] == [args.batch_size, 2 * args.batch_size]
    # and the checkpoint is as good as it says
    hook_envs(monkeypatch, script, None)
    script.train(script.saved_args(run_dir))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_no_number(script, monkeypatch, value):
    """Catches: a check of the loss alone; parameters that were spoilt in the midst of an update, and are saved."""
    args, calls = small_args(script, checkpoint_every=1), []
    clip_grad_norm_, minibatches = torch.nn.utils.clip_grad_norm_, args.update_epochs * args.num_minibatches

    def spoil(parameters, max_norm, **options):
        parameters = list(parameters)
        calls.append(None)
        if len(calls) == minibatches + 2:  # of the second iteration the second, with more of them to come
            parameters[-1].grad.view(-1)[0] = value
        return clip_grad_norm_(parameters, max_norm, **options)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spoil)
    with pytest.raises(FloatingPointError) as error:
        script.train(args)
    assert_told(error.value, "grad_norm", args.batch_size)
    assert len(calls) <= 2 * minibatches
    (run_dir,) = Path("runs").iterdir()
    assert script.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 1
    assert_finite(parameters(run_dir).values())
    assert [step for step, _ in read_scalars(run_dir)["losses/value_loss"]] == [args.batch_size]


def test_an_env_that_raises(script, monkeypatch, agents):
    """Catches: an env's error that is swallowed or dressed up, and a checkpoint written in its wake."""

    class GripperError(Exception):
        pass

    args = small_args(script, checkpoint_every=2)

    def fail(count, transition):
        if count == 3 * args.num_steps - 1:
            raise GripperError("stuck")

    hook_envs(monkeypatch, script, fail)
    with pytest.raises(GripperError, match=r"^stuck$"):
        script.train(args)
    (run_dir,) = Path("runs").iterdir()
    assert script.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 2
    assert [step for step, _ in read_scalars(run_dir)["losses/value_loss"]] == [args.batch_size, 2 * args.batch_size]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_traceback_of_an_env_that_raises(launcher, vectorization):
    """Catches: an env's error that is told without the line of the env that it comes from, or that hangs the run."""
    options = dict(env_id="faulty_envs:Raises-v0", vectorization=vectorization, checkpoint_every=1)
    process = launcher.run("ppo", *flags(**SMALL["ppo"] | options))
    assert process.returncode == 1
    assert "RuntimeError: the gripper is stuck" in process.stderr
    assert re.search(r'faulty_envs\.py", line \d+, in move', process.stderr)
    (run_dir,) = Path("runs").iterdir()
    assert ppo.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 1
