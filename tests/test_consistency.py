"""What keeps the copies honest: one text below the fold, the same source under the same name above it; short scripts;
the pins agree, every detail is cited.

`python tests/test_consistency.py ppo.py` copies what is below the fold of ppo.py into the other scripts.
"""

import ast
import difflib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import SMALL

ROOT = Path(__file__).resolve().parent.parent
ALL_SCRIPTS = sorted(path.stem for path in ROOT.glob("ppo*.py"))
SOURCE = {name: (ROOT / f"{name}.py").read_text() for name in ALL_SCRIPTS}
CLOSEST = {"ppo_atari_lstm": "ppo_atari"}  # the script that a reader comes from, where it is not ppo.py

RULE = f"# {'-' * 98}\n"
FOLD = f"{RULE}# The life of a run: nothing of PPO; the same text in every script.\n{RULE}"
MICRORTS = f"{RULE}# MicroRTS as a vector env: the Java game of gym_microrts 0.3.2, called by JPype.\n{RULE}"

# the only names above the fold whose source may differ from script to script, and why
MAY_DIFFER = {
    "Args": "defaults, and fields of the script's own",
    "make_envs": "env specifics live here",
    "Agent": "network and action distribution live here",
    "compute_gradients": "an LSTM takes sequences, masks come along",
    "train": "one long story; held line by line by MOST_CHANGES",
    "evaluate": "an LSTM carries its state from step to step",
}
# of these the closest script's lines that may go, and the lines that may come, at most; any other copy is exact
MOST_CHANGES = {
    "train": {
        "ppo_atari": (6, 7),
        "ppo_continuous_action": (2, 14),
        "ppo_lstm": (15, 37),
        "ppo_atari_lstm": (6, 19),
        "ppo_multidiscrete": (7, 15),
    },
    "evaluate": {"ppo_lstm": (2, 5), "ppo_atari_lstm": (2, 5)},
}

# the longest that each script may be, in lines; they may come down, but never go up
MOST_LINES = {
    "ppo": 715,
    "ppo_atari": 775,
    "ppo_continuous_action": 785,
    "ppo_atari_lstm": 845,
    "ppo_lstm": 850,
    "ppo_multidiscrete": 1060,  # with MicroRTS, which has lines of its own
}
SLACK = 1.02  # so that a repair of two lines does not fail
MOST_LINES_OF_MICRORTS = 280
MOST_LINES_OF_THE_FOLD = 350
MOST_WIDE_LINES = 0.15  # the share of lines that may pass 100 columns: shorter means less to understand, not denser
MOST_LINES_OF_TRAIN, MOST_LINES_OF_ITS_LOOP = 84, 60  # in ppo.py
MOST_LEVELS = 4  # how deep blocks may lie in one another inside train: if in for in for in with

DETAILS = {
    "core": (range(1, 13), lambda name: True),
    "core ": ([13], lambda name: name in ("ppo", "ppo_multidiscrete")),  # separate networks
    "atari": ([1, 2, 3, 4, 5, 6, 8, 9], lambda name: "atari" in name),
    "atari ": ([7], lambda name: name == "ppo_atari"),  # the stack of four frames: an LSTM does without
    "cont": (range(1, 10), lambda name: name == "ppo_continuous_action"),
    "lstm": (range(1, 6), lambda name: "lstm" in name),
    "multi": ([1], lambda name: name == "ppo_multidiscrete"),
    "aux": ([1, 2, 3], lambda name: True),
}


def cut_at(banner: str, source: str, name: str) -> tuple[str, str]:
    """The text before a banner, and the text from the banner on."""
    assert source.count(banner) == 1, f"{name}.py has no such banner, or more than one:\n{banner}"
    above, below = source.split(banner)
    return above, banner + below


def above_the_fold(name: str) -> str:
    return cut_at(FOLD, SOURCE[name], name)[0]


def below_the_fold(name: str) -> str:
    return cut_at(FOLD, SOURCE[name], name)[1]


def copy_the_fold(name: str) -> None:
    """Give all scripts the text that this one has below the fold."""
    for other in ALL_SCRIPTS:
        if below_the_fold(other) != below_the_fold(name):
            (ROOT / f"{other}.py").write_text(above_the_fold(other) + below_the_fold(name))
            print(f"{other}.py: now as {name}.py below the fold")


def definitions(name: str) -> dict[str, str]:
    """The source of each function and class at the top level above a script's fold, decorators included."""
    lines, result = SOURCE[name].splitlines(), {}
    for node in ast.parse(above_the_fold(name)).body:
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


def levels(node: ast.AST, outside: int = 0) -> int:
    """How deep blocks (for, while, if, with, try, match, a function) lie in one another inside of a node."""
    deepest = outside
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        is_block = isinstance(child, ast.stmt) and (hasattr(child, "body") or isinstance(child, ast.Match))
        deepest = max(deepest, levels(child, outside + (is_block and not is_elif)))
    return deepest


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


def test_the_same_text_below_the_fold():
    """Catches: a repair of checkpoints, signals or logs that landed in some of the scripts only."""
    expected, others = below_the_fold("ppo"), []
    for name in ALL_SCRIPTS:
        if below_the_fold(name) != expected:
            pairs = enumerate(zip(below_the_fold(name).splitlines(), expected.splitlines()))
            line = next((line for line, (ours, theirs) in pairs if ours != theirs), 0)
            others.append(f"{name}.py:{above_the_fold(name).count(chr(10)) + 1 + line}")
    assert not others, (
        f"{', '.join(others)}: not what ppo.py has there; below the fold a repair lands in every script: "
        "`python tests/test_consistency.py ppo.py` copies ppo.py's text, or name the script whose text is meant"
    )


def test_same_name_same_source():
    """Catches: a fix that landed in some of the scripts only."""
    first, differing = {}, []
    for name in ALL_SCRIPTS:
        for definition, source in definitions(name).items():
            if definition not in MAY_DIFFER and first.setdefault(definition, (name, source))[1] != source:
                differing.append(f"{definition} in {name}.py and {first[definition][0]}.py")
    assert not differing, (
        f"{', '.join(differing)}: the same name means the same source, so that a fix lands in every script; "
        "meant? add the name to MAY_DIFFER in tests/test_consistency.py, with the reason"
    )


def test_what_may_differ_does():
    """Catches: a name that is excused though its source is the same by now, and may then drift unseen."""
    for definition in MAY_DIFFER:
        sources = {definitions(name)[definition] for name in ALL_SCRIPTS if definition in definitions(name)}
        assert len(sources) > 1, f"{definition} is the same in all scripts: take it out of MAY_DIFFER"


@pytest.mark.parametrize("name", [name for name in ALL_SCRIPTS if name != "ppo"])
def test_the_story_is_the_same(name):
    """Catches: a training loop or an evaluation that drifted away from the script it was copied from."""
    for definition, limits in MOST_CHANGES.items():
        most, counted = limits.get(name, (0, 0)), changes(name, definition)
        assert counted[0] <= most[0] and counted[1] <= most[1], (  # noqa: PT018
            f"{definition} of {name}.py: -{counted[0]} +{counted[1]} lines against {closest(name)}.py, at most "
            f"-{most[0]} +{most[1]}: the story is the same but for the algorithm, a fix lands in every script; "
            "meant? raise MOST_CHANGES in tests/test_consistency.py"
        )


def test_every_script_is_tested():
    """Catches: a new script that no test runs."""
    assert set(ALL_SCRIPTS) == set(SMALL), "give the new script a small run in SMALL of tests/conftest.py"


def assert_short(what: str, lines: int, most: int) -> None:
    budget = "a budget that keeps scripts readable (MOST_LINES in tests/test_consistency.py): find the shorter form"
    assert lines <= SLACK * most, f"{what}: {lines} lines, at most {most}; {budget}, or give something up"


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_a_script_is_short(name):
    """Catches: a feature that costs every reader of a script its lines."""
    assert_short(f"{name}.py", SOURCE[name].count("\n"), MOST_LINES.get(name, MOST_LINES["ppo"]))
    if MICRORTS in SOURCE[name]:
        microrts = cut_at(MICRORTS, above_the_fold(name), name)[1]
        assert_short(f"MicroRTS in {name}.py", microrts.count("\n"), MOST_LINES_OF_MICRORTS)


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_few_lines_are_wide(name):
    """Catches: a budget of lines that was kept by longer ones."""
    lines = SOURCE[name].splitlines()
    wide = [number for number, line in enumerate(lines, 1) if len(line) > 100]
    assert len(wide) <= SLACK * MOST_WIDE_LINES * len(lines), f"{name}.py: {len(wide)} lines pass 100 columns: {wide}"


def test_the_fold_is_short():
    """Catches: a life of a run that grows with every wish."""
    assert_short("ppo.py below the fold", below_the_fold("ppo").count("\n"), MOST_LINES_OF_THE_FOLD)


def train_of(name: str) -> ast.FunctionDef:
    return next(node for node in ast.parse(SOURCE[name]).body if getattr(node, "name", "") == "train")


def test_train_is_short():
    """Catches: a story that no longer fits on a screen."""
    train = train_of("ppo")
    (loop,) = (n for n in ast.walk(train) if isinstance(n, ast.For) and "run.iteration" in ast.unparse(n.iter))
    assert_short("train in ppo.py", train.end_lineno - train.lineno + 1, MOST_LINES_OF_TRAIN)
    assert_short("the loop of train in ppo.py", loop.end_lineno - loop.lineno, MOST_LINES_OF_ITS_LOOP)


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_train_is_not_nested_deeply(name):
    """Catches: a case that is handled in the midst of the story, where a function or a call on the run would do."""
    deepest = levels(train_of(name))
    assert deepest <= MOST_LEVELS, f"train in {name}.py: blocks lie {deepest} deep, at most {MOST_LEVELS}"


def test_levels_are_counted():
    """Catches: the test above proving nothing, for it would count no levels."""
    for lines, expected in (
        (["def f():", " x = [y for y in z if y]"], 0),
        (["def f():", " if x:", "  pass", " elif y:", "  pass", " elif z:", "  pass"], 1),
        (["def f():", " with a:", "  for x in y:", "   if x:", "    pass", "   else:", "    while x:", "     pass"], 4),
    ):
        assert levels(ast.parse("\n".join(lines)).body[0]) == expected


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_same_order(name):
    """Catches: definitions or arguments that were moved, renamed or lost, which turns a diff into noise."""
    ours, theirs = list(definitions(name)), list(definitions(closest(name)))
    hint = f"{name}.py against {closest(name)}.py: nothing is moved, renamed or lost, so that a diff shows the lesson"
    assert [x for x in ours if x in theirs] == theirs, hint
    fields = {}
    for script in (name, closest(name)):
        fields[script] = re.findall(
            r"(?m)^    (\w+): .*=", definitions(script)["Args"].partition("def __post_init__")[0]
        )
        assert len(fields[script]) > 30
    own_env = {"vectorization"}  # how ppo.py's envs are run: another script's envs may have no such choice
    expected = [field for field in fields[closest(name)] if field not in own_env - set(fields[name])]
    assert [field for field in fields[name] if field in expected] == expected, hint


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_pins_are_those_of_requirements(name):
    """Catches: `uv run` on another version than `pip install -r requirements.txt`."""
    required = requirements()
    for package, (version, extras) in pins(block(name)["dependencies"]).items():
        assert package in required
        assert version == required[package][0], package
        assert extras <= required[package][1], package
    assert block(name)["requires-python"] == block("ppo")["requires-python"] == ">=3.11,<3.14"  # no box2d-py for 3.14


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_pins_cover_every_import(name):
    """Catches: a script that `uv run` cannot start, or stops when it comes to a lazy import."""
    packages_of = importlib.metadata.packages_distributions()
    pinned = set(pins(block(name)["dependencies"]))
    for module in imported_modules(name) - sys.stdlib_module_names:
        packages = {re.sub("[-_.]+", "-", package).lower() for package in packages_of[module]}
        assert packages & pinned, f"{module} comes from {packages}"
    if "AtariPreprocessing" in SOURCE[name]:
        assert "opencv-python-headless" in pinned, "AtariPreprocessing imports it"


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_a_script_stands_alone(name):
    """Catches: an import of another file of the project, after which a script cannot be copied."""
    folders = [ROOT / name for name in ("tests", "benchmark")]  # others are a user's: runs, wandb, an environment
    files = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    local = {path.stem for path in files} | {folder.name for folder in folders}
    assert "conftest" in local
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


if __name__ == "__main__":
    copy_the_fold(Path(sys.argv[1]).stem)
