"""Write docs/results.md and draw docs/curves_*.png from benchmark/results/*.csv: the tables are not typed by hand.

Run:   pip install -r benchmark/requirements.txt && python benchmark/report.py
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import learning_curves
from throughput import CLEANRL as CLEANRL_SETTINGS
from throughput import OURS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
PAGE = ROOT / "docs" / "results.md"
SETTINGS = ROOT / "docs" / "settings.md"
README = ROOT / "README.md"
START, END = "<!-- scripts -->\n", "<!-- /scripts -->\n"

CLEANRL = "CleanRL"
DETAILS = "the 37 details"
# (script, env and label): published mean return at the same number of steps, by whom; MuJoCo's are of v4
PUBLISHED = {
    ("ppo", "CartPole-v1"): ("490.04 ± 6.12", CLEANRL),
    ("ppo", "Acrobot-v1"): ("-86.36 ± 1.32", CLEANRL),
    ("ppo", "MountainCar-v0"): ("-200.00 ± 0.00", CLEANRL),
    ("ppo_continuous_action", "HalfCheetah-v5"): ("1442.64 ± 46.03", CLEANRL),
    ("ppo_continuous_action", "Hopper-v5"): ("2382.86 ± 271.74", CLEANRL),
    ("ppo_continuous_action", "Walker2d-v5"): ("2287.95 ± 571.78", CLEANRL),
    ("ppo_continuous_action", "InvertedPendulum-v5"): ("963.09 ± 22.20", CLEANRL),
    ("ppo_continuous_action", "Humanoid-v4"): ("716.11 ± 49.08", CLEANRL),
    ("ppo_continuous_action", "Pusher-v5"): ("-40.38 ± 7.15", CLEANRL),
    ("ppo_atari", "BreakoutNoFrameskip-v4"): ("414.66 ± 28.09", CLEANRL),
    ("ppo_atari", "PongNoFrameskip-v4"): ("20.36 ± 0.20", CLEANRL),
    ("ppo_atari", "BeamRiderNoFrameskip-v4"): ("1915.93 ± 484.58", CLEANRL),
    ("ppo_atari_lstm", "BreakoutNoFrameskip-v4"): ("128.92 ± 31.10", CLEANRL),
    ("ppo_atari_lstm", "PongNoFrameskip-v4"): ("19.78 ± 1.58", CLEANRL),
    ("ppo_atari_lstm", "BeamRiderNoFrameskip-v4"): ("1536.20 ± 612.21", CLEANRL),
    ("ppo_multidiscrete", "MicrortsMining-v1"): ("39.6", DETAILS),
    ("ppo_multidiscrete", "MicrortsMining-v1__unmasked"): ("39.0", DETAILS),
    ("ppo_multidiscrete", "MicrortsMining-v1__unmasked-published-settings"): ("39.0", DETAILS),
    ("ppo_multidiscrete", "MicrortsAttackShapedReward-v1"): ("19.2", DETAILS),
    ("ppo_multidiscrete", "MicrortsAttackShapedReward-v1__unmasked"): ("7.8", DETAILS),
    ("ppo_multidiscrete", "MicrortsRandomEnemyShapedReward3-v1"): ("19.7", DETAILS),
    ("ppo_multidiscrete", "MicrortsRandomEnemyShapedReward3-v1__unmasked"): ("3.8", DETAILS),
}
TIANSHOU = "Tianshou, v3, ten seeds, the maximum over training of test returns"
# script, env: the highest returns published for PPO at the same number of steps, and how they were counted
HIGHEST = {
    ("ppo_continuous_action", "HalfCheetah-v5"): [
        ("5819 ± 664", "RL-Zoo, v3, one tuned run, evaluated with the most likely action"),
        ("5784 ± 1244", TIANSHOU),
    ],
    ("ppo_continuous_action", "Hopper-v5"): [("2609 ± 701", TIANSHOU)],
    ("ppo_continuous_action", "Walker2d-v5"): [
        ("about 4000", "ikostrikov's, as Tianshou quotes it"),
        ("3589 ± 757", TIANSHOU),
    ],
    ("ppo_continuous_action", "Ant-v5"): [("3258 ± 1079", TIANSHOU)],
    ("ppo_continuous_action", "Humanoid-v4"): [("787 ± 194", TIANSHOU)],
    ("ppo_continuous_action", "Swimmer-v5"): [
        ("366.7", "a model that a user made with RL-Zoo (croumegous), v3, one run, evaluated"),
        ("282 ± 10", "RL-Zoo, v3, one tuned run, evaluated with the most likely action"),
        ("about 120", "Spinning Up, as Tianshou quotes it"),
    ],
    ("ppo_continuous_action", "Reacher-v5"): [("-4.1 ± 0.3", TIANSHOU)],
    ("ppo_continuous_action", "InvertedDoublePendulum-v5"): [("9231 ± 270", TIANSHOU)],
    ("ppo_atari", "BreakoutNoFrameskip-v4"): [("430.1 ± 8.1", "CleanRL's XLA variants, three seeds, training returns")],
    ("ppo_atari", "PongNoFrameskip-v4"): [("20.99", "RL-Zoo, one run, evaluated")],
    ("ppo_atari", "BeamRiderNoFrameskip-v4"): [
        ("3397", "RL-Zoo, one run, evaluated"),
        ("2861 ± 801", "CleanRL's XLA variants, three seeds, training returns"),
    ],
    ("ppo_lstm", "CartPole-v1"): [
        ("500", "SB3's model card, 100k steps, one run, evaluated"),
        ("402 ± 52", "the same, run again by openrlbenchmark"),
    ],
}
# script: actions, observations, default task, millions of steps there; name and envs of that task in throughput.csv
FRONT = {
    "ppo": ("Discrete", "vector", "CartPole-v1", 0.5, "cartpole", 4),
    "ppo_continuous_action": ("Box", "vector, normalised", "HalfCheetah-v5", 1, "halfcheetah-64", 64),
    "ppo_atari": ("Discrete", "the last 4 frames, uint8", "BreakoutNoFrameskip-v4", 10, "breakout", 8),
    "ppo_lstm": ("Discrete, Box", "vector, velocities hidden", "CartPole-v1", 0.1, "cartpole-lstm-16", 16),
    "ppo_atari_lstm": ("Discrete", "one frame, uint8", "BreakoutNoFrameskip-v4", 10, "breakout-lstm", 8),
    "ppo_multidiscrete": ("MultiDiscrete, masked", "grid or vector", "MicrortsMining-v4", 2, "microrts-mining", 8),
}
TIMES = ["policy", "envs", "advantages", "update", "rest"]  # parts of an env step's time
# columns that a measurement of speed is found by
SETTING = ["task", "script", "num_envs", "processes", "compiled", "threads", "machine is"]
# the results in the README's picture
PICTURED = [
    "ppo_continuous_action__HalfCheetah-v5",
    "ppo_atari__BreakoutNoFrameskip-v4",
    "ppo_multidiscrete__MicrortsMining-v1",
]
# what the part of a name after the env means, and the flags that it was made with
LABELS = {
    "": "bfloat16, the default",
    "unmasked": "no masks",
    "unmasked-published-settings": "no masks, the published settings",
    "constant-entropy": "the entropy bonus does not fall",
    "unmasked-constant-entropy": "no masks, the entropy bonus does not fall",
    "cleanrl-settings": "CleanRL's settings",
    "own-settings": "[settings of its own](settings.md)",
    "own-settings-2M-steps": "the same, 2M steps",
    "halfcheetah-settings": "[HalfCheetah's own settings](settings.md)",
    "fast": "8 minibatches, advantages normalised, a learning rate of 0.001",
    "normalised-advantages": "8 minibatches, advantages normalised",
    "short-horizon": "8 envs, 8 minibatches, advantages normalised, a discount of 0.97",
    "float32": "float32",
    "no-clip-vloss": "no clipping of the value loss",
    "64-games": "64 games, no value clipping",
    "64-envs": "64 games",
    "16-games": "16 games",
    "unmasked-16-games": "no masks, 16 games",
    "3M-steps": "3M steps",
    "300k-steps": "300k steps",
    "64-games-3M-steps": "64 games, no value clipping, 3M steps",
    "64-games-large-steps-3M-steps": "the same, four times the learning rate, a tenth of the entropy bonus",
    "8-envs": "8 envs, an LSTM each",
    "an-lstm-each": "an LSTM each",
    "former-defaults": "150k steps, the defaults before those of today",
    "bootstrap": "a time limit is bootstrapped",
    "150k": "150k steps",
    "time-limit-as-end": "a time limit counts as termination",
    "unmasked-time-limit-as-end": "a time limit counts as termination",
    "unmasked-less-entropy": "a tenth of the entropy bonus",
    "short-sequences": "sequences of 8, float32",
    "short-sequences-bfloat16": "sequences of 8, bfloat16",
}


def flags(changes: dict) -> str:
    """Arguments as they are typed: of the booleans only those that may be None take a value."""
    words = []
    for name, value in changes.items():
        flag, plain = name.replace("_", "-"), isinstance(value, bool) and name != "mask_actions"
        words += [f"--{flag}" if value else f"--no-{flag}"] if plain else [f"--{flag}", str(value)]
    return " ".join(words)


# settings with which a task gains much, where they differ from the defaults
OWN_SETTINGS = {
    ("ppo_continuous_action", "HalfCheetah-v5"): dict(num_minibatches=8, norm_adv=True, log_std_init=-1.0),
    ("ppo_continuous_action", "Ant-v5"): dict(num_minibatches=8, norm_adv=True),
    ("ppo_continuous_action", "InvertedPendulum-v5"): dict(ent_coef=0.0003),
    ("ppo_continuous_action", "InvertedDoublePendulum-v5"): dict(ent_coef=0.001),
    ("ppo_continuous_action", "Swimmer-v5"): dict(num_envs=8, num_steps=256, gamma=0.9999, gae_lambda=0.99)
    | dict(norm_reward=False, norm_adv=True, log_std_init=0.0, vf_coef=0.5),
    ("ppo_continuous_action", "Pusher-v5"): dict(num_envs=8, num_steps=256, update_epochs=20)
    | dict(learning_rate=1.5e-4, norm_adv=True, gamma=0.97, log_std_init=-0.7),
    ("ppo_continuous_action", "Reacher-v5"): dict(num_envs=8, num_steps=256, update_epochs=20)
    | dict(learning_rate=1.5e-4, norm_adv=True, gamma=0.97, log_std_init=-0.7),
    ("ppo_multidiscrete", "MicrortsAttackShapedReward-v1"): dict(total_timesteps=300_000, clip_vloss=False),
    ("ppo_multidiscrete", "MicrortsMining-v4"): dict(num_envs=16, num_minibatches=8),
    ("ppo_atari", "BeamRiderNoFrameskip-v4"): dict(num_envs=64, num_steps=32, num_minibatches=8, clip_vloss=False),
    ("ppo_atari", "PongNoFrameskip-v4"): dict(total_timesteps=5_000_000, num_envs=64, num_steps=32, num_minibatches=8)
    | dict(learning_rate=1e-3, clip_vloss=False, ent_coef=0.001, negative_slope=0.1),
}
FORMER_DEFAULTS = "--learning-rate 2e-3 --update-epochs 10 --no-anneal-clip --no-shared-lstm"
SHORT_SEQUENCES = (
    f"{FORMER_DEFAULTS} --total-timesteps 500000 --num-envs 32 --num-steps 512 --seq-len 8 --hidden-size 128 "
    "--num-minibatches 16"
)
UNMASKED = " -- --mask-actions False"
SIXTEEN_GAMES = flags(OWN_SETTINGS["ppo_multidiscrete", "MicrortsMining-v4"])
FLAGS = {
    "unmasked": UNMASKED,
    "constant-entropy": " -- --no-anneal-ent",
    "unmasked-constant-entropy": f"{UNMASKED} --no-anneal-ent",
    "unmasked-published-settings": f"{UNMASKED} --learning-rate 2.5e-4 --target-kl None --no-anneal-ent",
    "unmasked-less-entropy": f"{UNMASKED} --learning-rate 2.5e-4 --target-kl None --no-anneal-ent --ent-coef 0.001",
    "float32": " -- --no-bf16 --torch-threads 1 --env-threads 1",
    "150k": " -- --total-timesteps 150000",
    "cleanrl-settings": f" -- {flags(CLEANRL_SETTINGS)}",
    "own-settings-2M-steps": " -- "
    + flags(OWN_SETTINGS["ppo_atari", "PongNoFrameskip-v4"] | dict(total_timesteps=2_000_000)),
    "halfcheetah-settings": f" -- {flags(OWN_SETTINGS['ppo_continuous_action', 'HalfCheetah-v5'])}",
    "fast": " -- --num-minibatches 8 --norm-adv --learning-rate 0.001",
    "normalised-advantages": " -- --num-minibatches 8 --norm-adv",
    "short-horizon": " -- --num-envs 8 --num-steps 256 --num-minibatches 8 --norm-adv --gamma 0.97",
    "no-clip-vloss": " -- --no-clip-vloss",
    "64-games": f" -- {flags(OWN_SETTINGS['ppo_atari', 'BeamRiderNoFrameskip-v4'])}",
    "64-envs": " -- --num-envs 64 --num-minibatches 32",
    "16-games": f" -- {SIXTEEN_GAMES}",
    "unmasked-16-games": f"{UNMASKED} {SIXTEEN_GAMES}",
    "3M-steps": " -- --total-timesteps 3000000",
    "300k-steps": " -- --total-timesteps 300000",
    "64-games-3M-steps": " -- --total-timesteps 3000000 " + flags(OWN_SETTINGS["ppo_atari", "BeamRiderNoFrameskip-v4"]),
    "64-games-large-steps-3M-steps": " -- --total-timesteps 3000000 "
    + flags(OWN_SETTINGS["ppo_atari", "BeamRiderNoFrameskip-v4"] | dict(learning_rate=1e-3, ent_coef=0.001)),
    "8-envs": " -- --num-envs 8 --no-shared-lstm",
    "an-lstm-each": " -- --no-shared-lstm",
    "former-defaults": f" -- {FORMER_DEFAULTS} --total-timesteps 150000 --num-envs 8 --num-steps 128",
    "short-sequences": f" -- {SHORT_SEQUENCES}",
    "short-sequences-bfloat16": f" -- {SHORT_SEQUENCES} --bf16",
}
# results that make a figure together: its title, the script, the names, the command that makes them, what is seen
COMPARISONS = {
    "bootstrap": (
        "What bootstrapping at a time limit buys",
        "ppo_continuous_action",
        ["Pendulum-v1__bootstrap", "Pendulum-v1__time-limit-as-end"],
        f"python benchmark/bootstrap.py --seeds {{seeds}} -- --total-timesteps 300000 {flags(CLEANRL_SETTINGS)}",
        "Pendulum never terminates: its episodes are cut after 200 steps. Compared are the script, and the script with "
        "one line changed, so that the cut counts as termination, after which no reward is expected, as in many "
        "scripts. Each run that bootstraps ends above each that does not. How much it buys depends on the rest: with "
        "the script of commit 989672c, which did not yet map the actions' bounds, here 2, to -1 and 1, so that the "
        "first actions had half the standard deviation, the same commands ended at -154 ± 23 and -909 ± 159. A case in "
        "which seeds differ more than the two is [below](#microrts-without-masks-and-the-entropy-bonus).",
    ),
    "entropy_microrts": (
        "MicroRTS without masks, and the entropy bonus",
        "ppo_multidiscrete",
        [f"MicrortsMining-v1__unmasked-{name}" for name in ("published-settings", "time-limit-as-end", "less-entropy")],
        "python benchmark/bootstrap.py --script ppo_multidiscrete.py --env-id MicrortsMining-v1 "
        "--labels unmasked-published-settings unmasked-time-limit-as-end --seeds {seeds}"
        f"{FLAGS['unmasked-published-settings']}\n"
        "python benchmark/learning_curves.py --script ppo_multidiscrete.py --env-ids MicrortsMining-v1 --seeds {seeds} "
        f"--label unmasked-less-entropy{FLAGS['unmasked-less-entropy']}",
        "The published value is from a script that treats the limit of 200 steps as termination, with an entropy bonus "
        "of weight 0.01. With its settings ours rises as high, and then loses some of it in most runs, with the time "
        "limit bootstrapped or, by the one line changed as above, not: that is not the cause. While the returns fall, "
        "the entropy rises again (`losses/entropy`, from about 11 to 13; it is a sum over eight components, and begins "
        "at 18). With a tenth of the bonus (`--ent-coef 0.001`) two runs rise earlier and stay at 40, but the third "
        "never finds a reward: the bonus is what explores, and what costs the last few points. So by default it begins "
        "at 0.01 and falls to 0 ([above](#microrts-ppo_multidiscretepy), beside the rows in which it does not).",
    ),
    "bfloat16_lstm": (
        "Does the LSTM learn as well in bfloat16?",
        "ppo_lstm",
        ["CartPole-v1__short-sequences", "CartPole-v1__short-sequences-bfloat16"],
        "\n".join(
            f"python benchmark/learning_curves.py --script ppo_lstm.py --env-ids CartPole-v1 --seeds {{seeds}} "
            f"--label {label}{FLAGS[label]}"
            for label in ["short-sequences", "short-sequences-bfloat16"]
        ),
        "CartPole without velocities, at settings with large minibatches, where bfloat16 is faster "
        "([speed](#speed)); no default was chosen on these seeds and settings. The runs in bfloat16 all end at or near "
        "the highest possible return, those in float32 do but for one: ten seeds show no loss. bfloat16 is off by "
        "default because it is slower with small minibatches.",
    ),
    "bfloat16_atari": (
        "Does Breakout learn as well in bfloat16?",
        "ppo_atari",
        ["BreakoutNoFrameskip-v4__float32", "BreakoutNoFrameskip-v4"],
        f"python benchmark/learning_curves.py --script ppo_atari.py --env-ids BreakoutNoFrameskip-v4 --seeds {{seeds}} "
        f"--label float32{FLAGS['float32']}\n"
        "python benchmark/learning_curves.py --script ppo_atari.py --env-ids BreakoutNoFrameskip-v4 --seeds {seeds}",
        "`ppo_atari.py`'s CNN computes in bfloat16 where that is faster ([speed](#speed)). "
        "At the end of this comparison both runs in bfloat16 are ahead of both in float32: two seeds show no "
        "loss, and are too few to show a gain. (The runs continue [above](#atari-ppo_ataripy).)",
    ),
}
# the seeds and the last step of a comparison whose runs go on, and are in their script's table, too
PARTS = {"bfloat16_atari": (["1", "2"], 1_500_000)}
COMPARED = [(script, name) for key, (_, script, names, *_) in COMPARISONS.items() if key not in PARTS for name in names]
NOTES = {
    "ppo": "CartPoleHidden-v1 shows positions and no velocities, as `ppo_lstm.py` sees CartPole; here with the "
    "defaults of `ppo.py`, which were not chosen for it.",
    "ppo_continuous_action": "The published values are of the v4 envs. Humanoid-v5 charges for contact as well, and "
    "pays nothing for the step in which it falls, so it was run in both versions. The rows of commit 5c5b858 are older "
    "than the mapping of the actions' bounds to -1 and 1, which are 0.4 in Humanoid, 2 in Pusher and 3 in "
    "InvertedPendulum: there the command does something else today (Pusher, seed 1001: -31.0; before, seeds 1 to 3: "
    "-28.9, -28.0 and -29.0).",
    "ppo_atari": "The published values are of three seeds and 10M steps. The rows of 3M and 2M steps are of runs whose "
    "learning rate falls to 0 by then; those of 3M have two seeds, as a third could not have brought them to 20.8. Why "
    "Breakout keeps its defaults, BeamRider and Pong have settings of their own, and one of two agents with large "
    "steps ends at 14.6: [what was tried](tried.md#breakout-and-beamrider).",
    "ppo_atari_lstm": "The published values are of three seeds and 10M steps, the rows of 3M steps of shorter runs, "
    "whose learning rate falls to 0 by then.",
    "ppo_multidiscrete": "On MicrortsMining-v4 one seed of five with 8 games stays at 17 to 22: its agent plays one of "
    "the map's two sides only ([what was tried](tried.md#micrortsmining-v4)).\n\n"
    "The published values with masks are of a coarser mask than ours, which excludes every action "
    "that the game would refuse. That is not known to be all of the distance on MicrortsRandomEnemyShapedReward3-v1: "
    "the three runs whose entropy bonus does not fall ended in the same local optimum, but another run of seed 1, on "
    "another machine, built light units instead of workers and reached 119.5. Counted by hand, the game allows about "
    "112 to 130. There the most likely action is worse than a sample: 54, 78 and 71 against 80, 88 and 91.",
    "ppo_lstm": "The defaults were found by `python benchmark/tune.py memory`, on seeds from 1001, which no other row "
    "uses. The last 100 episodes, of 500 steps, are up to half of such a run, in which it still learns: what the agent "
    "can do in the end is in `evaluation`.",
}
TITLES = {
    "ppo": "Classic control",
    "ppo_continuous_action": "MuJoCo",
    "ppo_atari": "Atari",
    "ppo_lstm": "Memory: CartPole without velocities",
    "ppo_atari_lstm": "Memory on Atari",
    "ppo_multidiscrete": "MicroRTS",
}


def read(name: str) -> list[dict[str, str]]:
    """The rows of a file of results, or none."""
    return learning_curves.read(RESULTS / name)


def group(rows: list[dict[str, str]], *columns: str) -> dict[tuple, list[dict[str, str]]]:
    """The rows that agree in these columns, together."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[column] for column in columns)].append(row)
    return groups


def one_or_all(values: list[str]) -> str:
    """The value that all share, or each with the number of times that it comes in a row, or all of them."""
    if len(set(values)) == len(values):
        return ", ".join(values)
    runs = [(value, len(list(run))) for value, run in itertools.groupby(values)]
    if len(runs) > len(values) / 2:
        return ", ".join(values)
    return ", ".join(value if len(runs) == 1 else f"{value} × {number}" for value, number in runs)


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [columns, ["---"] * len(columns), *rows])


def published(script: str, name: str) -> tuple[str, str]:
    """What others report of an env and label, and who; two empty texts for none. Settings make no other task."""
    env_id, _, label = name.partition("__")
    task = f"{env_id}__{label}" if label.startswith("unmasked") else env_id
    return PUBLISHED.get((script, task.removesuffix("-constant-entropy").removesuffix("-16-games")), ("", ""))


def furthest(runs: list[dict[str, str]]) -> list[dict[str, str]]:
    """Those runs that have come as far as the one that is ahead: no mean mixes beginnings with ends."""
    most = max((int(run["global_step"]) for run in runs), default=0)
    return [run for run in runs if int(run["global_step"]) > 0.98 * most]


def table_of_returns(script: str, rows: list[dict[str, str]]) -> str:
    """A line per env, with all of its seeds."""
    lines = []
    for (name,), runs in group(rows, "env_id").items():
        env_id, _, label = name.partition("__")
        returns = [float(run["mean_return"]) for run in runs]
        compared = [float(run["mean_return"]) for run in furthest(runs)]
        mean = mean_and_std(compared)
        mean += f" ({len(compared)} of {len(runs)} seeds)" if len(compared) < len(runs) else ""
        theirs, source = published(script, name)
        steps = one_or_all([f"{int(run['global_step']):,}" for run in runs])
        minutes = one_or_all([run["minutes"] or "not recorded" for run in runs])
        lines.append(
            [
                env_id + (f", {LABELS.get(label, label)}" if label else ""),
                ", ".join(run["seed"] for run in runs),
                steps,
                ", ".join(f"{x:.2f}" for x in returns),
                mean,
                evaluation(furthest(runs)),
                f"{theirs} ({source})" if theirs else "",
                one_or_all([run["commit"] for run in runs]),
                minutes,
                one_or_all([run["machine"] for run in runs]),
            ]
        )
    columns = ["env", "seeds", "env steps", "mean return of the last 100 episodes", "mean ± std", "evaluation"]
    return table([*columns, "published", "commit", "minutes", "machine"], lines)


def mean_and_std(values: list[float]) -> str:
    """As a table has it."""
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.pstdev(values):.2f}" if len(values) > 1 else "")


def evaluation(runs: list[dict[str, str]]) -> str:
    """The mean of the runs' evaluations, and of how many runs it is if not of all; "" where there is none."""
    values = [float(run["evaluation"]) for run in runs if run.get("evaluation")]
    some = f" ({len(values)} of {len(runs)} seeds)" if len(values) < len(runs) else ""
    return mean_and_std(values) + some if values else ""


def table_of_highest(rows: list[dict[str, str]]) -> str:
    """A line per figure in HIGHEST and result of ours on its env, of runs that are at their end."""
    lines = []
    for (script, name), runs in group(rows, "script", "env_id").items():
        env_id, _, label = name.partition("__")
        ours = mean_and_std([float(run["mean_return"]) for run in furthest(runs)])
        ours = [str(len(furthest(runs))), ours, evaluation(furthest(runs))]
        for figure, counted in HIGHEST.get((script, env_id), []) if label in ("", "own-settings") else ():
            result = f"`{script}.py`, {env_id}" + (f", {LABELS[label]}" if label else "")
            lines.append([result, *ours, figure, counted])
    columns = ["script, env", "seeds", "training", "evaluation", "published", "by whom, and how it was counted"]
    return table(columns, lines)


def curves(path: Path, part: tuple[list[str], int] | None = None) -> dict[str, list[dict[str, str]]]:
    """The rows of each seed in a file of curves, or of some seeds up to some step."""
    runs = {seed: rows for (seed,), rows in group(read(path.name), "seed").items()}
    if part is None:
        return runs
    seeds, last = part
    return {seed: [row for row in runs[seed] if int(row["global_step"]) <= last] for seed in seeds}


def table_of_ends(script: str, names: list[str], part: tuple[list[str], int]) -> str:
    """A line per result: the mean of each seed's curve over the last 100,000 steps of this part."""
    seeds, last = part
    lines = []
    for name in names:
        runs = curves(RESULTS / f"{script}__{name}.csv", part).values()
        ends = [[row for row in run if int(row["global_step"]) > last - 100_000] for run in runs]
        returns = [statistics.mean(float(row["episodic_return"]) for row in rows) for rows in ends]
        env_id, _, label = name.partition("__")
        each = ", ".join(f"{x:.2f}" for x in returns)
        lines.append([f"{env_id}, {LABELS[label]}", ", ".join(seeds), each, mean_and_std(returns)])
    window = f"{last / 1e6 - 0.1:g}M to {last / 1e6:g}M"
    return table(["env", "seeds", f"mean return from {window} steps", "mean ± std"], lines)


def commas(number: str) -> str:
    """A whole number as it is read; what is none, as it is."""
    return f"{int(number):,}" if number.isdigit() else number


def of_fastest(rows: list[dict[str, str]], table_of: Callable, speed: Callable) -> str:
    """A table of the machine that is the fastest in the most settings, under its name; of those with a GPU another."""
    texts = []
    for of_device in group(rows, "device").values() if "device" in rows[0] else [rows]:
        settings = group(of_device, *[name for name in SETTING if name in rows[0]]).values()
        machines = [max(measured, key=speed)["machine"] for measured in settings]
        fastest = statistics.mode(machines)
        texts.append(f"{fastest}:\n\n{table_of([row for row in of_device if row['machine'] == fastest])}")
    return "\n".join(texts)


def by_setting(rows: list[dict[str, str]]) -> list[tuple[str, dict[str, str]]]:
    """Measurements in the order of tasks and envs, each with its task and what is unusual about it."""

    def order(row):
        several = int(row.get("processes", 1))
        return row["device"], list(OURS).index(row["task"]), several, int(row["num_envs"]), row["compiled"]

    named = []
    for row in sorted(rows, key=order):
        several = int(row.get("processes", 1))
        unusual = [f"{several} processes" if several > 1 else "", "compiled" if row["compiled"] == "yes" else ""]
        unusual.append("GPU" if row["device"] == "cuda" else "")
        named.append((", ".join([row["task"], *filter(None, unusual)]), row))
    return named


def table_of_speeds(rows: list[dict[str, str]]) -> str:
    """A line per measurement of throughput.csv or scaling.csv."""
    titles = {
        "num_envs": "envs",
        "ours": "steps/s",
        "peer": "Stable-Baselines3",
        "ratio": "ratio",
        "peak_memory_mb": "peak memory, MB",
        "repeats": "repeats",
    }
    titles = {name: title for name, title in titles.items() if any(row[name] for row in rows)}
    lines = [[task, *(commas(row[name]) for name in titles), row["commit"]] for task, row in by_setting(rows)]
    return table(["task", *titles.values(), "commit"], lines)


def table_of_parts(rows: list[dict[str, str]]) -> str:
    """A line per measurement of parts.csv: each part's microseconds per env step, its share, and what that limits."""
    mflop = {row["task"]: float(row["mflop"]) for row in read("flops.csv")}
    lines = []
    for task, row in by_setting(rows):
        spent = {part: float(row[part]) for part in TIMES}
        total = sum(spent.values())
        shares = [f"{spent[part]:.0f} ({spent[part] / total:.0%})" for part in TIMES]
        speeds = [f"{1e6 / x:,.0f}" for x in (total, total - spent["policy"], spent["envs"])]
        gflops = f"{1e3 * mflop[row['task']] / spent['update']:.0f}" if row["task"] in mflop else ""
        lines.append([task, row["num_envs"], *shares, *speeds, gflops, row["commit"]])
    titles = ["task", "envs", *(f"{part}, µs" for part in TIMES), "steps/s", "policy free", "envs alone"]
    return table([*titles, "update, GFLOP/s", "commit"], lines)


def table_of_threads(rows: list[dict[str, str]]) -> str:
    """A line per measurement of threads.csv."""
    titles = ["script", "threads", "machine is", "steps/s", "repeats"]
    lines = [[*(commas(row[title]) for title in titles), row["commit"]] for row in rows]
    return table([*titles, "commit"], lines)


def table_of_scripts() -> str:
    """The README's table: what each script is for, its result and its speed on its default task."""
    lines = []
    by_env = group(read("summary.csv"), "script", "env_id")
    for script, (actions, observations, env_id, millions, task, envs) in FRONT.items():
        runs = by_env.get((script, env_id), [])
        longer = by_env.get((script, f"{env_id}__float32"), [])  # of two precisions the one that has come further
        steps_of = lambda rows: max((int(row["global_step"]) for row in rows), default=0)
        label = ", float32" if steps_of(longer) > steps_of(runs) else ""
        runs = furthest(longer if label else runs)
        progress, mean, evaluated = "not run yet", "not run yet", []
        if runs:
            steps = max(int(run["global_step"]) for run in runs) / 1e6
            progress = f"{millions}M" if steps > 0.98 * millions else f"{steps:.2f}M of {millions}M so far"
            mean = f"{statistics.mean(float(run['mean_return']) for run in runs):.1f}{label}"
            evaluated = [float(run["evaluation"]) for run in runs if run.get("evaluation")]
        value, _ = PUBLISHED.get((script, env_id), ("", ""))
        theirs = f"{float(value.split()[0]):.1f}" if value else ""
        measured = [row for row in read("throughput.csv") if (row["task"], row["processes"]) == (task, "1")]
        measured = [row for row in measured if (row["device"], row["num_envs"]) == ("cpu", str(envs))]
        eager = max((row for row in measured if row["compiled"] == "no"), key=lambda row: int(row["ours"]))
        there = (eager["commit"], eager["machine"])
        speeds = {}
        for row in [row for row in measured if (row["commit"], row["machine"]) == there]:
            ratio = f", {float(row['ratio']):.1f} × SB3" if row["ratio"] else ""
            speeds[row["compiled"]] = f"{int(row['ours']):,}{ratio}"
        evaluation = f"{statistics.mean(evaluated):.1f}" if evaluated else ""
        result = [env_id, progress, str(len(runs)), mean, evaluation, theirs, speeds["no"], speeds.get("yes", "")]
        lines.append([f"[`{script}.py`]({script}.py)", actions, observations, *result])
    titles = ["script", "actions", "observations", "default task", "steps", "seeds", "mean return", "evaluation"]
    return table([*titles, "CleanRL's", "steps/s", "compiled"], lines)


def page() -> str:
    """The text of docs/results.md."""
    parts = [
        "# Results\n",
        "Written by `python benchmark/report.py` from `benchmark/results/*.csv`. Returns are undiscounted and "
        "unclipped, of whole training episodes with sampled actions. `commit` is the one whose script made the "
        "curve or, if that is not known, the one that added the curve. The arguments are the defaults except for the "
        "env, the seed and what the table names; `env steps` are those done so far. Curves are smoothed over a "
        "fiftieth of a run. ± is the standard deviation over the seeds (NumPy's `std`). `evaluation` is the mean "
        "return of 20 further episodes of each final agent, by the most likely action. `published` are the returns in "
        "[CleanRL's documentation](https://docs.cleanrl.dev/rl-algorithms/ppo/) and in "
        "[The 37 Implementation Details of PPO]"
        "(https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/).\n",
    ]
    results = read("summary.csv")
    by_script = group([row for row in results if (row["script"], row["env_id"]) not in COMPARED], "script")
    for script, title in TITLES.items():
        rows = by_script.get((script,), [])
        parts.append(f"## {title}: `{script}.py`\n")
        if not rows:
            parts.append("Not run yet.\n")
            continue
        commands = []
        named = defaultdict(list)  # the envs that were run on the same seeds, under the same label
        for (name,), runs in group(rows, "env_id").items():
            env_id, _, label = name.partition("__")
            seeds = " ".join(sorted({run["seed"] for run in runs}, key=int))
            named[label, seeds].append(env_id.replace("hidden-", "hidden:"))  # the module of that env
        for (label, seeds), envs in sorted(named.items()):
            for some in [[env] for env in envs] if label == "own-settings" else [envs]:
                command = f"python benchmark/learning_curves.py --script {script}.py --env-ids {' '.join(some)}"
                command += f" --seeds {seeds}" + (f" --label {label}" if label else "")
                own = f" -- {flags(OWN_SETTINGS[script, some[0]])}" if label == "own-settings" else ""
                commands.append(command + FLAGS.get(label, own))
        parts.append("```bash\n" + "\n".join(commands) + "\n```\n")
        if script in NOTES:
            parts.append(NOTES[script] + "\n")
        parts.append(table_of_returns(script, rows))
        parts.append(f"![Learning curves](curves_{script}.png)\n")
    for key, (title, script, names, command, text) in COMPARISONS.items():
        rows = [row for row in results if row["script"] == script and row["env_id"] in names]
        if {row["env_id"] for row in rows} != set(names):
            continue
        seeds = PARTS[key][0] if key in PARTS else sorted({row["seed"] for row in rows}, key=int)
        lines = table_of_ends(script, names, PARTS[key]) if key in PARTS else table_of_returns(script, rows)
        parts.append(f"## {title}\n\n{text}\n\n```bash\n{command.format(seeds=' '.join(seeds))}\n```\n")
        parts.append(lines)
        parts.append(f"![Learning curves]({key}.png)\n")
    parts.append("## Against the highest published returns\n")
    parts.append(
        "What others report was counted in several ways; `training` and `evaluation` are as above, over the seeds that "
        "have got to the end.\n"
    )
    parts.append(table_of_highest(results))
    parts.append("## Speed\n")
    parts.append(
        "Env steps per second, updates included, by `python benchmark/throughput.py`: ours and Stable-Baselines3 (for "
        "the LSTM, sb3-contrib's RecurrentPPO) in turn, on the same settings, except that ours computes Atari in "
        "bfloat16 where that is faster, RecurrentPPO sees the velocities, and each uses its own default number of "
        "threads. Given are medians, and the median of the pairs' ratios, on the fastest machine; the other machines' "
        "rows are in benchmark/results. Rows of commit 94fb592 are means of whole runs; later ones leave out the first "
        "iteration.\n"
    )
    parts.append(of_fastest(read("throughput.csv"), table_of_speeds, lambda row: float(row["ours"])))
    settings = [f"`{task}`: `{script}.py {flags(changes)}`" for task, (script, changes) in OURS.items() if changes]
    parts.append(f"A task has the defaults of its script, except for {'; '.join(settings)}.\n")
    if rows := read("parts.csv"):
        parts.append("## Where the time goes\n")
        parts.append(
            "By `python benchmark/parts.py`: microseconds per env step of a training run, and each part's share. "
            "`policy` is acting in the rollout, with the transfers to and from the device; `advantages` is GAE, with "
            "the values and log-probabilities if they are computed after the rollout; `update` is all epochs; `rest` "
            "is storing and logging. `policy free` is the steps/s if acting cost nothing, `envs alone` if all but the "
            "envs did. `update, GFLOP/s` is how fast the update computes: its matrix products and convolutions, as "
            "`python benchmark/parts.py --flops` counts them (not with an LSTM), in its time.\n\n"
            "What limits the speed on a CPU: in CartPole and HalfCheetah the number of calls, for their networks are "
            "so small that they compute at a few GFLOP/s; `--compile` makes fewer calls of them. With many CartPoles "
            "it is the envs, which are Python. In Breakout and MicroRTS half of the time is the update's arithmetic: "
            "even a policy that cost nothing would gain no more than `policy free` shows. (Of commit 3103c71, MicroRTS "
            "compiled is too slow by what is in its `envs`: garbage collections that no longer search what was "
            "compiled.)\n"
        )
        parts.append(of_fastest(rows, table_of_parts, lambda row: -sum(float(row[part]) for part in TIMES)))
    if rows := read("threads.csv"):
        parts.append("## Threads\n")
        parts.append(
            "By `python benchmark/threads.py`: on an idle machine, and on a busy one, where two other processes per "
            "core compute as well. `threads` are torch's and the games'. By default the Atari scripts use one per core "
            "that they may use, with GOMP_SPINCOUNT=10000: threads that wait for each other spin only briefly, and "
            "then sleep. The other scripts use one thread.\n"
        )
        parts.append(of_fastest(rows, table_of_threads, lambda row: float(row["steps/s"])))
    if rows := read("scaling.csv"):
        parts.append("## Cost as work grows\n")
        parts.append(
            "By `python benchmark/throughput.py --scaling --alone`: each task with more envs, all else at its default: "
            "the batch and its minibatches grow with the envs, up to 32,768 steps.\n"
        )
        parts.append(of_fastest(rows, table_of_speeds, lambda row: float(row["ours"])))
        parts.append("![Speed and memory against the number of envs](scaling.png)\n")
    missing = [f"{script}.py on {env}" for script, env in PUBLISHED if not list(RESULTS.glob(f"{script}__{env}*.csv"))]
    if missing:
        parts.append("## Not run\n")
        parts.append("Published by others, and not run here so far: " + ", ".join(missing) + ".\n")
    return "\n".join(parts)


def page_of_settings() -> str:
    """The text of docs/settings.md."""
    by_env = group(read("summary.csv"), "script", "env_id")
    lines = []
    for (script, env_id), changes in OWN_SETTINGS.items():
        command = f"`python {script}.py --env-id {env_id} {flags(changes)}`"
        for name, label in ((f"{env_id}__own-settings", command), (env_id, "the defaults")):
            runs = furthest(by_env.get((script, name), []))
            trained = mean_and_std([float(run["mean_return"]) for run in runs]) if runs else "not run yet"
            steps = commas(max((run["global_step"] for run in runs), key=int, default=""))
            lines.append([env_id, label, steps, str(len(runs)), trained, evaluation(runs)])
    columns = ["env", "command", "env steps", "seeds", "training", "evaluation"]
    return (
        "# Settings of their own\n\n"
        "The defaults of a script are one setting for all of its envs. Where an env gains much from its own, it is "
        "here, beside the defaults on the same env; `training` and `evaluation` are as in [results.md](results.md). "
        "All were found by `python benchmark/tune.py` and by hand, on other seeds than those of this table; "
        "[tried.md](tried.md) has the trials, and what was no better.\n\n" + table(columns, lines) + "\n"
        "What to try where a task of yours does the same:\n\n"
        "* A curve at its maximum falls to the bottom again and again (InvertedDoublePendulum): a small entropy bonus. "
        "The policy has become so certain that small steps change it much.\n"
        "* It stays at a gait that is quickly found (Swimmer): look further ahead, with `--gamma 0.9999 --gae-lambda "
        "0.99` and fewer envs.\n"
        "* Its episodes are short, of 50 or 100 steps (Pusher, Reacher): fewer envs, a shorter horizon, more and "
        "smaller steps.\n"
        "* Nearly all is won early, and then some of it is lost (MicrortsAttackShapedReward-v1): end the run earlier.\n"
        "* One seed of several never gets going (MicrortsMining-v4): more envs, with minibatches of the same size. Or "
        "its ReLUs are dead, where steps are large (Pong): `--negative-slope 0.1`.\n"
    )


def smooth(steps, returns, width: int = 50):
    """Running means over 1/width of a curve."""
    import numpy as np

    window = max(1, len(returns) // width)
    return steps[window - 1 :], np.convolve(returns, np.ones(window) / window, mode="valid")


UNITS = {"global_step": ("env steps, millions", 1e6), "minutes": ("minutes of training", 1)}


def draw_curves(
    axis, path: Path, color: str, name: str = "", against: str = "global_step", part: tuple | None = None
) -> None:
    """Thin seeds, and their mean with a band of one standard deviation; no mean of runs of unequal length."""
    import numpy as np

    label, unit = UNITS[against]
    runs = list(curves(path, part).values())
    ends = [int(run[-1]["global_step"]) for run in runs]
    averaged = len(runs) > 1 and min(ends) > 0.98 * max(ends)
    style = dict(linewidth=0.8, alpha=0.5) if averaged else dict(linewidth=1.6)
    lines = [
        smooth(*np.array([(float(r[against]) / unit, float(r["episodic_return"])) for r in run]).T) for run in runs
    ]
    for number, (steps, returns) in enumerate(lines):
        axis.plot(steps, returns, color=color, label=None if averaged or number else name or None, **style)
    axis.set_xlabel(label)
    if averaged:
        grid = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), 200)
        values = np.stack([np.interp(grid, x, y) for x, y in lines])
        mean, std = values.mean(0), values.std(0)
        label = ", ".join(filter(None, [name, f"mean of {len(lines)} seeds"]))
        axis.plot(grid, mean, linewidth=2.2, color=color, label=label)
        axis.fill_between(grid, mean - std, mean + std, alpha=0.15, color=color, linewidth=0)
    axis.set_ylabel("episodic return")
    axis.grid(alpha=0.25)


def draw_comparison(key: str) -> None:
    """The curves of several results in one panel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, script, names, *_ = COMPARISONS[key]
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for number, name in enumerate(names):
        env_id, _, label = name.partition("__")
        draw_curves(axis, RESULTS / f"{script}__{name}.csv", f"C{number}", LABELS[label], part=PARTS.get(key))
    axis.set_title(env_id, fontsize=13)
    axis.legend(loc="lower right")
    figure.savefig(ROOT / "docs" / f"{key}.png", dpi=80)
    plt.close(figure)


def draw_panel(axis, path: Path, color: str, against: str = "global_step") -> None:
    """The curves of one result, under its name, and the published return dashed."""
    script, name = path.stem.split("__", 1)
    draw_curves(axis, path, color, against=against)
    theirs, source = published(script, name)
    if theirs:
        axis.axhline(float(theirs.split()[0]), linestyle="--", linewidth=1.2, color="grey", label=source)
    env_id, _, label = name.partition("__")
    meaning = LABELS.get(label, label).partition("](")[0].lstrip("[")  # of a link its text
    axis.set_title(env_id + (f"  {meaning}" if label else ""), fontsize=13)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower right")


def draw_front() -> None:
    """The README's picture: a task of each of three scripts, of two precisions the one that has come further."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    last_step = lambda path: max((int(row["global_step"]) for row in read(path.name)), default=0)
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for number, (axis, name) in enumerate(zip(axes, PICTURED)):
        paths = [RESULTS / f"{name}.csv", RESULTS / f"{name}__float32.csv"]
        draw_panel(axis, max(paths, key=last_step), f"C{number}")
    figure.savefig(ROOT / "docs" / "curves.png", dpi=80)
    plt.close(figure)


def draw(script: str) -> None:
    """A panel per env against steps, one against minutes where they are known, and the published return dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    paths = [p for p in sorted(RESULTS.glob(f"{script}__*.csv")) if tuple(p.stem.split("__", 1)) not in COMPARED]
    panels = [(number, path, "global_step") for number, path in enumerate(paths)]
    timed = [all(row.get("minutes") for row in read(path.name)) for path in paths]
    panels += [(number, path, "minutes") for number, path in enumerate(paths) if timed[number]]
    panels.sort()
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6.4 * columns, 4.2 * rows), squeeze=False, layout="constrained")
    for axis, (number, path, against) in zip(axes.flat, panels):
        draw_panel(axis, path, f"C{number}", against)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(ROOT / "docs" / f"curves_{script}.png", dpi=80)
    plt.close(figure)


def draw_scaling(rows: list[dict[str, str]]) -> None:
    """Env steps per second, and peak memory, against the number of envs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(1, 2, figsize=(12.8, 4.6), layout="constrained")
    for (task, *_), points in group(rows, "task", "device", "compiled", "processes", "machine").items():
        points.sort(key=lambda row: int(row["num_envs"]))
        envs = [int(row["num_envs"]) for row in points]
        for axis, column in zip(axes, ["ours", "peak_memory_mb"]):
            axis.plot(envs, [float(row[column]) for row in points], marker="o", label=task)
    for axis, label in zip(axes, ["env steps per second", "peak memory, MB"]):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sorted({int(row["num_envs"]) for row in rows}))
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        for ticks in (axis.xaxis.set_major_formatter, axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            ticks("{x:,.0f}")
        axis.set_xlabel("envs")
        axis.set_title(label, fontsize=13)
        axis.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=12)
    figure.savefig(ROOT / "docs" / "scaling.png", dpi=80)
    plt.close(figure)


def main() -> None:
    if rows := read("scaling.csv"):
        draw_scaling(rows)
    PAGE.write_text(page())
    SETTINGS.write_text(page_of_settings())
    before, _, rest = README.read_text().partition(START)
    README.write_text(before + START + table_of_scripts() + END + rest.partition(END)[2])
    for key, (_, script, names, *_) in COMPARISONS.items():
        if all((RESULTS / f"{script}__{name}.csv").exists() for name in names):
            draw_comparison(key)
    for script in TITLES:
        if list(RESULTS.glob(f"{script}__*.csv")):
            draw(script)
    draw_front()


if __name__ == "__main__":
    main()
