"""The command line, as people and sweeps spell it; and runs and ids that belong to another script."""

import importlib
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, flags, small_args


def parsed(script, monkeypatch, *argv):
    """The arguments that a command line gives."""
    monkeypatch.setattr(script.sys, "argv", [f"{script.__name__}.py", *argv])
    return script.parse_args()


def test_every_way_to_write_a_boolean(script, monkeypatch):
    """Catches: `--anneal-lr False` refused, `--anneal_lr=False` of a wandb sweep refused, or a flag left unread."""
    booleans = [f.name for f in fields(script.Args) if f.type in (bool, bool | None)]
    assert len(booleans) > 10
    for name in booleans:
        flag = name.replace("_", "-")
        spellings = {
            True: [[f"--{flag}"], [f"--{flag}", "True"], [f"--{name}=True"], [f"--{flag}=true"]],
            False: [[f"--no-{flag}"], [f"--{flag}", "False"], [f"--{name}=False"], [f"--{flag}", "false"]],
        }
        for value, ways in spellings.items():
            for way in ways:
                args = parsed(script, monkeypatch, *way, "--gamma", "0.5")
                assert (getattr(args, name), args.gamma) == (value, 0.5), way


def test_whole_numbers_in_scientific_notation(script, monkeypatch):
    """Catches: `--total-timesteps 1e6` refused."""
    for million in ("1e6", "1E6", "1e+6", "1.0e6", "1000000", "1_000_000"):
        assert parsed(script, monkeypatch, "--total-timesteps", million).total_timesteps == 1_000_000
    assert parsed(script, monkeypatch, "--total_timesteps=2.5e5").total_timesteps == 250_000
    for number in ("1.5", "1.5e-1", "1.2.3e4", ".e4"):
        with pytest.raises(SystemExit):
            parsed(script, monkeypatch, "--total-timesteps", number)


def test_with_its_streams_closed():
    """Catches: a run that a daemon starts, without standard streams, which dies of its progress bar or first line."""
    argv = flags(**SMALL["ppo"], eval_episodes=1)
    command = shlex.join([sys.executable, str(ROOT / "ppo.py"), *argv])
    assert subprocess.run(["bash", "-c", f"{command} <&- >&- 2>&-"], check=False).returncode == 0
    (run_dir,) = Path("runs").iterdir()
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 4


def test_without_docstrings(script, monkeypatch):
    """Catches: `python -OO ppo.py` answered by a traceback."""
    monkeypatch.setattr(script, "__doc__", None)
    assert parsed(script, monkeypatch, "--gamma", "0.5").gamma == 0.5


def test_a_run_is_named_by_its_folder_or_its_checkpoint(script, launcher):
    """Catches: the path that tab completion offers, refused."""
    run_dir = script.train(small_args(script))
    for path in (run_dir, run_dir / "checkpoint.pt"):
        assert launcher.run(script.__name__, "--evaluate", str(path), "--eval-episodes", "1").returncode == 0
        assert launcher.run(script.__name__, "--resume", str(path)).returncode == 0
    assert script.train(script.Args(resume=str(run_dir / "checkpoint.pt"))) == run_dir


def test_a_run_of_another_script_names_it(launcher):
    """Catches: the answer `no checkpoint of this script` to somebody who only took the wrong one of six."""
    run_dir = importlib.import_module("ppo").train(small_args(importlib.import_module("ppo")))
    for flag in ("--resume", "--evaluate"):
        process = launcher.run("ppo_lstm", flag, str(run_dir))
        assert process.returncode == 2
        assert "written by ppo.py" in process.stderr
        assert process.stderr.count("\n") == 1


def test_arguments_that_the_script_lacks_are_named(script):
    """Catches: a checkpoint of an edited script, answered with no word of what the edit was."""
    run_dir = script.train(small_args(script))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    state["args"]["my_idea"] = 3
    torch.save(state, run_dir / "checkpoint.pt")
    with pytest.raises(script.UserError, match="my_idea"):
        script.train(small_args(script, resume=str(run_dir)))


def test_arguments_that_the_checkpoint_lacks_are_named(script, launcher):
    """Catches: a script that has learnt a flag, and goes on with an older run at a default that nobody is told of."""
    run_dir = script.train(small_args(script))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    del state["args"]["vf_coef"]
    torch.save(state, run_dir / "checkpoint.pt")
    told = "arguments newer than the checkpoint, at their defaults unless given: vf_coef"
    further = ["--resume", str(run_dir), "--total-timesteps", str(2 * small_args(script).total_timesteps)]
    play = ["--evaluate", str(run_dir), "--eval-episodes", "1"]
    for argv, count in ((play, 1), (further, 1), (play, 0)):  # the run that went on has written what it goes by
        process = launcher.run(script.__name__, *argv)
        assert process.returncode == 0, process.stderr
        assert process.stdout.count(told) == count


def test_env_kwargs(launcher):
    """Catches: what the env takes, lost on the way, or not kept for the evaluation; a traceback if it is wrong."""
    ppo = importlib.import_module("ppo")
    kwargs = json.dumps(dict(sutton_barto_reward=True))
    run_dir = ppo.train(small_args(ppo, env_kwargs=kwargs))
    returns = ppo.evaluate(run_dir / "checkpoint.pt", 2)
    assert returns == [-1.0, -1.0]
    for wrong, word in (("{", "JSON"), ("[1]", "JSON"), ('{"gravitation": 5}', "gravitation")):
        process = launcher.run("ppo", *flags(**SMALL["ppo"] | dict(env_kwargs=wrong, exp_name="wrong")))
        assert process.returncode == 2
        assert word in process.stderr
        assert process.stderr.count("\n") == 1
    assert [path.name for path in Path("runs").iterdir()] == [run_dir.name]


def test_a_module_in_the_current_folder(launcher):
    """Catches: `module:Env-v0` found beside the script only, not where the user is."""
    Path("here.py").write_text(
        "import gymnasium as gym\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "gym.register('Here-v0', entry_point=CartPoleEnv, max_episode_steps=50)\n"
    )
    result = launcher.run("ppo", *flags(**SMALL["ppo"] | dict(env_id="here:Here-v0")))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("env_id", "answer"),
    [
        ("ALE/Pong-v5", "ppo_atari.py"),
        ("BreakoutNoFrameskip-v4", "ppo_atari.py"),
        ("MicrortsMining-v4", "ppo_multidiscrete.py"),
        ("Pendulum-v1", "ppo_continuous_action.py"),
    ],
)
def test_ids_of_another_script(launcher, env_id, answer):
    """Catches: `module ALE not found` for a game that the script next door plays."""
    process = launcher.run("ppo", *flags(**SMALL["ppo"] | dict(env_id=env_id)))
    assert process.returncode == 2
    assert answer in process.stderr
    assert process.stderr.count("\n") == 1
    assert len(process.stderr) < 400
    assert not Path("runs").exists()


def test_a_copy_under_another_name_goes_on_with_the_run(launcher):
    """Catches: a run that only a file of the first name may resume, where people copy and rename."""
    ppo = importlib.import_module("ppo")
    run_dir = ppo.train(small_args(ppo))
    shutil.copy(ppo.__file__, "mine.py")
    result = launcher.run(str(Path("mine").absolute()), "--resume", str(run_dir), "--total-timesteps", "256")
    assert result.returncode == 0, result.stderr


def test_a_value_may_look_like_a_flag(script):
    """Catches: `--exp-name no-gae`, the name of an ablation, taken for the flag."""
    argv = ["--exp-name", "no-gae", "--wandb-tags=no-norm-adv", "--wandb-project-name", "compile", "--track"]
    expected = ["--exp-name", "no-gae", "--wandb-tags", "no-norm-adv", "--wandb-project-name", "compile"]
    assert script.spell_out(argv) == [*expected, "--track", "True"]
    argv = ["--exp-name", "anneal-lr", "--no-anneal-lr"]
    assert script.spell_out(argv) == ["--exp-name", "anneal-lr", "--anneal_lr", "False"]
