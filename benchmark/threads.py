"""Threads on a machine that is idle, busy, or a small share of a large one: two scripts with each setting in turn.

Run:   python benchmark/threads.py --repeats 3        (about 10 minutes; writes benchmark/results/threads.csv)

Busy: two processes per core compute besides. By default torch's threads spin while they wait for each other; those of
the Atari scripts do so for a moment, and then sleep; the other scripts take one thread. 64 threads are what a host's 64
cores would be counted as, were the share that the process may use not looked at: --host-cores 64 measures it, and takes
its time.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from learning_curves import RESULTS, ROOT, machine
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from throughput import commit, write

sys.path.insert(0, str(ROOT))
from ppo import CORES

SCRIPTS = {"ppo_atari.py": 64, "ppo_multidiscrete.py": 128}  # and steps per rollout and env
ITERATIONS = 4  # of 8 envs; the first is not counted
SLEEP, SHORT, SPIN = [{"GOMP_SPINCOUNT": count} for count in ("0", "10000", "300000")]  # the last is torch's default
SETTINGS = {  # name: environment, threads
    "one per core, GOMP_SPINCOUNT=10000": (SHORT, 0),
    "one per core, GOMP_SPINCOUNT=0": (SLEEP, 0),
    "one per core, torch's spinning": (SPIN, 0),
    "one": (SLEEP, 1),
}


def measure(script: str, environment: dict[str, str], threads: int) -> float:
    """Env steps per second of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        num_steps = SCRIPTS[script]
        sizes = ["--num-steps", str(num_steps), "--total-timesteps", str(ITERATIONS * 8 * num_steps)]
        env_threads = ["--env-threads", str(threads)] if "atari" in script else []
        command = [sys.executable, str(ROOT / script), *sizes, "--torch-threads", str(threads), *env_threads]
        null = subprocess.DEVNULL
        subprocess.run(command, cwd=folder, env=os.environ | environment, check=True, stdout=null, stderr=null)
        (run_dir,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run_dir)).Reload().Scalars("charts/SPS")
        return (events[-1].step - events[0].step) / (events[-1].wall_time - events[0].wall_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--host-cores", type=int, default=0, help="measure as many threads, too")
    args = parser.parse_args()
    settings = [(script, state, name) for script in args.scripts for state in ("idle", "busy") for name in SETTINGS]
    if args.host_cores:
        name = f"{args.host_cores}, torch's spinning"
        SETTINGS[name] = (SPIN, args.host_cores)
        settings.append(("ppo_atari.py", "idle", name))
    speeds = {setting: [] for setting in settings}
    for _ in range(args.repeats):
        for script, state, name in settings:
            number = 2 * CORES if state == "busy" else 0
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
            try:
                speeds[script, state, name].append(measure(script, *SETTINGS[name]))
            finally:
                for process in others:
                    process.kill()
            print(f"{script}, {state}, {name}: {speeds[script, state, name][-1]:.0f} steps/s", flush=True)
    place, measured = machine(), commit()
    columns = ["script", "machine is", "threads", "steps/s", "repeats", "commit", "machine"]
    for setting, values in speeds.items():
        row = dict(zip(columns, [*setting, f"{statistics.median(values):.0f}", len(values), measured, place]))
        write(RESULTS / "threads.csv", row, columns, columns[:3])


if __name__ == "__main__":
    main()
