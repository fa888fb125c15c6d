"""What a run's folder tells about the run: the script that made it, the command, the versions, the arguments."""

import functools
from pathlib import Path

import gymnasium as gym
import torch
from conftest import ROOT, SMALL, flags, read_log, small_args

import ppo


def test_the_script_is_kept(script):
    """Catches: a curve of which nobody knows any more which edit of the file made it; a folder that two runs share."""
    first, second = (script.train(small_args(script)) for _ in range(2))
    name = script.__name__
    for run_dir in (first, second):
        assert run_dir.parent == Path("runs").absolute()
        assert run_dir.name.startswith(f"CartPole-v1__{name}__1__")
        assert (run_dir / f"{name}_from_0.py").read_bytes() == (ROOT / f"{name}.py").read_bytes()
        assert {path.name for path in run_dir.glob("*.p?")} == {"checkpoint.pt", "best.pt", f"{name}_from_0.py"}
    assert first != second


def test_an_edited_script_is_kept(launcher):
    """Catches: the text of the first half of a run overwritten by that of the second, or by that of an evaluation."""
    run_mine = functools.partial(launcher.run, str(Path("mine/ppo").absolute()))
    original = (ROOT / "ppo.py").read_text()
    edited = original + "\n# an idea\n"
    run_dir = ppo.train(small_args(ppo, total_timesteps=64))
    Path("mine").mkdir()
    Path("mine/ppo.py").write_text(edited)
    resumed = run_mine("--resume", str(run_dir), "--total-timesteps", "96")
    evaluated = run_mine("--evaluate", str(run_dir), "--eval-episodes", "1")
    assert resumed.returncode == evaluated.returncode == 0, resumed.stderr + evaluated.stderr
    texts = {path.name: path.read_text() for path in run_dir.glob("*.py")}
    assert texts == {"ppo_from_0.py": original, "ppo_from_64.py": edited}


def test_arguments_are_in_tensorboard(launcher):
    """Catches: runs that TensorBoard can neither explain nor compare by their arguments, commands or versions."""
    argv = flags(**SMALL["ppo"] | dict(gamma=0.5, exp_name="my experiment"))
    assert launcher.run("ppo", *argv).returncode == 0
    (run_dir,) = Path("runs").iterdir()
    steps = small_args(ppo).total_timesteps
    ppo.train(ppo.saved_args(run_dir, gamma=0.75, total_timesteps=2 * steps))
    events = read_log(run_dir)
    tables = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors("hyperparameters/text_summary")}
    assert tables.keys() == {0, steps}  # what is true of the second half does not hide what was of the first
    versions = [f"|torch|{torch.__version__}|", f"|gymnasium|{gym.__version__}|", "|param|value|"]
    for row in (f"|command|{ROOT / 'ppo.py'} {' '.join(argv)}|", "|gamma|0.5|", *versions):
        assert row in tables[0].splitlines()
    assert "|gamma|0.75|" in tables[steps].splitlines()
    plugin = events.summary_metadata["_hparams_/session_start_info"].plugin_data
    assert plugin.plugin_name == "hparams"
    assert b"gamma" in plugin.content


def test_nothing_but_the_run_is_on_the_terminal(launcher):
    """Catches: lines of SDL, ffmpeg or Gym between those that matter; a run that hides that it rounded its steps."""
    argv = flags(**SMALL["ppo"] | dict(total_timesteps=130, eval_episodes=1, capture_video=True))
    result = launcher.run("ppo", *argv)
    assert result.returncode == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    first, *evaluations, last = lines
    assert first.startswith("from step 0 of 130: /")
    assert [line[:24] for line in evaluations] == ["evaluation: mean return "] * 2
    assert last.startswith("128 steps, ")
