"""What keeps the copies honest: the same name means the same source, the pins agree, every detail is cited."""

import ast
import difflib
import importlib.metadata
import re
import sys
import tomllib

import pytest
from conftest import ROOT

ALL_SCRIPTS = sorted(path.stem for path in ROOT.glob("ppo*.py"))
SOURCE = {name: (ROOT / f"{name}.py").read_text() for name in ALL_SCRIPTS}
CLOSEST = {"ppo_atari_lstm": "ppo_atari"}  # the script that a reader comes from, where it is not ppo.py

# the only names whose source may differ from script to script, and why
MAY_DIFFER = {
    "Args": "defaults, and fields of the script's own",
    "make_envs": "env specifics live here",
    "Agent": "network and action distribution live here",
    "train": "one long story; held line by line by MOST_CHANGES",
    "evaluate": "an LSTM carries its state from step to step",
}
# of these the closest script's lines that may go, and the lines that may come, at most; any other copy is exact
MOST_CHANGES = {
    "train": {
        "ppo_atari": (0, 3),
        "ppo_continuous_action": (4, 20),
        "ppo_lstm": (18, 55),
        "ppo_atari_lstm": (13, 38),
        "ppo_multidiscrete": (3, 8),
    },
    "evaluate": {"ppo_lstm": (5, 9), "ppo_atari_lstm": (5, 9)},
}

DETAILS = {
    "core": (range(1, 13), lambda name: True),
    "core ": ([13], lambda name: name in ("ppo", "ppo_multidiscrete")),  # separate networks
    "atari": ([1, 2, 3, 4, 5, 6, 8, 9], lambda name: "atari" in name),
    "atari ": ([7], lambda name: name == "ppo_atari"),  # the stack of four frames: an LSTM does without
    "cont": (range(1, 10), lambda name: name == "ppo_continuous_action"),
    "lstm": (range(1, 6), lambda name: "lstm" in name),
    "multi": ([1], lambda name: name == "ppo_multidiscrete"),
    "aux": ([1, 3], lambda name: True),
}


def definitions(name: str) -> dict[str, str]:
    """The source of each function and class at a script's top level, decorators included."""
    lines, result = SOURCE[name].splitlines(), {}
    for node in ast.parse(SOURCE[name]).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            result[node.name] = "\n".join(lines[start - 1 : node.end_lineno])
    return result


def closest(name: str) -> str:
    return CLOSEST.get(name, "ppo")


def changes(name: str, definition: str) -> tuple[int, int]:
    """How many lines of the closest script's definition are gone, and how many are new."""
    ours, theirs = definitions(name)[definition].splitlines(), definitions(closest(name))[definition].splitlines()
    diff = list(difflib.unified_diff(theirs, ours, n=0, lineterm=""))[2:]
    return tuple(sum(line.startswith(sign) for line in diff) for sign in "-+")


def block(name: str) -> dict:
    """The script's PEP 723 block."""
    text = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", SOURCE[name]).group(1)
    return tomllib.loads(re.sub(r"(?m)^# ?", "", text))


def pins(lines) -> dict[str, tuple[str, set[str]]]:
    """The version and the extras of each requirement; each has to be pinned."""
    result = {}
    for line in lines:
        name, extras, version = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?==([\w.]+)", line).groups()
        result[re.sub("[-_.]+", "-", name).lower()] = version, set((extras or "").split(",")) - {""}
    return result


def requirements() -> dict[str, tuple[str, set[str]]]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return pins(line for line in lines if line and not line.startswith("#"))


def imported_modules(name: str) -> set[str]:
    """The top-level modules that a script imports anywhere."""
    modules = set()
    for node in ast.walk(ast.parse(SOURCE[name])):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            modules.add(node.module.partition(".")[0])
    return modules


def test_same_name_same_source():
    """Catches: a fix that landed in some of the scripts only."""
    first = {}
    for name in ALL_SCRIPTS:
        for definition, source in definitions(name).items():
            if definition not in MAY_DIFFER:
                assert first.setdefault(definition, source) == source, f"{definition} in {name}.py"


@pytest.mark.parametrize("name", [name for name in ALL_SCRIPTS if name != "ppo"])
def test_the_story_is_the_same(name):
    """Catches: a training loop or an evaluation that drifted away from the script it was copied from."""
    for definition, limits in MOST_CHANGES.items():
        removed, added = changes(name, definition)
        most_removed, most_added = limits.get(name, (0, 0))
        assert removed <= most_removed, f"{definition}: {removed} lines differ from {closest(name)}.py"
        assert added <= most_added, f"{definition}: {added} lines are not in {closest(name)}.py"


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_same_order(name):
    """Catches: definitions or arguments that were moved, renamed or lost, which turns a diff into noise."""
    ours, theirs = list(definitions(name)), list(definitions(closest(name)))
    assert [x for x in ours if x in theirs] == theirs
    fields = {}
    for script in (name, closest(name)):
        fields[script] = re.findall(
            r"(?m)^    (\w+): .*=", definitions(script)["Args"].partition("def __post_init__")[0]
        )
        assert len(fields[script]) > 30
    own_env = {"vectorization"}  # how ppo.py's envs are run: another script's envs may have no such choice
    expected = [field for field in fields[closest(name)] if field not in own_env - set(fields[name])]
    assert [field for field in fields[name] if field in expected] == expected


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_pins_are_those_of_requirements(name):
    """Catches: `uv run` on another version than `pip install -r requirements.txt`."""
    required = requirements()
    for package, (version, extras) in pins(block(name)["dependencies"]).items():
        assert package in required
        assert version == required[package][0], package
        assert extras <= required[package][1], package
    assert block(name)["requires-python"] == block("ppo")["requires-python"] == ">=3.11"


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_pins_cover_every_import(name):
    """Catches: a script that `uv run` cannot start, or stops when it comes to a lazy import."""
    packages_of = importlib.metadata.packages_distributions()
    pinned = set(pins(block(name)["dependencies"]))
    for module in imported_modules(name) - sys.stdlib_module_names:
        packages = {re.sub("[-_.]+", "-", package).lower() for package in packages_of[module]}
        assert packages & pinned, f"{module} comes from {packages}"
    assert "moviepy" in pinned, "RecordVideo imports it"
    if "AtariPreprocessing" in SOURCE[name]:
        assert "opencv-python-headless" in pinned, "AtariPreprocessing imports it"


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_a_script_stands_alone(name):
    """Catches: an import of another file of the project, after which a script cannot be copied."""
    local = {path.stem for path in ROOT.rglob("*.py")} | {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert not imported_modules(name) & local


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_every_detail_is_cited(name):
    """Catches: an implementation detail that was dropped, or a tag of a detail that does not exist."""
    tags = ",".join(re.findall(r"\[((?:(?:core|atari|cont|lstm|multi|aux) \d+(?:, )?)+)\]", SOURCE[name]))
    cited = {(group, int(number)) for group, number in re.findall(r"(\w+) (\d+)", tags)}
    required = {
        (group.strip(), number) for group, (numbers, applies) in DETAILS.items() for number in numbers if applies(name)
    }
    known = {"core": 13, "atari": 9, "cont": 9, "lstm": 5, "multi": 1, "aux": 4}
    assert required - cited == set()
    assert {(group, number) for group, number in cited if not 1 <= number <= known[group]} == set()


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_docstring_shows_how_to_train_resume_and_evaluate(name):
    """Catches: commands to copy that name another script, or a flag that is gone."""
    docstring = ast.get_docstring(ast.parse(SOURCE[name]))
    commands = re.findall(r"^(Train|Resume|Evaluate): +python (\w+)\.py (.*)$", docstring, re.MULTILINE)
    assert [(what, script) for what, script, _ in commands] == [
        (what, name) for what in ("Train", "Resume", "Evaluate")
    ]
    fields = re.findall(r"(?m)^    (\w+): ", definitions(name)["Args"])
    for _, _, arguments in commands:
        for flag in re.findall(r"--([\w-]+)", arguments):
            assert flag.replace("-", "_") in fields
    if name != "ppo":
        assert "iffers from ppo" in docstring
