"""--resume: a run goes on where its checkpoint was, as planned; with --exact-resume as if it had never stopped."""

import itertools
import math
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import FOLD_SCRIPTS, SMALL, flags, read_scalars, small_args
from faulty_envs import Stop, crash_at, hook_envs
from launcher import wait_until

import ppo


def load(run_dir: Path) -> dict:
    """A run's checkpoint, but for the name by which the run was resumed."""
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    del state["args"]["resume"]
    return state


def same(ours, theirs) -> bool:
    """Whether two values of a checkpoint are the same, bit for bit."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    return type(ours) is type(theirs) and ours == theirs


def assert_same_end(run_dir: Path, other_dir: Path) -> None:
    """Both runs ended in the same state, whatever their folders' names, and logged the same."""
    ours, theirs = load(run_dir), load(other_dir)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not same(ours[key], theirs[key])] == []
    ours, theirs = read_scalars(run_dir), read_scalars(other_dir)
    for scalars in (ours, theirs):
        del scalars["charts/SPS"]
    assert ours == theirs


def crash(monkeypatch, script, step: int, **changes) -> Path:
    """Run the script until it crashes in the given step of its rollouts, and return its folder."""
    before = set(Path("runs").absolute().glob("*"))
    crash_at(monkeypatch, script, step)
    with pytest.raises(Stop):
        script.train(small_args(script, **changes))
    hook_envs(monkeypatch, script, None)
    run_dirs = set(Path("runs").absolute().glob("*")) - before
    return run_dirs.pop() if run_dirs else Path(changes["resume"])


def in_iteration(script, iteration: int) -> int:
    """A step in the midst of an iteration."""
    num_steps = small_args(script).num_steps
    return (iteration - 1) * num_steps + num_steps // 2


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_resumed_twice_is_bit_identical(script, monkeypatch):
    """Catches: a resumed run that depends on anything but its checkpoint."""
    run_dir = crash(monkeypatch, script, in_iteration(script, 3), checkpoint_every=2)
    assert load(run_dir)["iteration"] == 2
    shutil.copytree(run_dir, "again")
    first = script.train(small_args(script, checkpoint_every=2, resume=str(run_dir)))
    torch.rand(5)
    second = script.train(small_args(script, checkpoint_every=2, resume="again"))
    assert (first, second) == (run_dir, Path("again").absolute())
    assert load(first)["iteration"] == 4
    assert_same_end(first, second)


def test_exact_resume(script, monkeypatch):
    """Catches: any state that the checkpoint lacks: a random stream, Adam's moments, statistics, the envs' seeds."""
    options = dict(exact_resume=True, checkpoint_every=2)
    options["total_timesteps"] = 5 * small_args(script).batch_size
    plain = script.train(small_args(script, **options))
    run_dir = crash(monkeypatch, script, in_iteration(script, 3), **options)
    crash(monkeypatch, script, in_iteration(script, 1), resume=str(run_dir), **options)
    assert load(run_dir)["iteration"] == 2
    script.train(small_args(script, resume=str(run_dir), **options))
    assert_same_end(run_dir, plain)


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_without_exact_resume_the_episodes_go_on(script, monkeypatch):
    """Catches: envs that are restarted at each checkpoint though nobody asked for it, or twice where somebody did."""
    resets, step = [], script.gym.vector.VectorWrapper.reset

    def spy(envs, *args, **kwargs):
        if type(envs).__name__ == "HookedEnvs":
            resets.append(kwargs.get("seed"))
        return step(envs, *args, **kwargs)

    monkeypatch.setattr(script.gym.vector.VectorWrapper, "reset", spy)
    hook_envs(monkeypatch, script, lambda count, transition: None)
    args = small_args(script, checkpoint_every=2)
    seeds = [script.env_seeds(args, args.num_envs, script.TRAINING, k) for k in (0, 2)]
    script.train(args)
    assert resets == seeds[:1]
    resets.clear()
    script.train(small_args(script, checkpoint_every=2, exact_resume=True))
    assert resets == seeds  # once at the start, and after a checkpoint that an iteration follows


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_resumed_envs_are_seeded_anew(script, monkeypatch):
    """Catches: a resumed run that plays the first episodes again, or envs without a seed."""
    run_dir = crash(monkeypatch, script, in_iteration(script, 3), checkpoint_every=2)
    seeds, make_envs = [], script.make_envs

    def spy(*args):
        envs = make_envs(*args)
        reset = envs.reset

        def seeded_reset(*, seed=None, options=None):
            seeds.append(seed)
            return reset(seed=seed, options=options)

        envs.reset = seeded_reset
        return envs

    monkeypatch.setattr(script, "make_envs", spy)
    args = small_args(script, checkpoint_every=2, resume=str(run_dir))
    script.train(args)
    assert seeds[0] == script.env_seeds(args, args.num_envs, script.TRAINING, 2)
    assert not set(seeds[0]) & set(script.env_seeds(args, args.num_envs, script.TRAINING, 0))


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_the_log_goes_on_without_gap_or_overlap(script, monkeypatch):
    """Catches: steps that are logged twice, or missing, after a crash between two checkpoints."""
    total = 7 * small_args(script).batch_size
    options = dict(total_timesteps=total, checkpoint_every=2)
    run_dir = crash(monkeypatch, script, in_iteration(script, 4), **options)  # checkpoint 2, logged 3
    before = read_scalars(run_dir)
    crash(monkeypatch, script, in_iteration(script, 4), resume=str(run_dir), **options)  # checkpoint 4, logged 5
    script.train(small_args(script, resume=str(run_dir), **options))
    batch_size, scalars = small_args(script).batch_size, read_scalars(run_dir)
    assert scalars.keys() >= before.keys()
    for tag, points in scalars.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), tag
        if "episodic" not in tag and "mean_return" not in tag:  # these only where an episode ended
            assert steps == list(range(batch_size, total + 1, batch_size)), tag
        # what was logged before the checkpoint is still there
        kept = [point for point in before.get(tag, []) if point[0] <= 2 * batch_size]
        assert points[: len(kept)] == kept, tag
    plan = [(k * batch_size, small_args(script).learning_rate * (1 - (k - 1) / 7)) for k in range(1, 8)]
    assert scalars["charts/learning_rate"] == [(step, pytest.approx(rate)) for step, rate in plan]


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_recent_episodes_go_on(script, monkeypatch):
    """Catches: a mean of the last 100 returns or lengths that begins anew, and jumps, at a resume."""
    run_dir = crash(monkeypatch, script, in_iteration(script, 3), checkpoint_every=2)
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    state["kept"]["recent"] = [(-5000.0, 3), (7.25, 4)]
    torch.save(state, run_dir / "checkpoint.pt")
    script.train(script.saved_args(run_dir))
    recent = load(run_dir)["kept"]["recent"]
    assert recent[:2] == [(-5000.0, 3), (7.25, 4)]
    step, mean_return = read_scalars(run_dir)["charts/mean_return_100"][-1]
    assert step > state["global_step"]
    assert mean_return == pytest.approx(sum(episode[0] for episode in recent) / len(recent))


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_a_resume_with_another_batch_ends_within_the_total(script):
    """Catches: iterations done that are rounded down, so that the last one goes past the steps asked for."""
    args = small_args(script)
    run_dir = script.train(args)
    num_steps = 3 * args.num_steps  # 128 steps done are not a multiple of the new batch
    changes = dict(num_steps=num_steps, num_minibatches=args.num_minibatches)
    batch_size = num_steps * args.num_envs
    assert batch_size < args.total_timesteps < 2 * batch_size
    for total in (2 * batch_size, args.total_timesteps + 3 * batch_size):  # no iteration fits in; some do
        before = load(run_dir)["global_step"]
        script.train(script.saved_args(run_dir, total_timesteps=total, **changes))
        done = load(run_dir)["global_step"] - before
        # of the new plan's iterations those are left that begin after the steps done
        assert done == (total // batch_size - math.ceil(before / batch_size)) * batch_size
        assert before + done <= total


def test_arguments_come_from_the_checkpoint_and_the_command_line(launcher):
    """Catches: a resume with default arguments, one that ignores those given anew, a run that cannot be extended.

    Also one that takes a value for not given, since it is the script's default.
    """
    args = small_args(ppo, seed=7, gamma=0.9, gae_lambda=0.5, clip_vloss=False)
    run_dir = ppo.train(args)
    larger, minibatches = 6 * args.batch_size, 2 * args.num_minibatches
    given = dict(total_timesteps=larger, num_minibatches=minibatches, gamma=0.99, clip_vloss=True)
    assert {name: getattr(ppo.Args(), name) for name in ("gamma", "clip_vloss")} == dict(gamma=0.99, clip_vloss=True)
    expected = small_args(ppo, seed=7, gae_lambda=0.5, **given, resume=str(run_dir))
    assert ppo.saved_args(run_dir, **given) == expected
    assert ppo.saved_args(run_dir / "checkpoint.pt", **given) == replace(expected, resume=f"{run_dir}/checkpoint.pt")

    process = launcher.run("ppo", "--resume", str(run_dir), *flags(**given))
    assert process.returncode == 0, process.stderr
    state = load(run_dir)
    assert ppo.Args(**state["args"]) == replace(expected, resume=None)
    assert (state["iteration"], state["global_step"]) == (6, larger)
    rates = [(step, rate) for step, rate in read_scalars(run_dir)["charts/learning_rate"] if step > 4 * args.batch_size]
    parts = {5: 2 / 6, 6: 1 / 6}  # of the new plan
    assert rates == [(k * args.batch_size, pytest.approx(args.learning_rate * part)) for k, part in parts.items()]
    assert list(Path("runs").absolute().iterdir()) == [run_dir]


def test_arguments_from_python_are_what_they_say():
    """Catches: Args whose defaults are silently replaced by what the run had; saved_args that forgets the changes."""
    args = small_args(ppo, gamma=0.9)
    run_dir = ppo.train(args)
    more = dict(total_timesteps=2 * args.total_timesteps)
    for resumed, gamma in ((ppo.saved_args(run_dir, **more), 0.9), (small_args(ppo, resume=str(run_dir)), 0.99)):
        ppo.train(resumed)
        assert load(run_dir)["args"]["gamma"] == gamma
        assert load(run_dir)["args"]["total_timesteps"] == resumed.total_timesteps


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_a_finished_run_stays_finished(script):
    """Catches: a resume that trains past the planned end, or that spoils what is there."""
    run_dir = script.train(small_args(script))
    before, scalars = load(run_dir), read_scalars(run_dir)
    script.train(script.saved_args(run_dir))
    after = load(run_dir)
    for state in (before, after):
        for group in state["optimizer"]["param_groups"]:
            del group["lr"]  # which an iteration sets
    assert same(after, before)
    assert read_scalars(run_dir) == scalars


def test_kill_9_at_random_moments(launcher):
    """Catches: a torn checkpoint, progress that is lost, a log that overlaps, and any state that a kill loses."""
    rng = random.Random(1)
    options = SMALL["ppo"] | dict(exact_resume=True, checkpoint_every=2)
    options["total_timesteps"] = 40 * small_args(ppo).batch_size  # enough to be killed three times on the way
    plain = ppo.train(ppo.Args(**options))

    argv, checkpoint, steps = flags(**options), None, [0]

    def wait_for_the_next_checkpoint(process):
        version = lambda: (checkpoint.stat().st_ino, checkpoint.stat().st_mtime_ns)
        last = version()
        wait_until(lambda: version() != last or not process.running())

    for attempt in range(3):
        process = launcher.start("ppo", *argv)
        if attempt == 0:
            wait_until(lambda: len(list(Path("runs").glob("*/checkpoint.pt"))) == 2)
            (run_dir,) = set(Path("runs").absolute().iterdir()) - {plain}
            argv, checkpoint = ["--resume", str(run_dir)], run_dir / "checkpoint.pt"
        else:
            wait_for_the_next_checkpoint(process)  # the one that it has resumed from, written again
        for _ in range(rng.choice([1, 1, 2])):
            wait_for_the_next_checkpoint(process)
        time.sleep(rng.uniform(0, 0.05))  # and some time into what comes then
        process.send(signal.SIGKILL)
        assert process.wait() in (-signal.SIGKILL, 0), process.stderr
        steps.append(load(run_dir)["global_step"])  # raises if the file is torn
    assert steps == sorted(steps)
    assert 0 < steps[1] < options["total_timesteps"], "the first kill came too late to test anything"
    process = launcher.run("ppo", *argv)
    assert process.returncode == 0, process.stderr
    assert_same_end(run_dir, plain)


def test_speed_and_evaluations_after_a_resume_are_its_own(monkeypatch):
    """Catches: a speed that counts the steps before the resume; an evaluation that each resume plays again."""
    played, evaluate = [], ppo.evaluate
    monkeypatch.setattr(ppo, "evaluate", lambda *given: (played.append(given), evaluate(*given))[1])
    args = small_args(ppo, checkpoint_every=2, eval_every=2, eval_episodes=1)
    run_dir = ppo.train(args)
    assert len(played) == 2
    seconds = itertools.count()
    monkeypatch.setattr(ppo.time, "perf_counter", lambda: float(next(seconds)))
    ppo.train(ppo.saved_args(run_dir, total_timesteps=2 * args.total_timesteps))
    assert len(played) == 4
    scalars = read_scalars(run_dir)
    assert 0 < scalars["charts/SPS"][4][1] <= args.batch_size
    assert [step for step, _ in scalars["eval/episodic_return"]] == [k * args.batch_size for k in (2, 4, 6, 8)]


def test_a_run_that_is_complete_is_left_as_it_is(capsys):
    """Catches: a resume with nothing left to do that says that no episode has ended."""
    run_dir = ppo.train(small_args(ppo))
    last = capsys.readouterr().out.splitlines()[-1]
    assert "mean return" in last
    assert ppo.train(ppo.saved_args(run_dir)) == run_dir
    assert capsys.readouterr().out.splitlines()[-1] == last
