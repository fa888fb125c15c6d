"""--compile: the same training, through torch.compile. Its graphs are run as they are: the code that a C++ compiler
would make of them is not this project's, and no machine that tests needs one."""

import pytest
import torch
from conftest import parameters, small_args


@pytest.fixture
def graphs(monkeypatch):
    """Has torch.compile capture graphs without compiling them; counts the functions that it is given."""
    compiled, compile = [], torch.compile

    def spy(function, **options):
        compiled.append(function)
        return compile(function, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", spy)
    torch._dynamo.reset()
    return compiled


def test_compiled_equals_eager(script, graphs):
    """Catches: a policy or a loss that cannot be captured, and one that is captured with a value that changes."""
    arguments = dict(anneal_clip=True, checkpoint_every=2)
    eager = parameters(script.train(small_args(script, **arguments)))
    assert graphs == []
    compiled = parameters(script.train(small_args(script, compile=True, **arguments)))
    assert len(graphs) == 2
    for name, parameter in eager.items():
        torch.testing.assert_close(
            compiled[name], parameter, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
