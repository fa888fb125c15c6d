"""checkpoint.pt and best.pt: what is in them, that a failure never tears them, and that a bad one is refused."""

import contextlib
import importlib
import math
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FOUR_SCRIPTS, same_parameters, small_args
from faulty_envs import Stop, crash_at

import ppo


def load(run_dir: Path, name: str = "checkpoint.pt") -> dict:
    return torch.load(run_dir / name, weights_only=True)


def is_plain(value) -> bool:
    """Whether a value is made of numbers, strings, tensors, lists and dicts alone."""
    if isinstance(value, dict):
        return all(is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor)


def longer(run_dir: Path, iterations: int = 1) -> ppo.Args:
    """The arguments with which a small run goes on for some more iterations."""
    args = ppo.saved_args(run_dir)
    return ppo.saved_args(run_dir, total_timesteps=args.total_timesteps + iterations * args.batch_size)


@pytest.fixture
def run_dir() -> Path:
    """The folder of a small run."""
    return ppo.train(small_args(ppo, seed=7))


def test_contents(script):
    """Catches: a checkpoint that lacks a part of the run, or that needs code to be loaded."""
    args = small_args(script, seed=7)
    state = load(script.train(args))
    assert state.keys() >= {"agent", "optimizer", "args", "iteration", "global_step", "kept"}
    assert is_plain(state)
    assert script.Args(**state["args"]) == args
    assert all(value is None or type(value) in (bool, int, float, str) for value in state["args"].values())
    assert (state["iteration"], state["global_step"]) == (4, args.total_timesteps)
    envs = script.make_envs(args, 1)
    assert state["agent"].keys() == script.Agent(envs, args).state_dict().keys()
    envs.close()
    assert len(state["optimizer"]["state"]) > 0
    assert all(len(episode) == 2 for episode in state["kept"]["recent"])
    assert len(state["kept"]["recent"]) > 0


def test_schedule(script, monkeypatch):
    """Catches: no checkpoint before the first iteration or after the last, and one at each iteration or at none."""
    saved, save = [], script.Run.save

    def spy(run, agent, optimizer):
        save(run, agent, optimizer)
        state = load(run.folder)
        saved.append((state["iteration"], state["global_step"]))

    monkeypatch.setattr(script.Run, "save", spy)
    args = small_args(script, checkpoint_every=3)
    script.train(args)
    assert saved == [(k, k * args.batch_size) for k in (0, 3, 4)]


def set_returns(monkeypatch, *means: float) -> None:
    """Have 100 episodes end in each further iteration, of the mean return given."""
    log, means = ppo.Run.log, iter(means)

    def log_these(run, *args):
        run.episodes = [(next(means), 1)] * 100
        log(run, *args)

    monkeypatch.setattr(ppo.Run, "log", log_these)


def test_the_best_is_kept(monkeypatch, launcher):
    """Catches: a best.pt that holds the last agent, forgets at a resume how good it is, or cannot be played."""
    args = small_args(ppo, checkpoint_every=1)
    set_returns(monkeypatch, 1.0, 3.0, 2.0, 2.5, 2.9, 3.1)
    run_dir = ppo.train(args)
    best, last = load(run_dir, "best.pt"), load(run_dir)
    assert (best["iteration"], best["kept"]["best_score"]) == (2, 3.0)
    assert (last["iteration"], last["kept"]["best_score"]) == (4, 3.0)
    assert last["kept"]["score"] == 2.5
    assert not torch.equal(best["agent"]["actor.0.weight"], last["agent"]["actor.0.weight"])
    ppo.train(longer(run_dir))
    assert load(run_dir, "best.pt")["iteration"] == 2
    ppo.train(longer(run_dir))
    assert load(run_dir, "best.pt")["iteration"] == load(run_dir)["iteration"] == 6

    torch.save(best, run_dir / "best.pt")  # it alone is there to be played
    (run_dir / "checkpoint.pt").unlink()
    process = launcher.run("ppo", "--evaluate", str(run_dir / "best.pt"), "--eval-episodes", "3")
    returns = ppo.evaluate(run_dir / "best.pt", 3)
    assert process.stdout.startswith(f"evaluation: mean return {np.mean(returns):.2f} "), process.stderr
    assert process.stdout.endswith(" over 3 of 3 episodes\n")


def test_the_best_is_the_latest_before_there_are_100_episodes(run_dir):
    """Catches: a best.pt that a few lucky first episodes keep for ever, or none in a short run."""
    best = load(run_dir, "best.pt")
    assert best["iteration"] == 4
    assert len(best["kept"]["recent"]) < 100
    assert best["kept"]["best_score"] == -math.inf


def test_a_resume_from_the_best(monkeypatch, capsys):
    """Catches: --resume RUN/best.pt that goes on from the last checkpoint all the same, or in another folder."""
    args = small_args(ppo, checkpoint_every=1)
    set_returns(monkeypatch, 1.0, 3.0, 2.0, 2.5, 2.0)
    run_dir = ppo.train(args)
    with contextlib.chdir(run_dir):
        assert ppo.train(ppo.saved_args("best.pt", total_timesteps=3 * args.batch_size)) == run_dir
    assert (
        f"from step {2 * args.batch_size:,} of {3 * args.batch_size:,}: {run_dir} on cpu\n" in capsys.readouterr().out
    )
    assert load(run_dir)["iteration"] == 3
    assert load(run_dir, "best.pt")["iteration"] == 2


def test_the_log_is_never_behind_the_checkpoint(monkeypatch):
    """Catches: a gap in the curve of a run that is killed after a checkpoint, with the log's last lines in memory."""
    events = []

    def spy(owner, name, event):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(event), function(*args))[1])

    spy(ppo.SummaryWriter, "add_scalar", "log")
    spy(ppo.SummaryWriter, "flush", "flush")
    spy(os, "replace", "save")  # from here on the checkpoint is there
    ppo.train(small_args(ppo, checkpoint_every=1))
    text = " ".join(events).replace("save save", "save")  # best.pt, too
    saves = text.split().count("save")
    assert saves == text.count("flush save") == 5
    assert "log" in events


def test_the_file_is_whole_before_it_is_renamed(run_dir, monkeypatch):
    """Catches: a checkpoint written over the last one, which a kill would tear, or moved across file systems."""
    replaced, replace = [], os.replace

    def spy(source, target):
        assert Path(source).parent == Path(target).parent == run_dir
        whole = torch.load(source, weights_only=True)
        replace(source, target)
        replaced.append((Path(target).name, whole["iteration"], os.stat(target).st_ino))

    monkeypatch.setattr(os, "replace", spy)
    ppo.train(longer(run_dir))
    files = [(name, os.stat(run_dir / name).st_ino) for name in ("checkpoint.pt", "best.pt")]
    assert [(name, iteration) for name, iteration, _ in replaced] == [(n, k) for k in (4, 5) for n, _ in files]
    assert [(name, inode) for name, _, inode in replaced[2:]] == files


@pytest.mark.parametrize("failure", ["open", "write", "replace"])
def test_a_failed_write_keeps_the_checkpoint_before(run_dir, monkeypatch, failure):
    """Catches: a full or read-only disk that costs the run's checkpoint, or that is passed over in silence."""

    def fail(*args):
        raise OSError("no space left")

    before = (run_dir / "checkpoint.pt").read_bytes()
    if failure == "open":
        (run_dir / "checkpoint.tmp").mkdir()
    elif failure == "write":
        (run_dir / "checkpoint.tmp").symlink_to("/dev/full")
    else:
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((OSError, RuntimeError)):
        ppo.train(longer(run_dir))
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    assert ppo.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 4


def test_what_cannot_be_read_back_replaces_nothing(run_dir, monkeypatch):
    """Catches: a path kept by an edited script, whose checkpoints cannot be read again."""
    save, before = ppo.Run.save, (run_dir / "checkpoint.pt").read_bytes()

    def save_a_path_too(run, *args):
        run.kept["mine"] = run_dir
        save(run, *args)

    monkeypatch.setattr(ppo.Run, "save", save_a_path_too)
    with pytest.raises(pickle.UnpicklingError):
        ppo.train(longer(run_dir))
    assert (run_dir / "checkpoint.pt").read_bytes() == before


def test_what_a_kill_leaves_of_a_write_is_ignored(run_dir):
    """Catches: half a file that is taken for the checkpoint, or that blocks the next one."""
    shutil.copytree(run_dir, "torn")
    torn = Path("torn")
    (torn / "checkpoint.tmp").write_bytes(b"half a file")
    for folder in (run_dir, torn):
        ppo.train(longer(folder))
    assert same_parameters(run_dir, torn)
    assert not (torn / "checkpoint.tmp").exists()
    (torn / "checkpoint.pt").rename(torn / "checkpoint.tmp")
    with pytest.raises(ppo.UserError, match=r"torn/checkpoint\.pt is no checkpoint.*FileNotFoundError"):
        ppo.saved_args(torn)


class Bomb:
    """An object that makes the file `exploded` when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def write_text_over(run_dir: Path) -> None:
    (run_dir / "checkpoint.pt").write_bytes(bytes(range(256)) * 100)


def empty(run_dir: Path) -> None:
    (run_dir / "checkpoint.pt").write_bytes(b"")


def cut(run_dir: Path) -> None:
    data = (run_dir / "checkpoint.pt").read_bytes()
    (run_dir / "checkpoint.pt").write_bytes(data[: len(data) // 2])


def remove(run_dir: Path) -> None:
    (run_dir / "checkpoint.pt").unlink()


def make_folder(run_dir: Path) -> None:
    (run_dir / "checkpoint.pt").unlink()
    (run_dir / "checkpoint.pt").mkdir()


def plant_pickle(run_dir: Path) -> None:
    (run_dir / "checkpoint.pt").write_bytes(pickle.dumps(Bomb()))


def plant_bomb(run_dir: Path) -> None:
    torch.save(load(run_dir) | dict(kept=Bomb()), run_dir / "checkpoint.pt")


def make_list(run_dir: Path) -> None:
    torch.save([1, 2, 3], run_dir / "checkpoint.pt")


def keep_agent_only(run_dir: Path) -> None:
    torch.save(dict(agent=load(run_dir)["agent"]), run_dir / "checkpoint.pt")


def drop_kept(run_dir: Path) -> None:
    state = load(run_dir)
    del state["kept"]
    torch.save(state, run_dir / "checkpoint.pt")


def add_argument(run_dir: Path) -> None:
    state = load(run_dir)
    state["args"]["of_another_program"] = 1
    torch.save(state, run_dir / "checkpoint.pt")


def spoil_argument(run_dir: Path) -> None:
    state = load(run_dir)
    state["args"]["num_envs"] = 0
    torch.save(state, run_dir / "checkpoint.pt")


def mistype_argument(run_dir: Path) -> None:
    state = load(run_dir)
    state["args"]["num_steps"] = "many"
    torch.save(state, run_dir / "checkpoint.pt")


def change_network(run_dir: Path) -> None:
    state = load(run_dir)
    name = next(name for name, parameter in state["agent"].items() if parameter.ndim > 1)
    state["agent"][name] = torch.cat([state["agent"][name]] * 2)
    torch.save(state, run_dir / "checkpoint.pt")


def drop_layer(run_dir: Path) -> None:
    state = load(run_dir)
    state["agent"].popitem()
    torch.save(state, run_dir / "checkpoint.pt")


SPOIL = [write_text_over, empty, cut, remove, make_folder, plant_pickle, plant_bomb, make_list, keep_agent_only]
SPOIL += [add_argument, spoil_argument, mistype_argument, change_network, drop_layer, drop_kept]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    """The checkpoint of a small run."""
    with contextlib.chdir(tmp_path_factory.mktemp("good")):
        return (ppo.train(small_args(ppo)) / "checkpoint.pt").read_bytes()


@pytest.mark.parametrize("spoil", SPOIL)
def test_a_bad_checkpoint_is_refused(good, spoil):
    """Catches: a torn or foreign file that ends in a traceback, in training from scratch, or in a stranger's code."""
    folder = Path(spoil.__name__)
    folder.mkdir()
    (folder / "checkpoint.pt").write_bytes(good)
    spoil(folder)
    before = sorted(folder.iterdir())
    resume = lambda: ppo.train(small_args(ppo, resume=str(folder)))
    for attempt in (resume, lambda: ppo.evaluate(folder / "checkpoint.pt", 1)):
        if spoil is drop_kept and attempt is not resume:
            continue  # an evaluation does not need it
        with pytest.raises(ppo.UserError) as error:
            attempt()
        assert len(str(error.value).splitlines()) == 1
        assert re.search(rf"{folder}/checkpoint.pt\S* is no checkpoint of this script", str(error.value))
    assert sorted(folder.iterdir()) == before
    assert not Path("exploded").exists()


def test_the_bomb_is_live():
    """Catches: the test above proving nothing, for the planted code would run nowhere."""
    torch.save(dict(kept=Bomb()), "bomb.pt")
    torch.load("bomb.pt", weights_only=False)
    assert Path("exploded").exists()


def test_refused_from_the_command_line(launcher, run_dir):
    """Catches: a refusal that reaches the user as a traceback, or a shell script as success."""
    other_env = launcher.run("ppo", "--resume", str(run_dir), "--env-id", "Acrobot-v1")  # of another network
    plant_bomb(run_dir)
    for process in (other_env, *(launcher.run("ppo", flag, str(run_dir)) for flag in ("--resume", "--evaluate"))):
        assert process.returncode == 2
        assert process.stderr.startswith("error: ")
        assert process.stderr.count("\n") == 1
        assert not Path("exploded").exists()


def test_a_checkpoint_of_another_script(script, monkeypatch):
    """Catches: two scripts whose arguments are alike, and whose networks are then mixed up in a traceback."""
    for other_name in FOUR_SCRIPTS:
        if other_name == script.__name__:
            continue
        other = importlib.import_module(other_name)
        crash_at(monkeypatch, other, 1)
        with pytest.raises(Stop):
            other.train(small_args(other, exp_name=f"by_{other_name}"))
        (run_dir,) = Path("runs").glob(f"*__by_{other_name}__*")
        with pytest.raises(script.UserError, match="is no checkpoint of this script"):
            script.train(small_args(script, resume=str(run_dir)))
        with pytest.raises(script.UserError, match="is no checkpoint of this script"):
            script.evaluate(run_dir / "checkpoint.pt", 1)


def test_without_cuda_no_gpu_is_touched(monkeypatch):
    """Catches: --no-cuda that takes memory of a GPU all the same, or fails for one that is full."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"a GPU was touched by {name}"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    run_dir = ppo.train(small_args(ppo, cuda=False, eval_episodes=1))
    ppo.train(longer(run_dir))


def test_what_is_kept_goes_on(monkeypatch):
    """Catches: what an edited script keeps that begins anew at a resume; NumPy's numbers, which end the run."""
    log, begin, seen = ppo.Run.log, ppo.Run.begin, []

    def count(run, *args):
        seen.append((type(run.kept["number"]), float(run.kept["number"]), run.kept["tensor"].tolist()))
        run.kept["number"] = np.clip(run.kept["number"] + 1, 0, np.float64(100))
        run.kept["tensor"] = run.kept["tensor"] + 1
        log(run, *args)

    def begin_with_two(run, *args):
        run.kept |= dict(number=0.5, tensor=torch.zeros(2))
        begin(run, *args)

    monkeypatch.setattr(ppo.Run, "log", count)
    monkeypatch.setattr(ppo.Run, "begin", begin_with_two)
    ppo.train(longer(ppo.train(small_args(ppo))))
    assert [number for _, number, _ in seen] == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert [tensor for *_, tensor in seen] == [[k, k] for k in range(5)]
    assert seen[-1][0] is float
