"""Several processes, as torchrun starts them, train as one does."""

import importlib
import multiprocessing
import os
import signal
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import SMALL, read_scalars, same_parameters, small_args

SIZE = 2  # processes
# once, not in each process; torch imports _dynamo when it makes an optimizer
IMPORTED = ["ale_py", "gymnasium", "torch._dynamo", "torch.distributed", "torch.utils.tensorboard", "tyro"]


def in_process(rank: int, test, *args) -> None:
    """One of the processes that `together` starts."""
    torch.set_num_threads(1)
    os.environ |= dict(TORCHELASTIC_RUN_ID="1", RANK=str(rank), WORLD_SIZE=str(SIZE))  # as torchrun does; the scripts
    os.environ |= dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(SIZE))  # read them where they are imported
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


def train_and_tell(rank: int, name: str, arguments: dict, predictable: bool, told="rank") -> None:
    """Train, and write what happened in this process to {told}{rank}.pt."""
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
    torch.save(result | dict(run_dir=str(run_dir)), f"{told}{rank}.pt")


def told(name="rank") -> list[dict]:
    return [torch.load(f"{name}{rank}.pt", weights_only=True) for rank in range(SIZE)]


@pytest.mark.parametrize("name", [name for name in SMALL if name != "ppo_atari"])  # ppo_atari_lstm has its envs
def test_two_processes_train_as_one(name, monkeypatch):
    """Catches: gradients, statistics of normalisation, or a log, that are of a part of the batch only."""
    script = importlib.import_module(name)
    arguments = SMALL[name] | dict(num_envs=4, num_minibatches=1, norm_adv=False, total_timesteps=256)
    together(train_and_tell, name, arguments, True)
    first, second = told()
    assert first["seeds"] + second["seeds"] == script.env_seeds(script.Args(**arguments), 4, script.TRAINING, 0)
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
    for tag in ("charts/episodic_return", "charts/mean_return_100", *losses):
        if tag in ours:  # no game of Atari ends so soon
            np.testing.assert_allclose(ours[tag], theirs[tag], rtol=1e-3, atol=1e-4)
    checkpoint = torch.load(Path(first["run_dir"]) / "checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == expected["global_step"]
    assert sorted(checkpoint["kept"]["recent"]) == sorted(expected["kept"]["recent"])  # one process after the other
    assert len(list(Path(first["run_dir"]).iterdir())) == len(list(alone.iterdir()))


def train_compiled(rank: int, name: str, arguments: dict) -> None:
    """Train as it is, then with graphs that are captured, not compiled; none holds the exchange between processes."""
    train_and_tell(rank, name, arguments, predictable=False, told="eager")
    compile, graphs = torch.compile, []
    run_as_it_is = torch._dynamo.lookup_backend("aot_eager")

    def backend(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return run_as_it_is(module, inputs)

    torch.compile = lambda function, **_: compile(function, backend=backend, dynamic=False)
    train_and_tell(rank, name, arguments | dict(compile=True), predictable=False)
    exchanges = [target for graph in graphs for target in graph if "reduce" in target]
    assert not exchanges, "CUDA graphs cannot hold what goes from process to process"
    assert any("linear" in target for target in graphs[0])
    assert any("vector_norm" in target for target in graphs[-1])


def test_compiled_processes_train_as_eager_ones():
    """Catches: an exchange of gradients that is caught in a graph, or left out of one; processes that choose their
    actions and minibatches by the same numbers."""
    together(train_compiled, "ppo", SMALL["ppo"] | dict(num_envs=4))
    (eager, other), (first, second) = told("eager"), told()
    assert not torch.equal(eager["actions"], other["actions"])
    for key, value in eager["parameters"].items():
        assert torch.equal(value, other["parameters"][key])
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


def stop_and_resume(rank: int) -> None:
    script = importlib.import_module("ppo")
    arguments = SMALL["ppo"] | dict(checkpoint_every=2, exact_resume=True)
    whole = script.train(script.Args(**arguments))
    compute_gae, calls = script.compute_gae, []

    def signalled(*args):
        calls.append(args)
        if rank == 1 and len(calls) == 2:
            script.note_signal(os.getpid(), signal.SIGTERM, None)
        return compute_gae(*args)

    script.compute_gae = signalled
    with pytest.raises(SystemExit) as stopped:
        script.train(script.Args(**arguments))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(calls) == 2, "the processes did not stop together"
    dist.barrier()  # rank 0 has written
    (run_dir,) = (path for path in Path("runs").absolute().iterdir() if path != whole)
    if rank == 0:
        assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 2
    script.SIGNALS.clear()
    script.train(script.saved_args(run_dir))
    dist.barrier()
    assert same_parameters(whole, run_dir)
    Path("finished.txt").write_text(str(run_dir))


def test_a_signal_to_one_stops_all_and_they_resume_exactly():
    """Catches: a process that waits for ever for one that stopped; streams of the other processes not restored; a
    checkpoint that only as many processes as wrote it can read."""
    together(stop_and_resume)
    script = importlib.import_module("ppo")
    run_dir = Path("finished.txt").read_text()
    further = script.saved_args(run_dir, total_timesteps=256)
    assert torch.load(script.train(further) / "checkpoint.pt", weights_only=True)["global_step"] == 256


def compute_halves(rank: int) -> None:
    """Have each process compute the gradients of its half of a minibatch."""
    script = importlib.import_module("ppo")
    args = small_args(script, norm_adv=False, max_grad_norm=1e9)
    envs = script.make_envs(args, 1)
    torch.manual_seed(0)
    agent, frozen = script.Agent(envs, args), script.Agent(envs, args)
    frozen.load_state_dict(agent.state_dict())
    frozen.critic[0].weight.requires_grad_(False)
    minibatch = [torch.randn(8, 4), torch.randint(2, (8,)), *torch.randn(4, 8)]
    obs, actions, logprobs, advantages, values, returns = minibatch
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions)
    loss, _ = script.ppo_loss(newlogprob, logprobs, advantages, newvalue, values, returns, entropy, args)
    expected = dict(zip(dict(agent.named_parameters()), torch.autograd.grad(loss, list(agent.parameters()))))
    for each in (agent, frozen):
        stats = script.compute_gradients(each, [x[4 * rank :][:4] for x in minibatch], args)
        for name, parameter in each.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, expected[name])
            else:
                assert parameter.grad is None
    norm = torch.stack([x.norm() for name, x in expected.items() if name != "critic.0.weight"]).norm()
    torch.testing.assert_close(stats["grad_norm"], norm)
    assert script.average(x := torch.tensor([rank, 3.0])).tolist() == [0.5, 3.0]
    assert x.tolist() == [rank, 3.0], "changed in place"
    assert script.gather([rank] * (rank + 1)) == [0, 1, 1]


def test_averaged_gradients_are_those_of_the_whole_minibatch():
    """Catches: a sum for a mean, a norm of one process's part, an order of processes that is left to chance, and a
    parameter without a gradient, of which there is nothing to average."""
    together(compute_halves)
