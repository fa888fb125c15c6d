"""benchmark/: what is measured is what the results say it is."""

import contextlib
import csv
import json
import os
import subprocess
import time
import zlib
from dataclasses import replace
from pathlib import Path

import bootstrap
import film
import imageio.v2 as imageio
import learning_curves
import numpy as np
import optuna
import parts
import threads
import throughput
import torch
import tune
import tyro
from conftest import SCRIPTS, read_scalars, small_args
from torch.utils.tensorboard import SummaryWriter

import ppo


def test_each_part_of_the_time_is_told_apart(monkeypatch):
    """Catches: env steps that count as the policy's time, advantages as the update's, logging as nobody's."""
    waits = dict(policy=0.001, envs=0.002, advantages=0.15, update=0.015, rest=0.2)  # seconds of each call
    calls = dict(policy=128, envs=128, advantages=1, update=16, rest=1)  # in an iteration of 4 envs

    def slowed(function, part):
        return lambda *args, **options: (time.sleep(waits[part]), function(*args, **options))[1]

    make_envs = ppo.make_envs

    def make_slow_envs(*args):
        envs = make_envs(*args)
        envs.step = slowed(envs.step, "envs")
        return envs

    monkeypatch.setattr(ppo, "make_envs", make_slow_envs)
    monkeypatch.setattr(ppo.Agent, "get_action", slowed(ppo.Agent.get_action, "policy"))
    monkeypatch.setattr(ppo, "compute_gae", slowed(ppo.compute_gae, "advantages"))
    monkeypatch.setattr(ppo, "compute_gradients", slowed(ppo.compute_gradients, "update"))
    monkeypatch.setattr(ppo.Run, "log", slowed(ppo.Run.log, "rest"))
    for name in ("note_episodes", "stopped"):
        monkeypatch.setattr(ppo.Run, name, getattr(ppo.Run, name))  # put back, as all that time_parts replaces
    found = parts.time_parts("cartpole", 4, "cpu", False, seconds=0)
    for part, microseconds in found.items():
        assert microseconds >= 1e6 * waits[part] * calls[part] / 512, part


def test_a_measured_speed_is_that_of_the_log(monkeypatch):
    """Catches: a speed with the first iteration in it, in which imports and compilers work, or of the wrong number of
    steps."""
    now, log = [1e9], ppo.Run.log

    def slow_at_first(run, *args):
        now.append(now[-1] + (10 if len(now) > 1 else 1000))
        log(run, *args)

    monkeypatch.setattr(time, "time", lambda: now[-1])  # what TensorBoard notes
    monkeypatch.setattr(ppo.Run, "log", slow_at_first)
    monkeypatch.setattr(ppo.Run, "stopped", ppo.Run.stopped)  # put back, as all that run_ours replaces
    speed = throughput.run_ours("cartpole", 4, "cpu", False, seconds=0, scaling=False)
    assert len(now) == 4  # three iterations
    assert speed == 2 * 512 / 20


def test_curves_are_those_of_the_runs(monkeypatch, tmp_path):
    """Catches: a curve of another seed, a mean that is not of the last episodes, seeds that were there before lost, a
    run of an older commit that cannot be read, a run begun anew that was there, one continued that is complete."""
    monkeypatch.setattr(learning_curves, "RESULTS", tmp_path)
    args = small_args(ppo, num_steps=64, total_timesteps=512, exp_name="ppo-quick")
    runs = {seed: ppo.train(replace(args, seed=seed, eval_episodes=seed - 1, deterministic=True)) for seed in (1, 2)}
    learning_curves.write("ppo.py", "CartPole-v1", "quick", runs)
    with open(tmp_path / "ppo__CartPole-v1__quick.csv") as file:
        rows = list(csv.DictReader(file))
    with open(tmp_path / "summary.csv") as file:
        summary = {row["seed"]: row for row in csv.DictReader(file)}
    for seed, run_dir in runs.items():
        ours = [(int(row["global_step"]), float(row["episodic_return"])) for row in rows if row["seed"] == str(seed)]
        np.testing.assert_allclose(ours, read_scalars(run_dir)["charts/episodic_return"], rtol=1e-3)
        last = [value for value, _ in torch.load(run_dir / "checkpoint.pt", weights_only=True)["kept"]["recent"]]
        line = summary[str(seed)]
        assert (line["env_id"], line["global_step"], line["episodes"]) == ("CartPole-v1__quick", "512", str(len(last)))
        assert float(line["mean_return"]) == round(float(np.mean(last)), 2)
    (alone,) = ppo.evaluate(runs[2] / "checkpoint.pt", 1)
    assert [summary["1"]["evaluation"], summary["2"]["evaluation"]] == ["", f"{alone:.2f}"]

    (tmp_path / "ppo__CartPole-v1__quick.csv").write_text(
        "seed,global_step,episodic_return\n1,256,-1\n10,256,20.5\n"  # a file of before minutes were noted
    )
    learning_curves.write("ppo.py", "CartPole-v1", "quick", runs)
    with open(tmp_path / "ppo__CartPole-v1__quick.csv") as file:
        *of_runs, other = csv.DictReader(file)
    assert of_runs == rows
    assert other == dict(seed="10", global_step="256", episodic_return="20.5", minutes="")

    monkeypatch.setattr(learning_curves, "machine", lambda: "another machine")
    learning_curves.write("ppo.py", "CartPole-v1", "quick", runs)  # nothing was trained there
    with open(tmp_path / "summary.csv") as file:
        assert {row["seed"]: row for row in csv.DictReader(file)} == summary
    learning_curves.write("ppo.py", "CartPole-v1", "quick", {1: runs[2], 2: runs[2]})  # as if 1 had been trained anew
    with open(tmp_path / "summary.csv") as file:
        assert [row["machine"] for row in csv.DictReader(file)] == ["another machine", summary["2"]["machine"]]

    state = torch.load(runs[2] / "checkpoint.pt", weights_only=True)
    del state["kept"]
    for recent in (
        dict(kept=dict(recent=[(1.5, 9), (2.5, 8)])),
        dict(recent_returns=[1.5, 2.5], recent_lengths=[9, 8]),
    ):
        torch.save(state | recent, runs[2] / "checkpoint.pt")
        assert learning_curves.last_returns(runs[2]) == (512, [1.5, 2.5])

    started = []
    monkeypatch.setattr(learning_curves.subprocess, "run", lambda command, **_: started.append(command[1:]))
    train = lambda seed, *extra: learning_curves.train("ppo.py", "CartPole-v1", seed, "quick", Path.cwd(), [*extra])
    assert (train(1), train(2)) == (runs[1], runs[2])
    assert started == []
    assert train(1, "--total-timesteps", "1024") == runs[1]
    (command,) = started
    assert command == [str(learning_curves.ROOT / "ppo.py"), "--resume", str(runs[1]), "--total-timesteps", "1024"]
    (Path("runs") / "CartPole-v1__ppo-quick__3__1").mkdir()  # killed before it had a checkpoint
    monkeypatch.setattr(learning_curves.subprocess, "run", lambda command, **_: begin(command[2:]))

    def begin(arguments):
        assert tyro.cli(ppo.Args, args=arguments) == ppo.Args(seed=3, exp_name="ppo-quick")
        ppo.train(replace(args, seed=3))

    assert train(3).name.startswith("CartPole-v1__ppo-quick__3__")


def test_an_edited_script_is_told(monkeypatch, tmp_path):
    """Catches: a curve of an edited script under the commit's name, a clean one called edited for other files, the
    commit of another text, a commit left out of those that had a part in a run."""
    monkeypatch.setattr(learning_curves, "ROOT", tmp_path)
    who = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]

    def git(*command):
        return subprocess.run(["git", *who, *command], capture_output=True, text=True, check=True).stdout.strip()

    def commit(text, moment):
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"@{moment} +0000")
        Path("ppo.py").write_text(text)
        git("add", "ppo.py")
        git("commit", "--allow-empty", "--message", text)
        return git("rev-parse", "HEAD")[:7]

    def told(**texts):  # of what the run's folder keeps
        run_dir = Path("run")
        for path in run_dir.iterdir():
            path.unlink()
        for name, text in texts.items():
            path = run_dir / name.replace("_py", ".py").replace("_txt", ".txt")
            path.write_text(text)
            os.utime(path, (2500, 2500))
        found = {learning_curves.commits(script, run_dir) for script in ("ppo.py", str(tmp_path / "elsewhere/ppo.py"))}
        assert len(found) == 1
        return found.pop()

    Path("run").mkdir()
    git("init")
    first = commit("the script", 1000)
    second = commit("a change", 2000)
    again = commit("the script", 3000)
    other = commit("another change", 4000)
    commit("another change", 5000)  # of no script
    assert told(ppo_from_0_py="a change") == second
    assert told(ppo_from_0_py="the script") == again
    assert told(ppo_from_0_py="an edited script") == f"{second}-dirty"
    resumed = dict(ppo_from_1024_py="another change", ppo_from_512_py="the script", ppo_from_256_py="a change")
    assert told(ppo_from_0_py="a change", **resumed) == f"{second} {again} {other}"
    assert told(ppo_from_0_py="an edited script", ppo_from_512_py="a change") == f"{second}-dirty {second}"
    assert told(other_py="a change") == ""
    for note in ("", "-dirty"):  # of an older run
        command = f"a time: ppo.py\nPython 3, git commit {first}{'0' * 33}{note}\n"
        assert told(command_txt=command, ppo_py="the script") == first
        assert told(command_txt=command, ppo_py="an edited script") == f"{first}-dirty"


def test_a_row_replaces_that_of_the_same_setting(tmp_path):
    """Catches: tables that hold the same measurement twice, or lose that of another machine."""
    path, columns = tmp_path / "rows.csv", ["task", "num_envs", "steps", "machine"]
    for task, num_envs, steps, machine in [("a", 4, 1, "x"), ("a", 8, 2, "x"), ("a", 4, 3, "y"), ("a", 4, 5, "x")]:
        row = dict(task=task, num_envs=num_envs, steps=steps, machine=machine)
        throughput.write(path, row, columns, ["task", "num_envs"])
    with open(path) as file:
        found = [(row["num_envs"], row["machine"], row["steps"]) for row in csv.DictReader(file)]
    assert found == [("8", "x", "2"), ("4", "y", "3"), ("4", "x", "5")]


def test_tasks_are_those_of_the_scripts():
    """Catches: a task whose settings its script no longer takes, found by whoever measures next; a script without the
    line that bootstrap.py changes; settings of threads that its script does not know."""
    for task in throughput.OURS:
        name, changes = throughput.arguments(task, 0)
        script = __import__(name)
        assert json.dumps(vars(script.Args(**changes)), default=str)
    for name in SCRIPTS:
        assert Path(throughput.ROOT, f"{name}.py").read_text().count(bootstrap.RIGHT) == 1, name
    for name, num_steps in threads.SCRIPTS.items():
        args = __import__(name.removesuffix(".py")).Args(num_steps=num_steps, total_timesteps=32 * num_steps)
        assert args.num_iterations == threads.ITERATIONS


def test_minutes_are_those_of_training():
    """Catches: the hours for which a run lay stopped, counted as if it had trained."""
    run_dir = Path("a_run")
    with SummaryWriter(run_dir) as writer:
        for number, moment in enumerate([0, 60, 120, 180, 50_000, 50_060]):  # stopped after 180 seconds
            for tag in ("charts/SPS", "charts/episodic_return"):
                writer.add_scalar(tag, 1.0, number, walltime=1e9 + moment)
    assert [minutes for _, _, minutes in learning_curves.read_curve(run_dir)] == [1, 2, 3, 4, 5, 6]


def test_operations_are_those_of_the_networks(monkeypatch):
    """Catches: a backward pass, an epoch or a network that is not counted, or gradients that nobody computes."""
    monkeypatch.setattr(ppo, "compute_gradients", ppo.compute_gradients)  # put back, as all that is replaced
    layers = [(4, 64), (64, 64), (64, 2)], [(4, 64), (64, 64), (64, 1)]
    forward = sum(inputs * outputs for network in layers for inputs, outputs in network)
    for_inputs = sum(inputs * outputs for network in layers for inputs, outputs in network[1:])  # of no observation
    epochs, per_product = 4, 2
    assert parts.count_flops("cartpole") == epochs * per_product * (2 * forward + for_inputs) / 1e6


def test_what_there_is_no_time_for_is_measured_later(monkeypatch, tmp_path):
    """Catches: a measurement that is begun when the time is over, or again, or left out for a row of another commit."""
    path, now = tmp_path / "speeds.csv", [0.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: now[0])
    settings = [dict(task=task, num_envs=4, machine="here", commit="new") for task in ("a", "b", "c", "d")]
    throughput.write(path, settings[1] | dict(commit="old"), list(settings[0]), ["task", "num_envs"])

    def measure(minutes) -> str:
        measured = []
        for setting in throughput.still_to_measure(path, settings, minutes):
            throughput.write(path, setting, list(setting), ["task", "num_envs"])
            measured.append(setting["task"])
            now[0] += 40
        return "".join(measured)

    assert measure(minutes=1) == "ab"
    assert measure(minutes=1) == "cd"
    assert measure(minutes=1) == ""
    assert measure(minutes=None) == "abcd"


def test_batches_of_many_envs_are_bounded():
    """Catches: a million steps in an iteration of HalfCheetah with 512 envs; a task's own rollouts cut short."""
    for task in throughput.DEFAULT_TASKS:
        own = {"cartpole-lstm": 128, "halfcheetah": 2048}
        assert throughput.arguments(task, 0)[1].get("num_steps") == own.get(task)
        for num_envs in (1, 8, 64, 512):
            _, changes = throughput.arguments(task, num_envs)
            assert changes["num_envs"] * changes["num_steps"] <= 32_768
    assert throughput.arguments("halfcheetah", 512)[1]["num_steps"] == 64
    assert throughput.arguments("breakout", 64)[1]["num_steps"] == 128
    refused = throughput.possible(["cartpole", "cartpole-lstm"], [0, 512])  # sequences of 128 steps in rollouts of 64
    assert refused == [dict(task="cartpole", num_envs=n) for n in (4, 512)] + [dict(task="cartpole-lstm", num_envs=8)]


def test_a_film_shows_the_seconds_asked_for():
    """Catches: pictures of other moments, faster or slower than life, out of shape, or none of a film that is short."""
    with imageio.get_writer("film.mp4", fps=30, macro_block_size=2) as writer:
        for number in range(60):  # two seconds, that get brighter
            writer.append_data(np.full((40, 80, 3), 4 * number, np.uint8))

    def moments(skip, seconds):
        pictures = film.clip(Path("film.mp4"), skip, seconds, height=20, fps=10)
        assert {picture.size for picture in pictures} == {(40, 20)}
        return [round(np.asarray(picture).mean() / 4) for picture in pictures]

    np.testing.assert_allclose(moments(skip=0.5, seconds=1), range(15, 45, 3), atol=1)
    np.testing.assert_allclose(moments(skip=1.5, seconds=1), range(30, 60, 3), atol=1)
    np.testing.assert_allclose(moments(skip=1.5, seconds=9), range(0, 60, 3), atol=1)
    clips = [film.clip(Path("film.mp4"), 0, 1, height, 10) for height in (20, 20)]
    both = film.side_by_side((clips[0][0], clips[1][9]))
    assert both.size == (80, 20)
    assert np.asarray(both)[:, 60].mean() > np.asarray(both)[:, 20].mean() + 100


CHATTY = """
import itertools, sys, time
import ppo
clock = itertools.count(step=10)
time.perf_counter = lambda: next(clock)  # so that each iteration is told
if __name__ == "__main__":
    ppo.main()
"""


def test_a_search_goes_on_from_its_file(monkeypatch, tmp_path):
    """Catches: a trial that is judged by one env alone, or by another's goal; known runs trained again; tuning on a
    reported seed; a run that is below the others and goes on; a trial that was ended, taken for a whole one; an env's
    own flags left out; what was tried by hand, trained or sampled again; a run that was killed before its first
    checkpoint, resumed."""
    Path("chatty.py").write_text(CHATTY)
    space = dict(learning_rate=[1e-3, 1e-9], num_steps=[32])
    goals = {"CartPole-v1": 100.0, "CartPole-v0 --gamma 0.9": 50.0}
    search = tune.Search(str(tmp_path / "chatty.py"), goals, space, fixed=dict(num_envs=4), total_timesteps=2560)
    monkeypatch.setattr(tune, "RESULTS", tmp_path)
    monkeypatch.setitem(tune.SEARCHES, "quick", search)
    first = tune.Tuner("quick", tmp_path)
    good, bad = (dict(learning_rate=rate, num_steps=32) for rate in space["learning_rate"])
    told = []
    killed = Path(f"runs/CartPole-v1__tune-{zlib.crc32(json.dumps(good).encode()):08x}__1001__1")
    killed.mkdir(parents=True)
    assert first.run(good, "CartPole-v1", 1001, lambda *what: told.append(what) is None)
    assert first.value(good) == 0  # the other env is missing
    assert first.run(good, "CartPole-v0 --gamma 0.9", 1001, lambda *_: True)
    assert not first.run(bad, "CartPole-v1", 1001, lambda tenth, _: tenth < 4)
    assert first.value(bad) == 0
    assert [tenth for tenth, _ in told] == list(range(1, 11))
    (run_dir,) = Path("runs").glob("CartPole-v0__*")
    args = torch.load(run_dir / "checkpoint.pt", weights_only=True)["args"]
    given = dict(seed=1001, learning_rate=1e-3, num_envs=4, num_steps=32, total_timesteps=2560, env_id="CartPole-v0")
    assert args.items() >= (given | dict(gamma=0.9)).items()

    with open(tmp_path / "tune__quick.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["env_id"] for row in rows] == ["CartPole-v1", "CartPole-v0 --gamma 0.9", "CartPole-v1"]
    assert [len(row["tenths"].split()) for row in rows] == [10, 10, 4]
    assert [row["global_step"] for row in rows[:2]] == ["2560", "2560"]
    assert 1024 <= int(rows[2]["global_step"]) < 2560
    not_of_the_space, on_one_env = [dict(learning_rate=0.5, num_steps=32), dict(num_steps=32)], dict(good, num_steps=64)
    space["num_steps"] = [32, 64]
    tried = [(settings, row) for settings in not_of_the_space for row in rows[:2]] + [(on_one_env, rows[0])]
    with open(tmp_path / "tune__quick.csv", "a", newline="") as file:
        csv.DictWriter(file, rows[0]).writerows(row | dict(settings=json.dumps(settings)) for settings, row in tried)
    monkeypatch.setattr(tune.subprocess, "Popen", None)  # from here on, nothing is trained
    again = tune.Tuner("quick", tmp_path)
    scores = [float(rows[0]["mean_return"]) / 100, float(rows[1]["mean_return"]) / 50]
    assert again.value(good) == (sum(scores) / 2 + min(scores)) / 2 > 0
    trials = again.study().trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED"]
    assert trials[0].params == good
    assert trials[0].value == again.value(good)


def test_a_tuning_run_that_goes_on_keeps_its_returns(monkeypatch, tmp_path):
    """Catches: the tenths before a resume filled with the returns after it."""
    Path("chatty.py").write_text(CHATTY)
    search = tune.Search(str(tmp_path / "chatty.py"), {"CartPole-v1": 100.0}, dict(num_steps=[32]))
    search.fixed, search.total_timesteps = dict(num_envs=4, checkpoint_every=1), 5120
    monkeypatch.setitem(tune.SEARCHES, "quick", search)
    for folder, last in [("ended", 6), ("resumed", 10)]:
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(tune, "RESULTS", tmp_path / folder)
        tune.Tuner("quick", tmp_path).run(dict(num_steps=32), "CartPole-v1", 1001, lambda tenth, _, n=last: tenth < n)
    ended, resumed = (
        learning_curves.read(tmp_path / folder / "tune__quick.csv")[0]["tenths"].split()
        for folder in ("ended", "resumed")
    )
    assert len(list(Path("runs").iterdir())) == 1
    assert resumed[: len(ended)] == ended
    assert (len(set(ended)) > 3, len(resumed)) == (True, 10)


def test_a_tuning_run_is_compared_at_the_same_step_of_the_same_env(monkeypatch, tmp_path):
    """Catches: a run that a better one before it, on another env, protects; one ended among the first few, or early;
    one at the median ended."""
    monkeypatch.setattr(tune, "RESULTS", tmp_path)
    search = tune.Search("ppo.py", {"good": 1.0, "bad": 1.0}, dict(seed=[1]))
    monkeypatch.setitem(tune.SEARCHES, "quick", search)

    for earlier, on_bad, expected in [(4, 0.0, [None, 4]), (4, 0.8, [None, None]), (3, 0.0, [None, None])]:
        tuner, ends = tune.Tuner("quick", tmp_path), []

        def play(settings, env_id, seed, go_on, ends=ends, on_bad=on_bad):
            mean_return = on_bad if env_id == "bad" else 0.9
            ends.append(next((tenth for tenth in range(1, 11) if not go_on(tenth, mean_return)), None))
            return ends[-1] is None

        for number in range(earlier):
            for env_id, tenths in [("good", "0.9 " * 10), ("bad", "0.8 " * 10)]:
                tuner.rows[number, env_id, "1001"] = dict(env_id=env_id, seed="1001", tenths=tenths)
        monkeypatch.setattr(tuner, "run", play)
        monkeypatch.setattr(tuner, "value", lambda settings: 1.0)
        with contextlib.suppress(optuna.TrialPruned):
            tuner.objective(optuna.create_study().ask())
        assert ends == expected
