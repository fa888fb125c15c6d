"""SIGINT and SIGTERM: the iteration is finished, the run is saved, the way to go on is told; and nothing survives."""

import contextlib
import importlib
import os
import re
import shlex
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PROBED, ROOT, SMALL, flags, read_scalars, small_args
from faulty_envs import hook_envs
from launcher import wait_until

SIGNALS = [signal.SIGINT, signal.SIGTERM]
ENDLESS = dict(total_timesteps=10**9)


def load(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def signal_at(monkeypatch, script, step: int, signum: int) -> list[int]:
    """Let the script's next run get the signal in the given step of its rollouts; return the steps that it takes."""
    steps = []

    def hook(count, _):
        steps.append(count)
        if count == step:
            signal.raise_signal(signum)

    hook_envs(monkeypatch, script, hook)
    return steps


def second_iteration(script) -> int:
    """A step in the midst of the second iteration."""
    return small_args(script).num_steps * 3 // 2


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_ends_the_run_as_a_pause(script, monkeypatch, capfd, launcher, signum):
    """Catches: an iteration cut short or lost, a wrong exit code, and a resume command that does not work."""
    before = [signal.getsignal(each) for each in SIGNALS]
    steps = signal_at(monkeypatch, script, second_iteration(script), signum)
    with pytest.raises(SystemExit) as exit:
        script.train(small_args(script))
    assert exit.value.code == 128 + signum
    assert steps[-1] == 2 * small_args(script).num_steps
    assert [signal.getsignal(each) for each in SIGNALS] == before
    (run_dir,) = Path("runs").iterdir()
    batch_size, state = small_args(script).batch_size, load(run_dir)
    assert (state["iteration"], state["global_step"]) == (2, 2 * batch_size)
    assert [step for step, _ in read_scalars(run_dir)["losses/value_loss"]] == [batch_size, 2 * batch_size]

    out, err = capfd.readouterr()
    assert "Traceback" not in err
    python, *command = shlex.split(re.search(r"to go on: (.*)$", out, re.MULTILINE).group(1))
    assert python == "python"
    assert Path(command[0]).resolve() == ROOT / f"{script.__name__}.py"
    process = launcher.run(script.__name__, *command[1:])
    assert process.returncode == 0, process.stderr
    assert load(run_dir)["iteration"] == 4
    assert "to go on" not in process.stdout
    assert list(Path("runs").iterdir()) == [run_dir]


def test_ctrl_c_that_ends_the_reader_of_the_log_too(script, monkeypatch):
    """Catches: a run under `2>&1 | tee log`, where Ctrl-C ends tee as well, that dies of it and is not saved."""
    signal_at(monkeypatch, script, second_iteration(script), signal.SIGINT)
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)
    with open(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        os.dup2(writer, 2)
        try:
            with pytest.raises(SystemExit) as exit:
                script.train(small_args(script))
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    assert exit.value.code == 128 + signal.SIGINT
    (run_dir,) = Path("runs").iterdir()
    assert load(run_dir)["iteration"] == 2


@pytest.mark.parametrize("signum", SIGNALS)
def test_with_exact_resume_the_scheduled_checkpoint_stays(script, monkeypatch, signum):
    """Catches: a checkpoint between two restarts of the envs, from which the resumed run would differ."""
    signal_at(monkeypatch, script, second_iteration(script) + small_args(script).num_steps, signum)
    with pytest.raises(SystemExit) as exit:
        script.train(small_args(script, exact_resume=True, checkpoint_every=2))
    assert exit.value.code == 128 + signum
    (run_dir,) = Path("runs").iterdir()
    assert load(run_dir)["iteration"] == 2


def test_a_signal_skips_the_evaluation(script, monkeypatch):
    """Catches: a stop that first plays games for minutes."""

    def evaluate(*args):
        raise AssertionError

    monkeypatch.setattr(script, "evaluate", evaluate)
    signal_at(monkeypatch, script, second_iteration(script), signal.SIGTERM)
    with pytest.raises(SystemExit):
        script.train(small_args(script, checkpoint_every=2, eval_every=2, eval_episodes=1))


def test_a_signal_in_the_last_iteration_changes_nothing(script, monkeypatch, capfd):
    """Catches: a finished run that tells its user to go on."""
    args = small_args(script)
    signal_at(monkeypatch, script, args.num_iterations * args.num_steps, signal.SIGTERM)
    run_dir = script.train(args)
    assert load(run_dir)["iteration"] == args.num_iterations
    assert "to go on" not in capfd.readouterr().out


def start(launcher, script, **options):
    """Start a run that never ends, and wait until it is at work."""
    process = launcher.start(script.__name__, *flags(**SMALL[script.__name__] | ENDLESS | options))
    wait_until(lambda: list(Path("runs").glob("*/checkpoint.pt")) or not process.running())
    return process


def has_async(script) -> bool:
    return "vectorization" in vars(script.Args())


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_to_all_processes(script, launcher, signum):
    """Catches: workers that die of the Ctrl-C, or of a scheduler's SIGTERM, and take the iteration along; survivors."""
    process = start(launcher, script, **dict(vectorization="async") if has_async(script) else {})
    process.send_group(signum)
    assert process.wait() == 128 + signum, process.stderr
    assert "Traceback" not in process.stderr
    assert "to go on: python" in process.stdout


def test_a_second_ctrl_c_stops_at_once(script, monkeypatch):
    """Catches: a run that can only be killed while it is in a long iteration."""
    step, last = second_iteration(script), []

    def interrupt_twice(count, _):
        last[:] = [count]
        if count >= step:
            signal.raise_signal(signal.SIGINT)

    before = [signal.getsignal(each) for each in SIGNALS]
    hook_envs(monkeypatch, script, interrupt_twice)
    with pytest.raises(KeyboardInterrupt):
        script.train(small_args(script))
    assert last == [step + 1]
    assert [signal.getsignal(each) for each in SIGNALS] == before
    (run_dir,) = Path("runs").iterdir()
    assert load(run_dir)["iteration"] == 0


def test_a_signal_as_an_evaluation_returns(script, monkeypatch):
    """Catches: an exit without the line that resumes, where a signal comes between the last game and what follows."""
    evaluate, returned = script.evaluate, []

    def evaluate_and_note(*args):
        returned.append(evaluate(*args))
        return returned[-1]

    def trace(frame, event, _):
        if frame.f_code is script.Run.evaluate.__code__:
            if event == "line" and len(returned) == 1:
                returned.append("signalled")
                signal.raise_signal(signal.SIGTERM)
            return trace
        return None

    monkeypatch.setattr(script, "evaluate", evaluate_and_note)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(SystemExit) as stopped:
            script.train(small_args(script, eval_episodes=1, eval_every=1, checkpoint_every=1))
    finally:
        sys.settrace(before)
    assert returned[1:] == ["signalled"]
    assert stopped.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(("name", "leaves"), [("Worker<AsyncVectorEnv>-0", True), ("SpawnPoolWorker-1", False)])
def test_only_workers_of_async_envs_leave_the_group(script, monkeypatch, name, leaves):
    """Catches: a training in a user's own pool that Ctrl-C does not reach."""
    left = []
    monkeypatch.setattr(script.os, "setpgrp", lambda: left.append(True))
    monkeypatch.setattr(script.multiprocessing, "parent_process", lambda: True)
    monkeypatch.setattr(script.multiprocessing.current_process(), "_name", name)
    script.prepare_process(small_args(script))
    assert bool(left) == leaves


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_second_ctrl_c_stops_a_hanging_env(probed_script, launcher, vectorization):
    """Catches: an exit that waits for the env to finish its step, and a worker that stays in it."""
    actions, _ = PROBED[probed_script.__name__]
    options = dict(env_id=f"faulty_envs:Sleeps{actions}-v0", vectorization=vectorization)
    process = launcher.start(probed_script.__name__, *flags(**SMALL[probed_script.__name__] | options))
    wait_until(lambda: Path("asleep").exists() or not process.running())
    assert Path("interrupted").exists()  # the first, which the env sends
    wait_until(lambda: "stopping after this iteration" in process.stderr or not process.running())  # and is noted
    process.send_group(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    assert "Traceback" not in process.stderr


def test_workers_end_as_gymnasium_asks():
    """Catches: a close that takes no arguments, as gymnasium gives where envs are dropped, and workers that go on."""
    script = importlib.import_module("ppo")
    envs = script.make_envs(small_args(script, vectorization="async"), 2)
    envs.reset(seed=[1, 2])
    workers = envs.unwrapped.processes
    envs.close(terminate=True)
    wait_until(lambda: not any(worker.is_alive() for worker in workers))


def test_ctrl_c_as_a_step_is_sent_kills_a_hanging_env():
    """Catches: an exit that waits for an env of which gymnasium does not know yet that it is in its step."""
    script = importlib.import_module("ppo")
    Path("interrupted").touch()  # the env leaves us alone
    envs = script.make_envs(small_args(script, env_id="faulty_envs:Sleeps-v0", vectorization="async"), 2)
    envs.reset(seed=[1, 2])
    for _ in range(19):
        envs.step(np.zeros(2, int))
    workers = envs.unwrapped.processes
    envs.unwrapped.parent_pipes[0].send(("step", np.int64(0)))
    wait_until(Path("asleep").exists)
    rescue = threading.Timer(60, workers[0].kill)  # or a failure would take an hour
    rescue.start()
    with pytest.raises(KeyboardInterrupt), contextlib.closing(envs):
        raise KeyboardInterrupt
    assert rescue.is_alive()
    rescue.cancel()
    assert not any(worker.is_alive() for worker in workers)
