"""docs/howto.md: each recipe works as it is written."""

import importlib.util
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, SMALL, flags, parameters, read_scalars

TEXT = (ROOT / "docs" / "howto.md").read_text()
RECIPES = dict(part.split("\n", 1) for part in TEXT.split("\n## … ")[1:])


def blocks(recipe: str) -> list[tuple[str, str, str]]:
    """The (language, file name or nothing, text) of each block of code."""
    return re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", recipe, re.MULTILINE | re.DOTALL)


def write_files(recipe: str) -> None:
    """Have the scripts in the current folder, and the files that the recipe names."""
    for path in ROOT.glob("ppo*.py"):
        Path(path.name).write_bytes(path.read_bytes())
    for language, name, text in blocks(recipe):
        if language == "diff":
            script = re.match(r"--- (\S+)\n", text)[1]
            command = ["patch", "--no-backup-if-mismatch", "-F0", "-o", name, script]
            result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
            assert result.returncode == 0, f"{name}: {script} has changed, make the diff anew: {result.stdout}"
        elif name:
            Path(name).write_text(text)


def run_commands(recipe: str, python: str, folder: Path) -> str:
    """Type the recipe's commands, with `python` a file of that text in the folder; return what they print."""
    (folder / "python").write_text(python)
    (folder / "python").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    commands = "".join(text for language, name, text in blocks(recipe) if language == "bash" and not name)
    environment = os.environ | dict(PATH=path, PYTHONPATH="")
    command = ["bash", "-e", "-c", commands]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def scontrol(monkeypatch, tmp_path_factory):
    """SLURM's command, as far as a recipe needs it: notes what it was asked for in the file that is returned."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {folder}/asked\n')
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return folder / "asked"


@pytest.mark.parametrize("title", RECIPES)
def test_recipe(title, scontrol, launcher, tmp_path_factory):
    """Catches: a recipe whose lines are no longer in ppo.py, or that never worked as it is written."""
    recipe = RECIPES[title]
    write_files(recipe)
    out = run_commands(recipe, launcher.python, tmp_path_factory.mktemp("bin"))
    if "sweep" in title:
        first, best = map(int, re.search(r"mean return (\d+) at first, (\d+) with", out).groups())
        assert best > 1.3 * first, "the search should have found a better learning rate"
    if "preempted" in title:
        assert "preempted: 143" in out
        assert "stopped by signal 15; to go on" in out  # and not at the end of its steps
        assert scontrol.read_text() == "requeue 17\n"
        finished = [path for path in Path("runs").iterdir() if (path / "checkpoint.pt").exists()]
        assert max(step for path in finished for step, _ in read_scalars(path)["charts/SPS"]) == 29_696
    if "intrinsic" in title:
        (run_dir,) = Path("runs").iterdir()
        assert all(0 < value <= 1 for _, value in read_scalars(run_dir)["charts/novelty"])
    if "images" in title:
        (run_dir,) = Path("runs").iterdir()
        assert read_scalars(run_dir)["charts/episodic_return"][-1][1] > (12 if "actions" in title else 14)  # of 20
    if "infos" in title:
        scalars = read_scalars(next(Path("runs").iterdir()))
        rewards = [value / 50 for _, value in scalars["charts/episodic_return"]]  # of a step: the speed
        assert [value for _, value in scalars["charts/speed"]][-3:] == pytest.approx(rewards[-3:], abs=0.1)
    if "follow the KL" in title:
        rates = [value for _, value in read_scalars(next(Path("runs").iterdir()))["charts/learning_rate"]]
        assert all(min(abs(after / before - f) for f in (1, 1.5, 1 / 1.5)) < 1e-3 for before, after in pairwise(rates))
        assert len(set(rates)) > 1
    if "checkpoint" in title:
        (run_dir,) = Path("runs").iterdir()
        weights = [value for _, value in read_scalars(run_dir)["charts/kl_coef"]]
        assert len(weights) == 16
        assert all(after / before in (0.5, 1, 2) for before, after in pairwise([1, *weights]))
        assert weights[7] < 0.5  # where a resume that began with 1 again would differ
    if "begin with" in title:
        teacher, tuned = (parameters(next(Path("runs").glob(f"*__{name}__*"))) for name in ("teacher", "tuned"))
        same = {name for name in teacher if torch.equal(teacher[name], tuned[name])}
        assert same == {"actor.0.weight", "actor.0.bias"}
    if "seeds" in title:
        assert "over 3 seeds" in out
    if "flag" in title:
        (run_dir,) = Path("runs").iterdir()
        points = read_scalars(run_dir)["charts/ent_coef"]
        assert points[0][1] == pytest.approx(0.02)
        assert 0.001 < points[-1][1] < 0.005


@pytest.mark.parametrize("name", ["annealed_entropy", "penalised"])
def test_a_recipe_compiles_once(name, compiled, monkeypatch):
    """Catches: a number that changes, given to the loss as such: --compile would make a new graph in each iteration."""
    (recipe,) = (recipe for recipe in RECIPES.values() if f"```diff {name}.py" in recipe)
    write_files(recipe)
    spec = importlib.util.spec_from_file_location(name, f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, script)
    spec.loader.exec_module(script)
    graphs = []
    for iterations in (1, 4):
        compiled.clear()
        torch._dynamo.reset()
        arguments = SMALL["ppo"] | dict(total_timesteps=32 * iterations)
        script.train(script.Args(**arguments, compile=True, update_epochs=2))
        graphs.append(dict(compiled))
    assert graphs[0] == graphs[1] != {}


def test_a_recipe_that_fails_is_told(launcher, tmp_path_factory):
    """Catches: recipes that pass whatever their commands do."""
    write_files("")
    with pytest.raises(AssertionError, match="--num-envs must be at least 1"):
        run_commands("```bash\npython ppo.py --num-envs 0\n```", launcher.python, tmp_path_factory.mktemp("bin"))


def test_the_sweep_is_one_that_the_script_understands(launcher):
    """Catches: a sweep whose every run ends with `unrecognized arguments`, which only a server would tell."""
    (text,) = (text for _, name, text in blocks(RECIPES["run seeds, and sweep"]) if name == "sweep.yaml")
    sweep = yaml.safe_load(text)
    chosen = {
        name: rule.get("value", rule.get("values", [rule.get("min")])) for name, rule in sweep["parameters"].items()
    }
    chosen = {name: value[0] if isinstance(value, list) else value for name, value in chosen.items()}
    assert "${args_no_boolean_flags}" in sweep["command"]
    spelled = {name: f"--{name}" if value is True else f"--{name}={value}" for name, value in chosen.items()}
    arguments = [spelled[name] for name, value in chosen.items() if value is not False]  # as an agent of wandb does it
    result = launcher.run(sweep["program"].removesuffix(".py"), *arguments, *flags(num_envs=2))
    assert result.returncode == 0, result.stderr
    (run_dir,) = Path("runs").iterdir()
    assert sweep["metric"]["name"] in read_scalars(run_dir)
