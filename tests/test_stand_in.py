"""On a GPU's stand-in, see stand_in.py: what the tests of `-m cuda` show on a real one, as far as a CPU can show it."""

import importlib
from pathlib import Path

import pytest
import torch
from conftest import FOUR_SCRIPTS, SCRIPTS, same_parameters, small_args
from stand_in import stand_in


def follow(script, monkeypatch, **changes) -> tuple[Path, list[str]]:
    """Train on the stand-in; return the folder, and the transfers with where a step, minibatch or update ended."""
    with stand_in(monkeypatch) as noted, monkeypatch.context() as context:

        def mark(owner, name, word, before=False):
            function = getattr(owner, name)

            def marked(*args):
                noted.extend([word] * before)
                result = function(*args)
                noted.extend([word] * (not before))
                return result

            context.setattr(owner, name, marked)

        mark(script.Run, "note_episodes", "step")
        mark(script, "compute_gradients", "minibatch", before=True)
        mark(script, "gather", "log", before=True)  # the first is of the explained variance, once it is on the CPU
        run_dir = script.train(small_args(script, **changes))
        return run_dir, list(noted)


def waits(words: list[str]) -> list[str]:
    """What each minibatch waited for, where `words` are follow()'s; after the last comes the explained variance."""
    updates = [update.removesuffix(" down ") for update in " ".join(words).split("log") if "minibatch" in update]
    return [minibatch.strip() for update in updates for minibatch in update.split("minibatch")[1:]]


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "ppo_atari"], indirect=True)
def test_it_trains_as_on_the_cpu_and_never_waits(script, monkeypatch, capsys):
    """Catches: a tensor left on the CPU; a number copied before it is there; a rollout that asks a GPU for each number
    by itself; an `if` on a loss, a norm or a mask in the minibatch loop, answered 16 to 320 times an update."""
    args = small_args(script, anneal_clip=True)
    on_cpu = script.train(args)
    on_gpu, words = follow(script, monkeypatch, anneal_clip=True)
    assert f": {on_gpu} on cuda" in capsys.readouterr().out
    assert same_parameters(on_cpu, on_gpu)
    steps = " ".join(words).split("step")[1:]  # the first are of setting up
    up = "up up" if "lstm" in script.__name__ else "up"  # an LSTM sends where episodes start besides
    assert {step.strip() for step in steps if "minibatch" not in step} == {f"{up} down"}
    minibatches = waits(words)
    assert len(minibatches) == args.num_iterations * args.update_epochs * args.num_minibatches
    assert not any("down" in minibatch for minibatch in minibatches)


def test_a_wait_is_seen(monkeypatch):
    """Catches: the test above proving nothing, for it would see no wait."""
    clip = torch.nn.utils.clip_grad_norm_

    def clip_and_ask(*args, **options):
        norm = clip(*args, **options)
        assert norm >= 0
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_ask)
    _, words = follow(importlib.import_module("ppo"), monkeypatch)
    assert all("down" in minibatch for minibatch in waits(words))


@pytest.mark.parametrize("script", FOUR_SCRIPTS, indirect=True)
def test_a_run_changes_its_device(script, monkeypatch):
    """Catches: a checkpoint that only the device that wrote it can read, and a state that does not come back to it."""
    arguments = dict(anneal_lr=False, exact_resume=True, checkpoint_every=1, target_kl=1.0)
    if script.__name__ == "ppo_multidiscrete":
        arguments["anneal_ent"] = False
    args = small_args(script, **arguments)
    whole = script.train(args)
    with stand_in(monkeypatch):
        begun = script.train(small_args(script, **arguments | dict(total_timesteps=2 * args.batch_size)))
        script.train(script.saved_args(begun, cuda=False, total_timesteps=3 * args.batch_size))
        script.train(script.saved_args(begun, cuda=True, total_timesteps=4 * args.batch_size))
        assert len(script.evaluate(begun / "checkpoint.pt", 1)) == 1
    assert same_parameters(begun, whole)


def test_it_refuses_what_a_gpu_refuses(monkeypatch):
    """Catches: a stand-in that lets everything pass."""
    with stand_in(monkeypatch) as noted:
        x, on_cpu = torch.ones(3, device="cuda"), torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            x + on_cpu
        with pytest.raises(RuntimeError, match="same device"):
            torch.nn.Linear(3, 1).to("cuda")(on_cpu)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        noted.clear()
        assert (x + 1 + torch.tensor(1.0)).cpu().tolist() == [3, 3, 3]  # numbers come along
        x[on_cpu > 0] = on_cpu.to("cuda")
        assert noted == ["down", "up"]
        noted.clear()
        x[x > 0], float(x[0]), x.nonzero()
        assert noted == ["down", "down", "down"]
