"""Several processes, as torchrun starts them, train as one does."""

import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import FOLD_SCRIPTS, ROOT, SMALL, flags, read_scalars, same_parameters, small_args
from launcher import wait_until

SIZE = 2  # processes
# once, not in each process; torch imports _dynamo when it makes an optimizer
IMPORTED = ["ale_py", "gymnasium", "torch._dynamo", "torch.distributed", "torch.utils.tensorboard", "tyro"]


def in_process(rank: int, test, *args) -> None:
    """One of the processes that `together` starts."""
    torch.set_num_threads(1)
    store = f"file://{Path('store').absolute()}"
    dist.init_process_group("gloo", store, timeout=timedelta(seconds=100), rank=rank, world_size=SIZE)
    test(rank, *args)
    dist.destroy_process_group()


def together(test, *args) -> None:
    """Call test(rank, *args) in processes that know of each other; a failure in one fails here."""
    Path("store").unlink(missing_ok=True)
    multiprocessing.set_forkserver_preload(IMPORTED)
    torch.multiprocessing.start_processes(in_process, (test, *args), nprocs=SIZE, start_method="forkserver")


def act_predictably(script) -> None:
    """Have the script's agents act without chance: the random numbers of two processes are not those of one."""
    choose, choose_all = getattr(script.Agent, "get_action", None), script.Agent.get_action_and_value

    def choose_predictably(agent, obs, deterministic=False):
        action = choose(agent, obs, deterministic=True)
        return action + 0.5 if action.is_floating_point() else action  # off the mean, where the gradient is not zero

    def choose_all_predictably(agent, *args, **options):
        result = choose_all(agent, *args, deterministic=True, **options)
        if len(args) == 1 and result[0].is_floating_point():
            result = choose_all(agent, *args, action=result[0] + 0.5)
        return result

    if choose:
        script.Agent.get_action = choose_predictably
    else:
        script.Agent.get_action_and_value = choose_all_predictably


def train_and_tell(rank: int, name: str, arguments: dict, predictable: bool) -> None:
    """Train, and write what happened in this process to rank{rank}.pt."""
    script = importlib.import_module(name)
    agents, seeds, first_actions = [], [], []
    make_envs, make_agent = script.make_envs, script.Agent

    def spied_envs(*args):
        envs = make_envs(*args)
        reset, step = envs.reset, envs.step
        envs.reset = lambda *, seed=None, options=None: (seeds.extend(seed or []), reset(seed=seed, options=options))[1]
        envs.step = lambda actions: (first_actions.append(np.array(actions)), step(actions))[1]
        return envs

    def spied_agent(*args):
        agents.append(make_agent(*args))
        return agents[-1]

    if predictable:
        act_predictably(script)
    script.make_envs, script.Agent = spied_envs, spied_agent
    run_dir = script.train(script.Args(**arguments))
    result = dict(parameters=agents[0].state_dict(), seeds=seeds, actions=torch.tensor(np.stack(first_actions)))
    torch.save(result | dict(run_dir=str(run_dir)), f"rank{rank}.pt")


def told() -> list[dict]:
    return [torch.load(f"rank{rank}.pt", weights_only=True) for rank in range(SIZE)]


@pytest.mark.parametrize("name", [name for name in SMALL if name != "ppo_atari"])  # ppo_atari_lstm has its envs
def test_two_processes_train_as_one(name, monkeypatch):
    """Catches: gradients, statistics of normalisation, or a log, that are of a part of the batch only."""
    script = importlib.import_module(name)
    arguments = SMALL[name] | dict(num_envs=4, num_minibatches=1, norm_adv=False, total_timesteps=256)
    together(train_and_tell, name, arguments, True)
    first, second = told()
    monkeypatch.setattr(script, "Agent", type("Agent", (script.Agent,), {}))  # what is changed now is undone at the end
    act_predictably(script)
    alone = script.train(script.Args(**arguments))
    expected = torch.load(alone / "checkpoint.pt", weights_only=True)
    for key, value in expected["agent"].items():
        assert torch.equal(first["parameters"][key], second["parameters"][key])
        torch.testing.assert_close(first["parameters"][key], value, rtol=1e-4, atol=1e-5)
    assert first["run_dir"] == second["run_dir"]
    ours, theirs = read_scalars(Path(first["run_dir"])), read_scalars(alone)
    assert ours.keys() == theirs.keys()
    losses = (f"losses/{name}" for name in ("value_loss", "approx_kl", "entropy", "explained_variance", "grad_norm"))
    for tag in ("charts/episodic_return", *losses):
        if tag in ours:  # no game of Atari ends so soon
            np.testing.assert_allclose(ours[tag], theirs[tag], rtol=1e-3, atol=1e-4)
    checkpoint = torch.load(Path(first["run_dir"]) / "checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == expected["global_step"]
    assert len(list(Path(first["run_dir"]).iterdir())) == len(list(alone.iterdir()))


def train_compiled(rank: int, name: str, arguments: dict) -> None:
    """As train_and_tell, with graphs that are captured but not compiled; none holds the exchange between processes."""
    script = importlib.import_module(name)
    compile, average, in_graph, graphs = torch.compile, script.average, [], []
    run_as_it_is = torch._dynamo.lookup_backend("aot_eager")

    def backend(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return run_as_it_is(module, inputs)

    torch.compile = lambda function, **_: compile(function, backend=backend, dynamic=False)
    script.average = lambda x: (in_graph.append(torch.compiler.is_compiling()), average(x))[1]
    train_and_tell(rank, name, arguments, predictable=False)
    assert set(in_graph) == {False}, "CUDA graphs cannot hold what goes from process to process"
    policy_and_loss, _, _, clipping = graphs  # in between the gradient becomes a vector, and is split again
    assert any("linear" in target for target in policy_and_loss)
    assert any("vector_norm" in target for target in clipping)


def test_compiled_processes_train_as_eager_ones():
    """Catches: an exchange of gradients that is caught in a graph, or left out of one."""
    arguments = SMALL["ppo"] | dict(num_envs=4)
    together(train_and_tell, "ppo", arguments, False)
    eager, _ = told()
    together(train_compiled, "ppo", arguments | dict(compile=True))
    first, second = told()
    for key, value in eager["parameters"].items():
        assert torch.equal(first["parameters"][key], second["parameters"][key])
        torch.testing.assert_close(first["parameters"][key], value, rtol=1e-4, atol=1e-5)


def update_until_kl(rank: int) -> None:
    """Train with a KL that is 0 here and 1 there; write how many minibatches that took to rank{rank}.pt."""
    script = importlib.import_module("ppo")
    ppo_loss, calls = script.ppo_loss, []

    def loss_with_kl(*given):
        loss, stats = ppo_loss(*given)
        calls.append(rank)
        return loss, stats | dict(approx_kl=torch.tensor(float(rank)))

    script.ppo_loss = loss_with_kl
    script.train(small_args(script, target_kl=0.4))
    torch.save(len(calls), f"rank{rank}.pt")


def test_processes_stop_at_the_same_epoch():
    """Catches: a process that goes on alone, and waits for ever, for its own part of the batch changed less."""
    together(update_until_kl)
    args = small_args(importlib.import_module("ppo"))
    assert told() == [args.num_iterations * args.num_minibatches] * SIZE


def test_processes_wait_for_an_evaluation(monkeypatch):
    """Catches: processes that give up after half an hour, while the first one plays its episodes."""
    script, joined = importlib.import_module("ppo"), []
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: joined.append((backend, timeout)))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(script.atexit, "register", lambda function: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    script.join_processes(script.Args(cuda=False))
    ((backend, timeout),) = joined
    assert backend == "gloo"
    assert timeout >= timedelta(hours=12)


def test_processes_share_no_random_stream():
    """Catches: processes that play the same episodes, or choose their actions and minibatches by the same numbers."""
    arguments = SMALL["ppo"] | dict(num_envs=4)
    together(train_and_tell, "ppo", arguments, False)
    first, second = told()
    script = importlib.import_module("ppo")
    assert first["seeds"] + second["seeds"] == script.env_seeds(script.Args(**arguments), 4, script.TRAINING, 0)
    assert len({*first["seeds"], *second["seeds"]}) == 4
    assert not torch.equal(first["actions"], second["actions"])
    assert all(torch.equal(first["parameters"][key], value) for key, value in second["parameters"].items())


def stop_and_resume(rank: int) -> None:
    script = importlib.import_module("ppo")
    arguments = SMALL["ppo"] | dict(checkpoint_every=2, exact_resume=True)
    whole = script.train(script.Args(**arguments))
    compute_gae, calls = script.compute_gae, []

    def signalled(*args):
        calls.append(args)
        if rank == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_gae(*args)

    script.compute_gae = signalled
    with pytest.raises(SystemExit) as stopped:
        script.train(script.Args(**arguments))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(calls) == 2, "the processes did not stop together"
    dist.barrier()  # rank 0 has written
    (run_dir,) = (path for path in Path("runs").iterdir() if path != whole)
    if rank == 0:
        assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 2
    script.train(script.Args(**arguments, resume=str(run_dir)))
    dist.barrier()
    assert same_parameters(whole, run_dir)
    Path("finished.txt").write_text(str(run_dir))


def test_a_signal_to_one_stops_all_and_they_resume_exactly():
    """Catches: a process that waits for ever for one that stopped; streams of the other processes not restored; a
    checkpoint that only as many processes as wrote it can read."""
    together(stop_and_resume)
    script = importlib.import_module("ppo")
    run_dir = Path("finished.txt").read_text()
    further = script.Args(**SMALL["ppo"] | dict(total_timesteps=256, resume=run_dir))
    assert torch.load(script.train(further) / "checkpoint.pt", weights_only=True)["global_step"] == 256


def average_halves(rank: int, name: str) -> None:
    script = importlib.import_module(name)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    unused = torch.nn.Linear(2, 2)
    agent = torch.nn.ModuleList([network, unused])
    x = torch.randn(8, 3)
    expected = torch.autograd.grad((network(x) ** 2).mean(), list(network.parameters()))
    (network(x[4 * rank :][:4]) ** 2).mean().backward()
    with script.Run(script.Args()):
        script.average_gradients(agent)
    for parameter, gradient in zip(network.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient)
    assert unused.weight.grad is None
    assert script.average(torch.tensor([rank, 3.0])).tolist() == [0.5, 3.0]
    assert script.gather([rank] * (rank + 1)) == [0, 1, 1]


def test_averaged_gradients_are_those_of_the_whole_minibatch():
    """Catches: a sum for a mean, and an order of processes that is left to chance."""
    together(average_halves, "ppo")


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_one_process_averages_nothing(script):
    """Catches: helpers that need torchrun."""
    x, items = torch.ones(3), [1, 2]
    assert script.average(x) is x
    assert script.gather(items) == items
    assert script.num_processes() == 1
    agent = torch.nn.Linear(2, 1)
    agent.weight.grad = gradient = torch.ones(1, 2)
    with script.Run(small_args(script)) as run:
        script.average_gradients(agent)
        assert agent.weight.grad is gradient
        assert torch.equal(gradient, torch.ones(1, 2))
        assert (run.rank, run.processes) == (0, 1)
        assert run.share("num_envs") == small_args(script).num_envs


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_what_cannot_be_shared_is_refused(script, monkeypatch):
    """Catches: a remainder of the envs or of a minibatch that is dropped silently."""
    monkeypatch.setattr(script, "num_processes", lambda: 3)
    with pytest.raises(script.UserError, match=r"^--num-envs must be a multiple of 3, the number of processes, not 2$"):
        script.train(small_args(script))
    with pytest.raises(script.UserError, match="multiple of 3, the number of") as error:  # a minibatch of 3 envs
        script.train(small_args(script, num_envs=3, num_minibatches=3))
    flags_named = {flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", str(error.value))}
    assert flags_named == {"num_minibatches"}
    assert not Path("runs").exists()


def test_torchrun():
    """Catches: a command line that works alone only; two processes that write and speak at once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "ppo_atari.py")]
    arguments = flags(**SMALL["ppo_atari"] | dict(eval_episodes=1))
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^starting .* on cpu, 2 processes$", result.stdout, re.MULTILINE)) == 1
    assert result.stdout.count("evaluation: mean return") == 1
    (run_dir,) = Path("runs").iterdir()
    assert len(list(run_dir.glob("events*"))) == 1
    assert "eval/episodic_return" in read_scalars(run_dir)


def test_torchrun_is_stopped_by_a_signal():
    """Catches: a Ctrl-C that loses the run, or a command to resume it with one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "ppo.py")]
    with subprocess.Popen([*command, "--checkpoint-every", "1"], stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: list(Path().glob("runs/*/checkpoint.pt")))
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=300)[0]
    assert re.search(
        r"^stopped by signal 2; to go on: torchrun --nproc-per-node 2 \S*ppo.py --resume runs/", output, re.M
    )
    (checkpoint,) = Path().glob("runs/*/checkpoint.pt")
    state = torch.load(checkpoint, weights_only=True)
    assert state["global_step"] == state["iteration"] * 512
