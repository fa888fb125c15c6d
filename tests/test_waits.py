"""An update never waits for the device: nothing in it asks what a tensor holds, which a GPU answers late."""

import contextlib

import pytest
import torch
from conftest import small_args
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

ASKS = ("_local_scalar_dense", "nonzero", "unique", "_unique2", "masked_select", "is_nonzero", "equal", "item")


class Watch(TorchDispatchMode):
    """Notes the operations that need a tensor's numbers on the CPU."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if name in ASKS:
            self.seen.append(name)
        return function(*args, **kwargs or {})


@pytest.fixture
def waits(script, monkeypatch):
    """What the minibatches of a run asked for; the plan of an LSTM's sequences may ask, for it lives on the CPU."""
    watch, seen, compute_gradients = Watch(), [], script.compute_gradients
    watched = contextlib.ExitStack()

    def begin(*args):
        watched.enter_context(watch)
        return compute_gradients(*args)

    def end(*args):
        seen.append(list(watch.seen))
        watch.seen.clear()
        watched.close()

    monkeypatch.setattr(script, "compute_gradients", begin)
    handle = register_optimizer_step_post_hook(end)
    if hasattr(script, "cut_at_episodes"):
        cut_at_episodes = script.cut_at_episodes

        def plan(starts):
            asked = len(watch.seen)
            result = cut_at_episodes(starts)
            del watch.seen[asked:]
            return result

        monkeypatch.setattr(script, "cut_at_episodes", plan)
    yield seen
    handle.remove()


def test_an_update_never_waits(script, waits):
    """Catches: an `if` on a loss, a norm or a mask in the minibatch loop, answered 16 to 320 times an update."""
    args = small_args(script)
    script.train(args)
    assert len(waits) == args.num_iterations * args.update_epochs * args.num_minibatches
    assert not any(waits)


def test_a_wait_is_seen(script, waits, monkeypatch):
    """Catches: the test above proving nothing, for it would see no wait."""
    clip = torch.nn.utils.clip_grad_norm_

    def clip_and_ask(*args, **options):
        norm = clip(*args, **options)
        assert norm >= 0
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_ask)
    script.train(small_args(script))
    assert all(seen for seen in waits)
