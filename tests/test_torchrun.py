"""torchrun: what the processes refuse together, log of the whole batch, and do once."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FOLD_SCRIPTS, ROOT, SMALL, read_scalars, small_args
from test_processes import act_predictably, together, train_and_tell


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_a_minibatch_of_one_step_a_process_is_refused(script, monkeypatch):
    """Catches: advantages normalised by the deviation of a single step: NaN from the first update on."""
    monkeypatch.setattr(script, "num_processes", lambda: 2, raising=False)
    monkeypatch.setattr(script, "rank_and_size", lambda: (0, 2), raising=False)  # as it was called once
    changes = dict(seq_len=1) if "lstm" in script.__name__ else {}
    args = small_args(script, num_minibatches=small_args(script).batch_size // 2, **changes)
    with pytest.raises(script.UserError, match=r"--num-minibatches must be .* 2 processes"):
        script.train(args)
    assert not Path("runs").exists()


def train_on_single_steps(rank: int) -> None:
    script = importlib.import_module("ppo")
    arguments = SMALL["ppo"] | dict(num_minibatches=16, norm_adv=False, total_timesteps=32)
    run_dir = script.train(script.Args(**arguments))
    with pytest.raises(script.UserError, match="--num-minibatches"):
        script.train(script.Args(**arguments | dict(norm_adv=True)))
    Path(f"rank{rank}.txt").write_text(str(run_dir))


def test_without_normalisation_one_step_a_process_is_enough():
    """Catches: a refusal of what can be computed, and processes of which only one refuses what cannot."""
    together(train_on_single_steps)
    (run_dir,) = Path("runs").iterdir()
    assert {Path(f"rank{rank}.txt").read_text() for rank in range(2)} == {str(run_dir)}
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 1


@pytest.mark.parametrize("name", FOLD_SCRIPTS)
def test_explained_variance_is_of_the_whole_batch(name, monkeypatch):
    """Catches: the mean of each process's explained variance, which is that of no batch."""
    script = importlib.import_module(name)
    arguments = SMALL[name] | dict(num_envs=4, num_minibatches=1, norm_adv=False, update_epochs=1)
    arguments["total_timesteps"] = 2 * script.Args(**arguments | dict(total_timesteps=10**6)).batch_size
    together(train_and_tell, name, arguments, True)
    run_dir = torch.load("rank0.pt", weights_only=True)["run_dir"]
    monkeypatch.setattr(script, "Agent", type("Agent", (script.Agent,), {}))  # what is changed now is undone at the end
    act_predictably(script)
    ours, theirs = (read_scalars(Path(each)) for each in (run_dir, script.train(script.Args(**arguments))))
    assert len(theirs["losses/explained_variance"]) == 2
    np.testing.assert_allclose(
        ours["losses/explained_variance"], theirs["losses/explained_variance"], rtol=1e-4, atol=1e-5
    )


def test_torchrun_evaluates_once():
    """Catches: as many evaluations, and lines that tell of them, as processes."""
    script = importlib.import_module("ppo")
    run_dir = script.train(small_args(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "ppo.py")]
    command += ["--evaluate", str(run_dir), "--eval-episodes", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("evaluation: mean return") == 1
    assert "over 2 episodes" in result.stdout
