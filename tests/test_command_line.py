"""The command line: what it is parsed on top of, runs of other scripts, envs of the user's."""

import contextlib
import importlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, flags, small_args


def test_with_its_streams_closed():
    """Catches: a run that a daemon starts, without standard streams, which dies of its progress bar or first line."""
    argv = flags(**SMALL["ppo"], eval_episodes=1)
    command = shlex.join([sys.executable, str(ROOT / "ppo.py"), *argv])
    assert subprocess.run(["bash", "-c", f"{command} <&- >&- 2>&-"], check=False).returncode == 0
    (run_dir,) = Path("runs").iterdir()
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 4


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """The folder of a small run of ppo.py, which no test should change."""
    ppo = importlib.import_module("ppo")
    with contextlib.chdir(tmp_path_factory.mktemp("here")):
        return ppo.train(small_args(ppo, gamma=0.9, deterministic=True))


def parsed(script, monkeypatch, *argv: str):
    """The arguments that main() takes a command line for: those that it trains by."""
    given = []
    monkeypatch.setattr(script, "train", given.append)
    monkeypatch.setattr(script, "evaluate", lambda checkpoint, episodes, args: given.append(args))
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *argv])
    script.main()
    return given[0]


@pytest.mark.parametrize(("flag", "code"), [("--resume", 0), ("--evaluate", 128 + signal.SIGTERM)])
def test_the_exit_code_upon_a_signal(flag, code, run_dir, monkeypatch):
    """Catches: a run that a signal met in its last iteration, and that is done, as a failure; half an evaluation as a
    success. (Where a run ends early, train() exits itself.)"""
    ppo = importlib.import_module("ppo")
    monkeypatch.setattr(ppo, "SIGNALS", [signal.SIGTERM])
    parsed(ppo, monkeypatch, flag, str(run_dir))
    assert ppo.main() == code


def test_booleans(script, monkeypatch):
    """Catches: a switch that cannot be turned off, or that takes the next flag for its value."""
    for field in fields(script.Args):
        flag = f"--{field.name.replace('_', '-')}"
        ways = {bool: [[flag], [flag.replace("--", "--no-", 1)]], bool | None: [[flag, "True"], [flag, "False"]]}
        for way, value in zip(ways.get(field.type, []), (True, False)):
            args = parsed(script, monkeypatch, *way, "--gamma", "0.5")
            assert args == replace(script.Args(), gamma=0.5, **{field.name: value}), way


def test_without_docstrings(monkeypatch):
    """Catches: `python -OO ppo.py` answered by a traceback."""
    ppo = importlib.import_module("ppo")
    monkeypatch.setattr(ppo, "__doc__", None)
    assert parsed(ppo, monkeypatch, "--gamma", "0.5").gamma == 0.5


def test_a_runs_arguments_are_the_defaults(run_dir, monkeypatch):
    """Catches: a flag that a resume or an evaluation ignores, for it is the script's default; a forgotten argument."""
    ppo = importlib.import_module("ppo")
    saved = small_args(ppo, gamma=0.9, deterministic=True)
    for path in (run_dir, run_dir / "checkpoint.pt", run_dir / "best.pt"):  # as tab completion offers them
        as_resumed = replace(saved, resume=str(path))
        for way in (["--resume", str(path)], [f"--resume={path}"]):
            assert parsed(ppo, monkeypatch, *way) == as_resumed
        for way in (["--evaluate", str(path)], [f"--evaluate={path}"]):
            args = parsed(ppo, monkeypatch, *way)
            assert args == replace(as_resumed, evaluate=str(path), eval_episodes=10)
    changed = parsed(ppo, monkeypatch, "--gamma", "0.99", "--resume", str(run_dir), "--no-deterministic", "--seed", "3")
    assert changed == replace(saved, resume=str(run_dir), gamma=0.99, deterministic=False, seed=3)


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_a_run_of_another_script(run_dir, launcher, flag):
    """Catches: a traceback for somebody who only took the wrong one of six scripts, or a folder written to."""
    before = {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    process = launcher.run("ppo_lstm", flag, str(run_dir))
    assert process.returncode == 2
    assert f"{run_dir}/checkpoint.pt is no checkpoint of this script and network" in process.stderr
    assert process.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before


def test_arguments_that_the_script_lacks_are_named(run_dir):
    """Catches: a checkpoint of an edited script, answered with no word of what the edit was."""
    ppo = importlib.import_module("ppo")
    state = ppo.load_checkpoint(run_dir / "checkpoint.pt")
    state["args"]["my_idea"] = 3
    torch.save(state, "checkpoint.pt")
    with pytest.raises(ppo.UserError, match="my_idea"):
        ppo.train(small_args(ppo, resume="checkpoint.pt"))


def test_env_kwargs():
    """Catches: what the env takes, lost on the way, or not kept for the evaluation."""
    ppo = importlib.import_module("ppo")
    run_dir = ppo.train(small_args(ppo, env_kwargs=json.dumps(dict(sutton_barto_reward=True))))
    assert ppo.evaluate(run_dir / "checkpoint.pt", 2) == [-1.0, -1.0]
    assert min(ppo.evaluate(run_dir / "checkpoint.pt", 2, ppo.saved_args(run_dir, env_kwargs="{}"))) > 1


def test_a_module_in_the_current_folder(launcher):
    """Catches: `module:Env-v0` found beside the script only, not where the user is."""
    Path("here.py").write_text(
        "import gymnasium as gym\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "gym.register('Here-v0', entry_point=CartPoleEnv, max_episode_steps=50)\n"
    )
    result = launcher.run("ppo", *flags(**SMALL["ppo"] | dict(env_id="here:Here-v0")))
    assert result.returncode == 0, result.stderr


def test_a_copy_under_another_name_goes_on_with_the_run(run_dir, launcher):
    """Catches: a run that only a file of the first name may resume, where people copy and rename."""
    shutil.copytree(run_dir, "run")
    Path("mine.py").write_text((ROOT / "ppo.py").read_text() + "# mine\n")
    result = launcher.run(str(Path("mine").absolute()), "--resume", "run", "--total-timesteps", "160")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("160 steps, ")
    assert {path.name for path in Path("run").glob("*.py")} == {"ppo_from_0.py", "mine_from_128.py"}
