"""The command line: bad input is one sentence, exit code 2, and no file; good input does what --help says."""

import dataclasses
import importlib
import itertools
import os
import re
import runpy
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FOLD_SCRIPTS, ROOT, SCRIPTS, SMALL, flags, read_scalars, run_script, small_args

# flags that users of any script rely on
CONTRACT = """
    exp-name seed torch-deterministic cuda compile track wandb-project-name wandb-entity resume exact-resume
    checkpoint-every evaluate eval-episodes deterministic capture-video env-id num-envs total-timesteps learning-rate
    num-steps anneal-lr gamma gae gae-lambda num-minibatches update-epochs norm-adv clip-coef anneal-clip clip-vloss
    ent-coef vf-coef max-grad-norm target-kl
"""

BAD_NUMBERS = """
    num-envs=0 num-envs=-1 num-steps=0 num-minibatches=0 num-minibatches=-2 update-epochs=0 checkpoint-every=0
    learning-rate=0 learning-rate=-0.1 learning-rate=nan learning-rate=inf clip-coef=0 clip-coef=nan max-grad-norm=0
    target-kl=0 target-kl=-1 target-kl=nan gamma=-0.1 gamma=1.01 gamma=nan gae-lambda=-0.1 gae-lambda=1.01
    ent-coef=-0.1 ent-coef=nan vf-coef=-1 vf-coef=inf seed=-1 seed=99999999999999999999 eval-episodes=-1
    total-timesteps=0 total-timesteps=-1 total-timesteps=7 num-minibatches=3 num-minibatches=100000
    num-envs=four num-envs=4.5 learning-rate=fast gamma= seed=1.5
"""

# a script's own numbers
OWN_BAD_NUMBERS = [
    ("ppo_continuous_action", "log-std-init=nan log-std-init=inf log-std-init=-inf"),
    ("ppo_lstm", "log-std-init=nan reward-scale=nan reward-scale=inf reward-floor=nan reward-floor=inf"),
    ("ppo_lstm", "critic-learning-rate=inf critic-learning-rate=nan critic-learning-rate=0 weight-decay=inf"),
    ("ppo_atari_lstm", "hidden-size=0 num-layers=0 seq-len=-1 seq-len=3"),
]

# an env with other spaces than the script's, and a word of the answer that helps
WRONG_ENVS = {
    "ppo": [
        ("Pendulum-v1", "ppo_continuous_action.py"),
        ("CarRacing-v3", "CNN"),
        ("probe_envs:EndlessMultiDiscrete-v0", "ppo_multidiscrete.py"),
        ("probe_envs:NoSuchEnv-v0", "probe_envs:NoSuchEnv-v0"),
        ("no_such_module:Env-v0", "no_such_module"),
        ("", "env"),
    ],
    "ppo_atari": [
        ("CartPole-v1", "ppo.py"),
        ("Pendulum-v1", "ppo_continuous_action.py"),
        ("Breakout-v4", "BreakoutNoFrameskip-v4"),
        ("", "env"),
    ],
    "ppo_continuous_action": [("CartPole-v1", "ppo.py"), ("CarRacing-v3", "CNN")],
    "ppo_multidiscrete": [
        ("CartPole-v1", "ppo.py"),
        ("Pendulum-v1", "ppo_continuous_action.py"),
        ("MicrortsMinnig-v4", "MicrortsMining-v4"),
        ("probe_envs:NoSuchEnv-v0", "probe_envs:NoSuchEnv-v0"),
    ],
}


@pytest.fixture
def main(monkeypatch, capfd):
    """Runs a script as `python SCRIPT.py ...` would, in this process; returns exit code, stdout and stderr."""

    def run(module, *argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *argv])
        capfd.readouterr()
        try:
            runpy.run_path(str(ROOT / f"{module.__name__}.py"), run_name="__main__")
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        return code, *capfd.readouterr()

    return run


def small_flags(module, **changes) -> list[str]:
    return flags(**SMALL[module.__name__] | changes)


def assert_refused(result: tuple[int, str, str], *words: str):
    """The input was refused as the user should see it, and nothing was written or begun."""
    code, out, err = result
    assert code == 2, err
    assert "Traceback" not in err
    assert "starting" not in out
    assert [word for word in words if word not in err] == [], err
    assert os.listdir() == []


@pytest.mark.parametrize("setting", BAD_NUMBERS.split())
def test_bad_numbers(script, main, setting):
    """Catches: a value that crashes an hour later, trains on NaN, or is silently rounded."""
    flag, value = setting.split("=")
    assert_refused(main(script, *small_flags(script), f"--{flag}={value}"), flag)


@pytest.mark.parametrize(
    ("name", "setting"), [(name, setting) for name, settings in OWN_BAD_NUMBERS for setting in settings.split()]
)
def test_own_bad_numbers(main, name, setting):
    """Catches: a run that begins, writes a folder, and dies of the NaN that it was given."""
    flag, value = setting.split("=")
    assert_refused(main(importlib.import_module(name), *flags(**SMALL[name]), f"--{flag}={value}"), flag)


@pytest.mark.parametrize(
    "argv", [["--no-such-flag", "1"], ["--batch-size", "64"], ["stray"], ["--num-envs"], ["--resume", ""]], ids=str
)
def test_bad_flags(script, main, argv):
    """Catches: a mistyped flag that is ignored, and a derived size that can be set and is then overwritten."""
    assert_refused(main(script, *small_flags(script), *argv), argv[0])


def test_unknown_env_id(script, main):
    """Catches: a typo in the id answered by a traceback, and by no hint."""
    env_id = script.Args().env_id
    result = main(script, *small_flags(script), "--env-id", env_id[:3] + env_id[4:])
    assert_refused(result, env_id)
    assert len(result[2].strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "env_id", "word"), [(name, *case) for name in SCRIPTS for case in WRONG_ENVS.get(name, [])]
)
def test_wrong_env(main, name, env_id, word):
    """Catches: spaces that fail deep in the network, or that train nonsense, where another script would do."""
    script = __import__(name)
    result = main(script, *small_flags(script), "--env-id", env_id)
    assert_refused(result, word)
    assert len(result[2].strip().splitlines()) == 1


# arguments that an env cannot take: by another name, of another type, out of range, for a file that is not there
WRONG_KWARGS = [
    ("ppo", "CartPole-v1", '{"gravity": 5.0}', "gravity"),
    ("ppo", "probe_envs:Endless-v0", '{"gravity": 5.0}', "gravity"),
    ("ppo", "FrozenLake-v1", '{"map_name": "9x9"}', "9x9"),
    ("ppo", "LunarLander-v3", '{"gravity": 5.0}', "gravity"),
    ("ppo_continuous_action", "Ant-v5", '{"xml_file": "nowhere.xml"}', "nowhere.xml"),
    ("ppo_atari", "BreakoutNoFrameskip-v4", '{"gravity": 5.0}', "gravity"),
    ("ppo_atari", "BreakoutNoFrameskip-v4", '{"render_mode": "human"}', "render_mode"),
    ("ppo_atari_lstm", "PongNoFrameskip-v4", '{"num_envs": 3}', "num_envs"),
    ("ppo_multidiscrete", "MicrortsMining-v4", '{"gravity": 5.0}', "gravity"),
]


@pytest.mark.parametrize(("name", "env_id", "kwargs", "word"), WRONG_KWARGS)
def test_wrong_env_kwargs(main, name, env_id, kwargs, word):
    """Catches: an env that does not know its arguments, answered by a traceback."""
    script = __import__(name)
    result = main(script, *small_flags(script), "--env-id", env_id, "--env-kwargs", kwargs)
    assert_refused(result, env_id, word)
    assert result[2].strip().splitlines()[-1].startswith("error: cannot make the env")
    assert "ids like it" not in result[2]  # the id is right


@pytest.mark.parametrize("script", SCRIPTS, indirect=True)
def test_the_example_of_env_kwargs_works(script):
    """Catches: a help whose example the script's own default env refuses."""
    (example,) = re.findall(r"as JSON: '(.*)'", Path(script.__file__).read_text())
    script.make_envs(small_args(script, env_id=script.Args().env_id, env_kwargs=example), 1).close()


def test_an_observation_space_that_cannot_be_flat(main):
    """Catches: a Dict with a space of the env's own, as MiniGrid's mission, that ends in a traceback."""
    ppo = __import__("ppo")
    assert_refused(main(ppo, *small_flags(ppo), "--env-id", "probe_envs:OwnSpace-v0"), "OwnSpace")


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_exit_code_of_the_process(script):
    """Catches: a refusal that a shell script takes for success."""
    result = run_script(script.__name__, "--num-envs", "0")
    assert_refused((result.returncode, result.stdout, result.stderr), "--num-envs must be at least 1, not 0")


def test_sizes(script):
    """Catches: derived sizes that disagree with the flags, and good values at the edge that are refused."""
    args = small_args(script)
    assert args.batch_size == args.num_envs * args.num_steps
    assert args.minibatch_size * args.num_minibatches == args.batch_size
    assert args.num_iterations == args.total_timesteps // args.batch_size
    assert small_args(script, total_timesteps=args.batch_size).num_iterations == 1
    assert small_args(script, total_timesteps=2 * args.batch_size - 1).num_iterations == 1
    small_args(script, gamma=0.0, gae_lambda=0.0, ent_coef=0.0, vf_coef=0.0, seed=0, eval_episodes=0)
    small_args(script, gamma=1.0, gae_lambda=1.0)
    script.Args()


# where a script follows another source than the 37 details: its reference notebook, a tuned setting of the same task
OWN_DEFAULTS = {"ppo_multidiscrete": dict(target_kl=0.015), "ppo_lstm": dict(gamma=0.98, gae_lambda=0.8)}


def test_defaults_are_those_of_the_37_details(script):
    """Catches: a default changed for an experiment, and left."""
    args = script.Args()
    expected = dict(gae_lambda=0.95, gamma=0.99, max_grad_norm=0.5, vf_coef=0.5)
    expected |= dict(anneal_lr=True, gae=True, norm_adv=True, target_kl=None) | OWN_DEFAULTS.get(script.__name__, {})
    assert {name: getattr(args, name) for name in expected} == expected
    if script.__name__ in ("ppo", "ppo_atari"):
        assert (args.learning_rate, args.ent_coef, args.clip_vloss) == (2.5e-4, 0.01, True)
        assert (args.num_steps, args.num_minibatches, args.update_epochs) == (128, 4, 4)
        sizes = {"ppo": (4, 500_000, 0.2), "ppo_atari": (8, 10_000_000, 0.1)}
        assert (args.num_envs, args.total_timesteps, args.clip_coef) == sizes[script.__name__]


def test_help(script, main):
    """Catches: a flag without help, a flag that vanished, and help that fails to be drawn."""
    code, out, err = main(script, "--help")
    assert (code, err) == (0, "")
    listed = set(re.findall(r"--([a-z][\w-]*)", out))
    assert set(CONTRACT.split()) - listed == set()
    for field in dataclasses.fields(script.Args):
        assert (field.name.replace("_", "-") in listed) == field.init
    source = (ROOT / f"{script.__name__}.py").read_text()
    for field in dataclasses.fields(script.Args):
        if field.init:
            comment = re.search(rf"(?m)^    {field.name}: .*  # (.*)$", source).group(1)
            # drawn in columns: at least the first two words are there, beside or below the flag
            assert " ".join(comment.split()[:2]) in " ".join(re.sub("[│╭╮╰╯─]", " ", out).split()), field.name


def test_table_of_arguments(script, capsys):
    """Catches: a run whose log does not tell what was changed."""
    args = small_args(script, seed=7, gamma=0.5)
    script.train(args)
    table, _, rest = capsys.readouterr().out.partition("starting runs/")
    total = f"{args.total_timesteps:,} steps: {args.num_iterations:,} iterations of {args.batch_size:,}"
    assert total in rest.splitlines()
    lines = table.splitlines()
    assert len(lines) == len(dataclasses.fields(args))
    for line, field in zip(lines, dataclasses.fields(args)):
        value = getattr(args, field.name)
        assert line[1:].split()[0] == field.name
        assert str(value) in line
        changed = field.init and value != field.default
        assert line.startswith("*") == changed
        assert (f"(default {field.default})" in line) == changed
    assert sum(line.startswith("*") for line in lines) >= 2 + len(SMALL[script.__name__]) - 1


def progress(run_dir: Path) -> str:
    """What a finished run should say of the returns that it logged."""
    if "charts/episodic_return" not in read_scalars(run_dir):
        return "no episode has ended yet"
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    return f"mean return {np.mean(state['recent_returns']):.1f}, length {np.mean(state['recent_lengths']):.0f}"


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_a_run_shows_progress_and_where_it_went(script, launcher):
    """Catches: a log with a line an episode, without the run's folder, or full of escape codes where it is a file."""
    result = launcher.run(script.__name__, *small_flags(script))
    assert result.returncode == 0, result.stderr
    (run_dir,) = os.listdir("runs")
    assert run_dir.startswith(f"{re.sub('[/:]', '-', small_args(script).env_id)}__{script.__name__}__1__")
    assert f"starting runs/{run_dir} on cpu" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert f"runs/{run_dir}" in last
    assert progress(Path("runs", run_dir)) in last
    assert "\r" not in result.stdout + result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    assert len(result.stdout.splitlines()) < len(dataclasses.fields(script.Args)) + 10


def test_the_time_left(monkeypatch, capsys):
    """Catches: a time that is left when the run is over, and a mean of it over the whole run."""
    script = importlib.import_module("ppo")
    seconds = itertools.count(0, 10)  # ten from one look at the clock to the next
    monkeypatch.setattr(script.time, "perf_counter", lambda: float(next(seconds)))
    script.train(small_args(script))
    lines = re.findall(r"^([\d,]+) steps, [\d,.]+ steps/s, (\S+) left", capsys.readouterr().out, re.MULTILINE)
    assert [steps for steps, _ in lines] == ["32", "64", "96", "128"]
    times = [left for _, left in lines]
    assert times[-1] == "0:00:00"
    assert times == sorted(set(times), reverse=True)


def shown_in_a_terminal(name: str, *argv: str) -> str:
    """What a script shows a person at a terminal, its table of arguments left out."""
    primary, secondary = os.openpty()
    termios.tcsetwinsize(secondary, (24, 120))
    command = [sys.executable, str(ROOT / f"{name}.py"), *argv]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=secondary) as process:
        os.close(secondary)
        shown = b""
        try:
            while chunk := os.read(primary, 4096):
                shown += chunk
        except OSError:  # how a pseudo-terminal says that the other end is closed
            pass
    os.close(primary)
    assert process.returncode == 0
    return shown.decode()


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_progress_bar_in_a_terminal(script):
    """Catches: a bar that shows other steps than were taken, or none at all to a person at a terminal."""
    name = script.__name__
    shown = shown_in_a_terminal(name, *small_flags(script))
    total = SMALL[name]["total_timesteps"]
    assert f" 0/{total}" in shown
    assert f"{total}/{total}" in shown
    assert "steps" in shown
    (run_dir,) = Path("runs").iterdir()
    assert progress(run_dir) in shown
    shown = shown_in_a_terminal(name, "--resume", str(run_dir), "--total-timesteps", str(2 * total))
    assert f" 0/{2 * total}" not in shown
    assert f"{total}/{2 * total}" in shown
    assert f"{2 * total}/{2 * total}" in shown
