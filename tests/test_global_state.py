"""A run leaves the process as it found it, and asks nothing of it: it may be one of many, or run in a thread."""

import random
import signal
import threading

import numpy as np
import pytest
import torch
from conftest import FOLD_SCRIPTS, small_args
from faulty_envs import Stop, crash_at

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def handler(signum, frame):
    """A handler of the caller's own."""


def hook(failure):
    """A hook of the caller's own."""


@pytest.fixture
def unusual(monkeypatch):
    """All that a run might change, set to what no run sets it to; asserts at the end that it still is."""
    monkeypatch.setattr(threading, "excepthook", hook)
    before = [signal.signal(signum, handler) for signum in SIGNALS]
    threads, deterministic = torch.get_num_threads(), torch.backends.cudnn.deterministic
    torch.set_num_threads(3)
    torch.manual_seed(1234)
    state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    def assert_unchanged():
        assert torch.equal(torch.get_rng_state(), state)
        assert np.array_equal(np.random.get_state()[1], numpy_state)
        assert random.getstate() == python_state
        assert torch.get_num_threads() == 3
        assert [signal.getsignal(signum) for signum in SIGNALS] == [handler, handler]
        assert threading.excepthook is hook
        assert torch.backends.cudnn.allow_tf32  # as torch has it
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()

    yield assert_unchanged
    torch.set_num_threads(threads)
    torch.backends.cudnn.deterministic = deterministic
    for signum, old in zip(SIGNALS, before):
        signal.signal(signum, old)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_leaves_nothing_changed(script, unusual, deterministic):
    """Catches: a second run, or the caller's own work, that depends on the run before it."""
    torch.backends.cudnn.deterministic = deterministic
    script.train(small_args(script, torch_threads=1, torch_deterministic=not deterministic, eval_episodes=1))
    assert torch.backends.cudnn.deterministic == deterministic
    unusual()


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_a_compiled_run_leaves_nothing_changed(script, unusual, monkeypatch):
    """Catches: torch.compile told to look into backward(), for the caller's functions as well."""
    seen = []
    look = lambda function, **_: (seen.append(torch._dynamo.config.trace_autograd_ops), function)[1]
    monkeypatch.setattr(torch, "compile", look)
    script.train(small_args(script, torch_threads=1, compile=True))
    assert all(seen)
    assert seen
    assert not torch._dynamo.config.trace_autograd_ops  # as torch has it
    unusual()


def test_a_run_that_fails_leaves_nothing_changed(script, unusual, monkeypatch):
    """Catches: what is put back after a good end only."""
    torch.backends.cudnn.deterministic = False
    crash_at(monkeypatch, script, small_args(script).num_steps + 3)
    with pytest.raises(Stop):
        script.train(small_args(script, torch_threads=1))
    assert not torch.backends.cudnn.deterministic
    unusual()
    with pytest.raises(script.UserError):
        script.train(small_args(script, resume="runs/none"))
    assert not torch.backends.cudnn.deterministic
    unusual()


def test_an_evaluation_leaves_nothing_changed(script, unusual):
    """Catches: an evaluation that sets the number of threads for the rest of the process."""
    checkpoint = script.train(small_args(script, torch_threads=1)) / "checkpoint.pt"
    torch.manual_seed(1234)
    torch.set_num_threads(3)
    for signum in SIGNALS:
        signal.signal(signum, handler)
    script.evaluate(checkpoint, 1)
    unusual()


def test_evaluation_seeds_the_cpu_alone(script, monkeypatch):
    """Catches: an evaluation between two iterations that sets the GPU's stream back to the seed's."""
    checkpoint = script.train(small_args(script)) / "checkpoint.pt"

    def seed_all(*args):
        raise AssertionError("an evaluation seeds more than the CPU's generator")

    for owner in (torch, torch.random, torch.cuda):
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, seed_all)
    before = torch.get_rng_state()
    returns = script.evaluate(checkpoint, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert script.evaluate(checkpoint, 1) == returns  # and seeded it was


def test_train_works_off_the_main_thread(script):
    """Catches: a run that can only be started where Python lets signals be caught."""
    before, results = [signal.getsignal(signum) for signum in SIGNALS], []

    def run():
        try:
            results.append(script.train(small_args(script)))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (run_dir,) = results
    assert not isinstance(run_dir, BaseException), run_dir
    assert script.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 4
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


@pytest.mark.parametrize("script", ["ppo"], indirect=True)
def test_float32_is_float32(script, monkeypatch):
    """Catches: TF32 in cuDNN, its default, with which the policy of the update is not that of the rollout."""
    seen, compute_gae = [], script.compute_gae

    def spy(*given):
        seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic))
        return compute_gae(*given)

    monkeypatch.setattr(script, "compute_gae", spy)
    script.train(small_args(script))
    assert set(seen) == {(False, True)}
