"""torchrun: when a script takes itself for a part of it, what is refused, joined, written once, done at a signal."""

import importlib
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, SMALL, flags, read_scalars, small_args
from launcher import wait_until
from test_processes import together


def test_one_process_averages_nothing():
    """Catches: helpers that need torchrun."""
    ppo = importlib.import_module("ppo")  # not above: `together` has the processes read this file first
    x, items = torch.ones(3), [1, 2]
    assert torch.equal(ppo.average(x), x)
    assert ppo.gather(items) == items
    assert (ppo.PROCESSES, ppo.RANK) == (1, 0)


def test_a_schedulers_variables_are_not_torchruns(launcher):
    """Catches: a run that waits for others for ever, where WORLD_SIZE is of something else."""
    code = "import os; os.environ |= dict(WORLD_SIZE='2', RANK='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='1')"
    process = launcher.run("ppo", *flags(**SMALL["ppo"]), code=code)
    assert process.returncode == 0, process.stderr
    assert list(Path("runs").glob("*/checkpoint.pt"))


def test_what_cannot_be_shared_is_refused(monkeypatch):
    """Catches: a remainder of the envs, of a minibatch or of its sequences that is dropped silently; advantages
    normalised by the deviation of a single step, NaN from the first update on; a refusal of what can be computed, or of
    the defaults while the command line is read, to which the flags may add what is missing."""
    ppo = importlib.import_module("ppo")  # not above: `together` has the processes read this file first
    monkeypatch.setattr(ppo, "PROCESSES", 3)
    small_args(ppo)  # the processes have not joined yet
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ppo.UserError, match=r"^--num-envs must be a multiple of 3 processes, not 2$"):
        small_args(ppo)
    with pytest.raises(ppo.UserError, match=r"^--num-minibatches must be a divisor of 48 steps, each with 2 per"):
        small_args(ppo, num_envs=3, num_minibatches=3)
    with pytest.raises(ppo.UserError, match=r"^--num-minibatches .* each with 2 per process, not 16$"):
        small_args(ppo, num_envs=3, num_minibatches=16)
    small_args(ppo, num_envs=3, num_minibatches=16, norm_adv=False)
    ppo_lstm = importlib.import_module("ppo_lstm")
    monkeypatch.setattr(ppo_lstm, "PROCESSES", 3)
    with pytest.raises(ppo_lstm.UserError, match=r"^--num-minibatches must be a divisor of 6 sequences, for each"):
        small_args(ppo_lstm, num_envs=3, num_minibatches=4)


def test_a_run_that_other_processes_could_not_share(monkeypatch):
    """Catches: a run on more processes that is refused for the number of envs that it had, not that it is to have."""
    ppo = importlib.import_module("ppo")  # not above: `together` has the processes read this file first
    folder = ppo.train(small_args(ppo))
    monkeypatch.setattr(ppo, "PROCESSES", 3)
    args = ppo.saved_args(folder, num_envs=3)  # as main() does, before the processes join
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    state = ppo.load_checkpoint(args.resume)
    assert (state["args"]["num_envs"], args.num_envs) == (2, 3)
    with pytest.raises(ppo.UserError, match=r"^--num-envs must be a multiple of 3 processes, not 2$"):
        ppo.replace(args, num_envs=2)


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (4, None)])
def test_processes_join(monkeypatch, gpus, backend):
    """Catches: processes that give up after half an hour, while the first one plays its episodes; all on the first GPU;
    nccl where two share a GPU."""
    ppo = importlib.import_module("ppo")  # not above: `together` has the processes read this file first
    joined, devices, trained = [], [], []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, timeout: joined.append((*given, timeout)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--seed", "7"])
    monkeypatch.setattr(ppo, "PROCESSES", 4)
    monkeypatch.setattr(ppo, "train", lambda args: trained.append((len(joined), args.seed)))
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    ppo.main()
    ((used, timeout),) = joined
    assert used == backend
    assert timeout >= timedelta(hours=12)
    assert devices == ([3 % gpus] if gpus else [])
    assert trained == [(1, 7)]


def use_the_command_line(rank: int) -> None:
    """Train on single steps, and evaluate the run by the command line."""
    script = importlib.import_module("ppo")
    run_dir = script.train(small_args(script, num_minibatches=16, norm_adv=False, total_timesteps=32))
    dist.barrier()  # rank 0 has written
    evaluate, calls = script.evaluate, []
    script.evaluate = lambda *given: calls.append(evaluate(*given))
    script.dist.init_process_group = lambda *_, **__: None  # that has been done
    sys.argv = ["ppo.py", "--evaluate", str(run_dir), "--eval-episodes", "2"]
    script.main()
    assert [len(returns) for returns in calls] == ([2] if rank == 0 else [])
    dist.barrier()
    Path(f"rank{rank}.txt").write_text(str(run_dir))


def test_processes_evaluate_once():
    """Catches: as many evaluations, and lines that tell of them, as processes; a minibatch of one step that fails."""
    together(use_the_command_line)
    (run_dir,) = Path("runs").absolute().iterdir()
    assert {Path(f"rank{rank}.txt").read_text() for rank in range(2)} == {str(run_dir)}
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 1


WATCHED = f"""
import atexit, runpy, sys
from pathlib import Path

names = lambda: [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
atexit.register(lambda: sys.stderr.write(f"threads at the end: {{names()}}\\n"))  # called last
sys.argv[0] = {str(ROOT / "ppo.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_torchrun():
    """Catches: a command line that works alone only; two processes that write and speak at once; a Ctrl-C that loses
    the run, or is not told to all; the process group's threads that outlive it, and abort one in thirty processes."""
    Path("watched.py").write_text(WATCHED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "watched.py"]
    command += flags(checkpoint_every=1, eval_every=1, eval_episodes=1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        load = lambda path: torch.load(path, weights_only=True)
        trained = lambda: any(load(path)["iteration"] > 1 for path in Path().glob("runs/*/ch*.pt"))  # and evaluated
        wait_until(lambda: trained() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    assert len(re.findall(r"^threads at the end: (?!.*gloo)", errors, re.MULTILINE)) == 2, errors
    (run_dir,) = Path("runs").absolute().iterdir()
    assert len(re.findall(r"^from step 0 of .* on cpu$", output, re.MULTILINE)) == 1, errors
    pattern = rf'^stopped by signal 2; to go on: .*ppo\.py" --resume "{re.escape(str(run_dir))}"$'
    assert len(re.findall(pattern, output, re.MULTILINE)) == 1, errors
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert state["global_step"] == state["iteration"] * 512
    assert len(list(run_dir.glob("events*"))) == 1
    scalars = read_scalars(run_dir)
    assert [step for step, _ in scalars["losses/value_loss"]] == [512 * (i + 1) for i in range(state["iteration"])]
    assert output.count("evaluation: mean return") >= len(scalars["eval/episodic_return"]) >= 1
