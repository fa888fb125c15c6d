"""An evaluation ends: by a signal, by a limit where its episodes do not; and what it would need is tried at first."""

import os
import re
import signal
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from conftest import PROBED, SMALL, flags, read_scalars, small_args
from faulty_envs import hook_envs
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from launcher import wait_until
from probe_envs import ACTION_SPACES, Probe

import ppo

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Never(Probe):
    """Its episodes never end."""

    def move(self, bit):
        return 0.0, 1.0, False


for suffix in ACTION_SPACES:
    gym.register(f"Never{suffix}-v0", entry_point=Never, kwargs=dict(actions=suffix))


def load(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def hook_evaluation(monkeypatch, script, hook) -> None:
    """Call hook(step) after each step that the script's evaluations take."""
    evaluate, inside = script.evaluate, []

    def spy(*args, **kwargs):
        inside.append(True)
        try:
            return evaluate(*args, **kwargs)
        finally:
            inside.clear()

    monkeypatch.setattr(script, "evaluate", spy)
    hook_envs(monkeypatch, script, lambda count, _: hook(count) if inside else None)


def signal_evaluation(monkeypatch, script, signum: int) -> list[int]:
    """Let the script get the signal in an evaluation's third step; return the steps that evaluations take."""
    steps = []

    def hook(count):
        steps.append(count)
        assert len(steps) <= 3, "the evaluation goes on"
        if count == 3:
            signal.raise_signal(signum)

    hook_evaluation(monkeypatch, script, hook)
    return steps


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_ends_the_evaluation_and_the_run(script, monkeypatch, capfd, signum):
    """Catches: a stop that waits until all episodes are played, one that loses the run, and a mean of no episode."""
    before = [signal.getsignal(each) for each in SIGNALS]
    options = dict(checkpoint_every=2, eval_every=2, eval_episodes=2)
    with monkeypatch.context() as context:
        steps = signal_evaluation(context, script, signum)
        with pytest.raises(SystemExit) as exit:
            script.train(small_args(script, **options))
    assert exit.value.code == 128 + signum
    assert steps == [1, 2, 3]
    assert [signal.getsignal(each) for each in SIGNALS] == before
    (run_dir,) = Path("runs").iterdir()
    out, err = capfd.readouterr()
    assert re.search(rf"^stopped by signal {signum:d}; to go on: python .*--resume {run_dir}$", out, re.MULTILINE)
    assert "Traceback" not in err
    assert "evaluation:" not in out
    assert "eval/episodic_return" not in read_scalars(run_dir)
    args = small_args(script, **options)
    state = load(run_dir)
    assert (state["iteration"], state["global_step"]) == (2, 2 * args.batch_size)
    script.train(small_args(script, resume=str(run_dir)))
    assert load(run_dir)["iteration"] == 4


def test_a_signal_in_the_last_evaluation(script, monkeypatch, capfd):
    """Catches: a finished run that cannot be stopped playing, or that tells its user to go on."""
    steps = signal_evaluation(monkeypatch, script, signal.SIGTERM)
    run_dir = script.train(small_args(script, eval_episodes=2))
    assert steps == [1, 2, 3]
    assert load(run_dir)["iteration"] == 4
    assert "to go on" not in capfd.readouterr().out
    assert "eval/episodic_return" not in read_scalars(run_dir)


def test_a_signal_while_saving_skips_the_evaluation(script, monkeypatch):
    """Catches: an evaluation begun, and played to its end, though a signal came just before it."""
    replace, args = os.replace, small_args(script, checkpoint_every=2, eval_every=2, eval_episodes=2)
    saves = []

    def spy(*paths):
        replace(*paths)
        saves.append(paths)
        if len(saves) == 2:  # the first is before the first iteration
            signal.raise_signal(signal.SIGTERM)

    def hook(count):
        raise AssertionError("the evaluation has begun")

    monkeypatch.setattr(os, "replace", spy)
    hook_evaluation(monkeypatch, script, hook)
    with pytest.raises(SystemExit) as exit:
        script.train(args)
    assert exit.value.code == 128 + signal.SIGTERM


def test_the_process_is_stopped_in_an_endless_evaluation(probed_script, launcher):
    """Catches: a scheduler's SIGTERM that must be followed by SIGKILL, for an evaluation never ends."""
    actions, _ = PROBED[probed_script.__name__]
    options = dict(env_id=f"test_evaluation_ends:Never{actions}-v0", checkpoint_every=1, eval_every=1, eval_episodes=1)
    process = launcher.start(probed_script.__name__, *flags(**SMALL[probed_script.__name__] | options))
    checkpoints = lambda: list(Path("runs").glob("*/checkpoint.pt"))
    wait_until(lambda: (checkpoints() and load(checkpoints()[0].parent)["iteration"]) or not process.running())
    process.send(signal.SIGTERM)
    try:
        assert process.wait() == 128 + signal.SIGTERM, process.stderr
    finally:
        process.send_group(signal.SIGKILL)
    assert "to go on: python" in process.stdout
    assert "Traceback" not in process.stderr


def test_an_evaluation_whose_episodes_do_not_end_is_given_up(script, monkeypatch, capsys):
    """Catches: a run that hangs in an evaluation for ever, and a mean of no episode that is logged as NaN."""
    monkeypatch.setattr(script, "EPISODE_LIMIT", 3, raising=False)
    steps = []

    def hook(count):
        steps.append(count)
        assert count <= 6, "the evaluation goes on"

    hook_evaluation(monkeypatch, script, hook)
    run_dir = script.train(small_args(script, checkpoint_every=2, eval_every=2, eval_episodes=2))
    assert steps == [1, 2, 3, 4, 5, 6] * 2
    assert load(run_dir)["iteration"] == 4  # training went on
    out = capsys.readouterr().out
    assert out.count("given up after 6 steps, in which 0 of 2 episodes ended") == 2
    assert "mean return nan" not in out
    assert "eval/episodic_return" not in read_scalars(run_dir)


def test_what_ended_before_it_was_given_up_counts(probed_script, monkeypatch, capsys):
    """Catches: finished episodes thrown away, and an evaluation of fewer episodes that does not say so."""
    script, (actions, _) = probed_script, PROBED[probed_script.__name__]
    monkeypatch.setattr(script, "EPISODE_LIMIT", 2, raising=False)
    args = small_args(script, env_id=f"probe_envs:ThreeSteps{actions}-v0", eval_episodes=2)
    run_dir = script.train(args)
    out = capsys.readouterr().out
    assert "given up after 4 steps, in which 1 of 2 episodes ended" in out
    assert "over 1 episodes" in out
    assert read_scalars(run_dir)["eval/episodic_return"] == [(args.total_timesteps, 3.0)]
    assert script.evaluate(run_dir / "checkpoint.pt", 3) == [3.0, 3.0]


def assert_refused_before_the_first_step(script, monkeypatch, args) -> None:
    steps = []
    hook_envs(monkeypatch, script, lambda count, _: steps.append(count))
    with pytest.raises(script.UserError, match="--capture-video") as error:
        script.train(args)
    assert "\n" not in str(error.value).strip()
    assert steps == []
    assert os.listdir() == []


def test_a_video_that_cannot_be_encoded_is_refused_at_once(script, monkeypatch):
    """Catches: a video that fails after hours of training, for lack of an encoder."""
    monkeypatch.setitem(sys.modules, "moviepy", None)  # not installed
    assert_refused_before_the_first_step(script, monkeypatch, small_args(script, capture_video=True, eval_episodes=1))


def test_an_env_that_cannot_render_is_refused_at_once(probed_script, monkeypatch):
    """Catches: a video that fails after hours of training, for the env draws nothing."""
    actions, _ = PROBED[probed_script.__name__]
    args = small_args(probed_script, env_id=f"probe_envs:ThreeSteps{actions}-v0", capture_video=True, eval_episodes=1)
    assert_refused_before_the_first_step(probed_script, monkeypatch, args)


def test_an_env_that_renders_no_picture_is_refused_at_once(monkeypatch):
    """Catches: an env that lets itself be asked for pictures and gives none: a film without a frame."""
    monkeypatch.setattr(CartPoleEnv, "render", lambda env: None)
    assert_refused_before_the_first_step(ppo, monkeypatch, small_args(ppo, capture_video=True, eval_episodes=1))


@pytest.mark.parametrize("when", ["train", "evaluate"])
def test_the_command_refuses_an_env_that_cannot_render(launcher, when):
    """Catches: a traceback out of gymnasium for --capture-video, in training or with --evaluate."""
    env_id = "probe_envs:ThreeSteps-v0"
    if when == "train":
        argv = flags(**SMALL["ppo"] | dict(env_id=env_id, capture_video=True))
    else:
        launcher.run("ppo", *flags(**SMALL["ppo"] | dict(env_id=env_id)))
        (run_dir,) = Path("runs").iterdir()
        argv = ["--evaluate", str(run_dir), "--capture-video"]
    process = launcher.run("ppo", *argv)
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    *warnings, told = process.stderr.strip().splitlines()  # the warnings are gymnasium's
    assert re.match(r"error: --capture-video cannot film .*: \w", told)
    assert not [line for line in warnings if line.startswith("error")]
    assert when == "evaluate" or os.listdir() == []
