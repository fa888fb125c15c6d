"""The Atari env against a plain one: gymnasium's wrappers around a single game, and the rules of lives written out."""

import contextlib
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import read_scalars, same_parameters
from conftest import small_args as short_games_args
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

BREAKOUT = "BreakoutNoFrameskip-v4"  # lives and FIRE
MS_PACMAN = "MsPacmanNoFrameskip-v4"  # lives, no FIRE
PONG = "PongNoFrameskip-v4"  # no lives, FIRE among its actions
GAMES = [BREAKOUT, MS_PACMAN, PONG]


def small_args(module, **changes):
    """Args of a small run, with games as long as they are."""
    return short_games_args(module, **dict(env_kwargs="{}") | changes)


@pytest.fixture
def without_noops(atari_script, monkeypatch):
    """Games that begin at once, so that two emulators see the same frames."""

    class NativeEnv(atari_script.AtariVectorEnv):
        def __init__(self, *args, **kwargs):
            assert kwargs["noop_max"] == 30
            super().__init__(*args, **kwargs | dict(noop_max=0))

    class Preprocessing(atari_script.AtariPreprocessing):
        def __init__(self, *args, **kwargs):
            assert kwargs["noop_max"] == 30
            super().__init__(*args, **kwargs | dict(noop_max=0))

    monkeypatch.setattr(atari_script, "AtariVectorEnv", NativeEnv)
    monkeypatch.setattr(atari_script, "AtariPreprocessing", Preprocessing)


@contextlib.contextmanager
def short_games(env_id: str, frames: int):
    """Games of that id are truncated after so many frames."""
    kwargs = gym.spec(env_id).kwargs
    before = kwargs["max_num_frames_per_episode"]
    kwargs["max_num_frames_per_episode"] = frames
    try:
        yield
    finally:
        kwargs["max_num_frames_per_episode"] = before


def random_actions(envs, steps: int, seed: int = 0) -> np.ndarray:
    """Actions (steps, N), each kept for a few steps, so that a paddle moves."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(envs.single_action_space.n, size=(steps // 4 + 1, envs.num_envs))
    return actions.repeat(4, axis=0)[:steps]


class PlainGame:
    """One game as the baselines play it, from gymnasium's wrappers: what the script's env should do, step by step."""

    def __init__(self, env_id: str, stack: int):
        env = gym.make(env_id, frameskip=1)
        meanings = env.unwrapped.get_action_meanings()
        self.fire = meanings.index("FIRE") if "FIRE" in meanings else None
        self.ale = env.unwrapped.ale
        self.env = FrameStackObservation(AtariPreprocessing(env, noop_max=0), stack, padding_type="zero")

    def reset(self):
        obs, _ = self.env.reset()
        self.lives, self.life_starts, self.game_return, self.steps = self.ale.lives(), True, 0.0, 0
        return obs

    def step(self, action):
        if self.life_starts and self.fire is not None:
            action = self.fire
        obs, reward, terminated, truncated, _ = self.env.step(int(action))
        lives, self.lives = self.lives, self.ale.lives()
        self.life_starts = 0 < self.lives < lives
        self.game_return += reward
        self.steps += 1
        return obs, reward, terminated, truncated


@pytest.mark.parametrize(
    ("env_id", "steps", "frames"),
    [
        (BREAKOUT, 600, 108_000),
        (MS_PACMAN, 1500, 108_000),
        (PONG, 2000, 108_000),
        (BREAKOUT, 300, 400),
        (PONG, 300, 401),
    ],
)
def test_equals_the_plain_game(atari_script, without_noops, env_id, steps, frames):
    """Catches: another observation, a game that restarts at a lost life, no FIRE, returns of a life or clipped."""
    with (
        short_games(env_id, frames),
        contextlib.closing(atari_script.make_envs(small_args(atari_script, env_id=env_id), 1)) as envs,
    ):
        assert (envs.single_observation_space.dtype, envs.single_observation_space.shape[1:]) == (np.uint8, (84, 84))
        game = PlainGame(env_id, stack=envs.single_observation_space.shape[0])
        obs, _ = envs.reset(seed=[1])
        np.testing.assert_array_equal(obs[0], game.reset())
        lives_lost = games = clipped = 0
        for action in random_actions(envs, steps):
            obs, rewards, terminations, truncations, infos = envs.step(action)
            expected, reward, terminated, truncated = game.step(action[0])
            lives_lost += game.life_starts
            clipped += abs(reward) > 1
            assert rewards[0] == np.sign(reward)
            life_lost = game.life_starts and not truncated  # where the game is cut, the env tells no lost life
            assert (terminations[0], truncations[0]) == (terminated or life_lost, truncated)
            assert bool(infos.get("_episode", [False])[0]) == (terminated or truncated)
            if terminated or truncated:
                games += 1
                np.testing.assert_array_equal(infos["final_obs"][0], expected)
                assert (infos["episode"]["r"][0], infos["episode"]["l"][0]) == (game.game_return, game.steps)
                expected = game.reset()
            assert obs.dtype == np.uint8
            np.testing.assert_array_equal(obs[0], expected)
    # the game had what the test is about
    assert games >= 2
    assert (lives_lost > 0) == (env_id != PONG)
    assert (clipped > 0) == (env_id == MS_PACMAN)


@pytest.mark.parametrize("atari_script", ["ppo_atari"], indirect=True)
@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [*((env_id, "{}") for env_id in GAMES), (BREAKOUT, '{"frameskip": 1}'), (BREAKOUT, '{"frameskip": 6}')],
)
def test_recorded_games_are_the_same(atari_script, without_noops, env_id, kwargs):
    """Catches: an evaluation on other observations, lives or rewards than the agent was trained on."""
    args = small_args(atari_script, env_id=env_id, env_kwargs=kwargs)
    native, recorded = (atari_script.make_envs(args, 1, render) for render in (False, True))
    with contextlib.closing(native), contextlib.closing(recorded):
        assert native.single_observation_space == recorded.single_observation_space
        assert native.single_action_space == recorded.single_action_space
        np.testing.assert_array_equal(native.reset(seed=[1])[0], recorded.reset(seed=[1])[0])
        for action in random_actions(native, 300, seed=1):
            for ours, theirs in zip(native.step(action)[:4], recorded.step(action)[:4]):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("atari_script", ["ppo_atari"], indirect=True)
def test_recorded_games_take_what_games_take(atari_script):
    """Catches: an evaluation with video whose games are longer, or others, than those of training."""
    args = small_args(atari_script, env_kwargs='{"max_num_frames_per_episode": 100}')
    ends = []
    for render in (False, True):
        with contextlib.closing(atari_script.make_envs(args, 1, render)) as envs:
            envs.reset(seed=[1])
            ends.append(next(step for step in range(60) if envs.step(np.zeros(1, np.int64))[3][0]))
    assert abs(ends[0] - ends[1]) <= 8  # no-ops are frames, too


@pytest.mark.parametrize("name", ["episodic_life", "life_loss_info", "mode", "difficulty", "continuous", "x"])
def test_arguments_that_a_game_cannot_have(atari_script, name):
    """Catches: lives logged and evaluated as games, a mode that is ignored, a traceback."""
    args = small_args(atari_script, env_kwargs=f'{{"{name}": 1}}')
    for render in (False, True):
        with pytest.raises(atari_script.UserError, match=rf"^--env-kwargs of a game may be frameskip, .*, not {name}$"):
            atari_script.make_envs(args, 1, render)


@pytest.mark.parametrize("atari_script", ["ppo_atari"], indirect=True)
def test_all_actions_and_sticky_ones(atari_script):
    """Catches: an argument that is taken and has no effect, in training or in a film."""
    args = small_args(atari_script, env_kwargs='{"full_action_space": true, "repeat_action_probability": 1.0}')
    for render in (False, True):
        with contextlib.closing(atari_script.make_envs(args, 1, render)) as envs:
            assert envs.single_action_space.n == 18
            seen = []
            for action in (2, 3):  # up, right; but the first action, none, is repeated for ever
                envs.reset(seed=[1])
                seen.append([envs.step(np.array([action]))[0] for _ in range(20)][-1])
            assert np.array_equal(*seen)


class Lives(gym.vector.VectorEnv):
    """A game that has `first` lives, then what `steps` says: how many, whether terminated, whether truncated."""

    num_envs = 1

    def __init__(self, first, *steps):
        self.first, self.steps = first, iter(steps)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1), dict(lives=np.array([self.first]))

    def step(self, actions):
        lives, terminated, truncated = next(self.steps)
        return np.zeros(1), np.zeros(1), np.array([terminated]), np.array([truncated]), dict(lives=np.array([lives]))


def test_a_game_that_goes_on_without_lives_loses_none(atari_script):
    """Catches: Q*bert's end counted twice: it has 0 lives for some frames before its game is over."""
    envs = atari_script.AtariLives(Lives(2, (1, False, False), *2 * [(0, False, False)], (3, True, False)), None)
    envs.reset()
    assert [bool(envs.step(np.zeros(1))[2][0]) for _ in range(4)] == [True, False, False, True]


def test_a_game_that_is_truncated_with_extra_lives_loses_none(atari_script):
    """Catches: DemonAttack cut with more lives than a new game has: not a lost life, for the cut is bootstrapped."""
    envs = atari_script.AtariLives(Lives(3, (5, False, False), (3, False, True), (2, False, False)), None)
    envs.reset()
    ends = [tuple(bool(end[0]) for end in envs.step(np.zeros(1))[2:4]) for _ in range(3)]
    assert ends == [(False, False), (False, True), (True, False)]


@pytest.mark.parametrize("atari_script", ["ppo_atari"], indirect=True)
@pytest.mark.parametrize("env_id", GAMES)
def test_several_games_do_not_mix(atari_script, env_id):
    """Catches: lives or FIRE of one game that act on another, and a result that depends on the threads."""
    steps = 200
    args = small_args(atari_script, env_id=env_id)
    seeds = atari_script.env_seeds(args, 2, atari_script.TRAINING, 0)
    with contextlib.closing(atari_script.make_envs(args, 2)) as together:
        actions = random_actions(together, steps)
        first, _ = together.reset(seed=seeds)
        expected = [together.step(action) for action in actions]
    with contextlib.closing(atari_script.make_envs(args, 1)) as alone:
        for n in range(2):
            np.testing.assert_array_equal(alone.reset(seed=[seeds[n]])[0][0], first[n])
            for action, ours in zip(actions, expected):
                for x, y in zip(alone.step(action[[n]])[:4], ours[:4]):
                    np.testing.assert_array_equal(x[0], y[n])


@pytest.mark.parametrize("atari_script", ["ppo_atari"], indirect=True)
def test_games_begin_with_no_ops(atari_script):
    """Catches: no no-ops at all, or as many in every game, so that an agent can learn one game by heart."""
    args = small_args(atari_script, env_id=PONG)
    with contextlib.closing(atari_script.make_envs(args, 5)) as envs:
        _, infos = envs.reset(seed=atari_script.env_seeds(args, 5, atari_script.TRAINING, 0))
    noops = infos["episode_frame_number"]
    assert len(set(noops.tolist())) >= 4
    assert noops.max() - noops.min() <= 30


@pytest.mark.parametrize("atari_script", ["ppo_atari"], indirect=True)
@pytest.mark.parametrize(("env_id", "sticky"), [("ALE/Pong-v5", True), (PONG, False)])
def test_sticky_actions_are_those_of_the_id(atari_script, without_noops, env_id, sticky):
    """Catches: sticky actions in NoFrameskip-v4, or none in v5; the v5 frame skip applied on top of the wrapper's."""
    args = small_args(atari_script, env_id=env_id)
    with contextlib.closing(atari_script.make_envs(args, 2)) as envs:
        obs, infos = envs.reset(seed=[1, 2])  # without no-ops the seeds differ in what sticks only
        frames = infos["episode_frame_number"][0]
        differ = not np.array_equal(*obs)
        for action in random_actions(envs, 60)[:, :1]:
            obs, _, _, _, infos = envs.step(np.repeat(action, 2))
            differ |= not np.array_equal(*obs)
        assert differ == sticky
        assert infos["episode_frame_number"][0] == frames + 4 * 60


def test_a_random_frame_skip_is_refused(atari_script):
    """Catches: Breakout-v4, whose frame skip is random, trained as if it were Breakout with some other skip."""
    for env_id in ("Breakout-v4", "CartPole-v1"):
        with pytest.raises(atari_script.UserError, match=f"{env_id} is not an Atari game with a fixed frame skip"):
            atari_script.make_envs(small_args(atari_script, env_id=env_id), 1)


@pytest.mark.parametrize("atari_script", ["ppo_atari"], indirect=True)
def test_a_game_is_truncated_at_its_limit_of_frames(atari_script, without_noops):
    """Catches: the limit counted in steps, no limit, or one that counts as a lost game."""
    env_id, frames = "MontezumaRevengeNoFrameskip-v4", 2000
    assert gym.spec(env_id).kwargs["max_num_frames_per_episode"] == 108_000
    args = small_args(atari_script, env_id=env_id, env_threads=1)
    with short_games(env_id, frames), contextlib.closing(atari_script.make_envs(args, 1)) as envs:
        envs.reset(seed=[1])
        noop = np.zeros(1, np.int64)  # it waits at the start, where nothing harms it
        for _ in range(frames // 4 - 1):
            _, _, terminations, truncations, _ = envs.step(noop)
            assert not terminations[0]
            assert not truncations[0]
        _, _, terminations, truncations, infos = envs.step(noop)
    assert (terminations[0], truncations[0]) == (False, True)
    assert infos["episode"]["l"][0] == frames // 4


class GarbageFinalObs(gym.vector.VectorWrapper):
    """Replaces rows of infos["final_obs"] by noise: those of steps that truncated, or those of all the others."""

    def __init__(self, envs, where_truncated: bool):
        super().__init__(envs)
        self.where_truncated, self.replaced, self.rng = where_truncated, 0, np.random.default_rng(0)

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        if "final_obs" in infos:
            rows = truncations if self.where_truncated else ~truncations
            shape = (rows.sum(), *self.single_observation_space.shape)
            infos["final_obs"] = infos["final_obs"].copy()
            infos["final_obs"][rows] = self.rng.integers(0, 256, shape, np.uint8)
            self.replaced += rows.sum()
        return obs, rewards, terminations, truncations, infos


def test_final_observations_are_read_where_truncated_only(atari_script, monkeypatch):
    """Catches: the uninitialised rows of final_obs in the value of a state, or the next game's start in its place."""
    args = small_args(atari_script, num_envs=4, num_steps=64, total_timesteps=768, update_epochs=1)
    make_envs, wrappers = atari_script.make_envs, []
    with short_games(args.env_id, 600):
        run_dir = atari_script.train(args)
        for where_truncated in (False, True):

            def make_envs_with_garbage(*args, where_truncated=where_truncated):
                wrappers.append(GarbageFinalObs(make_envs(*args), where_truncated))
                return wrappers[-1]

            monkeypatch.setattr(atari_script, "make_envs", make_envs_with_garbage)
            other_dir = atari_script.train(args)
            assert wrappers[-1].replaced > 0
            assert same_parameters(run_dir, other_dir) == (not where_truncated)


def test_the_learner_sees_signs_and_life_losses(atari_script, monkeypatch):
    """Catches: raw rewards in the advantages, and values that look past a lost life."""
    rollouts = []
    compute_gae = atari_script.compute_gae

    def spy(rewards, values, next_values, terminations, dones, *discounts):
        rollouts.append((rewards.clone(), terminations.clone(), dones.clone()))
        return compute_gae(rewards, values, next_values, terminations, dones, *discounts)

    monkeypatch.setattr(atari_script, "compute_gae", spy)
    args = small_args(atari_script, env_id=MS_PACMAN, num_steps=300, total_timesteps=600, update_epochs=1)
    run_dir = atari_script.train(args)
    rewards, terminations, dones = rollouts[0]
    assert set(rewards.unique().tolist()) == {0.0, 1.0}
    assert terminations.sum() >= 2
    assert torch.equal(terminations, dones)
    episodes = read_scalars(run_dir).get("charts/episodic_return", [])
    assert all(value % 10 == 0 and value > rewards.sum() for _, value in episodes)


def test_observations_reach_the_network_as_bytes(atari_script, monkeypatch):
    """Catches: a rollout buffer four times too large, and pixels that are scaled twice or not at all."""
    dtypes, ranges = set(), []
    encode = atari_script.Agent.encode

    def spy(self, obs, *rest):
        dtypes.add(obs.dtype)
        return encode(self, obs, *rest)

    monkeypatch.setattr(atari_script.Agent, "encode", spy)
    args = small_args(atari_script)
    with contextlib.closing(atari_script.make_envs(args, 2)) as envs:
        agent = atari_script.Agent(envs, args)
        first = next(module for module in agent.modules() if isinstance(module, torch.nn.Conv2d))
        first.register_forward_pre_hook(lambda _, inputs: ranges.append(inputs[0]))
        agent.encode(torch.full((1, *envs.single_observation_space.shape), 255, dtype=torch.uint8))
        assert ranges[0].is_floating_point()
        assert (ranges[0] == 1).all()
    atari_script.train(args)
    assert dtypes == {torch.uint8}


def test_a_short_run_on_pong(atari_script):
    """Catches: a run that breaks where the first game ends, and an evaluation that returns clipped or partial games."""
    args = small_args(atari_script, env_id=PONG, num_steps=64, total_timesteps=512, eval_episodes=1, update_epochs=1)
    with short_games(PONG, 800):
        run_dir = atari_script.train(args)
    scalars = read_scalars(run_dir)
    lengths = [value for _, value in scalars["charts/episodic_length"]]
    assert all(170 <= length <= 200 for length in lengths)
    assert all(-21 <= value <= 21 for _, value in scalars["charts/episodic_return"] + scalars["eval/episodic_return"])
    assert [step for step, _ in scalars["losses/value_loss"]] == [128, 256, 384, 512]
    assert all(math.isfinite(value) for points in scalars.values() for _, value in points)


def test_float32_features_do_not_depend_on_the_memory_layout(atari_script):
    """Catches: pixels that are permuted, not only laid out anew, before the convolutions."""
    args = small_args(atari_script)
    with contextlib.closing(atari_script.make_envs(args, 2)) as envs:
        agent = atari_script.Agent(envs, args)
        obs = torch.as_tensor(np.stack([envs.single_observation_space.sample() for _ in range(3)]))
    expected = agent.network((obs.float() / 255).contiguous())
    torch.testing.assert_close(agent.encode(obs), expected, rtol=1e-5, atol=1e-5)


def test_convolutions_are_channels_last(atari_script):
    """Catches: the slower layout, in which one frame stays unless told otherwise, as it is in both at once."""
    args = small_args(atari_script)
    with contextlib.closing(atari_script.make_envs(args, 2)) as envs:
        agent = atari_script.Agent(envs, args)
        obs = torch.as_tensor(np.stack([envs.single_observation_space.sample() for _ in range(3)]))
    strides = []
    for layer in agent.network:
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(lambda layer, given, out: strides.append(out.stride()[1]))
    for agent.bf16 in (False, True):
        agent.encode(obs)
    assert strides == [1] * 6


def test_bfloat16_is_close_to_float32(atari_script):
    """Catches: a half precision that reaches the heads, a flag that does nothing, pixels rounded before the scaling."""
    args = small_args(atari_script)
    with contextlib.closing(atari_script.make_envs(args, 2)) as envs:
        agent = atari_script.Agent(envs, args)
        obs = torch.as_tensor(np.stack([envs.single_observation_space.sample() for _ in range(3)]))
    exact = agent.encode(obs)
    agent.bf16 = True
    rounded = agent.encode(obs)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).norm() < 0.02 * exact.norm()
