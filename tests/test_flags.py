"""Flags: what a resume and an evaluation heed and what they refuse; the run's folder; numbers at the edge."""

import importlib
import itertools
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FOLD_SCRIPTS, flags, read_scalars, small_args
from faulty_envs import Stop, hook_envs

# other envs, with the same spaces and with others
OTHER_ENVS = {
    "ppo": ["probe_envs:CartPoleHidden-v0", "Acrobot-v1"],
    "ppo_continuous_action": ["probe_envs:EndlessBox-v0"],
    "ppo_atari": ["PongNoFrameskip-v4"],
    "ppo_lstm": ["probe_envs:CartPoleHidden-v0", "Acrobot-v1"],
    "ppo_atari_lstm": ["PongNoFrameskip-v4"],
    "ppo_multidiscrete": ["probe_envs:ThreeStepsMultiDiscrete-v0"],
}
TOO_LATE = {
    "ppo_continuous_action": [["--no-norm-obs"], ["--log-std-init", "-1"]],
    "ppo_lstm": [["--log-std-init", "-1"], ["--mask-velocity", "False"]],
}
UNHEEDED = {name: [["--hidden-size", "24"]] for name in ("ppo_lstm", "ppo_atari_lstm")}


def load(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def contents(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def begin(name: str, **changes) -> Path:
    """The folder of a run that has done one iteration."""
    script = importlib.import_module(name)
    return script.train(small_args(script, total_timesteps=small_args(script, **changes).batch_size, **changes))


def assert_refused(process, flag: str) -> None:
    """The process ended with one sentence that names the flag."""
    assert process.returncode == 2, (flag, process.stdout + process.stderr)
    assert flag.replace("--no-", "--") in process.stderr
    assert len(process.stderr.strip().splitlines()) == 1
    assert "Traceback" not in process.stderr


def test_a_weight_decay_given_anew_holds(launcher):
    """Catches: a flag that a resume takes, prints and ignores, for the optimizer's state brings the old value."""
    run_dir = begin("ppo_lstm")
    argv = flags(resume=run_dir, weight_decay=0.25, total_timesteps=128)
    process = launcher.run("ppo_lstm", *argv)
    assert process.returncode == 0, process.stderr
    state = load(run_dir)
    assert state["iteration"] == 4
    assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.25, 0.25]
    steps = {int(moments["step"]) for moments in state["optimizer"]["state"].values()}
    args = importlib.import_module("ppo_lstm").Args(**state["args"])
    assert steps == {4 * args.update_epochs * args.num_minibatches}  # the moments were kept


def test_an_optimizer_of_another_shape_is_refused(script):
    """Catches: a layer frozen, or a group of parameters added, before a resume: a traceback out of torch."""
    run_dir = begin(script.__name__)
    state = load(run_dir)
    state["optimizer"]["param_groups"][0]["params"].pop()
    torch.save(state, run_dir / "checkpoint.pt")
    with pytest.raises(script.UserError, match="another optimizer"):
        script.train(script.Args(resume=str(run_dir)))


def test_a_resume_cannot_take_steps_back(script):
    """Catches: a total that is less than what is done: nothing happens, and the checkpoint tells the smaller number."""
    run_dir = script.train(small_args(script))
    before = contents(run_dir)
    with pytest.raises(script.UserError, match="--total-timesteps must be at least the 128 steps already done, not 64"):
        script.train(script.Args(resume=str(run_dir), total_timesteps=64))
    assert contents(run_dir) == before


def test_what_a_resume_comes_too_late_to_change(script, launcher):
    """Catches: a resume with statistics that were never gathered; a flag that is taken, printed and does nothing."""
    run_dir = begin(script.__name__)
    before = contents(run_dir)
    for argv in [["--exp-name", "other"], *TOO_LATE.get(script.__name__, [])]:
        assert_refused(launcher.run(script.__name__, "--resume", str(run_dir), *argv), argv[0])
    assert contents(run_dir) == before
    assert list(Path("runs").iterdir()) == [run_dir]


def test_a_resume_on_another_env_is_refused(script, launcher):
    """Catches: a resume on another env, and one that is answered by a word on networks, without the flag."""
    run_dir = begin(script.__name__)
    before = contents(run_dir)
    for env_id in OTHER_ENVS[script.__name__]:
        assert_refused(launcher.run(script.__name__, "--resume", str(run_dir), "--env-id", env_id), "--env-id")
    assert contents(run_dir) == before
    assert list(Path("runs").iterdir()) == [run_dir]


def test_evaluation_refuses_what_it_does_not_heed(script, launcher):
    """Catches: --evaluate with another env or network that is ignored silently, so that the number is of another."""
    run_dir, name = begin(script.__name__), script.__name__
    before = contents(run_dir)
    cases = [["--env-id", OTHER_ENVS[name][0]], ["--learning-rate", "0.5"], *UNHEEDED.get(name, [])]
    for argv in cases:
        process = launcher.run(name, "--evaluate", str(run_dir), "--eval-episodes", "1", *argv)
        assert_refused(process, argv[0])
        assert "evaluation:" not in process.stdout
    assert contents(run_dir) == before


def first_observations(monkeypatch, script, run_dir: Path, **options) -> list[bytes]:
    """What an evaluation sees in its first steps."""
    seen = []

    def hook(count, transition):
        seen.append(transition[0].tobytes())
        if count == 30:
            raise Stop

    hook_envs(monkeypatch, script, hook)
    with pytest.raises(Stop):
        script.evaluate(run_dir / "checkpoint.pt", 10, **options)
    return seen


def test_another_seed_evaluates_other_episodes(script, monkeypatch):
    """Catches: an evaluation that plays the same few episodes whatever seed it is given."""
    run_dir = begin(script.__name__)
    assert load(run_dir)["args"]["seed"] == 1
    as_trained = first_observations(monkeypatch, script, run_dir)
    other = first_observations(monkeypatch, script, run_dir, seed=99)
    assert other != as_trained
    assert first_observations(monkeypatch, script, run_dir, seed=99) == other
    assert first_observations(monkeypatch, script, run_dir, seed=1) == as_trained
    assert first_observations(monkeypatch, script, run_dir, seed=0) not in (as_trained, other)


@pytest.mark.parametrize("name", FOLD_SCRIPTS)
def test_what_evaluation_heeds(launcher, name):
    """Catches: --seed that --evaluate ignores; a refusal of the flags that are meant for it, or do no harm."""
    run_dir = begin(name, deterministic=True, eval_episodes=1)
    before = contents(run_dir)

    def play(*argv: str) -> str:
        process = launcher.run(name, "--evaluate", str(run_dir), *argv)
        assert process.returncode == 0, process.stderr
        return process.stdout

    as_trained = play("--eval-episodes", "4")
    assert "over 4 episodes" in as_trained
    assert "over 10 episodes" in play()
    other = play("--eval-episodes", "4", "--seed", "99")
    assert other != as_trained
    assert play("--eval-episodes", "4", "--seed", "99", "--torch-threads", "2", "--no-cuda") == other
    assert play("--eval-episodes", "4", "--seed", "1") == as_trained
    script = importlib.import_module(name)
    returns = script.evaluate(run_dir / "checkpoint.pt", 4, deterministic=True)
    deterministic = play("--eval-episodes", "4", "--deterministic")
    assert f"min {min(returns):.2f}, max {max(returns):.2f} over 4 episodes" in deterministic
    assert contents(run_dir) == before


def test_the_folder_has_a_name_that_any_system_takes(script):
    """Catches: a folder that Windows, rsync or a nested path makes something else of."""
    run_dir = script.train(small_args(script, exp_name="lr:1/2"))
    assert os.listdir("runs") == [run_dir.name]
    assert not set(":/") & set(run_dir.name)
    assert "lr-1-2" in run_dir.name
    assert script.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 4


def test_two_runs_begun_in_the_same_second_have_two_folders(script, monkeypatch):
    """Catches: runs of one experiment that write over each other, for both found the folder missing."""
    ticks, mkdir, raced = itertools.count(), Path.mkdir, []
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000 + next(ticks) * 1e-6)
    first = script.train(small_args(script))
    assert first.name.endswith("__1700000000")

    def lose_the_race(path, *args, **kwargs):
        if path.parent.name == "runs" and not path.exists() and not raced:
            raced.append(path)
            mkdir(path, parents=True)  # by another run, just before this one does
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", lose_the_race)
    before = contents(first)
    second = script.train(small_args(script))
    assert raced
    assert len({first, second, *raced}) == 3
    assert os.listdir(raced[0]) == []
    assert contents(first) == before


def test_a_runs_folder_that_leads_nowhere_is_refused(script, monkeypatch):
    """Catches: a search for a free name that never ends where `runs` is a link to a disk that is not mounted."""
    Path("runs").symlink_to("/no/such/disk")
    calls, mkdir = [], Path.mkdir

    def count(path, *args, **kwargs):
        calls.append(path)
        assert len(calls) < 100, "the search never ends"
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", count)
    with pytest.raises(script.UserError, match="cannot write to"):
        script.train(small_args(script))


def test_no_nan_is_shown_before_an_episode_has_ended(script, capfd):
    """Catches: "mean return nan", which looks like a run gone wrong."""
    changes = dict(num_steps=4, total_timesteps=16) | (dict(seq_len=4) if "lstm" in script.__name__ else {})
    run_dir = script.train(small_args(script, **changes))
    out, err = capfd.readouterr()
    assert "charts/episodic_return" not in read_scalars(run_dir)
    assert not re.search(r"\bnan\b", out + err)
    assert "no episode has ended yet" in out.splitlines()[-1]


def test_minibatches_of_two_steps_are_accepted(script):
    """Catches: a rule that refuses what can be normalised, or whose words refuse it."""
    changes = dict(seq_len=1) if "lstm" in script.__name__ else {}
    size = small_args(script).batch_size
    args = small_args(script, num_minibatches=size // 2, total_timesteps=size, update_epochs=1, **changes)
    assert args.minibatch_size == 2
    assert load(script.train(args))["iteration"] == 1
    with pytest.raises(script.UserError, match=f"--num-minibatches must be at most half of .* {size} steps"):
        small_args(script, num_minibatches=size, **changes)
    assert small_args(script, num_minibatches=size, norm_adv=False, **changes).minibatch_size == 1


def test_patience_ends_a_run(script):
    """Catches: a run that goes on for hours after it has stopped to improve."""
    options = dict(env_id="probe_envs:ThreeSteps-v0", total_timesteps=640)  # every return is 3
    assert load(script.train(small_args(script, patience=3, **options)))["iteration"] == 9 + 3  # by the 9th 96 ended
    assert load(script.train(small_args(script, patience=0, **options)))["iteration"] == 20


def test_patience_begins_with_a_hundred_episodes():
    """Catches: a run that ends before an episode did, or for the lucky first of them."""
    script = importlib.import_module("ppo")
    state = load(script.train(small_args(script, env_id="MountainCar-v0", patience=1)))
    assert (state["iteration"], state["recent_returns"]) == (4, [])
    state = load(script.train(small_args(script, seed=3, patience=1, total_timesteps=640, learning_rate=1e-9)))
    returns = state["recent_returns"]
    assert len(returns) < 100
    assert returns[0] > np.mean(returns), "the first is lucky"
    assert state["iteration"] == 20


def test_patience_counts_steps():
    """Catches: patience that a resume with another batch size uses up, or fills again, for it counted iterations."""
    script = importlib.import_module("ppo_lstm")
    options = dict(env_id="probe_envs:ThreeSteps-v0")  # every return is 3: never better than at first
    run_dir = script.train(small_args(script, patience=14, total_timesteps=384, **options))
    state = load(run_dir)
    assert (state["global_step"], state["best_step"], state["best_return"]) == (384, 288, 3.0)
    batch_size = 8
    smaller = dict(num_steps=4, seq_len=4, total_timesteps=1024, patience=14)
    script.train(small_args(script, resume=str(run_dir), **options | smaller))
    assert load(run_dir)["global_step"] == 288 + 14 * batch_size


def test_recent_are_the_last_hundred_episodes():
    """Catches: a mean over the whole run, or over a few episodes."""
    script = importlib.import_module("ppo")
    state = load(script.train(small_args(script, env_id="probe_envs:ThreeSteps-v0", total_timesteps=640)))
    assert len(state["recent_returns"]) == 100
    assert state["recent_lengths"] == [3] * 100
