"""The network's first weights, the optimiser, and what each switch of the training loop does."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FOUR_SCRIPTS, SCRIPTS, read_scalars, same_parameters, small_args
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


@pytest.fixture
def spies(script, monkeypatch):
    """What the script's ppo_loss and compute_gae were given and returned, call by call, in every run."""
    record = SimpleNamespace(loss_args=[], samples=[], stats=[], lambdas=[], advantages=[], values=[], returns=[])
    ppo_loss, compute_gae = script.ppo_loss, script.compute_gae

    def spy_loss(new_logprobs, old_logprobs, advantages, new_values, old_values, returns, entropy, args):
        loss, stats = ppo_loss(new_logprobs, old_logprobs, advantages, new_values, old_values, returns, entropy, args)
        record.loss_args.append(args)
        record.samples.append(torch.stack([advantages, old_values, returns], dim=1))
        record.stats.append({name: value.item() for name, value in stats.items()})
        return loss, stats

    def spy_gae(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
        advantages, returns = compute_gae(rewards, values, next_values, terminations, dones, gamma, gae_lambda)
        record.lambdas.append(gae_lambda)
        record.advantages.append(advantages)
        record.values.append(values.clone())
        record.returns.append(returns)
        return advantages, returns

    monkeypatch.setattr(script, "ppo_loss", spy_loss)
    monkeypatch.setattr(script, "compute_gae", spy_gae)
    return record


def new_agent(script):
    args = small_args(script)
    envs = script.make_envs(args, 1)
    envs.close()
    return script.Agent(envs, args)


@pytest.mark.parametrize("script", SCRIPTS, indirect=True)
def test_orthogonal_init(script):
    """Catches: a layer with PyTorch's default weights, or with another layer's gain."""
    agent = new_agent(script)
    layers = {name: module for name, module in agent.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    gains = dict.fromkeys(layers, math.sqrt(2))
    gains[[name for name in layers if name.startswith("actor")][-1]] = 0.01
    gains[[name for name in layers if name.startswith("critic")][-1]] = 1.0
    for name, layer in layers.items():
        weight = layer.weight.detach().flatten(1)
        gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        torch.testing.assert_close(gram, gains[name] ** 2 * torch.eye(len(gram)), rtol=0, atol=1e-5, msg=name)
        assert (layer.bias == 0).all(), name
    assert set(gains.values()) == {math.sqrt(2), 0.01, 1.0}


@pytest.mark.parametrize("script", ["ppo_lstm", "ppo_atari_lstm"], indirect=True)
def test_recurrent_init(script):
    """Catches: LSTM weights that are orthogonal as a whole only, or its two biases at random."""
    for module in new_agent(script).modules():
        if isinstance(module, nn.LSTM | nn.LSTMCell):
            for name, parameter in module.named_parameters():
                if "bias" in name:
                    assert (parameter == 0).all()
                else:
                    gram = parameter.detach().T @ parameter.detach()
                    if len(parameter) < parameter.shape[1]:
                        gram = parameter.detach() @ parameter.detach().T
                    torch.testing.assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-5)


def sample(script, layer: str, output: list[float], **changes) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions for many equal observations, where the policy's last layer has this output, and their log-probability."""
    args = small_args(script, **changes)
    envs = script.make_envs(args, 1)
    envs.close()
    agent = script.Agent(envs, args)
    setattr(agent, layer, nn.Flatten())
    getattr(agent, layer).register_forward_hook(lambda _, x, y: torch.tensor(output).expand(len(x[0]), -1))
    space = envs.single_observation_space
    number = 1_000 if len(space.shape) > 1 else 20_000  # pixels take time
    obs = torch.as_tensor(space.sample()).expand(number, *space.shape)
    memory = [agent.memory.initial_state(number), torch.ones(number)] if "lstm" in script.__name__ else []
    with torch.no_grad():
        action, logprob, *_ = agent.get_action_and_value(obs, *memory)
    return action, logprob


@pytest.mark.parametrize("script", ["ppo", "ppo_atari", "ppo_lstm", "ppo_atari_lstm"], indirect=True)
def test_discrete_actions_are_samples_of_the_policy(script):
    """Catches: a sampler of another distribution, which an agent can learn with all the same."""
    torch.manual_seed(0)
    pixels = "atari" in script.__name__
    logits = torch.linspace(-2, 1, 4 if pixels else 3)
    actions, logprobs = sample(script, "actor", logits.tolist(), **{} if pixels else {"env_id": "Acrobot-v1"})
    p = logits.softmax(-1)
    shares = actions.bincount(minlength=len(p)) / len(actions)
    assert ((shares - p).abs() < 4 * (p * (1 - p) / len(actions)).sqrt()).all(), (shares, p)
    torch.testing.assert_close(logprobs, p.log()[actions])


@pytest.mark.parametrize("script", ["ppo_continuous_action", "ppo_lstm"], indirect=True)
def test_continuous_actions_are_samples_of_the_policy(script):
    """Catches: a variance for a standard deviation, and a mean that is not the network's."""
    torch.manual_seed(0)
    layer = "actor" if script.__name__ == "ppo_lstm" else "actor_mean"
    args = dict(env_id="Pendulum-v1", log_std_init=math.log(0.5))
    actions, logprobs = sample(script, layer, [0.7], **args)
    policy = torch.distributions.Normal(0.7, 0.5)
    probabilities = policy.cdf(actions.flatten()).sort().values  # uniform, where they are the policy's samples
    steps = torch.linspace(0, 1, len(actions))
    assert (probabilities - steps).abs().max() < 1.95 / math.sqrt(len(actions))  # Kolmogorov and Smirnov, p = 0.001
    torch.testing.assert_close(logprobs, policy.log_prob(actions.flatten()))


@pytest.mark.parametrize("script", SCRIPTS, indirect=True)
def test_optimizer(script):
    """Catches: Adam's default epsilon, and parameters that are not trained."""
    args = small_args(script, anneal_lr=False, learning_rate=1e-3)
    run_dir = script.train(args)
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    updates = args.num_iterations * args.update_epochs * args.num_minibatches
    for group in state["optimizer"]["param_groups"]:
        assert (group["eps"], group["betas"], group["weight_decay"]) == (1e-5, (0.9, 0.999), 0)
        assert float(group["lr"]) == pytest.approx(1e-3)
    trained = sum(len(group["params"]) for group in state["optimizer"]["param_groups"])
    assert trained == len(list(new_agent(script).parameters()))
    assert {int(moments["step"]) for moments in state["optimizer"]["state"].values()} == {updates}
    assert len(state["optimizer"]["state"]) == trained


def test_learning_rate_falls_linearly_also_after_resume(script):
    """Catches: a rate that is 0 in the last iteration, one iteration behind, or back at the start after a resume."""
    args = small_args(script)
    first = 4 * args.batch_size
    run_dir = script.train(small_args(script, total_timesteps=first, learning_rate=1e-3))
    rates = read_scalars(run_dir)["charts/learning_rate"]
    assert rates == [(k * args.batch_size, pytest.approx(1e-3 * (1 - (k - 1) / 4))) for k in range(1, 5)]
    groups = torch.load(run_dir / "checkpoint.pt", weights_only=True)["optimizer"]["param_groups"]
    assert all(float(group["lr"]) == pytest.approx(1e-3 / 4) for group in groups), "what was logged was not used"
    script.train(small_args(script, total_timesteps=2 * first, learning_rate=1e-3, resume=str(run_dir)))
    rates = read_scalars(run_dir)["charts/learning_rate"][4:]
    assert rates == [(k * args.batch_size, pytest.approx(1e-3 * (1 - (k - 1) / 8))) for k in range(5, 9)]
    constant = script.train(small_args(script, anneal_lr=False))
    assert {rate for _, rate in read_scalars(constant)["charts/learning_rate"]} == {np.float32(args.learning_rate)}


@pytest.fixture
def gradient_norms():
    """The norm of the gradient over all parameters, at each step of any optimiser."""
    norms = []

    def spy(optimizer, *_):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())

    hook = register_optimizer_step_pre_hook(spy)
    yield norms
    hook.remove()


def test_gradients_are_clipped_before_each_step(script, gradient_norms):
    """Catches: a bound per layer instead of over all parameters, or one applied after the step."""
    script.train(small_args(script, max_grad_norm=0.01))
    assert 0.01 * 0.99 <= max(gradient_norms) <= 0.01 * 1.001
    gradient_norms.clear()
    script.train(small_args(script, max_grad_norm=math.inf))
    assert max(gradient_norms) > 0.02


def test_each_step_has_a_gradient_of_its_own(script, gradient_norms):
    """Catches: gradients that are not zeroed, and so pile up from minibatch to minibatch."""
    # the whole batch in each step, and parameters that all but stand still: the same gradient again and again
    options = dict(num_minibatches=1, learning_rate=1e-9, anneal_lr=False, max_grad_norm=1e6)
    args = small_args(script, **options, total_timesteps=small_args(script).batch_size)
    script.train(args)
    assert gradient_norms == [pytest.approx(gradient_norms[0], rel=0.01)] * args.update_epochs


def test_no_gae_is_n_step_returns(script, spies):
    """Catches: --no-gae that does nothing, or that drops the bootstrap."""
    args = small_args(script, gae=False, gae_lambda=0.5)
    script.train(args)
    assert spies.lambdas == [1.0] * args.num_iterations
    script.train(small_args(script, gae_lambda=0.5))
    assert spies.lambdas[args.num_iterations :] == [0.5] * args.num_iterations


def test_anneal_clip(script, spies):
    """Catches: a clip range that does not fall, falls to 0, or is saved fallen in the checkpoint."""
    args = small_args(script, anneal_clip=True, clip_coef=0.2)
    run_dir = script.train(args)
    updates = args.update_epochs * args.num_minibatches
    coefs = [loss_args.clip_coef for loss_args in spies.loss_args]
    expected = [0.2 * (1 - k / args.num_iterations) for k in range(args.num_iterations)]
    assert coefs == pytest.approx(np.repeat(expected, updates).tolist())
    assert script.load_checkpoint(run_dir / "checkpoint.pt")["args"]["clip_coef"] == 0.2
    spies.loss_args.clear()
    script.train(small_args(script, clip_coef=0.2, anneal_clip=False))
    assert {loss_args.clip_coef for loss_args in spies.loss_args} == {0.2}


@pytest.mark.parametrize("script", ["ppo_multidiscrete"], indirect=True)
def test_anneal_ent(script, spies):
    """Catches: an entropy bonus that does not fall, that falls without being asked, or that undoes --anneal-clip."""
    args = small_args(script, ent_coef=0.01, anneal_ent=True, anneal_clip=True, clip_coef=0.2)
    script.train(args)
    falls = np.repeat(
        1 - np.arange(args.num_iterations) / args.num_iterations, args.update_epochs * args.num_minibatches
    )
    assert [loss_args.ent_coef for loss_args in spies.loss_args] == pytest.approx((0.01 * falls).tolist())
    assert [loss_args.clip_coef for loss_args in spies.loss_args] == pytest.approx((0.2 * falls).tolist())
    spies.loss_args.clear()
    script.train(small_args(script, ent_coef=0.01, anneal_ent=False))
    assert {loss_args.ent_coef for loss_args in spies.loss_args} == {0.01}


@pytest.mark.parametrize("target_kl", [1e-12, 1e-3, 1e6])
def test_target_kl(script, spies, target_kl):
    """Catches: an early stop that never comes, comes within an epoch, or ends the whole run."""
    args = small_args(script, target_kl=target_kl, learning_rate=1e-3, anneal_lr=False)
    run_dir = script.train(args)
    kls = [stats["approx_kl"] for stats in spies.stats]
    losses = [stats["value_loss"] for stats in spies.stats]
    logged = [value for _, value in read_scalars(run_dir)["losses/value_loss"]]
    epochs_taken = []
    for iteration in range(args.num_iterations):
        epochs, means = 0, []
        while epochs < args.update_epochs:
            epoch, kls = kls[: args.num_minibatches], kls[args.num_minibatches :]
            epochs += 1
            if np.mean(epoch) > target_kl:
                break
        taken = epochs * args.num_minibatches
        means, losses = losses[:taken], losses[taken:]
        assert logged[iteration] == pytest.approx(np.mean(means), rel=1e-4)
        epochs_taken.append(epochs)
    assert kls == []
    if target_kl == 1e-12:
        assert epochs_taken == [1] * args.num_iterations
    if target_kl == 1e6:
        assert epochs_taken == [args.update_epochs] * args.num_iterations


def test_target_kl_is_compared_with_the_last_epoch(script, spies):
    """Catches: a mean over all epochs so far, which falls behind the policy."""
    options = dict(learning_rate=2e-3, update_epochs=8, total_timesteps=small_args(script).batch_size)
    args = small_args(script, **options)
    script.train(args)
    epochs = np.reshape([stats["approx_kl"] for stats in spies.stats], (args.update_epochs, -1)).mean(1)
    # stop at an epoch, not the last, whose KL is above all before it, by a target that the mean so far stays below
    stop = next(k for k in range(1, args.update_epochs - 1) if epochs[k] > epochs[:k].max())
    target_kl = (epochs[stop] + max(epochs[:stop].max(), epochs[: stop + 1].mean())) / 2
    spies.stats.clear()
    script.train(small_args(script, target_kl=float(target_kl), **options))
    assert len(spies.stats) == (stop + 1) * args.num_minibatches


def test_each_epoch_takes_every_sample_once(script, spies):
    """Catches: samples left out, drawn twice, put together of different rows, or never shuffled."""
    args = small_args(script, norm_adv=False)
    script.train(args)
    in_order = lambda rows: sorted(map(tuple, rows.tolist()))
    epochs = [
        torch.cat(spies.samples[i : i + args.num_minibatches])
        for i in range(0, len(spies.samples), args.num_minibatches)
    ]
    assert len(epochs) == args.num_iterations * args.update_epochs
    for i, epoch in enumerate(epochs):
        iteration = i // args.update_epochs
        batch = (spies.advantages[iteration], spies.values[iteration], spies.returns[iteration])
        assert in_order(epoch) == in_order(torch.stack([x.flatten() for x in batch], dim=1))
    assert any(not torch.equal(epoch, epochs[0]) for epoch in epochs[1 : args.update_epochs])


def test_losses_are_logged_as_means_over_the_update(script, spies):
    """Catches: the last minibatch's numbers under the name of the whole update's."""
    args = small_args(script, learning_rate=3e-3)
    scalars = read_scalars(script.train(args))
    updates = args.update_epochs * args.num_minibatches
    for name in spies.stats[0]:
        means = np.array([stats[name] for stats in spies.stats]).reshape(-1, updates).mean(1)
        steps, values = zip(*scalars[f"losses/{name}"])
        np.testing.assert_allclose(values, means, rtol=1e-4, atol=1e-7, err_msg=name)
        assert steps == tuple(args.batch_size * k for k in range(1, args.num_iterations + 1))
    policy, value, entropy, loss = (
        np.array(scalars[f"losses/{name}"])[:, 1] for name in ("policy_loss", "value_loss", "entropy", "loss")
    )
    falls = 1 - np.arange(args.num_iterations) / args.num_iterations if hasattr(args, "anneal_ent") else 1
    expected = policy + args.vf_coef * value - args.ent_coef * falls * entropy
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    for returns, values, (_, logged) in zip(spies.returns, spies.values, scalars["losses/explained_variance"]):
        residual = (returns - values).numpy().astype(np.float64)
        assert logged == pytest.approx(1 - residual.var() / returns.numpy().astype(np.float64).var(), abs=1e-3)
    assert all(value > 0 for _, value in scalars["charts/SPS"])


@pytest.mark.parametrize("name", [*FOUR_SCRIPTS, "ppo_atari"])
def test_sync_equals_async(name):
    """Catches: an async env that is seeded, reset or read otherwise than a sync one."""
    script = __import__(name)
    if "vectorization" in script.Args.__dataclass_fields__:
        runs = [script.train(small_args(script, vectorization=kind)) for kind in ("sync", "async")]
        assert same_parameters(*runs)
    else:  # the env is parallel by itself: the number of its threads must not matter
        runs = [script.train(small_args(script, env_threads=threads)) for threads in (1, 2)]
        assert same_parameters(*runs)
