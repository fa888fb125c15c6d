"""Measure training speed, env steps per second with updates included, beside Stable-Baselines3 on the same settings.

Run:   pip install -r benchmark/requirements.txt
       python benchmark/throughput.py --tasks cartpole breakout --repeats 5
       python benchmark/throughput.py --tasks cartpole --compile --alone
       python benchmark/throughput.py --tasks breakout-lstm --alone --processes 2
       python benchmark/throughput.py --device cuda --num-envs 8 64 512 --compile both --repeats 1 --minutes 7
       python benchmark/throughput.py --scaling --alone

Each run is a process of its own and trains for --seconds, or until its third iteration if that comes later, with
--scaling its second. With a given number of envs a batch has at most 32,768 steps: with many of them rollouts are
shorter. The runs take turns (A B A B ...), so that a drift of the machine's speed meets all, and what counts is the
median of the pairs' ratios. The speed is the steady one: the first iteration, with whatever was compiled there, is not
in it, on either side. Peak memory is the host's, of the training process, of the first one where torchrun starts
several. With --minutes nothing new is begun once they are over, and the same command, given again, goes on with what
this commit has not been measured in on this machine.

Results are printed and written to benchmark/results/throughput.csv, or with --scaling to scaling.csv, from which
`python benchmark/report.py` makes the tables of docs/results.md.
"""

import argparse
import contextlib
import csv
import importlib
import io
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from learning_curves import machine, read

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
ENVIRONMENT = dict(os.environ)  # before a script adds to it: the peer runs in what its users have

SHORT_SEQUENCES = dict(num_envs=32, num_steps=512, num_minibatches=16, update_epochs=10, seq_len=8, hidden_size=128)
SHORT_SEQUENCES |= dict(shared_lstm=False, torch_threads=0)
CLEANRL = dict(num_envs=1, num_steps=2048, num_minibatches=32, norm_adv=True, clip_vloss=True, vf_coef=0.5)
CLEANRL |= dict(log_std_init=0.0)
LONG_SEQUENCES = dict(num_envs=8, num_steps=128, num_minibatches=4, update_epochs=4, seq_len=128, hidden_size=128)
LONG_SEQUENCES |= dict(shared_lstm=False)
# task: script, its arguments where they differ from the defaults
OURS = {
    "cartpole": ("ppo", {}),
    "breakout": ("ppo_atari", {}),
    "breakout-float32": ("ppo_atari", dict(bf16=False)),
    "halfcheetah": ("ppo_continuous_action", CLEANRL),
    "halfcheetah-64": ("ppo_continuous_action", {}),
    "halfcheetah-8-minibatches": ("ppo_continuous_action", dict(num_minibatches=8, norm_adv=True)),
    "cartpole-lstm": ("ppo_lstm", LONG_SEQUENCES),
    "cartpole-lstm-16": ("ppo_lstm", {}),
    "cartpole-lstm-short-sequences": ("ppo_lstm", SHORT_SEQUENCES),
    "cartpole-lstm-short-sequences-bfloat16": ("ppo_lstm", SHORT_SEQUENCES | dict(bf16=True)),
    "breakout-lstm": ("ppo_atari_lstm", {}),
    "microrts-mining": ("ppo_multidiscrete", {}),
    "microrts-mining-unmasked": ("ppo_multidiscrete", dict(mask_actions=False)),
}
DEFAULT_TASKS = ["cartpole", "breakout", "halfcheetah", "halfcheetah-64", "cartpole-lstm-16", "breakout-lstm"]
DEFAULT_TASKS += ["microrts-mining"]
WITH_PEER = {"cartpole", "breakout", "breakout-float32", "halfcheetah", "halfcheetah-64"}
WITH_PEER |= {"cartpole-lstm", "cartpole-lstm-16"}
LARGEST_BATCH = 32_768  # steps, with a given number of envs
SETTING = ["task", "num_envs", "processes", "device", "compiled"]
COLUMNS = [*SETTING, "repeats", "ours", "peer", "ratio", "peak_memory_mb", "commit", "machine"]


def arguments(task: str, num_envs: int) -> tuple[str, dict]:
    """A task's script and arguments, with as many envs, 0 for the task's own number."""
    name, changes = OURS[task]
    changes = dict(total_timesteps=10**9) | changes
    if num_envs:
        num_steps = changes.get("num_steps", importlib.import_module(name).Args().num_steps)
        changes |= dict(num_envs=num_envs, num_steps=min(num_steps, LARGEST_BATCH // num_envs))
    return name, changes


def run_ours(task: str, num_envs: int, device: str, compiled: bool, seconds: float, scaling: bool) -> float:
    """Train with our script; return env steps per second."""
    name, changes = arguments(task, num_envs)
    script = importlib.import_module(name)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes |= dict(anneal_lr=False, cuda=device == "cuda", compile=compiled)
    args = script.Args(**changes)
    if script.PROCESSES > 1:
        script.dist.init_process_group("gloo")
    logged, log = [], script.Run.log

    def timed_log(run, *args):
        log(run, *args)
        logged.append(time.monotonic())

    def stopped(run):
        enough = len(logged) >= (2 if scaling else 3) and logged[-1] - logged[0] > seconds
        return any(script.gather([enough]))  # all processes stop together

    script.Run.log, script.Run.stopped = timed_log, stopped
    with contextlib.redirect_stdout(io.StringIO()):
        run_dir = script.train(args)
    if script.RANK > 0:  # the first process speaks for all
        sys.exit()
    events = EventAccumulator(str(run_dir)).Reload().Scalars("charts/SPS")
    return (events[-1].step - events[0].step) / (events[-1].wall_time - events[0].wall_time)


def run_sb3(task: str, num_envs: int, device: str, seconds: float) -> float:
    """Train Stable-Baselines3's PPO, or sb3-contrib's RecurrentPPO, with the same settings."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    name, changes = arguments(task, num_envs)
    args = importlib.import_module(name).Args(**changes)
    common = dict(
        learning_rate=args.learning_rate,
        n_steps=args.num_steps,
        batch_size=args.minibatch_size,
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef if args.clip_vloss else None,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
        normalize_advantage=args.norm_adv,
        seed=1,
        device=device,
    )
    if name == "ppo_atari":
        envs = VecFrameStack(make_atari_env(args.env_id, args.num_envs, seed=1), 4)
        model = PPO("CnnPolicy", envs, **common)
    elif name == "ppo_continuous_action":
        model = PPO("MlpPolicy", VecNormalize(make_vec_env(args.env_id, args.num_envs)), **common)
    elif name == "ppo_lstm":
        from sb3_contrib import RecurrentPPO

        policy = dict(lstm_hidden_size=args.hidden_size, net_arch=[args.hidden_size])
        policy |= dict(shared_lstm=args.shared_lstm, enable_critic_lstm=not args.shared_lstm)
        envs = make_vec_env(args.env_id, args.num_envs)
        model = RecurrentPPO("MlpLstmPolicy", envs, policy_kwargs=policy, **common)
    else:
        model = PPO("MlpPolicy", make_vec_env(args.env_id, args.num_envs), **common)
    begun = []  # when each rollout began: the second of them is when the first iteration was done

    class Stop(BaseCallback):
        def _on_rollout_start(self) -> None:
            begun.append(time.monotonic())

        def _on_step(self) -> bool:
            return not (len(begun) >= 4 and begun[-1] - begun[1] > seconds)

    model.learn(10**9, callback=Stop())
    return (len(begun) - 2) * args.batch_size / (begun[-1] - begun[1])


def measure(side: str, processes: int, seconds: float, **setting) -> tuple[float, float]:
    """Run one side in a process of its own, or several; return its steps per second and its peak memory in MB."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        request = json.dumps(dict(side=side, seconds=seconds, **setting))
        command = [sys.executable, *torchrun, str(Path(__file__).resolve()), "--one", request]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmark"), os.environ.get("PYTHONPATH", "")])
        environment = ENVIRONMENT | {"PYTHONPATH": paths}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(result.stderr)
    speed, memory = result.stdout.split()[-2:]
    return float(speed), float(memory)


def measure_one(request: dict) -> None:
    """In the process that measures: train, and print the speed and the peak memory."""
    sys.path.insert(0, str(ROOT))
    if request.pop("side") == "ours":
        speed = run_ours(**request)
    else:
        del request["compiled"], request["scaling"]
        speed = run_sb3(**request)
    print(speed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def commit() -> str:
    """The commit that is measured."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"], check=False).returncode == 1
    return head.stdout.strip() + ("-dirty" if changed else "") or "unknown"


def possible(tasks: list[str], numbers: list[int]) -> list[dict]:
    """Each task with each number of envs, 0 for its own, but for what its script refuses."""
    settings = []
    for task, number in itertools.product(tasks, numbers):
        name, changes = arguments(task, number)
        script = importlib.import_module(name)
        try:
            settings.append(dict(task=task, num_envs=script.Args(**changes).num_envs))
        except script.UserError as error:  # such as fewer sequences than minibatches
            print(f"{task} with {number} envs: {error}")
    return settings


def still_to_measure(path: Path, settings: list[dict], minutes: float | None) -> Iterator[dict]:
    """The settings, each with its commit and machine; with `minutes`, while these last, those that `path` lacks."""
    begun = time.monotonic()
    for setting in settings:
        rows = read(path) if minutes else []
        if any(all(row[name] == str(value) for name, value in setting.items()) for row in rows):
            continue
        if minutes and time.monotonic() - begun > 60 * minutes:
            print("the time is over: the same command goes on")
            return
        yield setting


def write(path: Path, row: dict, columns: list[str], setting: list[str]) -> None:
    """Put a row into a file of results, in the place of an older one of the same setting on the same machine."""
    same = lambda other: all(str(other[name]) == str(row[name]) for name in [*setting, "machine"])
    rows = [other for other in read(path) if not same(other)] + [row]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=OURS, default=DEFAULT_TASKS)
    parser.add_argument("--num-envs", nargs="+", type=int, default=[0], help="0: the task's own")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", nargs="?", choices=["yes", "no", "both"], const="yes", default="no")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="of each run, after its first iteration")
    parser.add_argument("--processes", type=int, default=1, help="of our side, by torchrun, on a CPU")
    parser.add_argument("--minutes", type=float, help="begin nothing new after these; leave out what is measured")
    parser.add_argument("--alone", action="store_true", help="only our side")
    parser.add_argument("--scaling", action="store_true", help="each task with 1 to 256 envs, into scaling.csv")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure_one(json.loads(args.one))
        return
    if args.processes > 1 and args.device == "cuda":
        parser.error("several processes are measured on a CPU")
    numbers = [1, 4, 16, 64, 256] if args.scaling else args.num_envs
    modes = dict(yes=[True], no=[False], both=[False, True])[args.compile]
    path = RESULTS / ("scaling.csv" if args.scaling else "throughput.csv")
    same = dict(device=args.device, processes=args.processes, commit=commit(), machine=machine(args.device))
    settings = [task | same for task in possible(args.tasks, numbers)]
    for setting in still_to_measure(path, settings, args.minutes):
        task, num_envs = setting["task"], setting["num_envs"]
        with_peer = task in WITH_PEER and not args.alone
        sides = [("ours", compiled) for compiled in modes] + [("sb3", False)] * with_peer
        speeds, peaks = {side: [] for side in sides}, dict.fromkeys(sides, 0.0)
        for _ in range(args.repeats):
            for side in sides:
                name, compiled = side
                processes = args.processes if name == "ours" else 1
                how = dict(device=args.device, compiled=compiled, scaling=args.scaling)
                speed, peak = measure(name, processes, args.seconds, task=task, num_envs=num_envs, **how)
                speeds[side].append(speed)
                peaks[side] = max(peaks[side], peak)
        for compiled in modes:
            ours, peer = speeds["ours", compiled], speeds.get(("sb3", False))
            row = setting | dict(compiled="yes" if compiled else "no", repeats=args.repeats)
            row |= dict(ours=f"{statistics.median(ours):.0f}", peer="", ratio="")
            if peer:
                ratio = statistics.median(a / b for a, b in zip(ours, peer))
                row |= dict(peer=f"{statistics.median(peer):.0f}", ratio=f"{ratio:.2f}")
            row |= dict(peak_memory_mb=f"{peaks['ours', compiled]:.0f}")
            print(row, flush=True)
            write(path, row, COLUMNS, SETTING)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
