"""Measure where the time of training goes: envs, policy in the rollout, advantages, update, and the rest.

Run:   pip install -r benchmark/requirements.txt
       python benchmark/parts.py --tasks cartpole halfcheetah --compile both
       python benchmark/parts.py --device cuda --num-envs 8 64 512 --compile both --minutes 8
       python benchmark/parts.py --flops

Each task trains in a process of its own for --seconds, and a clock is read where one part hands over to the next:

policy      from the last env step's end to the next one's beginning: the observations to the device, the forward pass,
            the actions back; on a GPU with the wait for it
envs        inside envs.step
advantages  from the rollout's end to compute_gae's: values, and log-probabilities where they come after the rollout
update      all epochs, to the moment when a GPU is done with them
rest        stored rewards, noted episodes, logging

The first iteration, with whatever is compiled there, is left out; checkpoints are not written. Results, in microseconds
per env step, are printed and written to benchmark/results/parts.csv, from which `python benchmark/report.py` makes a
table of docs/results.md. With --flops nothing is timed: counted are the floating-point operations of an update's matrix
products and convolutions, forward and backward, into benchmark/results/flops.csv: with the time, how fast it computes.
"""

import argparse
import contextlib
import importlib
import io
import itertools
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from learning_curves import machine
from throughput import (
    DEFAULT_TASKS,
    ENVIRONMENT,
    OURS,
    RESULTS,
    ROOT,
    arguments,
    commit,
    possible,
    still_to_measure,
    write,
)

PARTS = ["policy", "envs", "advantages", "update", "rest"]
SETTING = ["task", "num_envs", "device", "compiled"]
COUNTED = ["cartpole", "breakout", "halfcheetah", "microrts-mining"]  # torch does not count those of an LSTM


def time_parts(task: str, num_envs: int, device: str, compiled: bool, seconds: float) -> dict[str, float]:
    """Train; return the microseconds per env step of each part."""
    import torch

    name, changes = arguments(task, num_envs)
    script = importlib.import_module(name)
    args = script.Args(
        **changes | dict(anneal_lr=False, cuda=device == "cuda", compile=compiled, checkpoint_every=10**9)
    )
    spent, iterations = dict.fromkeys(PARTS, 0.0), []
    last = begun = time.perf_counter()

    def lap(part: str) -> None:
        """What has passed since the last lap was spent on this part."""
        nonlocal last
        if device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        spent[part] += now - last
        last = now

    make_envs, compute_gae = script.make_envs, script.compute_gae
    note_episodes, log = script.Run.note_episodes, script.Run.log

    def timed_envs(*args):
        envs = make_envs(*args)
        step = envs.step
        envs.step = lambda actions: (lap("policy"), step(actions), lap("envs"))[1]
        return envs

    def timed_log(run, *args):
        nonlocal spent, begun
        lap("update")
        log(run, *args)
        lap("rest")
        iterations.append(last)
        if len(iterations) == 1:
            spent, begun = dict.fromkeys(PARTS, 0.0), last

    script.make_envs = timed_envs
    script.compute_gae = lambda *args: (compute_gae(*args), lap("advantages"))[0]
    script.Run.note_episodes = lambda *args: (note_episodes(*args), lap("rest"))[0]
    script.Run.log = timed_log
    script.Run.stopped = lambda run: len(iterations) >= 3 and last - begun > seconds
    with contextlib.redirect_stdout(io.StringIO()):
        script.train(args)
    steps = (len(iterations) - 1) * args.batch_size
    assert abs(sum(spent.values()) - (iterations[-1] - begun)) < 1e-3, "a part was forgotten, or counted twice"
    return {part: 1e6 * spent[part] / steps for part in PARTS}


def count_flops(task: str) -> float:
    """The millions of floating-point operations per env step of an update, all of whose epochs are run."""
    from torch.utils.flop_counter import FlopCounterMode

    name, changes = arguments(task, 0)
    script = importlib.import_module(name)
    args = script.Args(**changes | dict(cuda=False, anneal_lr=False, target_kl=None))
    args = replace(args, total_timesteps=args.batch_size)
    compute_gradients, counted = script.compute_gradients, []

    def counting(*given):
        with FlopCounterMode(display=False) as counter:
            result = compute_gradients(*given)
        counted.append(counter.get_total_flops())
        return result

    script.compute_gradients = counting
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        script.train(args)
    script.compute_gradients = compute_gradients
    return sum(counted) / args.batch_size / 1e6


def measure(request: dict) -> dict[str, float]:
    """time_parts in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--one", json.dumps(request)]
        result = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=OURS, default=DEFAULT_TASKS)
    parser.add_argument("--num-envs", nargs="+", type=int, default=[0], help="0: the task's own")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", nargs="?", choices=["yes", "no", "both"], const="yes", default="no")
    parser.add_argument("--seconds", type=float, default=10, help="of each run, after its first iteration")
    parser.add_argument("--minutes", type=float, help="begin nothing new after these; leave out what is measured")
    parser.add_argument("--flops", action="store_true", help="count operations instead of measuring time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.flops:
        for task in COUNTED:
            row = dict(task=task, mflop=f"{count_flops(task):.2f}", commit=commit(), machine="any")
            print(row, flush=True)
            write(RESULTS / "flops.csv", row, list(row), ["task"])
        return
    if args.one:
        print(json.dumps(time_parts(**json.loads(args.one))))
        return
    modes = dict(yes=["yes"], no=["no"], both=["no", "yes"])[args.compile]
    same = dict(device=args.device, commit=commit(), machine=machine(args.device))
    tasks = possible(args.tasks, args.num_envs)
    settings = [task | dict(compiled=compiled) | same for task, compiled in itertools.product(tasks, modes)]
    for setting in still_to_measure(RESULTS / "parts.csv", settings, args.minutes):
        how = dict(device=args.device, compiled=setting["compiled"] == "yes", seconds=args.seconds)
        parts = measure(dict(task=setting["task"], num_envs=setting["num_envs"]) | how)
        row = {name: setting[name] for name in SETTING} | {part: f"{parts[part]:.1f}" for part in PARTS}
        row |= dict(commit=setting["commit"], machine=setting["machine"])
        print(row, flush=True)
        write(RESULTS / "parts.csv", row, list(row), SETTING)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
