"""An evaluation ends: by a signal, by a limit where its episodes do not; what cannot be filmed is known at first."""

import re
import signal
from pathlib import Path

import pytest
import torch
from conftest import SMALL, flags, read_scalars, small_args
from faulty_envs import hook_envs
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from launcher import wait_until

import ppo


def load(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def hook_evaluation(monkeypatch, script, hook) -> None:
    """Call hook(step) after each step that the script's evaluations take."""
    evaluate, inside = script.evaluate, []

    def spy(*args, **kwargs):
        inside.append(True)
        try:
            return evaluate(*args, **kwargs)
        finally:
            inside.clear()

    monkeypatch.setattr(script, "evaluate", spy)
    hook_envs(monkeypatch, script, lambda count, _: hook(count) if inside else None)


def stop_evaluation(monkeypatch, script) -> list[int]:
    """Let the script be told of a SIGTERM in an evaluation's third step; return the steps that evaluations take."""
    steps, signals = [], []
    monkeypatch.setattr(script, "SIGNALS", signals)

    def hook(count):
        steps.append(count)
        assert len(steps) <= 3, "the evaluation goes on"
        if count == 3:
            signals.append(signal.SIGTERM)

    hook_evaluation(monkeypatch, script, hook)
    return steps


def test_a_signal_ends_the_evaluation_and_the_run(script, monkeypatch, capfd):
    """Catches: a stop that waits until all episodes are played, one that loses the run, and a mean of no episode."""
    options = dict(checkpoint_every=2, eval_every=2, eval_episodes=2)
    with monkeypatch.context() as context:
        steps = stop_evaluation(context, script)
        with pytest.raises(SystemExit) as exit:
            script.train(small_args(script, **options))
    assert exit.value.code == 128 + signal.SIGTERM
    assert steps == [1, 2, 3]
    (run_dir,) = Path("runs").absolute().iterdir()
    assert re.search(rf'; to go on: python .*--resume "{run_dir}"$', capfd.readouterr().out, re.MULTILINE)
    scalars, state = read_scalars(run_dir), load(run_dir)
    assert "eval/episodic_return" not in scalars
    assert state["iteration"] == len(scalars["losses/value_loss"]) < 4
    script.train(script.saved_args(run_dir, eval_episodes=0, eval_every=0))
    assert load(run_dir)["iteration"] == 4


def test_a_signal_in_the_last_evaluation(script, monkeypatch, capfd):
    """Catches: a finished run that cannot be stopped playing, or that tells its user to go on."""
    steps = stop_evaluation(monkeypatch, script)
    run_dir = script.train(small_args(script, eval_episodes=2))
    assert steps == [1, 2, 3]
    assert load(run_dir)["iteration"] == 4
    assert "to go on" not in capfd.readouterr().out
    assert "eval/episodic_return" not in read_scalars(run_dir)


def test_half_an_evaluation_is_not_logged(monkeypatch):
    """Catches: a mean of the episodes that had ended when a signal came, which are the short ones."""
    signals = []
    monkeypatch.setattr(ppo, "SIGNALS", signals)
    monkeypatch.setattr(ppo, "evaluate", lambda *_: signals.append(signal.SIGTERM) or [9.0])
    run_dir = ppo.train(small_args(ppo, eval_episodes=2))
    assert "eval/episodic_return" not in read_scalars(run_dir)


def test_a_signal_while_saving_skips_the_evaluation(monkeypatch):
    """Catches: an evaluation begun, and played to its end, though a signal came just before it."""
    save, signals = ppo.Run.save, []

    def save_and_stop(run, *given):
        save(run, *given)
        signals.extend([signal.SIGTERM] * (run.iteration == 2))

    monkeypatch.setattr(ppo, "SIGNALS", signals)
    monkeypatch.setattr(ppo.Run, "save", save_and_stop)
    monkeypatch.setattr(ppo, "evaluate", lambda *_: pytest.fail("the evaluation has begun"))
    with pytest.raises(SystemExit):
        ppo.train(small_args(ppo, checkpoint_every=2, eval_every=2, eval_episodes=2))


def test_the_process_is_stopped_in_an_endless_evaluation(launcher):
    """Catches: a scheduler's SIGTERM that must be followed by SIGKILL, for an evaluation never ends."""
    options = SMALL["ppo"] | dict(checkpoint_every=1, eval_every=1, eval_episodes=10**9)
    process = launcher.start("ppo", *flags(**options))
    checkpoints = lambda: list(Path("runs").glob("*/checkpoint.pt"))
    wait_until(lambda: (checkpoints() and load(checkpoints()[0].parent)["iteration"]) or not process.running())
    process.send(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM, process.stderr
    assert "to go on: python" in process.stdout
    assert "Traceback" not in process.stderr


def test_half_an_evaluation_by_itself_is_no_success(launcher):
    """Catches: exit code 0 of a stopped --evaluate, upon which a shell goes on to what was to follow it."""
    run_dir = ppo.train(small_args(ppo))
    process = launcher.start("ppo", "--evaluate", str(run_dir), "--eval-episodes", "1000000", "--capture-video")
    wait_until(lambda: (run_dir / "videos").exists() or not process.running())  # the handlers are set
    process.send(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM, process.stderr
    assert "Traceback" not in process.stderr
    assert "of 1000000 episodes" in process.stdout


def limit_evaluations(monkeypatch, script, steps: int) -> None:
    """Have the script's evaluations given up after so many steps for each episode, instead of 100,000."""

    def shorter(*given):
        return range(given[0] // 100_000 * steps) if given[0] >= 100_000 else range(*given)

    monkeypatch.setattr(script, "range", shorter, raising=False)


def test_an_evaluation_whose_episodes_do_not_end_is_given_up(script, monkeypatch, capsys):
    """Catches: a run that hangs in an evaluation for ever; a mean of no episode that is logged as NaN; episodes
    that have ended thrown away; an evaluation of fewer episodes that does not say so."""
    steps = []
    hook_evaluation(monkeypatch, script, steps.append)
    limit_evaluations(monkeypatch, script, 1)
    args = small_args(script, env_id="probe_envs:ThreeSteps-v0", checkpoint_every=2, eval_every=2, eval_episodes=2)
    run_dir = script.train(args)
    assert steps == [1, 2] * 2
    assert load(run_dir)["iteration"] == 4  # training went on
    assert "eval/episodic_return" not in read_scalars(run_dir)
    assert capsys.readouterr().out.count(" over 0 of 2 episodes") == 2
    limit_evaluations(monkeypatch, script, 2)
    assert script.evaluate(run_dir / "checkpoint.pt", 2) == [3.0]
    assert "mean return 3.00 ± 0.00 over 1 of 2 episodes" in capsys.readouterr().out
    assert script.evaluate(run_dir / "checkpoint.pt", 3) == [3.0, 3.0]


@pytest.mark.parametrize("draws", ["nothing", "no picture"])
def test_an_env_without_pictures_ends_the_run_before_its_first_step(monkeypatch, draws):
    """Catches: a video that fails after hours of training, for the env cannot render, or can and gives no picture."""
    steps = []
    hook_envs(monkeypatch, ppo, lambda count, _: steps.append(count))
    monkeypatch.setattr(CartPoleEnv, "render", lambda env: None)
    env_id = "CartPole-v1" if draws == "no picture" else "probe_envs:ThreeSteps-v0"
    error, text = (ppo.UserError, "cannot film") if draws == "no picture" else (NotImplementedError, "")
    with pytest.raises(error, match=text):
        ppo.train(small_args(ppo, env_id=env_id, capture_video=True))
    assert steps == []
