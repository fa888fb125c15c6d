"""README.md and docs/: the table of details points to the lines that cite them, tables of results are those of the CSV
files, links and flags exist.

`python tests/test_readme.py` writes the table of details anew, `python benchmark/report.py` those of results.
"""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
DETAILS = {
    "core 1": "vectorized envs",
    "core 2": "orthogonal initialisation, constant biases",
    "core 3": "Adam's epsilon of 1e-5",
    "core 4": "learning rate annealing",
    "core 5": "generalised advantage estimation",
    "core 6": "minibatches of a shuffled batch",
    "core 7": "normalised advantages",
    "core 8": "clipped surrogate objective",
    "core 9": "clipped value loss",
    "core 10": "overall loss and entropy bonus",
    "core 11": "global gradient clipping",
    "core 12": "debug variables",
    "core 13": "separate networks for policy and value",
    "atari 1": "no-op starts",
    "atari 2": "frame skip and max-pooling",
    "atari 3": "a lost life ends the horizon",
    "atari 4": "FIRE at the start of a life",
    "atari 5": "84 × 84 grey frames",
    "atari 6": "rewards by their sign",
    "atari 7": "four frames stacked",
    "atari 8": "one Nature CNN for both heads",
    "atari 9": "pixels scaled to 0..1",
    "cont 1": "actions from a normal distribution",
    "cont 2": "state-independent log standard deviation",
    "cont 3": "independent action components",
    "cont 4": "separate networks for policy and value",
    "cont 5": "actions clipped for the env only",
    "cont 6": "normalised observations",
    "cont 7": "clipped observations",
    "cont 8": "rewards scaled by the std of discounted sums of past ones",
    "cont 9": "clipped rewards",
    "lstm 1": "orthogonal LSTM weights, zero biases",
    "lstm 2": "initial states of zeros",
    "lstm 3": "states zeroed at episode starts",
    "lstm 4": "sequential minibatches",
    "lstm 5": "states rebuilt from the rollout's",
    "multi 1": "independent action components",
    "aux 1": "clip range annealing",
    "aux 2": "gradients averaged over processes",
    "aux 3": "early stop by KL",
    "aux 4": "invalid action masks",
}
# other programs'; those in howto.md are run
OTHERS = {"no-index", "logdir", "shutdown-timeout", "max-restarts"}
OTHERS |= {"nnodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id"}
HOMES = {
    "core": "ppo.py",
    "aux": "ppo.py",
    "atari": "ppo_atari.py",
    "cont": "ppo_continuous_action.py",
    "lstm": "ppo_lstm.py",
    "multi": "ppo_multidiscrete.py",
    "aux 4": "ppo_multidiscrete.py",
}


def table() -> str:
    """The table of docs/details.md, from the scripts' own tags."""
    lines = ["| detail | what | where |", "| --- | --- | --- |"]
    for tag, what in DETAILS.items():
        name = HOMES.get(tag) or HOMES[tag.split()[0]]
        source = (ROOT / name).read_text().splitlines()
        begin = source.index('"""', 1)  # of the script, whose docstring explains what a tag is
        cited = [n for n, line in enumerate(source, 1) if n > begin and re.search(rf"\b{tag}\b", line)]
        where = ", ".join(f"[{name}:{number}](../{name}#L{number})" for number in cited[:3])
        lines.append(f"| {tag} | {what} | {where} |")
    return "\n".join(lines) + "\n"


def test_table_of_details_points_to_the_lines():
    """A script was edited and the line numbers were not; or a detail is cited nowhere."""
    assert all(line.count("#L") for line in table().splitlines()[2:]), table()
    assert table() in (ROOT / "docs" / "details.md").read_text(), (
        "docs/details.md names lines that have moved: `python tests/test_readme.py` writes the table anew"
    )


def test_results_are_those_of_the_files():
    """A number was typed by hand, or a curve is newer than the page that shows it."""
    report = importlib.import_module("report")
    again = "`python benchmark/report.py` writes it anew"
    assert report.PAGE.read_text() == report.page(), f"docs/results.md is not that of benchmark/results: {again}"
    assert report.SETTINGS.read_text() == report.page_of_settings(), f"docs/settings.md is an old one: {again}"
    assert report.table_of_scripts() in README.read_text(), f"the README's table is not that of the results: {again}"
    for script in report.TITLES:
        drawn = (ROOT / "docs" / f"curves_{script}.png").exists()
        assert drawn == bool(list(report.RESULTS.glob(f"{script}__*.csv"))), f"the curves of {script}.py: {again}"


def test_the_tables_follow_the_files(monkeypatch, tmp_path):
    """The page would say the same whatever the files hold, or mix a run's beginning into a mean."""
    report = importlib.import_module("report")
    (tmp_path / "summary.csv").write_text(
        "script,env_id,seed,global_step,episodes,mean_return,commit,minutes,machine,evaluation\n"
        "ppo,CartPole-v1,1,499712,100,480.00,abc1234,3,2 cores,499.00\n"
        "ppo,CartPole-v1,2,499712,100,500.00,abc1234,4,2 cores,500.00\n"
        "ppo,CartPole-v1,3,100352,100,20.00,abc1234,1,2 cores,\n"
        "ppo_lstm,CartPole-v1,1,99840,100,490.00,abc1234,3,2 cores,\n"
        "ppo_lstm,CartPole-v1__former-defaults,1,99840,100,400.00,abc1234,3,2 cores,\n"
    )
    (tmp_path / "throughput.csv").write_bytes((report.RESULTS / "throughput.csv").read_bytes())
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    seeds = "480.00, 500.00, 20.00 | 490.00 ± 10.00 (2 of 3 seeds) | 499.50 ± 0.50 | 490.04 ± 6.12 (CleanRL) |"
    assert seeds in report.page()
    highest = report.table_of_highest(report.read("summary.csv")).splitlines()[2:]
    assert [line.rpartition(" | ")[0] for line in highest] == [
        "| `ppo_lstm.py`, CartPole-v1 | 1 | 490.00 |  | 500",
        "| `ppo_lstm.py`, CartPole-v1 | 1 | 490.00 |  | 402 ± 52",
    ]
    assert "| 0.5M | 2 | 490.0 | 499.5 | 490.0 |" in report.table_of_scripts()


def test_speeds_are_those_of_the_fastest_machine():
    """Catches: a table of a machine that is ahead in one setting only, of several machines, or of no GPU."""
    report = importlib.import_module("report")
    speeds = dict(a=[1, 2, 9], b=[3, 3, 3], c=[2, 1, 1])
    rows = [
        dict(task=str(task), machine=machine, ours=str(speed), device="cpu")
        for machine, of_tasks in speeds.items()
        for task, speed in enumerate(of_tasks)
    ]
    rows.append(dict(task="0", machine="a, H100", ours="99", device="cuda"))
    names = lambda rows: " ".join(row["machine"] for row in rows)
    assert report.of_fastest(rows, names, lambda row: float(row["ours"])) == "b:\n\nb b b\na, H100:\n\na, H100"


def test_a_comparison_is_of_the_same_seeds_and_steps(monkeypatch, tmp_path):
    """Of two results one would count a seed more than the other, or what a run learned later."""
    report = importlib.import_module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    header = "seed,global_step,episodic_return,minutes\n"
    for name, seeds in dict(one="12", another="123").items():
        rows = [f"{seed},{step},{value},1\n" for seed in seeds for step, value in [(400_000, 99), (700_000, 99)]]
        rows += [f"{seed},{step},{10 * int(seed)},1\n" for seed in seeds for step in (400_001, 500_000)]
        (tmp_path / f"ppo__{name}.csv").write_text(header + "".join(rows))
    lines = report.table_of_ends("ppo", ["one", "another"], (["1", "2"], 500_000)).splitlines()
    assert [line.split(" | ", 1)[1] for line in lines[2:]] == ["1, 2 | 10.00, 20.00 | 15.00 ± 5.00 |"] * 2


def test_the_front_page_tells_the_speed_that_was_measured():
    """Catches: a claim of the best task, or of a faster machine than others that were measured."""
    rows = importlib.import_module("report").read("throughput.csv")
    ratios = [float(row["ratio"]) for row in rows if row["ratio"]]
    claim = f"{min(ratios):.1f} to {max(ratios):.0f} times as fast as Stable-Baselines3"
    assert claim in " ".join((ROOT / "README.md").read_text().split())


def test_the_front_page_is_short():
    """The README grew until nobody reads it; docs/ is there for the rest."""
    lines = README.read_text().count("\n")
    assert lines <= 130, f"README.md has {lines} lines, at most 130: move something to docs/"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_scripts_exist(page):
    """A file was renamed and a page still names it."""
    text = page.read_text()
    links = {link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link}
    assert not {link for link in links if not (page.parent / link).exists()}
    named = set(re.findall(r"\b((?:ppo(?!_from_)\w*|(?:benchmark|tests)/\w+)\.py)\b", text))  # not of a run's folder
    assert not {name for name in named if not (ROOT / name).exists()}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "howto.md"], ids=lambda page: page.name)
def test_flags_exist(page):
    """A page advertises a flag that no script has."""
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", page.read_text()))
    sources = "".join(path.read_text() for path in [*ROOT.glob("ppo*.py"), *ROOT.glob("benchmark/*.py")])
    unknown = {f for f in flags - OTHERS if f.removeprefix("no-").replace("-", "_") not in sources and f not in sources}
    assert not unknown


if __name__ == "__main__":
    page = ROOT / "docs" / "details.md"
    start, end = "<!-- details -->\n", "<!-- /details -->\n"
    text = page.read_text()
    head, tail = text.split(start)[0], text.split(end)[1]
    page.write_text(head + start + table() + end + tail)


def test_each_file_of_tests_is_in_the_page_on_them():
    """Catches: a file of tests that one finds by chance only."""
    text = (ROOT / "tests" / "README.md").read_text()
    there = {path.name for path in (ROOT / "tests").glob("test_*.py")}
    assert set(re.findall(r"\]\((test_\w+\.py)\)", text)) == there
