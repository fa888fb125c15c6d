"""ppo_loss, which is the same in every script (see test_consistency.py), against plain NumPy, switch by switch; and in
real runs of each."""

import inspect

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, small_args

import ppo

M = 64
INPUTS = ["new_logprobs", "old_logprobs", "advantages", "new_values", "old_values", "returns", "entropy"]
# every coefficient differs from its default and from the others, so that none can stand in for another
OPTIONS = dict(norm_adv=False, clip_coef=0.25, clip_vloss=False, ent_coef=0.125, vf_coef=0.75)
SWITCHES = [{}, dict(norm_adv=True), dict(clip_vloss=True), dict(norm_adv=True, clip_vloss=True)]
SWITCHES += [dict(clip_coef=0.05), dict(clip_vloss=True, clip_coef=1.5), dict(ent_coef=0.0), dict(vf_coef=2.0)]


def random_inputs(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = {name: rng.normal(size=M) for name in INPUTS}
    inputs["old_logprobs"] = -rng.exponential(size=M)
    inputs["new_logprobs"] = inputs["old_logprobs"] + rng.normal(scale=0.3, size=M)
    inputs["entropy"] = rng.uniform(0, 2, size=M)
    return inputs


def run(inputs, **options):
    """Return the loss, and its parts as floats."""
    tensors = [torch.tensor(inputs[name], dtype=torch.float64) for name in INPUTS]
    loss, stats = ppo.ppo_loss(*tensors, small_args(ppo, **OPTIONS | options))
    return loss.item(), {name: value.item() for name, value in stats.items()}


def in_numpy(inputs, norm_adv, clip_coef, clip_vloss, ent_coef, vf_coef):
    """The loss and its parts, one sample at a time, and the gradient for each input that the network computes."""
    x = {name: np.asarray(array, float) for name, array in inputs.items()}
    m = len(x["returns"])
    advantages = x["advantages"]
    if norm_adv:
        mean = sum(advantages) / m
        std = (sum((advantages - mean) ** 2) / (m - 1)) ** 0.5
        advantages = (advantages - mean) / (std + 1e-8)
    parts = dict.fromkeys(["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"], 0.0)
    gradients = {name: np.zeros(m) for name in ("new_logprobs", "new_values", "entropy")}
    for i in range(m):
        log_ratio = x["new_logprobs"][i] - x["old_logprobs"][i]
        ratio = np.exp(log_ratio)
        clipped = min(max(ratio, 1 - clip_coef), 1 + clip_coef)
        parts["policy_loss"] -= min(ratio * advantages[i], clipped * advantages[i]) / m
        if ratio * advantages[i] <= clipped * advantages[i]:
            gradients["new_logprobs"][i] = -ratio * advantages[i] / m
        error, slope = x["new_values"][i] - x["returns"][i], 1.0
        if clip_vloss:
            change = x["new_values"][i] - x["old_values"][i]
            clipped_change = min(max(change, -clip_coef), clip_coef)
            clipped_error = x["old_values"][i] + clipped_change - x["returns"][i]
            if clipped_error**2 > error**2:
                error, slope = clipped_error, float(abs(change) < clip_coef)
        parts["value_loss"] += 0.5 * error**2 / m
        gradients["new_values"][i] = vf_coef * error * slope / m
        parts["entropy"] += x["entropy"][i] / m
        gradients["entropy"][i] = -ent_coef / m
        parts["old_approx_kl"] -= log_ratio / m
        parts["approx_kl"] += (ratio - 1 - log_ratio) / m
        parts["clipfrac"] += (abs(ratio - 1) > clip_coef) / m
    loss = parts["policy_loss"] - ent_coef * parts["entropy"] + vf_coef * parts["value_loss"]
    return loss, parts, gradients


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_equals_numpy(switches):
    """Catches: a lost half, a wrong sign, a switch that does nothing, a statistic under another's name."""
    for seed in range(3):
        inputs = random_inputs(seed)
        loss, stats = run(inputs, **switches)
        expected_loss, parts, _ = in_numpy(inputs, **OPTIONS | switches)
        assert loss == pytest.approx(expected_loss, abs=1e-12)
        assert stats == pytest.approx(parts, abs=1e-12)
        assert list(stats) == list(parts)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_gradients_equal_numpy(switches):
    """Catches: a detached ratio, a gradient through a clipped sample, statistics that keep the graph alive."""
    inputs = random_inputs()
    args = small_args(ppo, **OPTIONS | switches)
    tensors = [torch.tensor(inputs[name], dtype=torch.float64) for name in INPUTS]
    for name in ("new_logprobs", "new_values", "entropy"):
        tensors[INPUTS.index(name)].requires_grad_()
    loss, stats = ppo.ppo_loss(*tensors, args)
    loss.backward()
    _, _, gradients = in_numpy(inputs, **OPTIONS | switches)
    for name, expected in gradients.items():
        np.testing.assert_allclose(tensors[INPUTS.index(name)].grad.numpy(), expected, atol=1e-14, err_msg=name)
    assert not any(value.requires_grad or value.ndim for value in stats.values())


def test_by_hand():
    """Catches: a mistake that the NumPy definition shares; these numbers were worked out on paper."""
    # ratios 2, 1/2, 2, 1/2 and advantages 1, 1, -1, -1 at clip 0.25: the objective is 1.25, 0.5, -2, -0.75
    ratios, advantages = np.array([2, 0.5, 2, 0.5]), np.array([1, 1, -1, -1])
    inputs = dict(old_logprobs=np.log([0.3, 0.3, 0.4, 0.4]), advantages=advantages)
    inputs["new_logprobs"] = inputs["old_logprobs"] + np.log(ratios)
    # errors 1, 0, 3, -1 unclipped; the values clipped are 0.25, 0.25, 2, -0.25: errors 0.25, -0.75, 2, 0.75
    inputs |= dict(old_values=np.zeros(4), new_values=[1, 1, 3, -2], returns=[0, 1, 0, -1], entropy=[0, 1, 2, 3])
    inputs["old_values"][2] = 1.75
    _, stats = run(inputs)
    assert stats["policy_loss"] == pytest.approx(-(1.25 + 0.5 - 2 - 0.75) / 4)
    assert stats["value_loss"] == pytest.approx((1 + 0 + 9 + 1) / 8)
    assert stats["entropy"] == pytest.approx(1.5)
    assert stats["old_approx_kl"] == pytest.approx(0, abs=1e-12)
    assert stats["approx_kl"] == pytest.approx(0.25)
    assert stats["clipfrac"] == 1
    loss, stats = run(inputs, clip_vloss=True)
    assert stats["value_loss"] == pytest.approx((1 + 0.75**2 + 9 + 1) / 8)
    assert loss == pytest.approx(0.25 - 0.125 * 1.5 + 0.75 * (1 + 0.75**2 + 9 + 1) / 8)


def test_advantages_are_normalised_by_the_unbiased_std():
    """Catches: the biased standard deviation, and a division by zero where all advantages are equal."""
    inputs = random_inputs()
    inputs["old_logprobs"] = inputs["new_logprobs"] - np.log(1.125)  # within the clip range: the loss is linear
    inputs["new_logprobs"][1:] = inputs["old_logprobs"][1:] = 0.0
    inputs["advantages"] = np.arange(M, dtype=float)
    _, stats = run(inputs, norm_adv=True)
    normalised = (inputs["advantages"] - np.mean(inputs["advantages"])) / np.std(inputs["advantages"], ddof=1)
    assert stats["policy_loss"] == pytest.approx(-0.125 * normalised[0] / M, abs=1e-9)
    inputs["advantages"] = np.full(M, 3.0)
    loss, stats = run(inputs, norm_adv=True)
    assert stats["policy_loss"] == 0
    assert np.isfinite(loss)


def test_invariant_to_the_scale_of_the_advantages_only_when_normalised():
    """Catches: advantages normalised whatever --no-norm-adv says, or outside of the loss, over the whole batch."""
    inputs = random_inputs()
    scaled = inputs | dict(advantages=10 * inputs["advantages"] + 3)
    losses = [run(x, norm_adv=True)[1]["policy_loss"] for x in (inputs, scaled)]
    assert losses[0] == pytest.approx(losses[1])
    losses = [run(x, norm_adv=False)[1]["policy_loss"] for x in (inputs, scaled)]
    assert losses[0] != pytest.approx(losses[1])


def test_a_minibatch_of_one_is_refused(script):
    """Catches: the standard deviation of a single advantage, NaN, which spoils every parameter."""
    single = dict(num_envs=1, num_steps=4, num_minibatches=4)
    if hasattr(script.Args, "seq_len"):
        single["seq_len"] = 1
    with pytest.raises(script.UserError, match="num-minibatches"):
        small_args(script, **single, norm_adv=True)
    small_args(script, **single, norm_adv=False)


def test_the_value_loss_takes_the_larger_error():
    """Catches: a minimum in place of the maximum in value clipping, which hides the error instead of keeping it."""
    inputs = random_inputs()
    plain = run(inputs, clip_vloss=False)[1]["value_loss"]
    assert run(inputs, clip_vloss=True)[1]["value_loss"] > plain
    same = inputs | dict(old_values=inputs["new_values"])
    assert run(same, clip_vloss=True)[1]["value_loss"] == pytest.approx(plain)


def test_more_entropy_is_a_smaller_loss():
    """Catches: an entropy bonus that punishes exploration."""
    inputs = random_inputs()
    loss, _ = run(inputs)
    more, _ = run(inputs | dict(entropy=inputs["entropy"] + 1))
    assert more == pytest.approx(loss - OPTIONS["ent_coef"])


def test_kl_is_never_negative():
    """Catches: the noisy estimate, whose sign is anyone's guess, under the name of the good one."""
    negative = 0
    for seed in range(20):
        _, stats = run(random_inputs(seed))
        assert stats["approx_kl"] >= 0
        negative += stats["old_approx_kl"] < 0
    assert negative > 0


def test_at_the_old_parameters():
    """Catches: a loss that is not at rest where the policy has not moved."""
    inputs = random_inputs()
    inputs["old_logprobs"] = inputs["new_logprobs"]
    _, stats = run(inputs, norm_adv=True)
    assert stats["policy_loss"] == pytest.approx(0, abs=1e-12)
    assert [stats[name] for name in ("old_approx_kl", "approx_kl", "clipfrac")] == [0, 0, 0]


def test_ratio_is_1_on_the_first_minibatch_of_each_iteration(script, monkeypatch):
    """Catches: log-probabilities of other actions, observations, states or masks than those of the rollout."""
    calls = []
    original = script.ppo_loss

    def spy(*tensors_and_args):
        calls.append([tensor.detach().clone() for tensor in tensors_and_args[:-1]])
        return original(*tensors_and_args)

    monkeypatch.setattr(script, "ppo_loss", spy)
    args = small_args(script, learning_rate=1e-2)
    script.train(args)
    updates = args.update_epochs * args.num_minibatches
    assert len(calls) == args.num_iterations * updates
    for new_logprobs, old_logprobs, _, new_values, old_values, _, entropy in calls[::updates]:
        # the same network on the same data, in a batch of another size: equal but for rounding
        torch.testing.assert_close(new_logprobs, old_logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(new_values, old_values, rtol=0, atol=1e-4)
        assert len(new_logprobs) == args.minibatch_size
        assert (entropy > 0).all()
    for new_logprobs, old_logprobs, *_ in calls[updates - 1 :: updates]:
        assert not torch.allclose(new_logprobs, old_logprobs, rtol=0, atol=1e-5), "the policy did not move"


@pytest.mark.parametrize("name", [name for name in SCRIPTS if "lstm" not in name])
def test_log_probability_is_that_of_the_sample(name):
    """Catches: a ratio that is not exactly 1 for the same network and the same batch."""
    script = __import__(name)
    assert list(inspect.signature(script.Agent.get_action_and_value).parameters)[1:3] == ["obs", "action"]
    args = small_args(script)
    torch.manual_seed(1)
    envs = script.make_envs(args, 2)
    try:
        obs, _ = envs.reset(seed=script.env_seeds(args, 2, script.TRAINING, 0))
        agent = script.Agent(envs, args)
        with torch.no_grad():
            for parameter in agent.parameters():  # away from the almost uniform first policy
                parameter += 0.05 * torch.randn_like(parameter)
            action, logprob, entropy, value = agent.get_action_and_value(torch.as_tensor(obs))
            again = agent.get_action_and_value(torch.as_tensor(obs), action)
            values = agent.get_value(torch.as_tensor(obs))
    finally:
        envs.close()
    for first, second in zip((action, logprob, entropy, value), again):
        assert torch.equal(first, second)
        assert first.shape[0] == 2
    assert torch.equal(value, values)
    assert logprob.shape == entropy.shape == value.shape == (2,)
