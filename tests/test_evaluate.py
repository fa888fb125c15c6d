"""Evaluation: whole episodes, raw returns, a random stream of its own; and films that can be watched."""

import re
import weakref
from pathlib import Path

import gymnasium as gym
import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from conftest import ATARI_SCRIPTS, FOLD_SCRIPTS, read_scalars, small_args
from gymnasium.envs import registration
from gymnasium.envs.classic_control import CartPoleEnv

import ppo

FOLD = pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
PPO = pytest.mark.parametrize("script", ["ppo"], indirect=True)


class Recorder(gym.Wrapper):
    """Keeps the raw rewards of each whole episode, innermost: below all that a script wraps around an env."""

    def __init__(self, env):
        super().__init__(env)
        self.episodes = []

    def reset(self, **kwargs):
        self.rewards = []
        return self.env.reset(**kwargs)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.rewards.append(float(reward))
        if terminated or truncated:
            self.episodes.append(self.rewards)
        return obs, reward, terminated, truncated, info


@pytest.fixture
def recorders(monkeypatch):
    """A Recorder of each env that gymnasium makes, with the render mode that was asked for."""
    made, make = [], gym.make

    def spy(*args, **kwargs):
        made.append(Recorder(make(*args, **kwargs)))
        return made[-1]

    monkeypatch.setattr(gym, "make", spy)
    monkeypatch.setattr(registration, "make", spy)  # which gym.make_vec calls
    return made


TRAINED = {}  # script -> the checkpoint of a small run


@pytest.fixture
def checkpoint(script) -> Path:
    """The checkpoint of a small run, alone in a folder."""
    if script not in TRAINED:
        # a hit in this game is worth 5 points or more
        changes = dict(env_id="SpaceInvadersNoFrameskip-v4") if script.__name__ in ATARI_SCRIPTS else {}
        TRAINED[script] = (script.train(small_args(script, **changes)) / "checkpoint.pt").read_bytes()
    path = Path("run/checkpoint.pt").absolute()
    path.parent.mkdir()
    path.write_bytes(TRAINED[script])
    return path


def test_returns_are_of_whole_episodes_and_raw_rewards(script, checkpoint, recorders):
    """Catches: returns that are clipped, scaled, discounted, of a life, or of the part that fell in the loop."""
    atari = script.__name__ in ATARI_SCRIPTS  # whose games are gymnasium's only where they are filmed
    returns = script.evaluate(checkpoint, 2, script.saved_args(checkpoint, capture_video=atari))
    (episodes,) = (recorder.episodes for recorder in recorders if recorder.episodes)
    assert len(episodes) == len(returns) == 2
    assert all(type(value) is float for value in returns)
    assert returns == pytest.approx([sum(rewards) for rewards in episodes])
    assert not atari or max(map(max, episodes)) >= 5


@FOLD
def test_evaluation_is_repeatable_and_alone(script, checkpoint):
    """Catches: an evaluation that depends on what was random before, or moves what is random after; a seed not used."""
    torch.manual_seed(5)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = script.evaluate(checkpoint, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.rand(7)
    assert script.evaluate(str(checkpoint), 3) == first  # a path in a string will do
    assert script.evaluate(checkpoint.parent, 3) == first  # and the run's folder
    assert len(first) == 3
    assert script.evaluate(checkpoint, 2) == first[:2]
    assert script.evaluate(checkpoint, 3, script.saved_args(checkpoint, seed=2)) != first


def test_deterministic_takes_the_most_likely_action(script, checkpoint, monkeypatch):
    """Catches: a flag that does nothing, or takes the least likely action; an agent that plays with dropout."""
    get_action_and_value, chosen, sampled, modes = script.Agent.get_action_and_value, [], [], []

    def spy(agent, *args, deterministic=False):
        result = get_action_and_value(agent, *args, deterministic=deterministic)
        modes.append(agent.training)
        if deterministic:
            chosen.append(result[1].item())
            sampled.extend((len(chosen) - 1, get_action_and_value(agent, *args)[1].item()) for _ in range(2))
        return result

    monkeypatch.setattr(script.Agent, "get_action_and_value", spy)
    script.evaluate(checkpoint, 1)
    assert chosen == []
    args = script.saved_args(checkpoint, deterministic=True)
    first = script.evaluate(checkpoint, 1, args)
    assert chosen
    assert all(logprob <= chosen[index] + 1e-6 for index, logprob in sampled)
    assert any(logprob < chosen[index] - 1e-6 for index, logprob in sampled)
    assert not any(modes)
    assert script.evaluate(checkpoint, 1, args) == first


@FOLD
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


@PPO
def test_the_agent_at_that_step_is_evaluated(script, monkeypatch):
    """Catches: returns of the best agent so far, logged as those of the latest."""
    played = []
    monkeypatch.setattr(script, "evaluate", lambda path, *_: played.append(path.name) or [1.0])
    script.train(small_args(script, checkpoint_every=1, eval_every=2))
    assert played == ["checkpoint.pt"] * 2


@PPO
def test_the_command(script, launcher, checkpoint):
    """Catches: numbers that are not those of the episodes, an evaluation that changes the run, flags without effect."""
    run_dir = checkpoint.parent
    best = checkpoint.rename(run_dir / "best.pt")
    number = r"(-?\d+\.\d+)"
    pattern = rf"^evaluation: mean return {number} ± {number} over (\d+) of (\d+) episodes$"

    def printed(*argv: object) -> list[float]:
        process = launcher.run("ppo", *map(str, argv), "--eval-episodes", "2")
        assert process.returncode == 0, process.stderr
        return [float(value) for value in re.search(pattern, process.stdout, re.MULTILINE).groups()]

    returns = script.evaluate(best, 2, script.saved_args(best, deterministic=True))
    expected = [np.mean(returns), np.std(returns), 2, 2]
    assert printed("--evaluate", best, "--deterministic") == pytest.approx(expected, abs=0.0051)
    assert list(run_dir.iterdir()) == [best]
    best.rename(checkpoint)
    # this CartPole gives no reward but -1 at an episode's end
    argv = ["--evaluate", run_dir, "--env-kwargs", '{"sutton_barto_reward": true}']
    assert printed(*argv) == [-1, 0, 2, 2]
    assert list(run_dir.iterdir()) == [checkpoint]
    assert checkpoint.read_bytes() == TRAINED[script]


@pytest.mark.parametrize("script", ["ppo", "ppo_atari"], indirect=True)
def test_films(script, monkeypatch, recorders):
    """Catches: no film, one that lacks frames or shows the network's grey picture; no film of the untrained agent."""
    monkeypatch.delenv("DISPLAY", raising=False)
    changes = dict(eval_episodes=1, eval_every=2, checkpoint_every=2, capture_video=True)
    args = small_args(script, **changes)
    run_dir = script.train(args)
    steps = [0, 2 * args.batch_size, 4 * args.batch_size]
    scalars = read_scalars(run_dir)
    assert [step for step, _ in scalars["eval/episodic_return"]] == steps
    films = [run_dir / f"videos/step_{step}.mp4" for step in steps]
    assert sorted(run_dir.glob("videos/**/*")) == sorted(films)
    filmed = [recorder.episodes for recorder in recorders if recorder.render_mode == "rgb_array"]
    assert [len(episodes) for episodes in filmed] == [1, 1, 1]
    for path, episodes in zip(films, filmed):
        frames = np.stack(list(imageio.imiter(path)))
        assert frames.dtype == np.uint8
        length = sum(map(len, episodes))
        if script is ppo:
            assert len(frames) == length  # what each action answers
        else:
            assert 0.7 * length <= 4 * len(frames) <= length + 8  # no-ops are steps of the recorder, not of the film
            assert frames.shape[1:] == (210, 160, 3)
            assert (frames.max(-1).astype(int) - frames.min(-1)).max() > 100  # in colour
        spread = frames.max(0).astype(int) - frames.min(0)
        assert spread.max() > 50  # something moves
    # evaluated again, the same folder holds the same films
    script.evaluate(run_dir / "checkpoint.pt", 1)
    assert sorted(run_dir.glob("videos/**/*")) == sorted(films)


@PPO
def test_a_film_holds_no_frames(script, monkeypatch, checkpoint, recorders):
    """Catches: every frame held until its episode ends, which takes gigabytes of memory in a long game."""
    frames, alive, render = [], [], Recorder.render

    def spy(recorder):
        frame = render(recorder)
        frames.append(weakref.ref(frame))
        alive.append(sum(reference() is not None for reference in frames))
        return frame

    monkeypatch.setattr(Recorder, "render", spy)
    script.evaluate(checkpoint, 1, script.saved_args(checkpoint, capture_video=True))
    assert len(alive) > 5
    assert max(alive) <= 2


class Painter(CartPoleEnv):
    """CartPole that shows `shown`."""

    def render(self):
        return self.shown


gym.register("Painter-v0", Painter, max_episode_steps=3)

GREY = np.tile(np.linspace(0, 1, 48), (32, 1))  # from black to white
RGB = np.stack([GREY, GREY[:, ::-1], 0 * GREY], -1)
DARK = np.zeros((32, 48), np.uint8) + 1  # one of 255
PICTURES = {  # what an env may render, and what is to be seen, from 0 to 1
    "uint8": ((255 * RGB).astype(np.uint8), RGB),
    "float from 0 to 1": (RGB.astype(np.float32), RGB),
    "float from 0 to 255": (255 * RGB, RGB),
    "float rounded to above 1": (RGB * (1 + 1e-6), RGB),
    "int64 from 0 to 255": ((255 * RGB).astype(int), RGB),
    "bool": (GREY > 0.5, GREY > 0.5),
    "int8 of 0 and 1": ((GREY > 0.5).astype(np.int8), GREY > 0.5),
    "grey": (GREY, GREY),
    "one channel": ((255 * GREY).astype(np.uint8)[..., None], GREY),
    "alpha": (np.concatenate([RGB, np.ones((32, 48, 1))], -1), RGB),
    "uint8, almost black": (DARK, DARK / 255),
    "black": (0.0 * RGB, 0 * RGB),
    "out of bounds": (2.0 * 255 * (RGB > 0.5) - 99, RGB > 0.5),
    "list": (GREY.tolist(), GREY),
}


@PPO
@pytest.mark.parametrize("name", PICTURES)
def test_what_an_env_renders_is_seen_in_the_film(script, name, checkpoint, monkeypatch):
    """Catches: a film that is black, for its picture had floats; channels that make the encoder fail, or change."""
    shown, expected = PICTURES[name]
    monkeypatch.setattr(Painter, "shown", shown, raising=False)
    script.evaluate(checkpoint, 1, script.saved_args(checkpoint, env_id="Painter-v0", capture_video=True))
    frames = np.stack(list(imageio.imiter(checkpoint.parent / "videos/step_128.mp4"))) / 255
    assert frames.shape == (3, 32, 48, 3)
    expected = np.broadcast_to(expected if np.ndim(expected) == 3 else expected[..., None], (32, 48, 3))
    assert np.abs(frames - expected).mean() < 0.05  # the encoder loses some sharpness of colours
    np.testing.assert_allclose(frames.mean((0, 1, 2)), expected.mean((0, 1)), atol=0.03)


@PPO
@pytest.mark.parametrize("shape", [(31, 47), (1, 1)])
def test_a_picture_of_odd_size_is_filmed(script, shape, checkpoint, monkeypatch):
    """Catches: an encoder that takes even sizes only, or stretches a picture to multiples of 16."""
    monkeypatch.setattr(Painter, "shown", np.full(shape, 0.5), raising=False)
    script.evaluate(checkpoint, 1, script.saved_args(checkpoint, env_id="Painter-v0", capture_video=True))
    frames = np.stack(list(imageio.imiter(checkpoint.parent / "videos/step_128.mp4")))
    assert frames.shape == (3, shape[0] + 1, shape[1] + 1, 3)
    if shape != (1, 1):  # of which a codec that halves colours makes what it likes
        assert frames.mean() == pytest.approx(127, abs=5)


NO_PICTURES = {
    "nothing": None,
    "text": "o_o",
    "number": 0.5,
    "row": np.zeros(48),
    "channels first": np.zeros((3, 32, 48)),
    "two channels": np.zeros((32, 48, 2)),
    "four dimensions": np.zeros((1, 32, 48, 3)),
    "no pixels": np.zeros((0, 0, 3)),
}


@PPO
@pytest.mark.parametrize("name", NO_PICTURES)
def test_what_is_no_picture_is_refused(script, name, monkeypatch):
    """Catches: a traceback out of the encoder, or a run that fails when it is over."""
    monkeypatch.setattr(Painter, "shown", NO_PICTURES[name], raising=False)
    begun = []
    monkeypatch.setattr(script.Run, "reset", lambda *given: begun.append(given))
    with pytest.raises(script.UserError, match=r"^cannot film ") as error:
        script.train(small_args(script, env_id="Painter-v0", capture_video=True))
    assert "\n" not in str(error.value)
    assert begun == []


@PPO
def test_training_never_renders(script, monkeypatch, recorders):
    """Catches: --capture-video that slows training down, or films it."""
    rendered = []
    monkeypatch.setattr(Recorder, "render", rendered.append)
    monkeypatch.setattr(script, "evaluate", lambda *args: [0.0])
    script.train(small_args(script, eval_episodes=1, capture_video=True))
    assert [recorder.render_mode for recorder in recorders] == [None, None]
    assert rendered == []


def test_a_good_agent_scores_as_it_should():
    """Catches: an evaluation that plays worse than the agent can, for it loads, seeds or wraps something else."""
    run_dir = ppo.train(small_args(ppo))
    path = run_dir / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    weights = {name: weight for name, weight in state["agent"].items() if name.startswith("actor")}
    assert len(weights) == 6  # of three layers: the first unit of each passes one linear function of the state on
    for weight in weights.values():
        weight.zero_()
    first, _, second, _, third, _ = weights.values()
    first[0] = torch.tensor([0.005, 0.05, 0.1, 0.1])  # x, its velocity, the pole's angle, its velocity
    second[0, 0] = 1
    third[1, 0] = 10_000  # push right where it is positive
    torch.save(state, path)
    for deterministic in (True, False):
        assert ppo.evaluate(path, 3, ppo.saved_args(path, deterministic=deterministic)) == [500.0] * 3
