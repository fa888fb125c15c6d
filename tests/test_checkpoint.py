"""checkpoint.pt: what is in it, that a failure never tears it, and that a bad one is refused in one sentence."""

import errno
import importlib
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PROBED, SCRIPTS, SMALL, flags, same_parameters, small_args
from faulty_envs import Stop, crash_at
from stand_in import stand_in


def load(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def is_plain(value) -> bool:
    """Whether a value is made of numbers, strings, tensors, lists and dicts alone."""
    if isinstance(value, dict):
        return all(is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor)


def longer(script) -> int:
    """The steps of a run of five iterations, one more than a small run has."""
    args = small_args(script)
    return args.total_timesteps + args.batch_size


@pytest.fixture
def run_dir(script) -> Path:
    """The folder of a small run."""
    return script.train(small_args(script, seed=7))


def test_contents(script, monkeypatch):
    """Catches: a checkpoint that lacks a part of the run, or that needs code to be loaded."""
    random_states, save = [], script.Run.save
    monkeypatch.setattr(script.Run, "save", lambda *args: (random_states.append(torch.get_rng_state()), save(*args))[1])
    args = small_args(script, seed=7)
    state = load(script.train(args))
    assert torch.equal(state["rng"]["cpu"], random_states[-1])  # where the run left it
    assert state.keys() >= {"agent", "optimizer", "args", "iteration", "global_step", "rng", "recent_returns"}
    assert is_plain(state)
    assert script.Args(**state["args"]) == args
    assert all(value is None or type(value) in (bool, int, float, str) for value in state["args"].values())
    assert (state["iteration"], state["global_step"]) == (4, args.total_timesteps)
    envs = script.make_envs(args, 1)
    assert state["agent"].keys() == script.Agent(envs, args).state_dict().keys()
    envs.close()
    assert len(state["optimizer"]["state"]) > 0


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


def test_the_log_is_never_behind_the_checkpoint(script, monkeypatch):
    """Catches: a gap in the curve of a run that is killed after a checkpoint, with the log's last lines in memory."""
    events = []

    def spy(owner, name, event):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(event), function(*args))[1])

    spy(script.SummaryWriter, "add_scalar", "log")
    spy(script.SummaryWriter, "flush", "flush")
    spy(os, "replace", "save")  # from here on the checkpoint is there
    script.train(small_args(script, checkpoint_every=1))
    saves = [index for index, event in enumerate(events) if event == "save"]
    assert len(saves) == 5
    assert "log" in events
    assert {events[index - 1] for index in saves} == {"flush"}


def test_the_file_is_on_disk_before_it_is_renamed(script, run_dir, monkeypatch):
    """Catches: a checkpoint that a power cut leaves empty, for its name was on the disk before its contents."""
    events, fsync, replace = [], os.fsync, os.replace

    def spy_fsync(fd):
        fsync(fd)
        events.append(("fsync", os.fstat(fd).st_ino, os.fstat(fd).st_size))

    def spy_replace(source, target):
        events.append(("replace", os.stat(source).st_ino, os.stat(source).st_size))
        assert Path(source).parent == Path(target).parent == run_dir
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    script.train(small_args(script, resume=str(run_dir)))
    whole = os.stat(run_dir / "checkpoint.pt")
    assert events == [("fsync", whole.st_ino, whole.st_size), ("replace", whole.st_ino, whole.st_size)]


@pytest.mark.parametrize("failure", ["open", "write", "fsync", "replace"])
def test_a_failed_write_keeps_the_checkpoint_before(script, run_dir, monkeypatch, failure):
    """Catches: a full or read-only disk that costs the run, or that is answered by a page of traceback."""

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = (run_dir / "checkpoint.pt").read_bytes()
    if failure == "open":
        (run_dir / "checkpoint.tmp").mkdir()
    elif failure == "write":
        (run_dir / "checkpoint.tmp").symlink_to("/dev/full")
    else:
        monkeypatch.setattr(os, failure, fail)
    with pytest.raises(SystemExit) as exit:
        script.train(small_args(script, resume=str(run_dir), total_timesteps=longer(script)))
    assert "checkpoint.pt" in exit.value.code
    assert "\n" not in exit.value.code
    assert failure == "open" or "No space left" in exit.value.code
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    assert script.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 4


def test_what_cannot_be_read_back_replaces_nothing(script, run_dir, monkeypatch):
    """Catches: a path, or a number of NumPy's, kept by an edited script, whose checkpoints cannot be read again."""
    save, before = script.Run.save, (run_dir / "checkpoint.pt").read_bytes()

    def save_a_path_too(run, *args):
        run.kept["mine"] = run_dir
        save(run, *args)

    monkeypatch.setattr(script.Run, "save", save_a_path_too)
    with pytest.raises(pickle.UnpicklingError):
        script.train(small_args(script, resume=str(run_dir), total_timesteps=longer(script)))
    assert (run_dir / "checkpoint.pt").read_bytes() == before


def test_a_log_that_cannot_be_written(script, run_dir, monkeypatch):
    """Catches: a resume in a folder that is read-only, answered by a traceback out of TensorBoard."""

    def fail(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(run_dir))

    monkeypatch.setattr(script, "SummaryWriter", fail)
    before = (run_dir / "checkpoint.pt").read_bytes()
    with pytest.raises(script.UserError, match="Permission denied"):
        script.train(small_args(script, resume=str(run_dir), total_timesteps=longer(script)))
    assert (run_dir / "checkpoint.pt").read_bytes() == before


def test_what_a_kill_leaves_of_a_write_is_ignored(script, run_dir):
    """Catches: half a file that is taken for the checkpoint, or that blocks the next one."""
    shutil.copytree(run_dir, "torn")
    torn = Path("torn")
    (torn / "checkpoint.tmp").write_bytes(b"half a file")
    for folder in (run_dir, torn):
        script.train(small_args(script, resume=str(folder), total_timesteps=longer(script)))
    assert same_parameters(run_dir, torn)
    assert not (torn / "checkpoint.tmp").exists()
    (torn / "checkpoint.pt").rename(torn / "checkpoint.tmp")
    with pytest.raises(script.UserError, match=r"no torn/checkpoint\.pt"):
        script.load_checkpoint(torn / "checkpoint.pt")


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
    torch.save(load(run_dir) | dict(recent_returns=Bomb()), run_dir / "checkpoint.pt")


def make_list(run_dir: Path) -> None:
    torch.save([1, 2, 3], run_dir / "checkpoint.pt")


def keep_agent_only(run_dir: Path) -> None:
    torch.save(dict(agent=load(run_dir)["agent"]), run_dir / "checkpoint.pt")


def drop_rng(run_dir: Path) -> None:
    state = load(run_dir)
    del state["rng"]
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
SPOIL += [drop_rng, add_argument, spoil_argument, mistype_argument, change_network, drop_layer]


def assert_one_sentence(error: Exception) -> None:
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 400


def test_a_bad_checkpoint_is_refused(script, run_dir):
    """Catches: a torn or foreign file that ends in a traceback, in training from scratch, or in a stranger's code."""
    good = (run_dir / "checkpoint.pt").read_bytes()
    for spoil in SPOIL:
        folder = Path(spoil.__name__)
        folder.mkdir()
        (folder / "checkpoint.pt").write_bytes(good)
        spoil(folder)
        before = sorted(folder.iterdir())
        with pytest.raises(script.UserError) as resumed:
            script.train(small_args(script, resume=str(folder)))
        with pytest.raises(script.UserError) as evaluated:
            script.evaluate(folder / "checkpoint.pt", 1)
        for error in (resumed.value, evaluated.value):
            assert_one_sentence(error)
            assert spoil.__name__ in str(error)  # the path
        assert sorted(folder.iterdir()) == before
        assert not Path("exploded").exists()


def test_the_bomb_is_live(tmp_path):
    """Catches: the test above proving nothing, for the planted code would run nowhere."""
    torch.save(dict(recent_returns=Bomb()), "bomb.pt")
    torch.load("bomb.pt", weights_only=False)
    assert Path("exploded").exists()


def test_refused_from_the_command_line(script, launcher, run_dir):
    """Catches: a refusal that reaches the user as a traceback, or a shell script as success."""
    plant_bomb(run_dir)
    for flag in ("--resume", "--evaluate"):
        process = launcher.run(script.__name__, flag, str(run_dir))
        assert process.returncode == 2
        assert process.stderr.startswith("error: ")
        assert process.stderr.count("\n") == 1
        assert not Path("exploded").exists()


def test_a_checkpoint_of_another_script(script, monkeypatch):
    """Catches: two scripts whose arguments are alike, and whose networks are then mixed up in a traceback."""
    for other_name in SCRIPTS:
        if other_name == script.__name__:
            continue
        other = importlib.import_module(other_name)
        crash_at(monkeypatch, other, 1)
        with pytest.raises(Stop):
            other.train(small_args(other, exp_name=f"by_{other_name}"))
        (run_dir,) = Path("runs").glob(f"*__by_{other_name}__*")
        with pytest.raises(script.UserError) as resumed:
            script.train(small_args(script, resume=str(run_dir)))
        with pytest.raises(script.UserError) as evaluated:
            script.evaluate(run_dir / "checkpoint.pt", 1)
        for error in (resumed.value, evaluated.value):
            assert_one_sentence(error)


# another env that the script can train on
OTHER_ENV = {"ppo": "Acrobot-v1", "ppo_atari": "PongNoFrameskip-v4", "ppo_atari_lstm": "PongNoFrameskip-v4"}
OTHER_ENV |= {"ppo_continuous_action": "MountainCarContinuous-v0", "ppo_lstm": "Acrobot-v1"}
OTHER_ENV |= {"ppo_multidiscrete": "probe_envs:EndlessMultiDiscrete-v0"}


def test_another_env_is_refused(script, launcher, run_dir):
    """Catches: a resumed run whose curve and checkpoint mix two envs."""
    before = sorted(run_dir.iterdir())
    argv = ["--resume", str(run_dir), *flags(env_id=OTHER_ENV[script.__name__])]
    process = launcher.run(script.__name__, *argv)
    assert process.returncode == 2
    assert process.stderr.startswith("error: ")
    assert process.stderr.count("\n") == 1
    assert sorted(run_dir.iterdir()) == before


def test_another_env_of_the_same_shape_is_refused(probed_script):
    """Catches: a check of the network alone, which fits many envs."""
    actions, _ = PROBED[probed_script.__name__]
    first, other = (f"probe_envs:{name}{actions}-v0" for name in ("ConstantReward", "ObservationValue"))
    run_dir = probed_script.train(small_args(probed_script, env_id=first))
    with pytest.raises(probed_script.UserError, match="ConstantReward"):
        probed_script.train(small_args(probed_script, env_id=other, resume=str(run_dir)))


def test_a_folder_that_cannot_be_made(script, launcher):
    """Catches: a traceback where the disk is read-only or `runs` is no folder."""
    Path("runs").write_text("not a folder")
    process = launcher.run(script.__name__, *flags(**SMALL[script.__name__]))
    assert process.returncode == 2
    assert process.stderr.startswith("error: cannot write to runs/")
    assert process.stderr.count("\n") == 1
    assert os.listdir() == ["runs"]


def test_without_cuda_no_gpu_is_touched(script, monkeypatch):
    """Catches: --no-cuda that takes memory of a GPU all the same, or fails for one that is full."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"a GPU was touched by {name}"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)  # as on the command line, see below
    run_dir = script.train(small_args(script, cuda=False))
    script.train(script.Args(resume=str(run_dir), total_timesteps=2 * small_args(script).total_timesteps, cuda=False))


@pytest.mark.parametrize("cuda", [True, False])
def test_without_cuda_no_gpu_is_seen(launcher, script, cuda):
    """Catches: --no-cuda, and a GPU that Adam asks at each step whether it records a graph."""
    name = "CUDA_VISIBLE_DEVICES"
    code = f"import atexit, os; os.environ[{name!r}] = '5'; atexit.register(lambda: print(os.environ[{name!r}]))"
    process = launcher.run(script.__name__, *flags(**SMALL[script.__name__] | dict(cuda=cuda)), code=code)
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("\n5\n" if cuda else "\n\n")


def test_what_is_kept_goes_on(script, monkeypatch):
    """Catches: NumPy's numbers, which no checkpoint holds, that end a run; a tensor that changes its device."""
    log, seen = script.Run.log, []

    def count(run, *args):
        seen.append((type(run.kept["number"]), float(run.kept["number"]), run.kept["tensor"].device.type))
        run.kept["number"] = np.clip(run.kept["number"] + 1, 0, np.float64(100))
        run.kept["tensor"] = run.kept["tensor"] + 1
        log(run, *args)

    iterations = script.Run.iterations

    def begin(run, *args):
        run.kept.update(number=0.5, tensor=torch.zeros(2, device=run.device))
        return iterations(run, *args)

    monkeypatch.setattr(script.Run, "log", count)
    monkeypatch.setattr(script.Run, "iterations", begin)
    args = small_args(script)
    run_dir = script.train(args)
    with stand_in(monkeypatch):
        script.train(small_args(script, resume=str(run_dir), total_timesteps=args.total_timesteps + args.batch_size))
    assert [number for _, number, _ in seen] == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert seen[-1][0] is float
    assert [device for _, _, device in seen] == ["cpu"] * 4 + ["cuda"]


def test_what_is_kept_takes_no_name_of_the_checkpoint(script, monkeypatch):
    """Catches: a second optimizer's state that is written, and read, as the first one's."""
    iterations = script.Run.iterations

    def begin(run, *args):
        run.kept["optimizer"] = {}
        return iterations(run, *args)

    monkeypatch.setattr(script.Run, "iterations", begin)
    with pytest.raises(script.UserError, match="optimizer"):
        script.train(small_args(script))
