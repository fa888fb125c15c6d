"""docs/howto.md: each recipe works as it is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, flags, read_scalars

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
            command = ["patch", "--no-backup-if-mismatch", "-F0", "-o", name, "ppo.py"]
            result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
            assert result.returncode == 0, f"{name}: ppo.py has changed, make the diff anew: {result.stdout}"
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
    if "flag" in title:
        (run_dir,) = Path("runs").iterdir()
        points = read_scalars(run_dir)["charts/ent_coef"]
        assert points[0][1] == pytest.approx(0.02)
        assert 0.001 < points[-1][1] < 0.005


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
    arguments = [f"--{name}={value}" for name, value in chosen.items()]  # as an agent of wandb spells them
    result = launcher.run(sweep["program"].removesuffix(".py"), *arguments, *flags(num_envs=2))
    assert result.returncode == 0, result.stderr
    (run_dir,) = Path("runs").iterdir()
    assert sweep["metric"]["name"] in read_scalars(run_dir)
