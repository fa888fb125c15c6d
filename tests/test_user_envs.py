"""What users' envs do that gymnasium's do not: CheckedEnv, and what becomes of a run whose env fails."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, flags, read_scalars, same_parameters, small_args
from launcher import wait_until
from odd_envs import DRAWS, ERRORS, INFOS, MISFITS, NUMBERS

import ppo

ACTIONS = dict(ppo_continuous_action="Box", ppo_multidiscrete="MultiDiscrete")  # the others: Discrete


def odd_args(script, what: str, *, vectorization="sync", env_id="odd_envs:Odd-v0", since=0, **changes):
    """Arguments of a small run in an env that is odd in one way."""
    kwargs = dict(what=what, since=since, actions=ACTIONS.get(script.__name__, ""))
    return small_args(script, env_id=env_id, env_kwargs=json.dumps(kwargs), vectorization=vectorization, **changes)


def observe(args, seeds: list[int], steps: int = 20) -> np.ndarray:
    """What envs observe: (steps + 1, N, *O)."""
    envs = ppo.make_envs(args, len(seeds))
    seen = [envs.reset(seed=seeds)[0]]
    seen += [envs.step(np.zeros(len(seeds), int))[0] for _ in range(steps)]
    envs.close()
    return np.stack(seen)


@pytest.mark.parametrize(
    ("source", "vectorization"),  # in this process torch's generator is training's own, which the run seeds
    [(source, kind) for source in DRAWS for kind in ("sync", "async") if (source, kind) != ("torch", "sync")],
)
def test_all_randomness_is_the_seeds(source, vectorization):
    """Catches: 16 processes with the state of one generator, which play the same levels; a --seed that does not reach
    numpy's and Python's global generators, torch's, or those of the env's spaces."""
    env_id = "odd_envs:Sampling-v0" if source == "a wrapper's space" else "odd_envs:Odd-v0"
    args = odd_args(ppo, source, vectorization=vectorization, env_id=env_id)
    seen = observe(args, [1, 2, 3])
    assert np.array_equal(observe(args, [1, 2, 3]), seen)
    assert not np.array_equal(observe(args, [4, 5, 6]), seen)
    assert len({tuple(x) for x in seen[0]}) == 3
    if vectorization == "async" or "space" in source:  # streams of their own
        assert np.array_equal(observe(args, [3, 2, 1]), seen[:, ::-1])
        first, second, _ = np.moveaxis(seen, 1, 0)
        assert not {tuple(x) for x in first[:, :1]} & {tuple(x) for x in second[:, :1]}


def test_an_envs_generators_differ():
    """Catches: env.np_random and the samples of the env's spaces as one stream, since one seed is given to each."""
    envs = ppo.make_envs(odd_args(ppo, "its observation space"), 1)
    (first,), _ = envs.reset(seed=[5])
    (env,) = envs.unwrapped.envs
    assert first[0] != pytest.approx(np.random.default_rng(5).random(), abs=1e-6)
    assert env.unwrapped.np_random.random() == np.random.default_rng(5).random()
    envs.reset(seed=[5])
    owners = (env.unwrapped, env.unwrapped.observation_space, env.unwrapped.action_space)
    assert len({owner.np_random.bit_generator.state["state"]["inc"] for owner in owners}) == 3
    envs.close()


def test_an_env_keeps_a_generator_of_its_own():
    """Catches: numpy's old RandomState replaced by a Generator, which has not its methods; an error upon np_random
    that is a property."""
    assert observe(odd_args(ppo, "an old generator"), [1, 2]).std() > 0
    own = odd_args(ppo, "np_random, which it forgets to seed", env_id="odd_envs:Own-v0")
    assert observe(own, [1, 2]).std() > 0


@pytest.mark.parametrize("source", ["numpy", "python", "its observation space"])
def test_a_seed_fixes_training_and_evaluations_change_nothing(source):
    """Catches: two runs of one seed that differ; an evaluation that moves the streams of training's envs."""
    runs = [ppo.train(odd_args(ppo, source, checkpoint_every=1, **more)) for more in ({}, dict(eval_every=1))]
    assert same_parameters(*runs)
    assert not same_parameters(runs[0], ppo.train(odd_args(ppo, source, seed=2)))


def test_an_env_does_not_seed_the_network():
    """Catches: runs of all seeds that begin with the same network, for an env's constructor seeds torch."""
    same = dict(learning_rate=1e-12, eval_episodes=0)
    runs = [ppo.train(odd_args(ppo, "seeds torch", seed=seed, **same)) for seed in (1, 2)]
    first, second = (ppo.load_checkpoint(run / "checkpoint.pt")["agent"] for run in runs)
    assert not torch.allclose(first["actor.0.weight"], second["actor.0.weight"], atol=0.01)


def test_an_env_that_moves():
    """Catches: a run's files in the folder to which an env's constructor has changed; what looks for them there."""
    here = Path.cwd()
    args = odd_args(ppo, "moves", eval_episodes=1)
    run_dir = ppo.train(args)
    assert run_dir.parent == here / "runs"
    assert Path.cwd() == here
    more = ppo.saved_args(run_dir.relative_to(here), total_timesteps=2 * args.total_timesteps)
    assert ppo.train(more) == run_dir
    assert ppo.load_checkpoint(run_dir / "checkpoint.pt")["global_step"] == more.total_timesteps
    assert len(ppo.evaluate(run_dir.relative_to(here), 1)) == 1
    os.chdir(here)


def test_the_callers_generators_are_as_before():
    """Catches: a training in the midst of a user's program that sets what the user draws."""
    before = np.random.get_state()[1].copy(), random.getstate()
    ppo.train(odd_args(ppo, "numpy", eval_episodes=1))
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_end_that_is_no_flag(vectorization):
    """Catches: a dict, which is true whatever it says, that ends every episode at its first step."""
    args = odd_args(ppo, "", env_id="odd_envs:NamedEnds-v0", vectorization=vectorization)
    with pytest.raises(TypeError, match=r"float.* 'dict'"):
        ppo.train(args)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("what", [*INFOS, *NUMBERS])
def test_infos_and_numbers(what, vectorization):
    """Catches: infos that nobody reads, or a reward that is an array of one number, that end a run in its midst."""
    run_dir = ppo.train(odd_args(ppo, what, vectorization=vectorization))
    assert read_scalars(run_dir)["charts/mean_return_100"][-1][1] == 8
    assert ppo.load_checkpoint(run_dir / "checkpoint.pt")["kept"]["recent"][-1] == (8.0, 8)


def test_every_script_takes_them(script):
    """Catches: a script that makes its envs in another way."""
    for what in ("ragged", "tensors"):
        run_dir = script.train(odd_args(script, what))
        assert read_scalars(run_dir)["charts/mean_return_100"][-1][1] == 8


@pytest.mark.parametrize("since", [0, 1], ids=["reset", "step"])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("what", MISFITS)
@pytest.mark.filterwarnings("ignore")
def test_observations_that_do_not_fit(what, vectorization, since):
    """Catches: 254.9 seen as 254, -1 as 255, one number in the place of four, for async envs cast whatever comes."""
    args = odd_args(ppo, what, vectorization=vectorization, since=since)
    space, misfit = MISFITS[what]
    with pytest.raises(ppo.UserError) as refused:
        observe(args, [1, 2], steps=1)
    sentence = str(refused.value)
    assert sentence.startswith(f"Odd-v0 gave {misfit()!r}, not of {space}")


def test_every_script_refuses_them(script):
    """Catches: a script that takes what does not fit."""
    with pytest.raises(script.UserError, match=r"Odd-v0 gave .*, not of Box"):
        script.train(odd_args(script, "a row for a vector"))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_step_of_the_old_gym(vectorization):
    """Catches: the mistake that is made most, met within gymnasium, where nothing says what a step must return."""
    args = odd_args(ppo, "", env_id="odd_envs:OldStep-v0", vectorization=vectorization)
    with pytest.raises(ValueError, match="expected 5, got 4") as error:
        observe(args, [1, 2], steps=1)
    if vectorization == "sync":  # else it was told by the env's process
        assert "obs, reward, terminated, truncated, _ =" in str(error.traceback[-1].statement)


def test_an_env_that_finds_no_server(launcher):
    """Catches: a wrong guess at why, and talk of a checkpoint, where no run has begun; the env's line lost."""
    options = SMALL["ppo"] | dict(env_id="odd_envs:Odd-v0", env_kwargs='{"what": "finds no server"}')
    result = launcher.run("ppo", *flags(**options))
    assert result.returncode == 1
    assert "odd_envs.py" in result.stderr
    assert "ConnectionRefusedError" in result.stderr
    assert "checkpoint" not in result.stderr
    assert not Path("runs").exists()


def test_a_misfit_on_the_command_line(launcher):
    """Catches: a traceback where a sentence would do, and success."""
    options = SMALL["ppo"] | dict(env_id="odd_envs:Odd-v0", env_kwargs='{"what": "one number for two"}')
    result = launcher.run("ppo", *flags(**options))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "Odd-v0 gave array([0.5], dtype=float32), not of Box(0.0, 1.0, (2,), float32)" in result.stderr


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("what", ERRORS)
def test_an_env_that_fails(launcher, what, vectorization):
    """Catches: a run that ends in the midst, in silence and with exit code 0, since pygame's window was closed; one
    that hangs, or loses the place of an error, which no process could send to another."""
    options = dict(env_id="odd_envs:Odd-v0", env_kwargs=json.dumps(dict(what=what)), vectorization=vectorization)
    result = launcher.run("ppo", *flags(**SMALL["ppo"] | options))
    assert result.returncode == 1
    (run_dir,) = Path("runs").absolute().iterdir()
    where = 'odd_envs.py", line'
    for told in ("RuntimeError: an env raised ", where, "; the last checkpoint is good"):
        assert told in result.stderr
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 0


def test_an_env_that_exits_in_an_evaluation(launcher):
    """Catches: an evaluation that ends in silence, and with exit code 0."""
    run_dir = ppo.train(odd_args(ppo, "nothing"))
    result = launcher.run("ppo", "--evaluate", str(run_dir), "--env-kwargs", '{"what": "sys.exit"}')
    assert result.returncode == 1
    assert "an env raised SystemExit()" in result.stderr


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("what", ["close", "close exits"])
def test_an_env_whose_close_fails(what, vectorization, capfd):
    """Catches: an evaluation, or the end of a run, that fails for an env has no window to close any more."""
    run_dir = ppo.train(odd_args(ppo, what, vectorization=vectorization, eval_episodes=1))
    assert read_scalars(run_dir)["eval/episodic_return"] == [(128, 8.0)]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_env_that_exits_as_it_is_made(vectorization):
    """Catches: a resumed job that counts as done, since its exit code is 0, though the env had no licence."""
    run_dir = ppo.train(odd_args(ppo, "nothing", vectorization=vectorization))
    with pytest.raises(RuntimeError, match=r"SystemExit\(\): an env raised it or called sys.exit"):
        ppo.train(ppo.saved_args(run_dir, env_kwargs='{"what": "exits"}', total_timesteps=256))


def start_async(launcher, **changes):
    """A run that has begun to train in processes of two envs, and their numbers."""
    options = SMALL["ppo"] | dict(vectorization="async", total_timesteps=10**9, checkpoint_every=1) | changes
    process = launcher.start("ppo", *flags(**options))
    load = lambda path: torch.load(path, weights_only=True)["iteration"]
    wait_until(lambda: any(load(path) for path in Path().glob("runs/*/ch*.pt")) or not process.running())
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2, process.stderr
    return process, [int(child) for child in children]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_each_process_of_the_job(launcher, signum):
    """Catches: envs that die of it first, as with SLURM's scancel, and take the iteration along."""
    process, workers = start_async(launcher)
    for pid in (*workers, process.pid):
        os.kill(pid, signum)
    assert process.wait() == 128 + signum, process.stderr
    assert process.stderr.strip() == "stopping after this iteration; Ctrl-C again stops at once"
    assert "to go on: python" in process.stdout


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_envs_are_made(launcher, signum):
    """Catches: envs' processes that die of it as long as they are not made yet, and a traceback of the run's."""
    options = dict(vectorization="async", env_id="odd_envs:Odd-v0", env_kwargs='{"what": "slow to make"}')
    process = launcher.start("ppo", *flags(**SMALL["ppo"] | options))
    beginnings = lambda: [int(path.stem) for path in Path().glob("*.made")]  # the main process makes one, too
    wait_until(lambda: len(beginnings()) == 3 or not process.running())
    for pid in beginnings():
        os.kill(pid, signum)
    assert process.wait() == 128 + signum, process.stderr
    assert "to go on: python" in process.stdout


def test_an_env_that_is_killed(launcher):
    """Catches: an EOFError that tells nobody that the memory was too small, or a main process that waits for ever."""
    process, workers = start_async(launcher)
    os.kill(workers[0], signal.SIGKILL)
    (run_dir,) = Path("runs").absolute().iterdir()
    wait_until(lambda: "want of memory" in process.stderr or not process.running())
    assert "want of memory" in process.stderr
    assert f"want of memory; a checkpoint in {run_dir} is good" in process.stderr
    assert process.wait() == 1


def test_the_end_of_python_ends_an_envs_process():
    """Catches: 30 seconds of waiting at the end of a run that failed, for envs' processes leave a SIGTERM to it."""
    envs = ppo.make_envs(odd_args(ppo, "nothing", vectorization="async"), 1)
    (worker,) = envs.unwrapped.processes
    worker._popen.terminate()  # as multiprocessing does
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    with contextlib.suppress(EOFError, ConnectionError):
        envs.close()


def test_constructors_draw_differently():
    """Catches: levels drawn by numpy as envs are made, equal in all processes."""
    envs = ppo.make_envs(odd_args(ppo, "drawn at first", vectorization="async"), 3)
    drawn, _ = envs.reset(seed=[1, 2, 3])
    envs.close()
    assert [len(set(column)) for column in drawn.T.tolist()] == [3, 3]


def test_an_evaluation_does_not_rewind_training():
    """Catches: the same draws in every rollout, as each evaluation makes an env whose constructor seeds everything."""
    runs = [ppo.train(odd_args(ppo, "seeds all", checkpoint_every=1, **more)) for more in ({}, dict(eval_every=1))]
    assert same_parameters(*runs)


def test_an_env_that_needs_gradients():
    """Catches: a simulator that is differentiated, and works in training alone."""
    run_dir = ppo.train(odd_args(ppo, "a gradient", eval_episodes=1))
    assert read_scalars(run_dir)["eval/episodic_return"] == [(128, 8.0)]


def test_an_env_that_is_stuck(launcher):
    """Catches: a run that no Ctrl-C ends, as an env's process computes for ever; a process that survives it."""
    process, workers = start_async(launcher, env_id="odd_envs:Odd-v0", env_kwargs='{"what": "stuck"}')
    for told in ("stopping after this iteration", "interrupted"):
        process.send(signal.SIGINT)
        wait_until(lambda told=told: told in process.stderr or not process.running())
    assert process.wait() == 130, process.stderr
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_an_envs_own_process_can_be_ended(launcher):
    """Catches: a run that hangs at its end, for what an env has forked does as training does upon a signal: go on."""
    options = dict(env_id="odd_envs:Odd-v0", env_kwargs='{"what": "a process"}', eval_episodes=1)
    result = launcher.run("ppo", *flags(**SMALL["ppo"] | options))
    assert result.returncode == 0, result.stderr
    assert "evaluation: mean return 8.00" in result.stdout


def test_torch_in_an_envs_process():
    """Catches: a fork of a process whose torch has run threads: the child waits for them for ever."""
    options = dict(env_id="odd_envs:Learner-v0", env_kwargs='{"what": "nothing"}', vectorization="async")
    options |= dict(torch_threads=2, checkpoint_every=1, eval_every=1, eval_episodes=1)
    options |= dict(num_envs=2, num_steps=64, total_timesteps=128)
    command = [sys.executable, ROOT / "ppo.py", *flags(**options)]
    with open("output", "w") as output:  # not a pipe, which a process that hangs would keep open
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        assert process.wait(timeout=100) == 0, Path("output").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert Path("output").read_text().splitlines()[-1].startswith("128 steps, mean return 8.0")
