"""--compile: the same training, through torch.compile. Its graphs are run as they are: the code that a C++ compiler
would make of them is not this project's, and no machine that tests needs one."""

import gc
import itertools

import pytest
import torch
from conftest import parameters, small_args

# how many graphs a minibatch, from its policy to its clipped gradient, and the rollout's policy become: a small policy
# none, on a CPU. An LSTM's cells are in its policy's, which is made twice: the first state is no inference tensor. Its
# sequences are compiled by nobody, and so cut a minibatch's: its backward pass goes through all pieces, and is in none
GRAPHS = dict(ppo=[1], ppo_continuous_action=[1], ppo_lstm=[4, 2], ppo_atari_lstm=[4, 2])


@pytest.fixture
def graphs(monkeypatch):
    """Has torch.compile capture graphs without compiling them; of each function that it is given, a list of those."""
    captured, compile = [], torch.compile
    run_as_it_is = torch._dynamo.lookup_backend("aot_eager")

    def spy(function, **options):
        captured.append([])

        def backend(module, inputs, graphs=captured[-1]):
            function = run_as_it_is(module, inputs)  # or an exception, after which a graph is captured anew
            graphs.append(module.graph)
            return function

        return compile(function, backend=backend, dynamic=options["dynamic"])

    monkeypatch.setattr(torch, "compile", spy)
    torch._dynamo.reset()
    return captured


def test_compiled_equals_eager(script, graphs):
    """Catches: a policy or a loss that cannot be captured, is captured in pieces, or with a value that changes."""
    arguments = dict(anneal_clip=True, checkpoint_every=2)
    eager = parameters(script.train(small_args(script, **arguments)))
    assert graphs == []
    compiled = parameters(script.train(small_args(script, compile=True, **arguments)))
    assert [len(function) for function in graphs] == GRAPHS.get(script.__name__, [1, 1]), "of GRAPHS above"
    for graph in itertools.chain(*graphs):  # CUDA graphs want every size to be known
        given = [node.meta["example_value"] for node in graph.nodes if node.op == "placeholder"]
        assert all(isinstance(value, torch.Tensor) for value in given)
        assert all(isinstance(size, int) for value in given for size in value.shape)
    for name, parameter in eager.items():
        torch.testing.assert_close(
            compiled[name], parameter, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("script", ["ppo_multidiscrete"], indirect=True)
def test_collections_do_not_search_what_was_compiled(script, graphs, monkeypatch):
    """Catches: garbage collections of 0.1 s each, of which MicroRTS's Java asks for one or two in an iteration."""
    log, frozen = script.Run.log, []
    monkeypatch.setattr(script.Run, "log", lambda run, *args: (frozen.append(gc.get_freeze_count()), log(run, *args)))
    gc.unfreeze()
    script.train(small_args(script))
    assert frozen == [0, 0, 0, 0]
    script.train(small_args(script, compile=True))
    gc.unfreeze()
    assert frozen[4] == 0
    assert frozen[5] > 10_000
    assert frozen[7] - frozen[5] < 1000  # what later iterations leave behind is collected, but for this
