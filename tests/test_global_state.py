"""What a run and an evaluation leave alone in the process: they may be among many, or run in a thread."""

import random
import signal
import threading

import numpy as np
import pytest
import torch
from conftest import small_args
from faulty_envs import Stop, crash_at

import ppo

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def handler(signum, frame):
    """A handler of the caller's own."""


@pytest.fixture
def unusual():
    """State of the process's that is set to what no run sets it to; asserts that it still is."""
    before, threads = [signal.signal(signum, handler) for signum in SIGNALS], torch.get_num_threads()
    np.random.seed(1234)
    random.seed(1234)
    numpy_state, python_state = np.random.get_state()[1].copy(), random.getstate()

    def assert_unchanged():
        assert np.array_equal(np.random.get_state()[1], numpy_state)
        assert random.getstate() == python_state
        assert [signal.getsignal(signum) for signum in SIGNALS] == [handler, handler]
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()

    yield assert_unchanged
    torch.set_num_threads(threads)
    for signum, old in zip(SIGNALS, before):
        signal.signal(signum, old)


def test_a_run_leaves_the_caller_alone(script, unusual, monkeypatch):
    """Catches: train() called from Python that catches the caller's signals, or draws from streams not its own."""
    script.train(small_args(script, eval_episodes=1))
    unusual()
    crash_at(monkeypatch, script, small_args(script).num_steps + 3)
    with pytest.raises(Stop):
        script.train(small_args(script))
    unusual()


def test_a_run_sets_what_it_needs(monkeypatch):
    """Catches: a run on the threads of the one before it; TF32 in cuDNN, its default, with which the policy of the
    update is not that of the rollout."""
    seen, compute_gae = [], ppo.compute_gae

    def spy(*given):
        cudnn = torch.backends.cudnn
        seen.append((torch.get_num_threads(), cudnn.deterministic, cudnn.allow_tf32))
        return compute_gae(*given)

    monkeypatch.setattr(ppo, "compute_gae", spy)
    monkeypatch.setattr(ppo, "CORES", 3)
    for threads, deterministic in ((0, False), (1, True)):
        seen.clear()
        ppo.train(small_args(ppo, torch_threads=threads, torch_deterministic=deterministic))
        assert set(seen) == {(threads or 3, deterministic, False)}


def test_an_evaluation_leaves_nothing_changed(unusual, monkeypatch):
    """Catches: an evaluation that sets the threads or the random streams of training, or the GPU's to the seed's."""
    checkpoint = ppo.train(small_args(ppo)) / "checkpoint.pt"

    def seed_all(*args):
        raise AssertionError("an evaluation seeds more than the CPU's generator")

    for owner in (torch, torch.random, torch.cuda):
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, seed_all)
    torch.set_num_threads(3)
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "deterministic", False)
    monkeypatch.setattr(cudnn, "allow_tf32", True)
    before = torch.get_rng_state()
    returns = ppo.evaluate(checkpoint, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert (torch.get_num_threads(), cudnn.deterministic, cudnn.allow_tf32) == (3, False, True)
    unusual()
    torch.rand(3)
    assert ppo.evaluate(checkpoint, 2) == returns  # and seeded it was


def test_train_works_off_the_main_thread():
    """Catches: a run that can only be started where Python lets signals be caught."""
    results = []

    def run():
        try:
            results.append(ppo.train(small_args(ppo)))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (run_dir,) = results
    assert not isinstance(run_dir, BaseException), run_dir
    assert ppo.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 4
