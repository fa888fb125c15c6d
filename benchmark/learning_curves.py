"""Train a script on several envs and seeds, a few runs at a time, and write their curves as CSV.

Run:   python benchmark/learning_curves.py --script ppo_continuous_action.py --env-ids Hopper-v5 --seeds 1 2 3 --jobs 2
       (what follows `--` goes to the script: ... -- --total-timesteps 500000)

For each env it writes benchmark/results/SCRIPT__ENV.csv (SCRIPT__ENV__LABEL.csv with --label): a row per iteration in
which an episode ended, with the mean return of those; and a line per run of summary.csv there: the mean return of the
last 100 episodes, the git commit, the minutes of training, the machine, and the mean return of --eval-episodes further
ones, played at the end by the most likely action. Other seeds that these files hold stay there.
A run that was begun before, in the same --work-dir, is resumed, so let only one process use it; one that is complete is
only read. The commit is found by the copy of the script that is kept in the run's folder.
`python benchmark/report.py` then writes docs/results.md and draws the curves.
"""

import argparse
import csv
import itertools
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"


def file_name(env_id: str) -> str:
    """The env's id as the names of folders have it."""
    return env_id.replace("/", "-").replace(":", "-")


def is_complete(checkpoint: Path, extra: list[str]) -> bool:
    """Whether a run has taken all of its steps, or all of those that `extra` now asks for."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    args = state["args"]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--total-timesteps", "--total_timesteps", type=int, default=args["total_timesteps"])
    wanted = parser.parse_known_args(extra)[0].total_timesteps
    return state["global_step"] + args["num_envs"] * args["num_steps"] > wanted


def train(script: str, env_id: str, seed: int, label: str, work_dir: Path, extra: list[str]) -> Path:
    """Train, or go on training, in work_dir, unless that is done; return its folder. `extra` are flags."""
    exp_name = Path(script).stem + (f"-{label}" if label else "")
    name = f"{file_name(env_id)}__{exp_name}__{seed}"
    runs = sorted((work_dir / "runs").glob(f"{name}__*/checkpoint.pt"))
    if runs and is_complete(runs[-1], extra):
        return runs[-1].parent
    begin = ["--env-id", env_id, "--seed", str(seed), "--exp-name", exp_name]
    arguments = ["--resume", str(runs[-1].parent)] if runs else begin
    paths = os.pathsep.join(
        [str(ROOT / "benchmark"), os.environ.get("PYTHONPATH", "")]
    )  # for envs that are modules here
    with open(work_dir / f"{name}.log", "a") as log:
        command, environment = [sys.executable, str(ROOT / script), *arguments, *extra], {"PYTHONPATH": paths}
        subprocess.run(command, cwd=work_dir, stdout=log, stderr=log, check=True, env=os.environ | environment)
    return sorted((work_dir / "runs").glob(f"{name}__*/checkpoint.pt"))[-1].parent


def read_curve(run_dir: Path) -> list[tuple[int, float, float]]:
    """The (env step, return, minutes of training so far) of each iteration in which an episode ended."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    times = [event.wall_time for event in events.Scalars("charts/SPS")]
    gaps = [after - before for before, after in pairwise(times)]
    usual = statistics.median(gaps)  # a gap that is much longer is a pause, or the time between two processes
    seconds = itertools.accumulate([usual, *(gap if gap < 20 * usual else usual for gap in gaps)])
    trained = {event.step: total / 60 for event, total in zip(events.Scalars("charts/SPS"), seconds)}
    return [(event.step, event.value, trained[event.step]) for event in events.Scalars("charts/episodic_return")]


def machine(device: str = "cpu") -> str:
    """The cores that may be used, what they are, and the GPU."""
    cpu = Path("/proc/cpuinfo")
    told = cpu.read_text() if cpu.exists() else ""
    names = re.findall(r"model name\s*: (.+)", told)
    name = re.sub(r"\(R\)|\(TM\)|Processor|CPU|@", "", names[0] if names else platform.machine())
    narrow = " without AVX-512" if "AMD" in name and "avx512f" not in told else ""  # of one name, but half as fast
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    return f"{cores} core{'s' if cores > 1 else ''}, {' '.join(name.split())}{narrow}{gpu}"


def git(*command: str) -> bytes:
    """What git says of this repository."""
    return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, check=False).stdout


def commits(script: str, run_dir: Path) -> str:
    """The commits whose text of the script had a part in a run; of an edited text the last one before it, and -dirty.

    Older runs note their commit in command.txt. "" where the folder tells nothing.
    """
    name, found = Path(script).name, []
    if (run_dir / "command.txt").exists():
        texts = [path.read_bytes() for path in run_dir.glob("*.py")]
        for commit in re.findall(r"git commit ([0-9a-f]{7})", (run_dir / "command.txt").read_text()):
            found.append(commit if git("show", f"{commit}:{name}") in texts else f"{commit}-dirty")
        return " ".join(dict.fromkeys(found))
    log = git("log", "--raw", "--no-abbrev", "--format=%H %ct", "--", name).decode()
    history = re.findall(r"^(\w{7})\w* (\d+)\n\n:\w+ \w+ \w+ (\w+)", log, re.MULTILINE)  # the newest first
    kept = run_dir.glob(f"{Path(script).stem}_from_*.py")
    for path in sorted(kept, key=lambda path: int(path.stem.rpartition("_")[2])):
        text = git("hash-object", "--no-filters", str(path.absolute())).decode().strip()
        same = [commit for commit, _, other in history if other == text]
        earlier = [commit for commit, moment, _ in history if int(moment) <= path.stat().st_mtime]
        found.append(same[0] if same else f"{earlier[0]}-dirty" if earlier else "unknown")
    return " ".join(dict.fromkeys(found))


def evaluation(run_dir: Path) -> str:
    """The mean return of the evaluation at a run's end; "" if there was none."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    played = events.Scalars("eval/episodic_return") if "eval/episodic_return" in events.Tags()["scalars"] else []
    at_the_end = [event.value for event in played if event.step == last_returns(run_dir)[0]]
    return f"{at_the_end[-1]:.2f}" if at_the_end else ""


def last_returns(run_dir: Path) -> tuple[int, list[float]]:
    """A run's step, and the returns of its last 100 episodes, of which older checkpoints have a list of their own."""
    state = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    if "recent_returns" in state:
        return state["global_step"], state["recent_returns"]
    return state["global_step"], [episode_return for episode_return, _ in state["kept"]["recent"]]


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file of results, or none."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write(script: str, env_id: str, label: str, runs: dict[int, Path]) -> None:
    """Write the curves of one env, and its runs' lines of the summary; other seeds' stay as they are."""
    env_name = file_name(env_id) + (f"__{label}" if label else "")
    path = RESULTS / f"{Path(script).stem}__{env_name}.csv"
    columns = ["seed", "global_step", "episodic_return", "minutes"]
    curves = {seed: read_curve(run_dir) for seed, run_dir in runs.items()}
    lines = [row for row in read(path) if int(row["seed"]) not in runs]
    for seed, curve in curves.items():
        lines += [dict(zip(columns, [seed, step, f"{value:.4g}", f"{time:.2f}"])) for step, value, time in curve]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(sorted(lines, key=lambda row: (int(row["seed"]), int(row["global_step"]))))
    summary = RESULTS / "summary.csv"
    rows = {(row["script"], row["env_id"], row["seed"]): row for row in read(summary)}
    columns = ["script", "env_id", "seed", "global_step", "episodes", "mean_return", "commit", "minutes", "machine"]
    columns += ["evaluation"]
    for seed, run_dir in runs.items():
        global_step, returns = last_returns(run_dir)
        key = (Path(script).stem, env_name, str(seed))
        mean = f"{sum(returns) / len(returns):.2f}"
        known = rows.get(key, {})
        commit = commits(script, run_dir) or known.get("commit", "unknown")
        row = [*key, str(global_step), str(len(returns)), mean, commit, f"{curves[seed][-1][2]:.0f}"]
        trained = list(known.values())[: len(row)] != row  # since it was written: here
        rows[key] = dict(zip(columns, [*row, machine() if trained else known["machine"], evaluation(run_dir)]))
    with open(summary, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows, key=lambda key: (*key[:2], int(key[2]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", required=True)
    parser.add_argument("--env-ids", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--label", default="", help="part of the result's name, where arguments follow `--`")
    parser.add_argument("--eval-episodes", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--work-dir", type=Path, default=Path("runs-benchmark"))
    ours = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args, extra = parser.parse_args(ours), sys.argv[len(ours) + 2 :]
    extra += ["--eval-episodes", str(args.eval_episodes), "--deterministic"]
    args.work_dir.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    runs, lock = {env_id: {} for env_id in args.env_ids}, threading.Lock()

    def job(env_id: str, seed: int) -> None:
        run_dir = train(args.script, env_id, seed, args.label, args.work_dir.resolve(), extra)
        with lock:  # what is known so far is written after each run
            runs[env_id][seed] = run_dir
            write(args.script, env_id, args.label, runs[env_id])
        print(f"{env_id} seed {seed}: {run_dir}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        for future in [pool.submit(job, env_id, seed) for seed in args.seeds for env_id in args.env_ids]:
            future.result()


if __name__ == "__main__":
    main()
