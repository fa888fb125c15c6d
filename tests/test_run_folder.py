"""What a run's folder tells about the run: the script that made it, the command, the versions, the arguments."""

import functools
import platform
import re
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from conftest import ROOT, SMALL, flags, run_script, small_args
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def test_the_script_is_kept(script):
    """Catches: a curve of which nobody knows any more which edit of the file made it."""
    run_dir = script.train(small_args(script))
    name = f"{script.__name__}.py"
    assert (run_dir / name).read_bytes() == (ROOT / name).read_bytes()
    text = (run_dir / "command.txt").read_text()
    for version in (platform.python_version(), torch.__version__, gym.__version__):
        assert version in text
    assert re.search(r"git commit ([0-9a-f]{40}(-dirty)?|unknown)$", text, re.MULTILINE)


def test_the_command_is_kept(launcher):
    """Catches: a run that cannot be repeated, for its command is lost with the shell's history."""
    argv = flags(**SMALL["ppo"] | dict(exp_name="with space"))
    assert launcher.run("ppo", *argv).returncode == 0
    (run_dir,) = Path("runs").iterdir()
    assert "'with space'" in (run_dir / "command.txt").read_text()


def test_an_edited_script_is_told_and_kept(launcher):
    """Catches: the text of the first half of a run overwritten by that of the second."""
    run_mine = functools.partial(launcher.run, str(Path("mine/ppo").absolute()))
    original = (ROOT / "ppo.py").read_text()
    Path("mine").mkdir()
    mine = Path("mine/ppo.py")
    mine.write_text(original)
    arguments = SMALL["ppo"] | dict(total_timesteps=64)
    assert run_mine(*flags(**arguments)).returncode == 0
    (run_dir,) = Path("runs").iterdir()

    further = ["--resume", str(run_dir), "--total-timesteps", "96"]
    again = run_mine(*further)
    assert "has changed" not in again.stdout
    mine.write_text(original + "\n# an idea\n")
    edited = run_mine("--resume", str(run_dir), "--total-timesteps", "128")
    assert edited.stdout.count("ppo.py has changed since this run began") == 1, edited.stderr
    texts = {path.name: path.read_text() for path in run_dir.glob("*.py")}
    assert texts == {"ppo.py": original, "ppo_from_96.py": original + "\n# an idea\n"}
    assert "has changed" not in run_mine("--resume", str(run_dir), "--total-timesteps", "160").stdout

    mine.write_text(original + "\n# another idea\n")
    evaluated = run_mine("--evaluate", str(run_dir), "--eval-episodes", "1")
    assert "ppo.py has changed since this run was trained" in evaluated.stdout
    assert {path.name for path in run_dir.glob("*.py")} == texts.keys()


def test_arguments_are_in_tensorboard(script):
    """Catches: runs that TensorBoard can neither explain nor compare by their arguments."""
    run_dir = script.train(small_args(script, gamma=0.5))
    script.train(small_args(script, gamma=0.5, resume=str(run_dir)))
    events = EventAccumulator(str(run_dir)).Reload()
    (table,) = events.Tensors("hyperparameters/text_summary")
    text = table.tensor_proto.string_val[0].decode()
    assert "|gamma|0.5|" in text
    assert "|param|value|" in text
    plugin = events.summary_metadata["_hparams_/session_start_info"].plugin_data
    assert plugin.plugin_name == "hparams"
    assert b"gamma" in plugin.content


def test_nothing_but_the_run_is_on_the_terminal(launcher):
    """Catches: lines of SDL, MuJoCo or Gym between those that matter."""
    result = run_script("ppo_continuous_action", *flags(env_id="HalfCheetah-v5", total_timesteps=64, num_steps=64))
    assert result.returncode == 0
    assert result.stderr == ""
    assert not Path("MUJOCO_LOG.TXT").exists()
    result = launcher.run("ppo", *flags(**SMALL["ppo"] | dict(eval_episodes=1, capture_video=True)))
    assert result.returncode == 0
    assert result.stderr == ""


@pytest.mark.parametrize("rounded", [True, False])
def test_the_number_of_steps_is_told_where_it_is_rounded(capsys, rounded):
    """Catches: a run that silently ends a little before the steps that were asked for."""
    import ppo

    ppo.train(small_args(ppo, total_timesteps=130 if rounded else 128))
    line = "128 steps: 4 iterations of 32" + (", of 130 asked for" if rounded else "")
    assert line in capsys.readouterr().out.splitlines()
