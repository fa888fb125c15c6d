"""What bootstrapping at a time limit buys: train with it, and with the time limit treated as termination.

Run:   python benchmark/bootstrap.py --seeds 1 2 3 --jobs 2 -- --total-timesteps 300000
       python benchmark/bootstrap.py --script ppo_multidiscrete.py --env-id MicrortsMining-v1 --seeds 1 2 3

The second is the script with one line changed, as below; both are run by learning_curves.py, which names their results
by --labels: Pendulum-v1__bootstrap and Pendulum-v1__time-limit-as-end.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RIGHT = "values, next_values, to_tensor(terminations).float(), dones, args.gamma"
WRONG = "values, next_values, dones, dones, args.gamma"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", default="ppo_continuous_action.py")
    parser.add_argument("--env-id", default="Pendulum-v1")
    parser.add_argument("--labels", nargs=2, default=["bootstrap", "time-limit-as-end"])
    parser.add_argument("--work-dir", type=Path, default=Path("runs-benchmark"))
    args, rest = parser.parse_known_args()
    script = ROOT / args.script
    text = script.read_text()
    if text.count(RIGHT) != 1:
        sys.exit(f"{script.name} has no line with {RIGHT!r}: change this report with it")
    edited = args.work_dir.resolve() / "time-limit-as-end" / script.name
    edited.parent.mkdir(parents=True, exist_ok=True)
    edited.write_text(text.replace(RIGHT, WRONG))
    command = [sys.executable, str(ROOT / "benchmark" / "learning_curves.py"), "--env-ids", args.env_id]
    command += ["--work-dir", str(args.work_dir)]
    for path, label in zip([script, edited], args.labels):
        subprocess.run([*command, "--script", str(path), "--label", label, *rest], check=True)


if __name__ == "__main__":
    main()
