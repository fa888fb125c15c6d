"""Flags: what a resume and an evaluation heed; the run's folder; numbers at the edge; patience."""

import contextlib
import importlib
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FOLD_SCRIPTS, flags, read_scalars, small_args
from faulty_envs import Stop, hook_envs


def load(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def contents(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def begin(name: str, **changes) -> Path:
    """The folder of a run that has done one iteration."""
    script = importlib.import_module(name)
    return script.train(small_args(script, total_timesteps=small_args(script, **changes).batch_size, **changes))


def test_a_weight_decay_given_anew_holds(launcher):
    """Catches: a flag that a resume takes, prints and ignores, for the optimizer's state brings the old value."""
    run_dir = begin("ppo_lstm")
    argv = flags(resume=run_dir, weight_decay=0.25, total_timesteps=128)
    process = launcher.run("ppo_lstm", *argv)
    assert process.returncode == 0, process.stderr
    state = load(run_dir)
    assert state["iteration"] == 4
    assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.25, 0.25]
    steps = {int(moments["step"]) for moments in state["optimizer"]["state"].values()}
    args = importlib.import_module("ppo_lstm").Args(**state["args"])
    assert steps == {4 * args.update_epochs * args.num_minibatches}  # the moments were kept


def test_an_optimizer_of_another_shape_is_refused():
    """Catches: a layer frozen before a resume, which crashes the process, or gives a layer the moments of another."""
    ppo = importlib.import_module("ppo")
    path = begin("ppo") / "checkpoint.pt"
    with contextlib.closing(ppo.make_envs(small_args(ppo), 1)) as envs:
        agent = ppo.Agent(envs, small_args(ppo))
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    ppo.load_checkpoint(path, agent, optimizer)
    assert len(optimizer.state_dict()["state"]) == len(list(agent.parameters()))
    with pytest.raises(ppo.UserError, match="is no checkpoint of this script and network"):
        ppo.load_checkpoint(path, agent, torch.optim.Adam(list(agent.parameters())[2:], fused=True))


def test_a_resume_on_an_env_of_another_size_is_refused(script):
    """Catches: a resume on another env that ends in a traceback of torch's, or when it has written to the folder."""
    run_dir = begin(script.__name__)
    before = contents(run_dir)
    with pytest.raises(script.UserError, match="is no checkpoint of this script and network"):
        script.train(script.saved_args(run_dir, env_id="Acrobot-v1", total_timesteps=128))
    assert contents(run_dir) == before
    assert list(Path("runs").absolute().iterdir()) == [run_dir]


def first_observations(monkeypatch, script, run_dir: Path, **changes) -> list[bytes]:
    """What an evaluation sees in its first steps."""
    seen = []

    def hook(count, transition):
        seen.append(transition[0].tobytes())
        if count == 30:
            raise Stop

    hook_envs(monkeypatch, script, hook)
    with pytest.raises(Stop):
        script.evaluate(run_dir / "checkpoint.pt", 10, script.saved_args(run_dir, **changes))
    return seen


def test_another_seed_evaluates_other_episodes(script, monkeypatch):
    """Catches: an evaluation that plays the same few episodes whatever seed it is given."""
    run_dir = begin(script.__name__)
    assert load(run_dir)["args"]["seed"] == 1
    as_trained = first_observations(monkeypatch, script, run_dir)
    other = first_observations(monkeypatch, script, run_dir, seed=99)
    assert other != as_trained
    assert first_observations(monkeypatch, script, run_dir, seed=99) == other
    assert first_observations(monkeypatch, script, run_dir, seed=1) == as_trained
    assert first_observations(monkeypatch, script, run_dir, seed=0) not in (as_trained, other)


@pytest.mark.parametrize("name", FOLD_SCRIPTS)
def test_what_evaluation_heeds(launcher, name):
    """Catches: a flag that --evaluate ignores, so that the number is of other episodes or of another env."""
    script = importlib.import_module(name)
    run_dir = begin(name, deterministic=True, eval_episodes=1)
    before = contents(run_dir)

    def play(*argv: str, **changes) -> list[float]:
        process = launcher.run(name, "--evaluate", str(run_dir), *argv, *flags(**changes))
        assert process.returncode == 0, process.stderr
        returns = script.evaluate(run_dir / "checkpoint.pt", 3, script.saved_args(run_dir, **changes))
        told = f"evaluation: mean return {np.mean(returns):.2f} ± {np.std(returns):.2f} over 3 of 3 episodes"
        assert process.stdout.splitlines() == [told]
        return returns

    as_trained = play("--eval-episodes", "3")
    other = play("--eval-episodes", "3", "--torch-threads", "2", "--no-cuda", seed=99)
    assert other != as_trained
    assert play("--eval-episodes", "3", deterministic=False) != as_trained
    assert play("--eval-episodes", "3", env_kwargs='{"sutton_barto_reward": true}') == [-1.0] * 3
    assert contents(run_dir) == before
    process = launcher.run(name, "--evaluate", str(run_dir), "--eval-episodes", "0", "--seed", "99")
    assert "over 10 of 10 episodes" in process.stdout


def test_the_folder_has_a_name_that_any_system_takes():
    """Catches: a folder that Windows, rsync or a nested path makes something else of."""
    run_dir = begin("ppo", env_id="probe_envs:ThreeSteps-v0", exp_name="lr:1/2")
    assert os.listdir("runs") == [run_dir.name]
    assert run_dir.name.startswith("probe_envs-ThreeSteps-v0__lr-1-2__1__")
    assert load(run_dir)["iteration"] == 1


def test_two_runs_begun_at_the_same_time(monkeypatch):
    """Catches: runs of one experiment that write over each other, for both found the folder missing."""
    ppo = importlib.import_module("ppo")
    moments = iter([1_700_000_000_001_000_000, 1_700_000_000_002_000_000, 1_700_000_000_002_999_999])
    clock = SimpleNamespace(time_ns=lambda: next(moments), perf_counter=time.perf_counter)
    monkeypatch.setattr(ppo, "time", clock)
    first, second = begin("ppo"), begin("ppo")  # a sweep's jobs begin in the same second
    assert [path.name.rpartition("__")[2] for path in (first, second)] == ["1700000000001", "1700000000002"]
    before = contents(first) | contents(second)
    with pytest.raises(FileExistsError, match=second.name):
        begin("ppo")
    assert contents(first) | contents(second) == before
    assert len(os.listdir("runs")) == 2


def test_no_nan_is_shown_before_an_episode_has_ended(capfd):
    """Catches: "mean return nan", which looks like a run gone wrong."""
    ppo = importlib.import_module("ppo")
    run_dir = ppo.train(small_args(ppo, num_steps=4, total_timesteps=16))
    out, err = capfd.readouterr()
    assert not {"charts/episodic_return", "charts/mean_return_100"} & read_scalars(run_dir).keys()
    assert not re.search(r"\bnan\b", out + err)
    assert "no episode ended" in out.splitlines()[-1]


def test_minibatches_of_two_steps_are_accepted(script):
    """Catches: a rule that refuses what can be normalised, or whose words refuse it."""
    changes = dict(seq_len=1) if "lstm" in script.__name__ else {}
    size = small_args(script).batch_size
    args = small_args(script, num_minibatches=size // 2, total_timesteps=size, update_epochs=1, **changes)
    assert args.minibatch_size == 2
    assert load(script.train(args))["iteration"] == 1
    with pytest.raises(script.UserError, match=f"--num-minibatches must be a divisor of {size} steps, each with 2 per"):
        small_args(script, num_minibatches=size, **changes)
    assert small_args(script, num_minibatches=size, norm_adv=False, **changes).minibatch_size == 1


def test_patience_ends_a_run():
    """Catches: a run that goes on for hours after it has stopped to improve; a mean over the whole run, or a few."""
    ppo = importlib.import_module("ppo")
    options = dict(env_id="probe_envs:ThreeSteps-v0", total_timesteps=640)  # every return is 3
    state = load(ppo.train(small_args(ppo, patience=3, **options)))
    assert (state["iteration"], state["kept"]["best_step"]) == (10 + 3, 10 * 32)  # by the 10th 100 had ended
    state = load(ppo.train(small_args(ppo, patience=0, **options)))
    assert (state["iteration"], state["kept"]["best_step"]) == (20, 10 * 32)
    assert state["kept"]["recent"] == [(3.0, 3)] * 100


def test_patience_begins_with_a_hundred_episodes():
    """Catches: a run that ends for the lucky first of them."""
    ppo = importlib.import_module("ppo")
    state = load(ppo.train(small_args(ppo, seed=3, patience=3, total_timesteps=640, learning_rate=1e-9)))
    returns = [each for each, _ in state["kept"]["recent"]]
    assert len(returns) < 100
    assert returns[0] > np.mean(returns), "the first is lucky"
    assert state["iteration"] == 20


def test_patience_waits_for_the_first_episodes():
    """Catches: a run that ends before an episode did, where episodes are longer than a few rollouts."""
    ppo = importlib.import_module("ppo")
    state = load(ppo.train(small_args(ppo, env_id="MountainCar-v0", patience=1)))
    assert (state["iteration"], state["kept"]["recent"]) == (4, [])


def test_patience_counts_steps():
    """Catches: patience that a resume with another batch size uses up, or fills again, for it counted iterations."""
    ppo = importlib.import_module("ppo")
    options = dict(env_id="probe_envs:ThreeSteps-v0", patience=14)  # every return is 3: never better than at first
    run_dir = ppo.train(small_args(ppo, total_timesteps=384, **options))
    state = load(run_dir)
    assert (state["global_step"], state["kept"]["best_step"], state["kept"]["best_return"]) == (384, 320, 3.0)
    ppo.train(ppo.saved_args(run_dir, num_steps=4, total_timesteps=1024))
    assert load(run_dir)["global_step"] == 320 + 14 * 8
