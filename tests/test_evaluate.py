"""Evaluation: whole episodes, raw returns, a random stream of its own; and videos that can be watched."""

import contextlib
import importlib
import re
import weakref
from pathlib import Path

import gymnasium as gym
import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from conftest import ATARI_SCRIPTS, FOUR_SCRIPTS, read_scalars, small_args
from gymnasium.wrappers import RecordVideo

import ppo


class Recorder(gym.Wrapper):
    """Keeps the raw rewards of each whole episode, innermost: below all that a script wraps around an env."""

    def __init__(self, env):
        super().__init__(env)
        self.episodes, self.closed = [], False

    def reset(self, **kwargs):
        self.rewards = []
        return self.env.reset(**kwargs)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.rewards.append(float(reward))
        if terminated or truncated:
            self.episodes.append(self.rewards)
        return obs, reward, terminated, truncated, info

    def close(self):
        self.closed = True
        self.env.close()


@pytest.fixture
def recorders(script, monkeypatch):
    """A Recorder of each env that is made by gym.make, with the render mode that was asked for."""
    made, make = [], gym.make

    def spy(*args, **kwargs):
        made.append(Recorder(make(*args, **kwargs)))
        return made[-1]

    monkeypatch.setattr(gym, "make", spy)
    return made


@pytest.fixture
def checkpoint(script) -> Path:
    """The checkpoint of a small run."""
    return script.train(small_args(script)) / "checkpoint.pt"


def test_returns_are_of_whole_episodes_and_raw_rewards(script, recorders):
    """Catches: returns that are clipped, scaled, discounted, of a life, or of the part that fell in the loop."""
    atari = script.__name__ in ATARI_SCRIPTS
    changes = dict(env_id="SpaceInvadersNoFrameskip-v4") if atari else {}  # a hit is worth 5 points or more
    checkpoint = script.train(small_args(script, **changes)) / "checkpoint.pt"
    recorders.clear()
    returns = script.evaluate(checkpoint, 2, capture_video=atari)  # Atari scripts use gym.make only where they record
    (episodes,) = (recorder.episodes for recorder in recorders if recorder.episodes)
    assert len(episodes) == len(returns) == 2
    assert all(type(value) is float for value in returns)
    assert returns == pytest.approx([sum(rewards) for rewards in episodes])
    assert not atari or max(map(max, episodes)) >= 5


@pytest.mark.parametrize("script", FOUR_SCRIPTS, indirect=True)
def test_evaluation_is_repeatable_and_alone(script, checkpoint, monkeypatch):
    """Catches: an evaluation that depends on what was random before, or that moves what is random after."""
    torch.manual_seed(5)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = script.evaluate(checkpoint, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.rand(7)
    assert script.evaluate(checkpoint, 3) == first
    assert len(first) == 3
    assert script.evaluate(checkpoint, 2) == first[:2]


def test_deterministic_takes_the_most_likely_action(script, checkpoint, monkeypatch):
    """Catches: a flag that does nothing, or that takes the least likely action."""
    get_action_and_value, chosen, sampled = script.Agent.get_action_and_value, [], []

    def spy(agent, *args, deterministic=False):
        result = get_action_and_value(agent, *args, deterministic=deterministic)
        if deterministic:
            chosen.append(result[1].item())
            sampled.extend((len(chosen) - 1, get_action_and_value(agent, *args)[1].item()) for _ in range(5))
        return result

    monkeypatch.setattr(script.Agent, "get_action_and_value", spy)
    script.evaluate(checkpoint, 1)
    assert chosen == []
    first = script.evaluate(checkpoint, 1, deterministic=True)
    assert chosen
    assert all(logprob <= chosen[index] + 1e-6 for index, logprob in sampled)
    assert any(logprob < chosen[index] - 1e-6 for index, logprob in sampled)
    assert script.evaluate(checkpoint, 1, deterministic=True) == first


@pytest.mark.parametrize("script", FOUR_SCRIPTS, indirect=True)
def test_evaluations_during_training_are_logged(script):
    """Catches: an evaluation of another agent than the one at that step, at other steps, or not of its return."""
    args = small_args(script, checkpoint_every=1, eval_every=2, eval_episodes=2)
    run_dir = script.train(args)
    points = read_scalars(run_dir)["eval/episodic_return"]
    assert [step for step, _ in points] == [2 * args.batch_size, 4 * args.batch_size]
    returns = script.evaluate(run_dir / "checkpoint.pt", 2)
    assert points[-1][1] == pytest.approx(np.mean(returns))

    run_dir = script.train(small_args(script, eval_episodes=2))
    assert read_scalars(run_dir)["eval/episodic_return"] == [(4 * args.batch_size, pytest.approx(np.mean(returns)))]
    assert "eval/episodic_return" not in read_scalars(script.train(small_args(script)))


@pytest.mark.parametrize("script", FOUR_SCRIPTS, indirect=True)
def test_the_command(script, launcher, checkpoint):
    """Catches: numbers that are not those of the episodes, and an evaluation that changes the run."""
    run_dir = checkpoint.parent
    before = {path: path.read_bytes() for path in run_dir.rglob("*")}
    argv = ["--evaluate", str(run_dir), "--eval-episodes", "2", "--deterministic"]
    process = launcher.run(script.__name__, *argv)
    assert process.returncode == 0, process.stderr
    number = r"(-?\d+\.\d+)"
    pattern = rf"mean return {number} ± {number}, min {number}, max {number} over 2 episodes"
    printed = [float(value) for value in re.search(pattern, process.stdout).groups()]
    returns = script.evaluate(checkpoint, 2, deterministic=True)
    expected = [np.mean(returns), np.std(returns), min(returns), max(returns)]
    assert printed == pytest.approx(expected, abs=0.0051)
    assert {path: path.read_bytes() for path in run_dir.rglob("*")} == before
    assert list(Path("runs").iterdir()) == [run_dir]


def test_videos(script, monkeypatch, recorders):
    """Catches: no video, one that does not open, lacks frames, or shows the network's grey picture; a stray one."""
    monkeypatch.delenv("DISPLAY", raising=False)
    run_dir = script.train(small_args(script, eval_episodes=2, capture_video=True))
    (recorder,) = (recorder for recorder in recorders if recorder.render_mode == "rgb_array" and recorder.episodes)
    atari = script.__name__ in ATARI_SCRIPTS
    lengths = [len(rewards) / (4 if atari else 1) for rewards in recorder.episodes]
    videos = sorted(run_dir.glob("videos/*/*.mp4"))
    assert len(videos) == len(lengths) == 2
    for path, length in zip(videos, lengths):
        frames = np.stack(list(imageio.imiter(path)))
        assert frames.dtype == np.uint8
        # each step's frame, and the one of the reset; a game's no-ops are steps of the recorder, not of the video
        assert 0.7 * length <= len(frames) <= length + 2
        spread = frames.max(0).astype(int) - frames.min(0)
        assert spread.max() > 50  # something moves
        if atari:
            assert frames.shape[1:] == (210, 160, 3)
            assert (frames.max(-1).astype(int) - frames.min(-1)).max() > 100  # in colour
    # evaluated again, the same folder holds the same videos
    script.evaluate(str(run_dir / "checkpoint.pt"), 1, capture_video=True)  # a path in a string will do
    assert sorted(run_dir.glob("videos/*/*.mp4")) == videos


def test_a_film_holds_no_frames(script, monkeypatch, checkpoint, recorders):
    """Catches: every frame held until its episode ends, which takes gigabytes of memory in a long game."""
    frames, alive, render = [], [], Recorder.render

    def spy(recorder):
        frame = render(recorder)
        frames.append(weakref.ref(frame))
        alive.append(sum(reference() is not None for reference in frames))
        return frame

    monkeypatch.setattr(Recorder, "render", spy)
    script.evaluate(checkpoint, 1, capture_video=True)
    assert len(alive) > 5
    assert max(alive) <= 2


def test_a_film_ends_with_its_encoder(tmp_path):
    """Catches: a traceback in place of an interrupted evaluation, for Ctrl-C in a terminal stops the encoder, too."""
    with contextlib.closing(ppo.make_envs(ppo.Args(eval_episodes=1), 1, tmp_path)) as envs:
        envs.reset(seed=[0])
        encoder = envs.unwrapped.envs[0].writer.proc
        encoder.stdin.write(b"half a frame")
        encoder.kill()
        encoder.wait()
    assert encoder.stdin.closed


@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_lstm"])
def test_the_camera_follows_a_runner(name, tmp_path):
    """Catches: films of MuJoCo in which the agent runs out of the picture; a camera that was asked for, not used."""
    script = importlib.import_module(name)

    def camera(**arguments) -> int:
        args = script.Args(**arguments)
        with contextlib.closing(script.make_envs(args, 1, tmp_path)) as envs:
            return envs.unwrapped.envs[0].unwrapped.mujoco_renderer.camera_id

    assert camera(env_id="HalfCheetah-v5") == 0  # the model's own camera, which follows its centre of mass
    assert camera(env_id="HalfCheetah-v5", env_kwargs='{"camera_id": -1}') == -1
    assert camera(env_id="HalfCheetah-v5", env_kwargs='{"default_camera_config": {"distance": 9}}') == -1
    assert camera(env_id="InvertedPendulum-v5") == -1  # it has none


def test_training_never_renders(script, monkeypatch, recorders):
    """Catches: --capture-video that slows training down, or records it."""
    events, init, render, reset = [], RecordVideo.__init__, Recorder.render, script.Run.reset

    def spy_init(wrapper, env, *args, **kwargs):
        events.append("wrapped")
        init(wrapper, env, *args, **kwargs)

    def spy_render(recorder):
        events.append("rendered")
        return render(recorder)

    def spy_reset(run, envs):  # the camera was tried out by now, on an env of its own
        events.append("training begins")
        assert {recorder.render_mode for recorder in recorders if not recorder.closed} <= {None}
        return reset(run, envs)

    monkeypatch.setattr(RecordVideo, "__init__", spy_init)
    monkeypatch.setattr(Recorder, "render", spy_render)
    monkeypatch.setattr(script.Run, "reset", spy_reset)
    monkeypatch.setattr(script, "evaluate", lambda *args: [0.0])
    script.train(small_args(script, eval_episodes=1, capture_video=True))
    assert recorders
    assert events.count("wrapped") <= 1
    assert events[-1] == "training begins"


def test_a_good_agent_scores_as_it_should(launcher):
    """Catches: an evaluation that plays worse than the agent can, for it loads, seeds or wraps something else."""
    run_dir = ppo.train(small_args(ppo))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    weights = {name: weight for name, weight in state["agent"].items() if name.startswith("actor")}
    assert len(weights) == 6  # of three layers: the first unit of each passes one linear function of the state on
    for weight in weights.values():
        weight.zero_()
    first, _, second, _, third, _ = weights.values()
    first[0] = torch.tensor([0.005, 0.05, 0.1, 0.1])  # x, its velocity, the pole's angle, its velocity
    second[0, 0] = 1
    third[1, 0] = 10_000  # push right where it is positive
    torch.save(state, run_dir / "checkpoint.pt")
    for flag in ("--deterministic", "--no-deterministic"):
        process = launcher.run("ppo", "--evaluate", str(run_dir), "--eval-episodes", "10", flag)
        assert "mean return 500.00 ± 0.00, min 500.00, max 500.00 over 10 episodes" in process.stdout


@pytest.mark.parametrize("script", ["ppo", "ppo_lstm"], indirect=True)
def test_layers_that_differ_in_training_are_told_that_it_is_over(script, monkeypatch):
    """Catches: an agent that plays with dropout, or normalises its batch of one."""
    run_dir = script.train(small_args(script))
    modes, act = [], script.Agent.get_action_and_value

    def spy(agent, *args, **options):
        modes.append(agent.training)
        return act(agent, *args, **options)

    monkeypatch.setattr(script.Agent, "get_action_and_value", spy)
    script.evaluate(run_dir / "checkpoint.pt", 1)
    assert modes
    assert not any(modes)
