"""The README: its table of details points to the lines that cite them, its commands and links exist.

`python tests/test_readme.py` writes the table anew.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
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
    "cont 8": "rewards scaled by the discounted return's std",
    "cont 9": "clipped rewards",
    "lstm 1": "orthogonal LSTM weights, zero biases",
    "lstm 2": "initial states of zeros",
    "lstm 3": "states zeroed at episode starts",
    "lstm 4": "sequential minibatches",
    "lstm 5": "states rebuilt from the rollout's",
    "multi 1": "independent action components",
    "aux 1": "clip range annealing",
    "aux 3": "early stop by KL",
    "aux 4": "invalid action masks",
}
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
    """The README's table of details, from the scripts' own tags."""
    lines = ["| detail | what | where |", "| --- | --- | --- |"]
    for tag, what in DETAILS.items():
        name = HOMES.get(tag) or HOMES[tag.split()[0]]
        source = (ROOT / name).read_text().splitlines()
        cited = [number for number, line in enumerate(source, 1) if re.search(rf"\b{tag}\b", line)]
        where = ", ".join(f"[{name}:{number}]({name}#L{number})" for number in cited[:3])
        lines.append(f"| {tag} | {what} | {where} |")
    return "\n".join(lines) + "\n"


def test_table_of_details_points_to_the_lines():
    """A script was edited and the README's line numbers were not; or a detail is cited nowhere."""
    assert all(line.count("#L") for line in table().splitlines()[2:]), table()
    assert table() in README.read_text(), "run: python tests/test_readme.py"


def test_links_and_scripts_exist():
    """A file was renamed and the README still names it."""
    text = README.read_text()
    links = {link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link}
    named = set(re.findall(r"\b((?:benchmark/|tests/)?\w+\.py)\b", text))
    missing = {name for name in links | named if not (ROOT / name).exists()}
    assert not missing


def test_flags_exist():
    """The README advertises a flag that no script has."""
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", README.read_text()))
    sources = "".join(path.read_text() for path in [*ROOT.glob("ppo*.py"), *ROOT.glob("benchmark/*.py")])
    others = {"no-index", "logdir"}
    unknown = {f for f in flags - others if f.removeprefix("no-").replace("-", "_") not in sources and f not in sources}
    assert not unknown


if __name__ == "__main__":
    start, end = "<!-- details -->\n", "<!-- /details -->\n"
    text = README.read_text()
    head, tail = text.split(start)[0], text.split(end)[1]
    README.write_text(head + start + table() + end + tail)
    sys.stdout.write(table())
