"""SIGINT and SIGTERM: the iteration is finished, the run is saved, the way to go on is told; and nothing survives."""

import contextlib
import importlib
import itertools
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, flags, read_scalars, small_args
from faulty_envs import hook_envs
from launcher import wait_until

import ppo

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def load(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def stop_at(monkeypatch, script, step: int) -> list[int]:
    """Let the script's next run be told of a SIGTERM in the given step; return the steps that its rollouts take."""
    steps, signals = [], []
    monkeypatch.setattr(script, "SIGNALS", signals)

    def hook(count, _):
        steps.append(count)
        if count == step:
            signals.append(signal.SIGTERM)

    hook_envs(monkeypatch, script, hook)
    return steps


def second_iteration(script) -> int:
    """A step in the midst of the second iteration."""
    return small_args(script).num_steps * 3 // 2


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_to_all_processes_is_a_pause(launcher, signum):
    """Catches: workers that die of the Ctrl-C and take the iteration along; one lost or cut short; a wrong exit code; a
    command to go on that does not work, with a blank in the folder's name."""
    process = launcher.start(
        "ppo", *flags(**SMALL["ppo"] | dict(total_timesteps=10**9, vectorization="async", exp_name="two words"))
    )
    wait_until(lambda: list(Path("runs").glob("*/events*")) or not process.running())
    wait_until(lambda: list(Path("runs").glob("*/checkpoint.pt")) or not process.running())
    process.send_group(signum)
    assert process.wait() == 128 + signum, process.stderr
    assert "stopping after this iteration" in process.stderr
    assert "Traceback" not in process.stderr
    (run_dir,) = Path("runs").iterdir()
    state, batch_size = load(run_dir), SMALL["ppo"]["num_envs"] * SMALL["ppo"]["num_steps"]
    steps = [batch_size * (i + 1) for i in range(state["iteration"])]
    assert state["global_step"] == steps[-1]
    assert [step for step, _ in read_scalars(run_dir)["losses/value_loss"]] == steps

    python, path, *command = shlex.split(re.search(r"to go on: (.*)$", process.stdout, re.MULTILINE).group(1))
    assert python == "python"
    assert Path(path).resolve() == ROOT / "ppo.py"
    process = launcher.run("ppo", *command, "--total-timesteps", str(steps[-1] + batch_size))
    assert process.returncode == 0, process.stderr
    assert load(run_dir)["iteration"] == len(steps) + 1
    assert "to go on" not in process.stdout
    assert list(Path("runs").iterdir()) == [run_dir]


# makes what is printed a pipe that nobody reads
UNREAD = "import os; read, write = os.pipe(); os.close(read); [os.dup2(write, fd) for fd in {fds}]"


def test_output_that_nobody_reads_any_more(launcher):
    """Catches: a Ctrl-C that ends the `tee` of a pipe as well, after which the next line that is printed ends the run,
    unsaved."""
    options = flags(**SMALL["ppo"] | dict(total_timesteps=10**9, checkpoint_every=10**9))
    process = launcher.start("ppo", *options, code=UNREAD.format(fds=[1]))
    wait_until(lambda: list(Path("runs").glob("*/events*")) or not process.running())
    process.send(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT, process.stderr
    (run_dir,) = Path("runs").iterdir()
    assert load(run_dir)["iteration"] > 0
    assert process.stderr.strip() == "stopping after this iteration; Ctrl-C again stops at once"


def test_errors_that_nobody_reads_either(launcher):
    """Catches: `2>&1 | tee`, where to tell of the signal fails, in the midst of the iteration."""
    options = flags(**SMALL["ppo"] | dict(total_timesteps=10**9, checkpoint_every=10**9))
    process = launcher.start("ppo", *options, code=UNREAD.format(fds=[1, 2]))
    wait_until(lambda: list(Path("runs").glob("*/events*")) or not process.running())
    process.send(signal.SIGINT)
    assert process.wait() != 0
    (run_dir,) = Path("runs").iterdir()
    state = load(run_dir)
    assert state["global_step"] == state["iteration"] * SMALL["ppo"]["num_envs"] * SMALL["ppo"]["num_steps"] > 0


@pytest.mark.parametrize("total_timesteps", [10**9, 2**62])
def test_a_terminal_that_is_gone(monkeypatch, total_timesteps):
    """Catches: a run that ends because a line cannot be printed: an OSError, or more time left than a timedelta has."""
    ticks = itertools.count(step=10)  # so that each iteration is told
    monkeypatch.setattr(ppo.time, "perf_counter", lambda: next(ticks))
    stop_at(monkeypatch, ppo, second_iteration(ppo))
    full = open("/dev/full", "w")  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit):
            ppo.train(small_args(ppo, total_timesteps=total_timesteps))
    with contextlib.suppress(OSError):
        full.close()
    (run_dir,) = Path("runs").iterdir()
    assert load(run_dir)["iteration"] == 2


def test_the_iteration_is_finished(script, monkeypatch, capfd):
    """Catches: an iteration that is cut short, or one more; the evaluation of a run that is stopped."""
    monkeypatch.setattr(script, "evaluate", lambda *_: pytest.fail("games are played first, for minutes"))
    steps = stop_at(monkeypatch, script, second_iteration(script))
    with pytest.raises(SystemExit) as exit:
        script.train(small_args(script, checkpoint_every=2, eval_every=2, eval_episodes=1))
    assert exit.value.code == 128 + signal.SIGTERM
    assert steps[-1] == 2 * small_args(script).num_steps
    (run_dir,) = Path("runs").iterdir()
    assert (load(run_dir)["iteration"], load(run_dir)["global_step"]) == (2, 2 * small_args(script).batch_size)
    assert f'--resume "{run_dir.absolute()}"\n' in capfd.readouterr().out


def test_with_exact_resume_the_scheduled_checkpoint_stays(script, monkeypatch):
    """Catches: a checkpoint between two restarts of the envs, from which the resumed run would differ."""
    stop_at(monkeypatch, script, second_iteration(script) + small_args(script).num_steps)
    with pytest.raises(SystemExit):
        script.train(small_args(script, exact_resume=True, checkpoint_every=2))
    (run_dir,) = Path("runs").iterdir()
    assert len(read_scalars(run_dir)["losses/value_loss"]) == 3
    assert load(run_dir)["iteration"] == 2


@pytest.mark.parametrize("exact_resume", [False, True])
def test_a_signal_in_the_last_iteration_changes_nothing(script, monkeypatch, capfd, exact_resume):
    """Catches: a finished run that tells its user to go on, or whose last iterations are not saved, off schedule."""
    args = small_args(script, exact_resume=exact_resume, checkpoint_every=3)
    stop_at(monkeypatch, script, args.num_iterations * args.num_steps)
    run_dir = script.train(args)
    assert args.num_iterations % args.checkpoint_every > 0
    assert load(run_dir)["iteration"] == args.num_iterations
    assert "to go on" not in capfd.readouterr().out


def test_training_from_python_leaves_signals_alone(script, monkeypatch):
    """Catches: a Ctrl-C in a notebook, or in a search's trial, that is swallowed, or handlers that stay changed."""
    handlers, seen = [signal.getsignal(each) for each in SIGNALS], []

    def interrupt(count, _):
        seen.append([signal.getsignal(each) for each in SIGNALS])
        if count == second_iteration(script):
            signal.raise_signal(signal.SIGINT)

    hook_envs(monkeypatch, script, interrupt)
    with pytest.raises(KeyboardInterrupt):
        script.train(small_args(script))
    assert seen == [handlers] * second_iteration(script)
    assert script.SIGNALS == []
    (run_dir,) = Path("runs").iterdir()
    assert load(run_dir)["iteration"] == 0


@pytest.mark.parametrize(("name", "leaves"), [("Worker<AsyncVectorEnv>-0", True), ("SpawnPoolWorker-1", False)])
def test_only_workers_of_async_envs_leave_the_group(script, monkeypatch, name, leaves):
    """Catches: a training in a user's own pool that Ctrl-C does not reach."""
    left = []
    monkeypatch.setattr(script.os, "setpgrp", lambda: left.append(True))
    monkeypatch.setattr(torch.multiprocessing.current_process(), "_name", name)
    script.make_envs(small_args(script), 1).close()
    assert bool(left) == leaves


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_second_ctrl_c_stops_at_once(launcher, vectorization):
    """Catches: an exit that waits for the env to finish its step, and a worker that stays in it."""
    options = dict(env_id="faulty_envs:Sleeps-v0", vectorization=vectorization, num_envs=1)
    process = launcher.start("ppo", *flags(**SMALL["ppo"] | options))
    wait_until(lambda: Path("asleep").exists() or not process.running())
    assert Path("interrupted").exists()  # the first, which the env sends
    wait_until(lambda: "stopping after this iteration" in process.stderr or not process.running())  # and is noted
    process.send_group(signal.SIGINT)
    wait_until(lambda: not process.running())
    assert process.returncode == 128 + signal.SIGINT
    for reader in process.readers:
        reader.join(timeout=20)
    survives = any(reader.is_alive() for reader in process.readers)  # a child has the output open
    if survives:
        os.kill(int(Path("asleep").read_text()), signal.SIGKILL)
    assert not survives, "a worker goes on"
    assert "Traceback" not in process.stderr


def test_workers_end_as_gymnasium_asks():
    """Catches: a close that takes no arguments, as gymnasium gives where envs are dropped, and workers that go on."""
    script = importlib.import_module("ppo")
    envs = script.make_envs(small_args(script, vectorization="async"), 2)
    envs.reset(seed=[1, 2])
    workers = envs.unwrapped.processes
    envs.close(terminate=True)
    wait_until(lambda: not any(worker.is_alive() for worker in workers))


def test_ctrl_c_in_a_step_kills_a_hanging_env():
    """Catches: an exit from Python that waits, for an hour, for an env to finish its step."""
    script = importlib.import_module("ppo")
    Path("interrupted").touch()  # the env leaves us alone
    envs = script.make_envs(small_args(script, env_id="faulty_envs:Sleeps-v0", vectorization="async"), 2)
    envs.reset(seed=[1, 2])
    for _ in range(19):
        envs.step(np.zeros(2, int))
    workers = envs.unwrapped.processes
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C would, while the step is waited for
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt), contextlib.closing(envs):
            envs.step(np.zeros(2, int))
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert not any(worker.is_alive() for worker in workers)
