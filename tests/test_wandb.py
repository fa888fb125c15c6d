"""--track, offline: the run's own file holds the history and the config; and wandb can never stop a run."""

import json
import re
import signal
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from conftest import SMALL, flags, read_scalars, small_args
from faulty_envs import Stop, crash_at, hook_envs
from wandb.proto import wandb_internal_pb2

import ppo


def records(path: Path):
    """The records of a .wandb file: a LevelDB log of protocol buffers, behind a header of 7 bytes."""
    data, offset, parts = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while offset + 7 <= len(data):
        room = -offset % 32768 or 32768  # records are cut at the ends of blocks
        if room < 7:
            offset += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def contents(path: Path) -> tuple[dict, dict]:
    """The config, and of each tag the (step, value) pairs."""
    config, history = {}, {}
    for record in records(path):
        for update in (record.run.config.update, record.config.update):
            config |= {item.key: json.loads(item.value_json) for item in update}
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for tag, value in row.items():
            history.setdefault(tag, []).append((row.get("global_step"), value))
    return config, history


def test_an_offline_run_holds_everything(launcher):
    """Catches: tags that only TensorBoard gets, rows sent twice, a config that is missing, a run that is not closed."""
    options = SMALL["ppo"] | dict(track=True, eval_episodes=1, capture_video=True, seed=5, wandb_tags="quick try")
    result = launcher.run("ppo", *flags(**options))
    assert result.returncode == 0, result.stderr
    (run_dir,) = Path("runs").glob("*__5__*")
    (file,) = (path for path in Path().rglob("run-*.wandb") if "latest-run" not in path.parts)
    config, history = contents(file)

    args = {name: config[name] for name in vars(ppo.Args())}
    assert args == vars(ppo.Args(**options))
    for tag, points in read_scalars(run_dir).items():
        ours = [(step, pytest.approx(value, rel=1e-5)) for step, value in points]
        # a row repeats the evaluation's value once it is known: the steps at which it was logged are a subset
        assert [point for point in history[tag] if point[0] in dict(points)] == ours, tag
    assert len(history["losses/value_loss"]) == 4
    assert [step for step, _ in history["eval/videos"]] == [0, 128]
    assert {path.name for path in run_dir.rglob("*.mp4")} == {"step_0.mp4", "step_128.mp4"}
    run = next(record.run for record in records(file) if record.HasField("run"))
    assert run.display_name == run_dir.name
    assert re.fullmatch("CartPole-v1__ppo__[0-9a-f]{8}", run.run_group)
    assert list(run.tags) == ["quick", "try"]
    metrics = [record.metric for record in records(file) if record.HasField("metric")]
    assert any((metric.glob_name, metric.step_metric) == ("*", "global_step") for metric in metrics)
    artifacts = [record.request.log_artifact.artifact for record in records(file)]
    artifacts += [record.artifact for record in records(file)]
    code = [entry for artifact in artifacts if artifact.type == "code" for entry in artifact.manifest.contents]
    assert {entry.path for entry in code} == {"ppo_from_0.py"}
    assert {entry.size for entry in code} == {Path(ppo.__file__).stat().st_size}
    assert any(record.HasField("exit") and record.exit.exit_code == 0 for record in records(file))
    # wandb mirrors the folder of the TensorBoard log: its own folder must not lie in there
    assert not [path for path in run_dir.rglob("*") if "wandb" in path.name]


def pretend(monkeypatch, **functions) -> None:
    """Replace wandb's functions: a run "abc" begins, and does nothing."""
    run = SimpleNamespace(id="abc", define_metric=lambda *_, **__: None, log_code=lambda _: None)
    for name in ("init", "finish", "log", "Video"):
        monkeypatch.setattr(wandb, name, functions.get(name, lambda *_, **__: None))
    monkeypatch.setattr(wandb, "run", run)
    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: init(**given) or run)


@pytest.mark.parametrize("failure", ["import", "init", "log"])
def test_a_failing_wandb_never_stops_a_run(monkeypatch, capsys, failure):
    """Catches: ten hours of training that end at a login prompt, at a package that is not there, at a film not sent."""

    def fail(*args, **kwargs):
        raise wandb.errors.UsageError("api_key not configured (no-tty)")

    if failure == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        pretend(monkeypatch, **{failure: fail})
    run_dir = ppo.train(small_args(ppo, track=True, capture_video=True, eval_episodes=1))
    assert ("wandb is off" in capsys.readouterr().err) == (failure != "log")
    assert len(read_scalars(run_dir)["losses/value_loss"]) == 4


def test_a_run_that_fails_is_closed_as_failed(monkeypatch):
    """Catches: a second training in the same process that logs into the run of the one that failed, as trials do."""
    calls = []
    pretend(monkeypatch, init=lambda **_: calls.append("init"), finish=lambda exit_code: calls.append(exit_code))
    crash_at(monkeypatch, ppo, 20)
    with pytest.raises(Stop):
        ppo.train(small_args(ppo, track=True))
    hook_envs(monkeypatch, ppo, None)
    ppo.train(small_args(ppo, track=True))
    assert calls == ["init", 1, "init", 0]


def test_a_resumed_run_goes_on_in_wandb(monkeypatch):
    """Catches: a second run in wandb for each pause, or one run that has steps twice since the first was killed;
    another project or team; films that are sent again."""
    calls, logged = [], []
    pretend(monkeypatch, init=lambda **given: calls.append(given), log=logged.append, Video=Path)
    options = dict(track=True, wandb_project_name="mine", wandb_entity="us", wandb_tags="a b")
    options |= dict(checkpoint_every=2, eval_every=2, eval_episodes=1)
    crash_at(monkeypatch, ppo, 3 * SMALL["ppo"]["num_steps"] + 3)  # in the fourth iteration, so the third is not saved
    with pytest.raises(Stop):
        ppo.train(small_args(ppo, **options))
    hook_envs(monkeypatch, ppo, None)
    (run_dir,) = Path("runs").absolute().iterdir()
    signals = []
    monkeypatch.setattr(ppo, "SIGNALS", signals)
    hook_envs(monkeypatch, ppo, lambda count, _: signals.append(signal.SIGTERM) if count == 3 else None)
    with pytest.raises(SystemExit):
        ppo.train(ppo.saved_args(run_dir))
    signals.clear()
    hook_envs(monkeypatch, ppo, None)
    assert logged == []  # no films
    ppo.train(ppo.saved_args(run_dir, total_timesteps=192, capture_video=True))
    assert [(call["id"], call["resume"]) for call in calls] == [(None, "allow"), (None, "allow"), ("abc", "allow")]
    for call in calls:
        assert (call["project"], call["entity"], call["name"]) == ("mine", "us", run_dir.name)
        assert call["tags"] == ["a", "b"]
    assert [(row["global_step"], row["eval/videos"]) for row in logged] == [
        (step, run_dir / f"videos/step_{step}.mp4") for step in (96, 128, 192)
    ]
    assert all(film.exists() for film in (row["eval/videos"] for row in logged))


def test_runs_of_one_group_differ_in_their_seeds_alone(monkeypatch):
    """Catches: a mean over seeds, as wandb draws it for a group, that is one over settings."""
    groups = []
    pretend(monkeypatch, init=lambda **given: groups.append(given["group"]))
    for changes in (
        {},
        dict(seed=2, checkpoint_every=1),
        dict(gamma=0.9),
        dict(env_kwargs='{"sutton_barto_reward": true}'),
    ):
        ppo.train(small_args(ppo, track=True, **changes))
    first, second, *others = groups
    assert first == second
    assert len({first, *others}) == 3
