"""Threads on a machine that is idle, busy, or a small share of a large one: ppo_atari.py with each setting in turn.

Run:   python benchmark/threads.py --repeats 3        (about 15 minutes; writes benchmark/results/threads.csv)

Busy: two processes per core compute besides. By default torch's threads spin while they wait for each other; the
scripts have them sleep. 64 threads are what a host's 64 cores would be counted as, were the share
that the process may use not looked at.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from learning_curves import RESULTS, ROOT, machine
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(ROOT))
from ppo import num_threads

MANY = ["--torch-threads", "64", "--env-threads", "64"]
ONE = ["--torch-threads", "1", "--env-threads", "1"]
SPIN = {"OMP_WAIT_POLICY": ""}  # torch's default: no policy; libgomp says that it is none, and spins a while
SETTINGS = {  # (machine, setting): environment, arguments
    ("idle", "a thread per core of the share, sleeping"): ({}, []),
    ("idle", "a thread per core of the share, torch's default"): (SPIN, []),
    ("idle", "one thread"): ({}, ONE),
    ("idle", "64 threads, torch's default"): (SPIN, MANY),
    ("busy", "a thread per core of the share, sleeping"): ({}, []),
    ("busy", "a thread per core of the share, torch's default"): (SPIN, []),
    ("busy", "one thread"): ({}, ONE),
}


def measure(environment: dict[str, str], arguments: list[str]) -> float:
    """Env steps per second of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "ppo_atari.py"), "--num-steps", "64", "--total-timesteps", "1024"]
        environment = os.environ | environment
        null = subprocess.DEVNULL
        subprocess.run([*command, *arguments], cwd=folder, env=environment, check=True, stdout=null, stderr=null)
        (run_dir,) = Path(folder, "runs").iterdir()
        return EventAccumulator(str(run_dir)).Reload().Scalars("charts/SPS")[-1].value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    cores = num_threads(0)
    speeds = {setting: [] for setting in SETTINGS}
    for _ in range(args.repeats):
        for (state, name), (environment, arguments) in SETTINGS.items():
            number = 2 * cores if state == "busy" else 0
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
            try:
                speeds[state, name].append(measure(environment, arguments))
            finally:
                for process in others:
                    process.kill()
            print(f"{state}, {name}: {speeds[state, name][-1]:.0f} steps/s", flush=True)
    describe = ["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    with open(RESULTS / "threads.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["machine is", "threads", "steps/s", "repeats", "commit", "machine"])
        for (state, name), values in speeds.items():
            writer.writerow([state, name, f"{statistics.median(values):.0f}", len(values), commit, machine()])


if __name__ == "__main__":
    main()
