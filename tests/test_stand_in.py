"""On a GPU's stand-in, see stand_in.py: what the tests of `-m cuda` show on a real one, as far as a CPU can show it."""

import pytest
import torch
from conftest import same_parameters, small_args
from stand_in import stand_in


def follow(script, monkeypatch, **changes) -> list[str]:
    """Train on the stand-in; return its transfers, and where a rollout's step, a minibatch or the update ended."""
    with stand_in(monkeypatch) as noted:

        def mark(owner, name, word, before=False):
            function = getattr(owner, name)

            def marked(*args):
                noted.extend([word] * before)
                result = function(*args)
                noted.extend([word] * (not before))
                return result

            monkeypatch.setattr(owner, name, marked)

        mark(script.Run, "note_episodes", "step")
        mark(script, "compute_gradients", "minibatch", before=True)
        mark(script, "variance", "log", before=True)
        script.train(small_args(script, **changes))
        return list(noted)


def test_it_trains_as_on_the_cpu(script, monkeypatch, capsys):
    """Catches: a tensor that is left on the CPU, and a number that was copied before it was there."""
    arguments = dict(anneal_clip=True, target_kl=1.0)
    on_cpu = script.train(small_args(script, **arguments))
    with stand_in(monkeypatch):
        on_gpu = script.train(small_args(script, **arguments))
    assert f"starting {on_gpu} on cuda" in capsys.readouterr().out
    assert same_parameters(on_cpu, on_gpu)


@pytest.mark.parametrize("begun_on_gpu", [True, False])
def test_a_run_changes_its_device(script, monkeypatch, begun_on_gpu):
    """Catches: a checkpoint that only the device that wrote it can read."""
    arguments = dict(anneal_lr=False, exact_resume=True, checkpoint_every=2)
    whole = script.train(small_args(script, **arguments))
    with stand_in(monkeypatch):
        half = small_args(script).total_timesteps // 2
        begun = script.train(small_args(script, cuda=begun_on_gpu, total_timesteps=half, **arguments))
        args = script.Args(resume=str(begun), total_timesteps=2 * half)
        args.cuda = not begun_on_gpu
        script.train(args)
        assert len(script.evaluate(begun / "checkpoint.pt", 1)) == 1
    assert same_parameters(begun, whole)


def test_a_step_takes_one_transfer_each_way(script, monkeypatch):
    """Catches: a rollout that asks a GPU for each number by itself; an LSTM sends where episodes start besides."""
    words = " ".join(follow(script, monkeypatch)).split("step")[1:]  # the first are of setting up
    up = "up up" if "lstm" in script.__name__ else "up"
    assert {step.strip() for step in words if "minibatch" not in step} == {f"{up} down"}


def waits(words: list[str]) -> list[str]:
    """What each minibatch waited for, where `words` are follow()'s."""
    updates = " ".join(words).split("log")[:-1:2]  # one for the variance of each of two tensors
    return [minibatch.strip() for update in updates for minibatch in update.split("minibatch")[1:]]


def test_an_update_never_waits(script, monkeypatch):
    """Catches: an `if` on a loss, a norm or a mask in the minibatch loop, answered 16 to 320 times an update."""
    args = small_args(script)
    seen = waits(follow(script, monkeypatch))
    assert len(seen) == args.num_iterations * args.update_epochs * args.num_minibatches
    assert not any("down" in minibatch for minibatch in seen)


def test_a_wait_is_seen(script, monkeypatch):
    """Catches: the test above proving nothing, for it would see no wait."""
    clip = torch.nn.utils.clip_grad_norm_

    def clip_and_ask(*args, **options):
        norm = clip(*args, **options)
        assert norm >= 0
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_ask)
    assert all("down" in minibatch for minibatch in waits(follow(script, monkeypatch)))


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
