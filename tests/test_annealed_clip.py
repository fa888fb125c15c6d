"""--anneal-clip: the loss gets a clip_coef that falls, as a tensor: compiled once, and the same numbers."""

from dataclasses import replace

import pytest
import torch
from conftest import FOLD_SCRIPTS, FOUR_SCRIPTS, parameters, small_args


@pytest.mark.parametrize("script", FOLD_SCRIPTS, indirect=True)
def test_the_loss_is_compiled_once(script, compiled):
    """Catches: a loss that is compiled anew in each iteration, for the annealed clip_coef is a new constant."""
    options = dict(total_timesteps=64, update_epochs=1)  # two values of clip_coef
    eager = parameters(script.train(small_args(script, anneal_clip=True, **options)))
    assert not compiled
    script.train(small_args(script, compile=True, **options))
    assert compiled["compute_gradients"] >= 1
    constant = dict(compiled)
    compiled.clear()
    torch._dynamo.reset()
    captured = parameters(script.train(small_args(script, compile=True, anneal_clip=True, **options)))
    assert compiled == constant
    for name, parameter in eager.items():
        torch.testing.assert_close(
            captured[name], parameter, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("script", FOUR_SCRIPTS, indirect=True)
def test_the_clip_falls_linearly_and_is_a_number_like_any_other(script, monkeypatch):
    """Catches: a schedule that is off by one iteration, and a tensor whose precision changes the numbers."""
    ppo_loss, coefs = script.ppo_loss, []
    args = small_args(script, anneal_clip=True, clip_coef=0.15, update_epochs=2)
    plain = parameters(script.train(args))

    def spy(*args):
        *tensors, args = args
        coefs.append(float(args.clip_coef))
        return ppo_loss(*tensors, replace(args, clip_coef=float(args.clip_coef)))

    monkeypatch.setattr(script, "ppo_loss", spy)
    as_floats = parameters(script.train(args))
    assert all(torch.equal(plain[name], as_floats[name]) for name in plain)
    minibatches = args.update_epochs * args.num_minibatches
    assert coefs == [pytest.approx(0.15 * part) for part in (1, 3 / 4, 2 / 4, 1 / 4) for _ in range(minibatches)]
