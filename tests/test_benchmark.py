"""benchmark/: what is measured is what the results say it is."""

import csv
import json
import subprocess
import time
from pathlib import Path

import learning_curves
import numpy as np
import parts
import throughput
import torch
from conftest import SMALL, flags, parameters, read_scalars
from torch.utils.tensorboard import SummaryWriter

import ppo


def test_each_part_of_the_time_is_told_apart(monkeypatch):
    """Catches: env steps that count as the policy's time, advantages as the update's, logging as nobody's."""
    waits = dict(policy=0.002, envs=0.004, advantages=0.3, update=0.03, rest=0.4)  # seconds of each call
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
    monkeypatch.setattr(ppo.Run, "note_episodes", ppo.Run.note_episodes)  # put back, as all that time_parts replaces
    found = parts.time_parts("cartpole", 4, "cpu", False, seconds=0)
    for part, microseconds in found.items():
        assert microseconds >= 1e6 * waits[part] * calls[part] / 512, part


def test_a_measured_speed_is_that_of_the_log(monkeypatch):
    """Catches: a speed with the first iteration in it, in which imports and compilers work, or of the wrong number of
    steps."""
    moments, log = [], ppo.Run.log

    def slow_at_first(run, *args):
        time.sleep(0.5 if moments else 2)
        log(run, *args)
        moments.append(time.time())

    monkeypatch.setattr(ppo.Run, "log", slow_at_first)
    speed = throughput.run_ours("cartpole", 4, "cpu", False, seconds=0, scaling=False)
    assert len(moments) == 3
    np.testing.assert_allclose(speed, 2 * 512 / (moments[-1] - moments[0]), rtol=0.2)


def test_curves_are_those_of_the_runs(monkeypatch, tmp_path, launcher):
    """Catches: a curve of another seed, a mean that is not of the last episodes, seeds that were there before lost, a
    run begun anew that was there."""
    monkeypatch.setattr(learning_curves, "RESULTS", tmp_path)
    arguments = SMALL["ppo"] | dict(num_steps=64, total_timesteps=512)
    runs = {}
    for seed in (1, 2):
        result = launcher.run("ppo", *flags(**arguments, seed=seed, exp_name="ppo-quick"))
        assert result.returncode == 0, result.stderr
        (runs[seed],) = Path("runs").glob(f"CartPole-v1__ppo-quick__{seed}__*")
    learning_curves.write("ppo.py", "CartPole-v1", "quick", runs)
    with open(tmp_path / "ppo__CartPole-v1__quick.csv") as file:
        rows = list(csv.DictReader(file))
    with open(tmp_path / "summary.csv") as file:
        summary = {row["seed"]: row for row in csv.DictReader(file)}
    for seed, run_dir in runs.items():
        ours = [(int(row["global_step"]), float(row["episodic_return"])) for row in rows if row["seed"] == str(seed)]
        np.testing.assert_allclose(ours, read_scalars(run_dir)["charts/episodic_return"], rtol=1e-3)
        last = torch.load(run_dir / "checkpoint.pt", weights_only=True)["recent_returns"]
        line = summary[str(seed)]
        assert (line["env_id"], line["global_step"], line["episodes"]) == ("CartPole-v1__quick", "512", str(len(last)))
        assert float(line["mean_return"]) == round(float(np.mean(last)), 2)

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

    before = parameters(runs[1])
    again = learning_curves.train("ppo.py", "CartPole-v1", 1, "quick", Path.cwd(), [])
    assert again.samefile(runs[1])
    assert all(torch.equal(before[name], value) for name, value in parameters(again).items())
    assert "resuming" in Path("CartPole-v1__ppo-quick__1.log").read_text()


def test_an_edited_script_is_told(monkeypatch, tmp_path):
    """Catches: a curve of an edited script under the commit's name, or a clean one called edited for other files."""

    def git(*command):
        who = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
        return subprocess.run(["git", *who, *command], capture_output=True, text=True, check=True).stdout.strip()

    Path("ppo.py").write_text("the script")
    git("init")
    git("add", "ppo.py")
    git("commit", "--message", "one")
    commit, run_dir = git("rev-parse", "HEAD"), tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.setattr(learning_curves, "ROOT", tmp_path)
    for note in ("", "-dirty"):
        (run_dir / "command.txt").write_text(f"a time: ppo.py\nPython 3, git commit {commit}{note}\n")
        for text, told in (("the script", ""), ("an edited script", "-dirty")):
            (run_dir / "ppo.py").write_text(text)
            assert learning_curves.commits("ppo.py", run_dir) == commit[:7] + told
            assert learning_curves.commits(str(tmp_path / "ppo.py"), run_dir) == commit[:7] + told


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
    """Catches: a task whose settings its script no longer takes, found by whoever measures next."""
    for task in throughput.OURS:
        name, changes = throughput.arguments(task, 0)
        script = __import__(name)
        assert json.dumps(vars(script.Args(**changes)), default=str)


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
        assert "num_steps" not in throughput.arguments(task, 0)[1]
        for num_envs in (1, 8, 64, 512):
            _, changes = throughput.arguments(task, num_envs)
            assert changes["num_envs"] * changes["num_steps"] <= 32_768
    assert throughput.arguments("halfcheetah", 512)[1]["num_steps"] == 64
    assert throughput.arguments("breakout", 64)[1]["num_steps"] == 128
    refused = throughput.possible(["cartpole", "cartpole-lstm"], [0, 512])  # sequences of 128 steps in rollouts of 64
    assert refused == [dict(task="cartpole", num_envs=n) for n in (4, 512)] + [dict(task="cartpole-lstm", num_envs=8)]
