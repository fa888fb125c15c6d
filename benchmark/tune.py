"""Search for settings of a script that are good on all of several envs, with Optuna.

Run:   python benchmark/tune.py mujoco --trials 20 --jobs 2      (mujoco, memory, microrts, atari: see SEARCHES)
       python benchmark/tune.py mujoco --best 3 --seeds 1002 1003   (the best so far, on further seeds)

A trial trains its settings on each env of the search, on one seed or a few. Seeds are 1001 and up, which no reported
figure uses. An env's score is the mean return of the last 100 training episodes over the env's goal in SEARCHES; the
trial's value is the mean of the scores' mean and their minimum, so that no env is given up for another. A run that is
below the median of the earlier runs of its env and seed, at the same step, ends its trial. (Those whose rows are in the
CSVs of today were compared by Optuna's MedianPruner: in effect, in the first run of a trial only.)

benchmark/results/tune__SEARCH.csv has a row per run: the settings, the seed, the mean return at each tenth of the run.
It is all that the search knows: the same command goes on from it. A run that was cut short is resumed in --work-dir.
Only one process at a time: two would overwrite each other's rows.
"""

import argparse
import csv
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from learning_curves import RESULTS, ROOT, file_name, is_complete, last_returns, read
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

COLUMNS = ["env_id", "seed", "global_step", "mean_return", "tenths", "settings"]
FIRST_SEED = 1001


@dataclass
class Search:
    """A script, the return of each env that is a score of 1, the values to choose from, and settings to begin with.

    Settings are arguments of the script. What they do not name is as `fixed` says, else the script's default. After its
    id, an env may have flags of its own.
    """

    script: str
    goals: dict[str, float]
    space: dict[str, list]
    begin: list[dict] = field(default_factory=list)
    fixed: dict = field(default_factory=dict)
    total_timesteps: int = 1_000_000
    seeds: int = 1  # of a trial: 1001 and on


COMMON = dict(batch_size=2048, update_epochs=10, learning_rate=3e-4, gamma=0.99, gae_lambda=0.95)
COMMON |= dict(clip_coef=0.2, vf_coef=0.25, norm_adv=True)
ATARI = ("num_envs", "batch_size", "num_minibatches", "learning_rate", "clip_coef", "clip_vloss")
LSTM = dict(gae_lambda=0.8, max_grad_norm=0.5, seq_len=32, num_envs=8, shared_lstm=False)
SEARCHES = {
    "mujoco": Search(
        script="ppo_continuous_action.py",
        goals={"Hopper-v5": 2900, "HalfCheetah-v5": 5800, "Walker2d-v5": 4100, "Ant-v5": 3300},
        space=dict(
            num_envs=[1, 8, 64],
            batch_size=[2048, 4096],
            num_minibatches=[8, 16, 32],
            update_epochs=[5, 10, 20],
            learning_rate=[1e-4, 2e-4, 3e-4, 5e-4, 1e-3],
            gamma=[0.98, 0.99, 0.995],
            gae_lambda=[0.9, 0.95, 0.98],
            clip_coef=[0.1, 0.2, 0.3],
            vf_coef=[0.25, 0.5, 1.0],
            norm_adv=[True, False],
            log_std_init=[-1.0, -0.5, 0.0],
        ),
        begin=[
            dict(num_envs=n, log_std_init=s, num_minibatches=m) | COMMON for n, s, m in [(64, 0.0, 8), (8, -0.5, 8)]
        ],
        fixed=dict(clip_vloss=False),
    ),
    "memory": Search(
        script="ppo_lstm.py",
        goals={"CartPole-v1": 500},
        space=dict(
            num_steps=[32, 64, 128],
            num_minibatches=[1, 2, 4, 8],
            update_epochs=[10, 20],
            learning_rate=[1e-3, 2e-3, 3e-3],
            gae_lambda=[0.8, 0.9],
            anneal_clip=[False, True],
            max_grad_norm=[0.5, 1.0],
            seq_len=[16, 32],
            num_envs=[8, 16],
            shared_lstm=[False, True],
        ),
        begin=[
            dict(num_steps=128, num_minibatches=8, update_epochs=10, learning_rate=2e-3, anneal_clip=False) | LSTM,
            dict(num_steps=32, num_minibatches=1, update_epochs=20, learning_rate=1e-3, anneal_clip=True) | LSTM,
        ],
        total_timesteps=100_000,
        seeds=4,
    ),
    "microrts": Search(
        script="ppo_multidiscrete.py",
        goals={
            "MicrortsAttackShapedReward-v1": 19.2,
            "MicrortsMining-v1": 39.9,
            "MicrortsMining-v1 --mask-actions False": 39.0,
        },
        space=dict(
            learning_rate=[2.5e-4, 3e-4, 1e-3],
            ent_coef=[0.001, 0.003, 0.01, 0.02],
            target_kl=[0.015, None],
            clip_vloss=[True, False],
            anneal_ent=[False, True],
        ),
        begin=[dict(learning_rate=3e-4, ent_coef=0.01, target_kl=0.015, clip_vloss=True, anneal_ent=True)],
        total_timesteps=2_000_000,
    ),
    "atari": Search(
        script="ppo_atari.py",
        goals={"BreakoutNoFrameskip-v4": 434, "BeamRiderNoFrameskip-v4": 2900},
        space=dict(
            num_envs=[8, 64],
            batch_size=[1024, 2048, 8192],
            num_minibatches=[4, 8, 32],
            learning_rate=[2.5e-4, 5e-4],
            clip_coef=[0.1, 0.2],
            clip_vloss=[True, False],
        ),
        begin=[
            dict(zip(ATARI, values)) for values in [(8, 1024, 4, 2.5e-4, 0.1, True), (64, 2048, 8, 2.5e-4, 0.1, False)]
        ],
        fixed=dict(compile=True),
        total_timesteps=10_000_000,
    ),
}


def to_flags(settings: dict) -> list[str]:
    """Settings as flags of a script; batch_size stands for num_steps."""
    settings = dict(settings)
    if "batch_size" in settings:
        settings["num_steps"] = settings.pop("batch_size") // settings["num_envs"]
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def tenths_so_far(run_dir: Path, total: int) -> list[float]:
    """The mean return of the last 100 episodes at each tenth of `total` steps that is in a run's checkpoint."""
    events, step = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload(), last_returns(run_dir)[0]
    tag = "charts/mean_return_100"
    curve = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    tenths = []
    for event in curve:
        while len(tenths) < min(event.step, step) * 10 // total:
            tenths.append(event.value)
    return tenths


class Tuner:
    """A search that goes on from what its CSV holds."""

    def __init__(self, search: str, work_dir: Path):
        self.search, self.work_dir = SEARCHES[search], work_dir.resolve()
        self.path, self.lock = RESULTS / f"tune__{search}.csv", threading.Lock()
        self.seeds = range(FIRST_SEED, FIRST_SEED + self.search.seeds)
        self.rows = {(row["settings"], row["env_id"], row["seed"]): row for row in read(self.path)}

    def settings(self) -> list[dict]:
        """What was tried, in the order of the first runs."""
        return [json.loads(text) for text in dict.fromkeys(text for text, _, _ in self.rows)]

    def run(self, settings: dict, env_id: str, seed: int, go_on: Callable[[int, float], bool]) -> bool:
        """Add a run's row, unless it is there; whether it was run to its end.

        go_on is called with each tenth of the run's steps, 1 to 10, and the mean return there; False ends the run.
        """
        key = json.dumps(settings), env_id, str(seed)
        env_id, *flags = env_id.split()
        total, exp_name = self.search.total_timesteps, f"tune-{zlib.crc32(' '.join([key[0], *flags]).encode()):08x}"
        name = f"{file_name(env_id)}__{exp_name}__{seed}"
        if key in self.rows:
            known = self.rows[key]["tenths"].split()
            for tenth, mean_return in enumerate(known, start=1):
                go_on(tenth, float(mean_return))
            return len(known) == 10
        checkpoints = lambda: sorted((self.work_dir / "runs").glob(f"{name}__*/checkpoint.pt"))
        tenths = tenths_so_far(checkpoints()[-1].parent, total) if checkpoints() else []
        command = [sys.executable, str(ROOT / self.search.script), *to_flags(self.search.fixed | settings)]
        command += [*flags, "--env-id", env_id, "--seed", str(seed), "--exp-name", exp_name]
        command += ["--total-timesteps", str(total), *(["--resume", str(checkpoints()[-1])] if checkpoints() else [])]
        paths = os.pathsep.join([str(ROOT / "benchmark"), os.environ.get("PYTHONPATH", "")])
        options = dict(cwd=self.work_dir, env=os.environ | {"PYTHONPATH": paths}, text=True)
        with (
            open(self.work_dir / f"{name}.log", "a") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, **options) as process,
        ):
            for line in process.stdout:
                log.write(line)
                progress = re.match(r"([\d,]+) steps, .*mean return (-?[\d.]+)", line)
                while progress and len(tenths) < int(progress[1].replace(",", "")) * 10 // total:
                    tenths.append(float(progress[2]))
                    if not go_on(len(tenths), tenths[-1]) and len(tenths) < 10:
                        process.terminate()  # the script saves a checkpoint, and ends
        if process.returncode not in (0, 143):
            raise RuntimeError(f"{name} failed: see {log.name}")
        step, returns = last_returns(checkpoints()[-1].parent)
        done = is_complete(checkpoints()[-1], [])
        mean = statistics.mean(returns or [0])
        tenths += [mean] * (10 - len(tenths)) if done else []
        values = [key[1], key[2], step, f"{mean:.2f}", " ".join(map("{:.1f}".format, tenths)), key[0]]
        with self.lock:
            self.rows[key] = dict(zip(COLUMNS, values))
            with open(self.path, "w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(self.rows.values())
        return done

    def is_known(self, settings: dict) -> bool:
        """Whether settings are of the search's space, and were run on all envs and seeds, or till a run was ended."""
        space = self.search.space
        if list(settings) != list(space) or any(value not in space[name] for name, value in settings.items()):
            return False  # tried by hand
        for env_id, seed in itertools.product(self.search.goals, self.seeds):
            row = self.rows.get((json.dumps(settings), env_id, str(seed)))
            if row is None or len(row["tenths"].split()) < 10:
                return row is not None
        return True

    def value(self, settings: dict) -> float:
        """How good settings are, from the runs of all seeds so far; 0 if an env has none that was run to its end."""
        scores = []
        for env_id, goal in self.search.goals.items():
            rows = [
                row for (text, env, _), row in list(self.rows.items()) if (text, env) == (json.dumps(settings), env_id)
            ]
            returns = [float(row["mean_return"]) for row in rows if len(row["tenths"].split()) == 10]
            scores.append(statistics.mean(returns) / goal if returns else 0.0)
        return (statistics.mean(scores) + min(scores)) / 2 if all(scores) else 0.0

    def returns_at(self, tenth: int, env_id: str, seed: int) -> list[float]:
        """The mean returns of the runs so far of an env and seed, at a tenth of their steps."""
        rows = [row for row in list(self.rows.values()) if (row["env_id"], row["seed"]) == (env_id, str(seed))]
        known = [row["tenths"].split() for row in rows]
        return [float(tenths[tenth - 1]) for tenths in known if len(tenths) >= tenth]

    def objective(self, trial: optuna.Trial) -> float:
        """Train a trial's settings on each env; their value."""
        settings = {name: trial.suggest_categorical(name, values) for name, values in self.search.space.items()}
        for number, (env_id, seed) in enumerate(itertools.product(self.search.goals, self.seeds)):

            def go_on(tenth: int, mean_return: float, number=number, env_id=env_id, seed=seed) -> bool:
                trial.report(mean_return / self.search.goals[env_id], 10 * number + tenth)  # Optuna ranks by it
                others = self.returns_at(tenth, env_id, seed)
                return tenth <= 3 or len(others) < 4 or mean_return >= statistics.median(others)

            if not self.run(settings, env_id, seed, go_on):
                raise optuna.TrialPruned
        return self.value(settings)

    def study(self) -> optuna.Study:
        """Optuna's study of the trials so far, with those queued that `begin` names."""
        sampler = optuna.samplers.TPESampler(multivariate=True, constant_liar=True, n_startup_trials=8)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for settings in filter(self.is_known, self.settings()):  # which costs nothing
            study.enqueue_trial(settings)
            study.optimize(self.objective, n_trials=1)
        for settings in self.search.begin:
            study.enqueue_trial(settings, skip_if_exists=True)
        return study


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", choices=SEARCHES)
    parser.add_argument("--trials", type=int, default=0, help="new ones")
    parser.add_argument("--best", type=int, default=0, help="so many of the best settings are run on --seeds too")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1002, 1003])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--work-dir", type=Path, default=Path("runs-benchmark"))
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    tuner = Tuner(args.search, args.work_dir)
    if args.trials:
        tuner.study().optimize(tuner.objective, n_trials=args.trials, n_jobs=args.jobs)
    ranked = sorted(tuner.settings(), key=tuner.value, reverse=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = itertools.product(ranked[: args.best], tuner.search.goals, args.seeds)
        list(pool.map(lambda run: tuner.run(*run, go_on=lambda *_: True), runs))
    for settings in sorted(ranked[: max(args.best, 5)], key=tuner.value, reverse=True):
        print(f"{tuner.value(settings):.3f} {' '.join(to_flags(tuner.search.fixed | settings))}")


if __name__ == "__main__":
    main()
