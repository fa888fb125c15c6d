"""The command line: bad input is one sentence, exit code 2, and no file; good input does what --help says."""

import dataclasses
import importlib
import itertools
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, SMALL, flags, small_args

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

# a script's own numbers; one of the others, to see that each script looks at them
OWN_BAD_NUMBERS = {
    "ppo": BAD_NUMBERS,
    "ppo_continuous_action": "num-envs=0 log-std-init=nan log-std-init=inf log-std-init=-inf",
    "ppo_atari": "num-envs=0 env-threads=-1 negative-slope=-0.1 negative-slope=nan",
    "ppo_lstm": """
        num-envs=0 log-std-init=nan reward-scale=nan reward-scale=inf reward-floor=nan reward-floor=inf
        critic-learning-rate=inf critic-learning-rate=nan critic-learning-rate=0 weight-decay=inf weight-decay=-1
    """,
    "ppo_atari_lstm": "num-envs=0 hidden-size=0 num-layers=0 seq-len=-1 seq-len=3 negative-slope=inf",
    "ppo_multidiscrete": "num-envs=0",
}

# envs with other spaces than the script's
WRONG_ENVS = {
    "ppo": ["Pendulum-v1", "CarRacing-v3", "probe_envs:EndlessMultiDiscrete-v0"],
    "ppo_continuous_action": ["CartPole-v1", "CarRacing-v3"],
    "ppo_atari": ["CartPole-v1", "Breakout-v4"],
    "ppo_lstm": ["CarRacing-v3", "probe_envs:EndlessMultiDiscrete-v0"],
    "ppo_multidiscrete": ["Pendulum-v1"],
}

# ids that gymnasium does not know, and what its answer has of them
UNKNOWN_ENVS = [
    ("ppo", "CartPol-v1", "CartPole"),
    ("ppo", "probe_envs:NoSuchEnv-v0", "NoSuchEnv"),
    ("ppo", "", "ID"),
    ("ppo_atari", "BreakoutNoFrameskp-v4", "BreakoutNoFrameskip"),
    ("ppo_multidiscrete", "MicrortsMinnig-v4", "MicrortsMinnig"),
]

# arguments that an env cannot take
WRONG_KWARGS = [
    ("ppo", "CartPole-v1", '{"gravity": 5.0}', "gravity"),
    ("ppo_continuous_action", "Ant-v5", '{"xml_file": "nowhere.xml"}', "nowhere.xml"),
    ("ppo_atari", "BreakoutNoFrameskip-v4", '{"gravity": 5.0}', "gravity"),
    ("ppo_atari_lstm", "PongNoFrameskip-v4", '{"num_envs": 3}', "num_envs"),
    ("ppo_multidiscrete", "MicrortsMining-v4", '{"gravity": 5.0}', "gravity"),
]


@pytest.fixture
def process(monkeypatch):
    """Keeps what main() does to its process, the signals' handlers and the path, from the tests that follow."""
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def main(process, monkeypatch, capfd):
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
    assert "from step" not in out
    assert [word for word in words if word not in err] == [], err
    assert os.listdir() == []


@pytest.mark.parametrize("script", SCRIPTS, indirect=True)
def test_bad_numbers(script, process, monkeypatch, capfd):
    """Catches: a value that crashes an hour later, trains on NaN, or is silently rounded."""
    begun, given = [], small_flags(script)
    monkeypatch.setattr(script, "train", begun.append)

    def answer(flag: str, value: str) -> str:
        monkeypatch.setattr(sys, "argv", [script.__file__, *given, f"--{flag}={value}"])
        try:
            script.main()
        except script.UserError as error:
            return str(error)
        except SystemExit as exit:  # tyro's
            return capfd.readouterr().err if exit.code == 2 else ""
        return ""

    settings = [setting.split("=") for setting in OWN_BAD_NUMBERS.get(script.__name__, BAD_NUMBERS).split()]
    assert [setting for setting in settings if setting[0] not in answer(*setting)] == []
    assert begun == []
    assert answer("seed", "3") == ""
    assert [args.seed for args in begun] == [3]


@pytest.mark.parametrize(
    "argv",
    [["--num-envs", "0"], ["--no-such-flag", "1"], ["--batch-size", "64"], ["stray"], ["--num-envs"], ["--resume"]],
    ids=str,
)
def test_bad_flags(main, argv):
    """Catches: a mistyped flag that is ignored, a derived size that can be set; a refusal taken for success."""
    ppo = importlib.import_module("ppo")
    assert_refused(main(ppo, *small_flags(ppo), *argv), argv[0])


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_an_empty_name_of_a_run(main, flag):
    """Catches: `--resume $RUN` of a variable that is not set, answered by a new run from the beginning."""
    ppo = importlib.import_module("ppo")
    assert_refused(main(ppo, *small_flags(ppo), flag, ""), "checkpoint.pt")


def test_a_refusal_is_one_sentence(main):
    """Catches: a traceback for a value, for an env of another script, or for arguments that are no JSON."""
    ppo = importlib.import_module("ppo")
    bad = [("num_envs", "0", "--num-envs must be at least 1, not 0"), ("env_id", "Pendulum-v1", "Pendulum-v1")]
    bad += [("env_kwargs", wrong, "JSON") for wrong in ("{", "[1]", "3")]
    for name, value, word in bad:
        result = main(ppo, *small_flags(ppo, **{name: value}))
        assert_refused(result, word)
        assert len(result[2].splitlines()) == 1


def test_an_argument_of_another_type(script):
    """Catches: a number read from a file as text, answered by the traceback of a comparison."""
    with pytest.raises(script.UserError, match="--num-envs must be at least 1, not 8"):
        small_args(script, num_envs="8")
    with pytest.raises(script.UserError, match="--env-kwargs must be a JSON object"):
        small_args(script, env_kwargs={})


@pytest.mark.parametrize(("name", "env_id", "word"), UNKNOWN_ENVS)
def test_unknown_env_id(main, name, env_id, word):
    """Catches: a typo in the id answered by a traceback, and by no hint."""
    script = importlib.import_module(name)
    result = main(script, *small_flags(script), "--env-id", env_id)
    assert_refused(result, word)
    assert len(result[2].strip().splitlines()) == 1


@pytest.mark.parametrize(("name", "env_id"), [(name, env_id) for name in WRONG_ENVS for env_id in WRONG_ENVS[name]])
def test_wrong_env(name, env_id):
    """Catches: spaces that fail deep in the network, or that train nonsense."""
    script = importlib.import_module(name)
    with pytest.raises(script.UserError, match=f"^{env_id} (has .* and .*, not|is not an Atari game)"):
        script.train(small_args(script, env_id=env_id))
    assert os.listdir() == []


@pytest.mark.parametrize(("name", "env_id", "kwargs", "word"), WRONG_KWARGS)
def test_wrong_env_kwargs(name, env_id, kwargs, word):
    """Catches: arguments that get lost on their way to the env, or are looked at when a folder has been made."""
    script = importlib.import_module(name)
    with pytest.raises((TypeError, OSError, script.UserError), match=word):
        script.train(small_args(script, env_id=env_id, env_kwargs=kwargs))
    assert os.listdir() == []


def test_a_module_that_is_not_there():
    """Catches: an answer on the env's name, where the name of its module was mistyped."""
    ppo = importlib.import_module("ppo")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        ppo.train(small_args(ppo, env_id="no_such_module:Env-v0"))
    assert os.listdir() == []


@pytest.mark.parametrize("script", SCRIPTS, indirect=True)
def test_the_example_of_env_kwargs_works(script):
    """Catches: a help whose example the script's own default env refuses."""
    (example,) = re.findall(r"as JSON: '(.*)'", Path(script.__file__).read_text())
    script.make_envs(small_args(script, env_id=script.Args().env_id, env_kwargs=example), 1).close()


def test_an_observation_space_that_cannot_be_flat():
    """Catches: a space of no fixed size that ends in a traceback without a word."""
    ppo = importlib.import_module("ppo")
    with pytest.raises(ppo.UserError, match="Sequence"):
        ppo.train(small_args(ppo, env_id="probe_envs:OwnSpace-v0"))
    assert os.listdir() == []


def test_sizes_follow_the_fields(script):
    """Catches: args.num_envs = 16 that trains another number of steps than it says."""
    args = small_args(script)
    before = args.batch_size
    args.num_envs *= 2
    assert (args.batch_size, args.minibatch_size) == (2 * before, 2 * before // args.num_minibatches)
    args.total_timesteps = 2.0 * args.batch_size  # a float, as 1e6 is
    assert args.num_iterations == 2
    run_dir = script.train(args)
    assert script.load_checkpoint(run_dir / "checkpoint.pt")["global_step"] == 2 * args.batch_size


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


def test_evaluations_have_episodes(script):
    """Catches: --eval-every 100 that never evaluates, as no number of episodes was given."""
    for asks in (dict(eval_every=100), dict(capture_video=True), dict(evaluate="run")):
        assert script.Args(**asks).eval_episodes == 10
        assert script.Args(**asks, eval_episodes=3).eval_episodes == 3
    assert script.Args().eval_episodes == 0


def test_arguments_that_were_changed_are_checked(script):
    """Catches: a value set afterwards that trains nonsense, or fails when a folder is there."""
    args = small_args(script)
    args.update_epochs = 0
    with pytest.raises(script.UserError, match="--update-epochs must be at least 1, not 0"):
        script.train(args)
    assert os.listdir() == []


# where a script follows another source than the 37 details: its reference notebook, a tuned setting of the same task
OWN_DEFAULTS = {"ppo_multidiscrete": dict(target_kl=0.015), "ppo_lstm": dict(gamma=0.98, gae_lambda=0.8)}
OWN_DEFAULTS |= {"ppo_continuous_action": dict(vf_coef=0.25, norm_adv=False)}


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
        assert field.name.replace("_", "-") in listed
    source = (ROOT / f"{script.__name__}.py").read_text()
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", out).split())
    for field in dataclasses.fields(script.Args):
        comment = re.search(rf"(?m)^    {field.name}: .*  # (.*)$", source).group(1)
        # drawn in columns: at least the first two words are there, beside or below the flag
        assert " ".join(comment.split()[:2]) in shown, field.name


def progress(run_dir: Path) -> str:
    """What a finished run should say of the episodes that ended in it."""
    recent = importlib.import_module("ppo").load_checkpoint(run_dir / "checkpoint.pt")["kept"]["recent"]
    mean_return, mean_length = np.mean(recent, axis=0)
    return f"mean return {mean_return:.1f}, length {mean_length:.0f}"


def test_what_a_run_prints(main):
    """Catches: a log that does not tell where the run went and how it ended, has a line an episode, or escape codes."""
    ppo = importlib.import_module("ppo")
    code, out, err = main(ppo, *small_flags(ppo, seed=7, gamma=0.5))
    assert (code, err) == (0, "")
    (run_dir,) = Path("runs").absolute().iterdir()
    assert run_dir.name.startswith("CartPole-v1__ppo__7__")
    begin, end = [line for line in out.splitlines() if "steps/s" not in line]  # a line every 5 seconds
    assert begin == f"from step 0 of 128: {run_dir} on cpu"
    assert end == f"128 steps, {progress(run_dir)}, in {run_dir}"
    assert not set("\r\x1b") & set(out)


@pytest.mark.parametrize(("seconds", "steps"), [(10, ["32", "64", "96", "128"]), (2, ["96"])])
def test_the_time_left(monkeypatch, capsys, seconds, steps):
    """Catches: a time that is left when the run is over, a line more often than every 5 seconds."""
    script = importlib.import_module("ppo")
    moments = itertools.count(0, seconds)  # so many from one look at the clock to the next
    clock = SimpleNamespace(perf_counter=lambda: float(next(moments)), time_ns=time.time_ns)
    monkeypatch.setattr(script, "time", clock)
    script.train(small_args(script))
    pattern = r"^([\d,]+) steps, [\d,.]+ steps/s, (\S+) left, (?:mean return \d|no episode)"
    lines = re.findall(pattern, capsys.readouterr().out, re.MULTILINE)
    assert [step for step, _ in lines] == steps
    times = [left for _, left in lines]
    assert times == [f"0:00:{seconds * (128 - int(step)) // 32:02}" for step in steps]
