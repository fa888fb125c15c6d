"""Measure training speed, env steps per second with updates included, beside Stable-Baselines3 on the same settings.

Run:   pip install -r benchmark/requirements.txt
       python benchmark/throughput.py --tasks cartpole breakout --repeats 5
       python benchmark/throughput.py --tasks breakout-lstm --alone --processes 2

Each run is a process of its own, the two in turn (A B A B ...), so that a drift of the machine's speed meets both; what
counts is the median of the ratios, pair by pair. Imports and set-up are not in the time, on either side. Results are
printed and written to benchmark/results/throughput.csv. Peak memory is that of the training process, of the first one
where torchrun starts several.
"""

import argparse
import contextlib
import csv
import importlib
import io
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "throughput.csv"

# task: script, its arguments where they differ from the defaults
OURS = {
    "cartpole": ("ppo", dict(total_timesteps=100_352)),
    "breakout": ("ppo_atari", dict(total_timesteps=10_240)),
    "breakout-float32": ("ppo_atari", dict(total_timesteps=10_240, bf16=False)),
    "halfcheetah": ("ppo_continuous_action", dict(total_timesteps=20_480)),
    "cartpole-lstm": (
        "ppo_lstm",
        dict(total_timesteps=20_480, num_minibatches=4, update_epochs=4, seq_len=128, hidden_size=128),
    ),
    "cartpole-lstm-short-sequences": (
        "ppo_lstm",
        dict(
            total_timesteps=163_840,
            num_envs=32,
            num_steps=512,
            update_epochs=10,
            seq_len=8,
            hidden_size=128,
            num_minibatches=16,
            torch_threads=0,
        ),
    ),
    "breakout-lstm": ("ppo_atari_lstm", dict(total_timesteps=10_240)),
    "microrts-mining": ("ppo_multidiscrete", dict(total_timesteps=512_000)),
    "microrts-mining-unmasked": ("ppo_multidiscrete", dict(total_timesteps=512_000, mask_actions=False)),
}


def run_ours(task: str) -> float:
    """Train with our script; return env steps per second."""
    sys.path.insert(0, str(ROOT))
    name, arguments = OURS[task]
    script = importlib.import_module(name)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = script.Args(**arguments)
    script.join_processes(args)
    with contextlib.redirect_stdout(io.StringIO()):
        run_dir = script.train(args)
    if script.dist.is_initialized() and script.dist.get_rank():  # the first one speaks for all
        sys.exit()
    return EventAccumulator(str(run_dir)).Reload().Scalars("charts/SPS")[-1].value


def run_sb3(task: str) -> float:
    """Train Stable-Baselines3's PPO, or sb3-contrib's RecurrentPPO, with the same settings."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    name, arguments = OURS[task]
    args = importlib.import_module(name).Args(**arguments)
    common = dict(
        learning_rate=args.learning_rate,
        n_steps=args.num_steps,
        batch_size=args.minibatch_size,
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
        seed=1,
        device="cpu",
    )
    if name == "ppo_atari":
        envs = VecFrameStack(make_atari_env(args.env_id, args.num_envs, seed=1), 4)
        model = PPO("CnnPolicy", envs, **common)
    elif name == "ppo_continuous_action":
        model = PPO("MlpPolicy", VecNormalize(make_vec_env(args.env_id, args.num_envs)), **common)
    elif name == "ppo_lstm":
        from sb3_contrib import RecurrentPPO

        policy = dict(lstm_hidden_size=args.hidden_size, net_arch=[args.hidden_size])
        envs = make_vec_env(args.env_id, args.num_envs)
        model = RecurrentPPO("MlpLstmPolicy", envs, policy_kwargs=policy, **common)
    else:
        model = PPO("MlpPolicy", make_vec_env(args.env_id, args.num_envs), **common)
    start = time.time()
    model.learn(args.total_timesteps)
    return model.num_timesteps / (time.time() - start)


def measure(side: str, task: str, processes: int = 1) -> tuple[float, float]:
    """Run one side in a process of its own, or several; return its steps per second and its peak memory in MB."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *torchrun, str(Path(__file__).resolve()), "--one", side, task]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(result.stderr)
    speed, memory = result.stdout.split()[-2:]
    return float(speed), float(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=OURS, default=["cartpole", "breakout"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="of our side, by torchrun")
    parser.add_argument("--alone", action="store_true", help="only our side, for tasks that the peer does not have")
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "TASK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        side, task = args.one
        speed = run_ours(task) if side == "ours" else run_sb3(task)
        print(speed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    rows = []
    if RESULTS.exists():
        with open(RESULTS, newline="") as file:
            new = [(task, str(args.processes)) for task in args.tasks]
            rows = [row for row in csv.DictReader(file) if (row["task"], row["processes"]) not in new]
    for task in args.tasks:
        ours, peer, memory = [], [], 0.0
        for _ in range(args.repeats):
            speed, peak = measure("ours", task, args.processes)
            ours.append(speed)
            memory = max(memory, peak)
            if not args.alone:
                peer.append(measure("sb3", task)[0])
        row = dict(task=task, processes=args.processes, repeats=args.repeats)
        row |= dict(ours=f"{statistics.median(ours):.0f}", peer="", ratio="")
        if peer:
            ratio = statistics.median(a / b for a, b in zip(ours, peer))
            row |= dict(peer=f"{statistics.median(peer):.0f}", ratio=f"{ratio:.2f}")
        row |= dict(peak_memory_mb=f"{memory:.0f}", machine=f"{os.cpu_count()} cores, {platform.machine()}")
        print(row, flush=True)
        rows.append(row)
        with open(RESULTS, "w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
