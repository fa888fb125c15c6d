"""Draw benchmark/results/*.csv: a panel per script and env, a line per seed, the published return dashed.

Run:   pip install -r benchmark/requirements.txt && python benchmark/plot.py
"""

import csv
import math
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = {  # mean over seeds at the end of the steps named, by CleanRL's documentation and the 37 details' figures
    "HalfCheetah-v5": (1442.64, "CleanRL, v4, 1M"),
    "Hopper-v5": (2382.86, "CleanRL, v4, 1M"),
    "Walker2d-v5": (2287.95, "CleanRL, v4, 1M"),
    "InvertedPendulum-v5": (963.09, "CleanRL, v4, 1M"),
    "MicrortsMining-v1": (39.6, "37 details, 2M"),
    "MicrortsMining-v1__unmasked": (39.0, "37 details, 2M"),
    "MicrortsAttackShapedReward-v1": (19.2, "37 details, 2M"),
    "MicrortsAttackShapedReward-v1__unmasked": (7.8, "37 details, 2M"),
}


def main() -> None:
    panels = sorted((ROOT / "benchmark/results").glob("*__*.csv"))
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 2.9 * rows), squeeze=False)
    for axis, path in zip(axes.flat, panels):
        script, env_id = path.stem.split("__", 1)
        curves = defaultdict(list)
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                curves[row["seed"]].append((int(row["global_step"]), float(row["episodic_return"])))
        for seed, points in curves.items():
            steps, returns = np.array(points).T
            window = max(1, len(returns) // 50)
            smooth = np.convolve(returns, np.ones(window) / window, mode="valid")
            axis.plot(steps[window - 1 :] / 1e6, smooth, linewidth=1, label=f"seed {seed}")
        if env_id in PUBLISHED:
            value, label = PUBLISHED[env_id]
            axis.axhline(value, linestyle="--", linewidth=1, color="grey", label=label)
        axis.set_title(f"{script}.py: {env_id.replace('__', ', ')}", fontsize=8)
        axis.set_xlabel("env steps, millions", fontsize=8)
        axis.set_ylabel("episodic return", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout()
    (ROOT / "docs").mkdir(exist_ok=True)
    figure.savefig(ROOT / "docs/learning_curves.png", dpi=110)


if __name__ == "__main__":
    main()
