"""On a GPU: `python -m pytest -m cuda -n 8 tests/test_cuda.py`. Skipped where there is none.

Training, resume and evaluation of each script; checkpoints that change between GPU and CPU; --compile with CUDA graphs;
two processes on one GPU; and no wait for the GPU in an update.
"""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SCRIPTS, SMALL, flags, parameters, read_scalars, run_script, small_args
from torch.optim.optimizer import register_optimizer_step_post_hook

import ppo_lstm

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU, or it is hidden: pytest -m cuda"),
]


def assert_close(run_dir, other_dir, rtol: float = 1e-2, atol: float = 1e-3) -> None:
    """The parameters are the same, up to the rounding of another kernel."""
    ours, theirs = parameters(run_dir), parameters(other_dir)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=atol, msg=lambda s, n=name: f"{n}: {s}")


def test_train_resume_evaluate(script):
    """Catches: a tensor that is left on the CPU, a state that does not come back to the GPU."""
    run_dir = script.train(small_args(script, exact_resume=True, checkpoint_every=1))
    assert all(p.device.type == "cpu" for p in script.load_checkpoint(run_dir / "checkpoint.pt")["agent"].values())
    half = small_args(script).total_timesteps // 2
    begun = script.train(
        small_args(script, exact_resume=True, checkpoint_every=1, total_timesteps=half, anneal_lr=False)
    )
    resumed = script.train(script.saved_args(begun, total_timesteps=2 * half))
    assert resumed == begun
    steps = [step for step, _ in read_scalars(resumed)["losses/value_loss"]]
    assert steps == sorted(set(steps))
    assert steps[-1] == 2 * half
    assert all(torch.isfinite(p).all() for p in parameters(resumed).values())
    assert len(script.evaluate(resumed / "checkpoint.pt", 1)) == 1


def test_exact_resume_is_exact(script):
    """Catches: random numbers of the GPU that a resumed run does not draw again."""
    arguments = dict(exact_resume=True, checkpoint_every=2)
    whole = script.train(small_args(script, **arguments))

    class Stop(Exception):
        pass

    with pytest.MonkeyPatch.context() as patch:
        log = script.Run.log

        def stop_in_the_third(run, *args):
            log(run, *args)
            if run.iteration == 3:
                raise Stop

        patch.setattr(script.Run, "log", stop_in_the_third)
        with pytest.raises(Stop):
            script.train(small_args(script, seed=1, exp_name="cut", **arguments))
    (cut,) = whole.parent.glob("*__cut__*")
    assert_close(script.train(script.saved_args(cut)), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cuda_first", [True, False])
def test_a_checkpoint_changes_its_device(script, cuda_first):
    """Catches: a checkpoint that only the device that wrote it can read."""
    half = small_args(script).total_timesteps // 2
    run_dir = script.train(small_args(script, cuda=cuda_first, total_timesteps=half))
    assert len(script.evaluate(run_dir / "checkpoint.pt", 1)) == 1
    given = flags(resume=str(run_dir), cuda=not cuda_first, total_timesteps=2 * half)
    result = run_script(script.__name__, *given, timeout=300)
    assert result.returncode == 0, result.stderr
    assert script.load_checkpoint(run_dir / "checkpoint.pt")["global_step"] == 2 * half


def ten_iterations(script, **changes):
    """Train for ten iterations; return the run's folder."""
    steps = 10 * SMALL[script.__name__]["num_steps"] * SMALL[script.__name__]["num_envs"]
    return script.train(small_args(script, total_timesteps=steps, anneal_clip=True, **changes))


def test_compiled_equals_eager(script, monkeypatch):
    """Catches: CUDA graphs that replay old inputs, or whose outputs are overwritten before they are read."""
    torch._dynamo.reset()
    eager = ten_iterations(script)
    compile = script.Run.compile

    def compile_the_update(run, function, **_):  # a compiled policy draws other random numbers
        return compile(run, function) if function.__name__ == "compute_gradients" else function

    monkeypatch.setattr(script.Run, "compile", compile_the_update)
    assert_close(ten_iterations(script, compile=True), eager)


def test_a_compiled_policy_trains(script):
    """Catches: a rollout whose actions, values or memory are those of another step."""
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["inductor"]
    skipped = counted["cudagraph_skips"]
    compiled = ten_iterations(script, compile=True)
    if script.__name__ in ("ppo", "ppo_continuous_action", "ppo_atari"):  # the others have pieces that are not compiled
        assert counted["cudagraph_skips"] == skipped, "a graph that is not replayed by CUDA graphs"
    kl = [value for _, value in read_scalars(compiled)["losses/approx_kl"]]
    assert len(kl) == 10
    assert all(torch.isfinite(p).all() for p in parameters(compiled).values())


@pytest.mark.parametrize("script", ["ppo_atari", "ppo_atari_lstm", "ppo_multidiscrete"], indirect=True)
def test_compiled_bfloat16_trains(script):
    """Catches: CUDA graphs that do not bear autocast, which the other tests leave off."""
    torch._dynamo.reset()
    grids = dict(env_id="MicrortsMining-v1") if script.__name__ == "ppo_multidiscrete" else {}  # a CNN, and masks
    compiled = ten_iterations(script, compile=True, bf16=True, **grids)
    assert all(torch.isfinite(p).all() for p in parameters(compiled).values())


def test_the_first_ratio_is_one(script, monkeypatch):
    """Catches: a rollout and an update of another precision, as TF32 would be in cuDNN's LSTM, but not in its cells."""
    ppo_loss, differences = script.ppo_loss, []

    def spy(new_logprobs, old_logprobs, *rest):
        differences.append((new_logprobs - old_logprobs).abs().max())
        return ppo_loss(new_logprobs, old_logprobs, *rest)

    monkeypatch.setattr(script, "ppo_loss", spy)
    script.train(small_args(script, num_minibatches=1, update_epochs=1))
    assert max(differences) < 1e-4


def test_the_ratio_of_a_compiled_policy_is_one(script, monkeypatch):
    """Catches: log-probabilities of a graph's earlier replay."""
    torch._dynamo.reset()
    log, first = script.Run.log, []

    def spy(run, stats, scalars):
        first.append(stats[0]["clipfrac"])
        log(run, stats, scalars)

    monkeypatch.setattr(script.Run, "log", spy)
    args = small_args(script, compile=True, num_minibatches=1, update_epochs=1)
    script.train(args)
    assert [float(x) for x in first] == [0] * args.num_iterations


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_two_processes_share_a_gpu(name, compile, tmp_path):
    """Catches: nccl, which wants a GPU for each process; gradients that a CUDA graph holds or replays."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(ROOT / f"{name}.py"), *flags(**SMALL[name], compile=compile)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=300)
    assert result.returncode == 0, result.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert all(torch.isfinite(p).all() for p in parameters(run_dir).values())
    norms = [value for _, value in read_scalars(run_dir)["losses/grad_norm"]]
    assert len(set(norms)) == len(norms), "a gradient of an earlier minibatch"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_line(name, tmp_path):
    """Catches: a command that only works in a process that has used the GPU before."""
    result = run_script(name, *flags(**SMALL[name] | dict(eval_episodes=1)), timeout=300)
    assert result.returncode == 0, result.stderr
    assert " on cuda" in result.stdout
    assert "evaluation: mean return" in result.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_cuda_no_gpu_is_touched(name, launcher):
    """Catches: --no-cuda that takes memory of a GPU all the same, as Adam's step does, or fails for a full one."""
    code = "import atexit, torch; atexit.register(lambda: print('touched:', torch.cuda.is_initialized()))"
    process = launcher.run(name, *flags(**SMALL[name] | dict(cuda=False)), code=code)
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("touched: False\n")


def test_no_wait_in_an_update(script, monkeypatch):
    """Catches: what stops the Python that runs ahead of the GPU, in the loop over the minibatches."""
    args, steps, compute_gradients = small_args(script, target_kl=None), [], script.compute_gradients

    def begin(*given):
        torch.cuda.set_sync_debug_mode("error")
        return compute_gradients(*given)

    def end(*_):  # what is logged comes after the last minibatch
        steps.append("step")
        if len(steps) % (args.update_epochs * args.num_minibatches) == 0:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(script, "compute_gradients", begin)
    hook = register_optimizer_step_post_hook(end)
    try:
        script.train(args)
    finally:
        hook.remove()
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == args.num_iterations * args.update_epochs * args.num_minibatches


def test_the_lstm_is_in_float32_on_a_gpu():
    """Catches: an LSTM in float16, which autocast may make of it on a GPU, and whose small gradients are lost."""
    run_dir = ppo_lstm.train(small_args(ppo_lstm, bf16=True))
    assert not ppo_lstm.load_checkpoint(run_dir / "checkpoint.pt")["args"]["bf16"]
