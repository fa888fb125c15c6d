"""Train a recurrent PPO agent (LSTM) on vector observations and Discrete or Box actions.
Flags: the experiment's, from --env-id the env's, from --total-timesteps PPO's; ranges are hints.

Train:     python ppo_lstm.py --env-id CartPole-v1 --seed 1
Resume:    python ppo_lstm.py --resume runs/CartPole-v1__ppo_lstm__1__*
Evaluate:  python ppo_lstm.py --evaluate runs/CartPole-v1__ppo_lstm__1__* --capture-video

Differs from ppo.py in: an LSTM before actor and critic, whose state the rollout carries along; values computed with
each action, as they need that state; minibatches of sequences of S steps, each trained from the state stored at its
start (truncated backpropagation through time); Box actions; velocities hidden by default, so that a memory is needed.

"PPO" is arXiv:1707.06347, "GAE" arXiv:1506.02438, both by Schulman et al.; a tag such as [core 7]
is a detail of Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization".
Shapes: T num_steps, N num_envs, B = T*N batch_size, M minibatch_size, *O of an obs, *A of an action,
S seq_len, H hidden_size, L num_layers, K the number of LSTMs; a state is (N, K, 2, L, H): hidden and cell.
With `torchrun --nproc-per-node 2 ppo_lstm.py` each of two processes has half of N, B and M.

You may stop reading at "The life of a run": what follows is not PPO, and the same in every script.
"""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch==2.13.0",
#   "gymnasium[box2d,classic-control,mujoco]==1.4.0",
#   "numpy==2.4.6",
#   "tyro==1.0.17",
#   "tensorboard==2.21.0",
#   "wandb==0.31.0",
#   "imageio[ffmpeg]==2.38.1",
# ]
# ///

import contextlib
import functools
import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn


@dataclass
class Args:
    # experiment
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # fixes the network's init, the sampled actions and every env's random stream
    torch_deterministic: bool = True  # deterministic cuDNN kernels
    cuda: bool = True  # use a GPU if there is one
    torch_threads: int = 1  # CPU threads of torch, 0: one per core; a small net is fastest on one
    compile: bool = False  # torch.compile policy, loss and gradient; pays off in long runs
    track: bool = False  # log to wandb too
    wandb_project_name: str = "ppo"  # wandb project
    wandb_entity: str | None = None  # wandb team; None: your own account
    wandb_tags: str = ""  # tags of the wandb run, separated by spaces
    resume: str | None = None  # run folder to resume, with its own arguments except those you give
    exact_resume: bool = False  # reset envs at checkpoints, to resume bit-identically (on a CPU)
    checkpoint_every: int = 100  # iterations between checkpoints
    evaluate: str | None = None  # run folder whose agent to evaluate, instead of training
    eval_episodes: int = 0  # 0: none, but 10 with --evaluate, --eval-every or --capture-video
    eval_every: int = 0  # iterations, a multiple of --checkpoint-every; 0: at the end only
    deterministic: bool = False  # evaluate with the most likely action instead of a sample
    capture_video: bool = False  # record the evaluated episodes as mp4 in RUN_DIR/videos

    # environment
    env_id: str = "CartPole-v1"  # a registered id, or "module:Name-v0" of a module to import
    env_kwargs: str = "{}"  # the env's keyword arguments, as JSON: '{"sutton_barto_reward": true}'
    num_envs: int = 16  # N, parallel envs [core 1]; 2 to 64
    mask_velocity: bool | None = None  # hide the velocities; None: in the envs listed in VELOCITIES
    vectorization: Literal["sync", "async"] = "sync"  # async: a process per env, for steps > 1 ms

    # algorithm
    total_timesteps: int = 100_000  # env steps in the whole run
    patience: int = 0  # end the run after so many iterations without a better mean return; 0: never
    learning_rate: float = 3e-3  # Adam's step size; 1e-4 to 3e-3
    num_steps: int = 64  # T, steps per env and rollout, a multiple of seq_len; 32 to 2048
    anneal_lr: bool = True  # learning rate falls linearly to 0 [core 4]
    gamma: float = 0.98  # discount per step; 0.9 to 0.999
    gae: bool = True  # generalised advantage estimation; off: n-step returns to the rollout's end
    gae_lambda: float = 0.8  # bias (0) against variance (1) in GAE; 0.8 to 1
    num_minibatches: int = 8  # minibatches per epoch, a divisor of the number of sequences; 1 to 32
    update_epochs: int = 20  # passes over each batch; 3 to 20
    norm_adv: bool = True  # normalise the advantages of each minibatch [core 7]
    clip_coef: float = 0.2  # epsilon of PPO eq. 7; 0.1 to 0.3
    anneal_clip: bool = True  # clip_coef falls linearly to 0 as well [aux 1]
    clip_vloss: bool = False  # clip the value's change [core 9]; not in the PPO paper, rarely helps
    ent_coef: float = 0.0  # weight of the entropy bonus; 0 to 0.01
    vf_coef: float = 0.5  # weight of the value loss; 0.25 to 1
    max_grad_norm: float = 0.5  # bound of the gradient's global norm [core 11]
    target_kl: float | None = None  # end an update after an epoch with a larger KL; 0.01 to 0.05
    seq_len: int = 32  # S, steps of a sequence, a divisor of num_steps; 0: num_steps [lstm 4]
    hidden_size: int = 64  # H, units of each LSTM layer and of the layer after it
    num_layers: int = 1  # L, layers of each LSTM
    shared_lstm: bool = True  # one LSTM for actor and critic instead of one each
    bf16: bool = False  # train in bfloat16, not the last layers, if the CPU is fast at it; from 1,000 steps a minibatch
    critic_learning_rate: float | None = None  # of a critic with --no-shared-lstm; None: learning_rate
    weight_decay: float = 0.0  # decoupled weight decay (AdamW); 0 to 0.01
    reward_floor: float = -math.inf  # smaller rewards are raised to this, before scaling
    reward_scale: float = 1.0  # factor on the learner's rewards; 0.01 if discounted returns are in the hundreds
    log_std_init: float = 0.0  # Box actions: log of the initial standard deviation; -2 to 0
    learn_log_std: bool = True  # Box actions: learn the standard deviation

    batch_size = property(lambda self: self.num_envs * self.num_steps)
    minibatch_size = property(lambda self: int(self.batch_size // self.num_minibatches))
    num_iterations = property(lambda self: int(self.total_timesteps // self.batch_size))
    num_sequences = property(lambda self: self.batch_size // (self.seq_len or self.num_steps))

    def __post_init__(self):
        require(self, "log_std_init reward_scale", math.isfinite, "a finite number")
        require(self, "reward_floor", lambda x: x < math.inf, "a number")
        require(self, "hidden_size num_layers", lambda x: x >= 1, "at least 1")
        require(self, "seq_len weight_decay", lambda x: 0 <= x < math.inf, "0 or more")
        is_own_rate = lambda x: x is None or (0 < x < math.inf and not self.shared_lstm)
        require(self, "critic_learning_rate", is_own_rate, "a positive number, and only with --no-shared-lstm")
        check_args(self)
        require(self, "seq_len", lambda x: not x or self.num_steps % x == 0, "a divisor of --num-steps, or 0")
        fits = lambda x: self.num_sequences % (x * (PROCESSES if dist.is_initialized() else 1)) == 0
        require(self, "num_minibatches", fits, f"a divisor of {self.num_sequences} sequences, for each process")


VELOCITIES = dict(CartPole=[1, 3], MountainCar=[1], Pendulum=[2], LunarLander=[2, 3, 5])  # indices in gymnasium's envs


def make_envs(args: Args, num_envs: int, render: bool = False) -> VectorEnv:
    """Return `num_envs` envs, with SAME_STEP autoreset and the returns of whole episodes in infos.

    Every transition is real: where an episode ends, infos["final_obs"] has its last observation;
    the returned one opens the next. `render` is for envs.render(). Other spaces are a UserError.
    """
    if args.capture_video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo then needs no screen

    def adapt(env: gym.Env) -> gym.Env:
        env = CheckedEnv(env)
        if isinstance(env.action_space, Discrete) and (start := env.action_space.start):  # ours is 0
            env = gym.wrappers.TransformAction(env, lambda action: action + start, Discrete(env.action_space.n))
        is_known = str(env.spec.entry_point).startswith("gymnasium.envs")
        hidden = is_known and VELOCITIES.get(env.spec.name.removesuffix("Continuous"))
        if args.mask_velocity and not hidden:
            raise UserError(f"the velocities of {args.env_id} are not in VELOCITIES: leave --mask-velocity out")
        if args.mask_velocity is not False and hidden:
            seen = np.isin(np.arange(env.observation_space.shape[0]), hidden, invert=True)
            env = gym.wrappers.TransformObservation(env, lambda obs: obs * seen, env.observation_space)
        if not isinstance(env.observation_space, Box) and env.observation_space.is_np_flattenable:
            env = gym.wrappers.FlattenObservation(env)  # Discrete: one-hot; Dict and Tuple: joined
        obs_space, space = env.observation_space, env.action_space
        is_float = isinstance(space, Box) and space.dtype.kind == "f" and len(space.shape) > 0
        fits = isinstance(obs_space, Box) and len(obs_space.shape) == 1
        if not fits or not (isinstance(space, Discrete) or is_float) or env.has_wrapper_attr("action_masks"):
            spaces = "vectors and Discrete or float actions (masks: ppo_multidiscrete.py)"
            raise UserError(f"{args.env_id} has {obs_space} and {space}, not {spaces}")
        if is_float:
            below, above = np.float64(space.low) > -1e9, np.float64(space.high) < 1e9  # has a lower, an upper bound
            low = np.where(below, space.low, np.where(above, space.high - 2, -1))
            high = np.where(above, space.high, low + 2)
            middle, half = (low + high) / 2, (high - low) / 2  # bounds become -1 and 1, about which a policy begins
            # the env gets the clipped action, the loss the sampled one [cont 5]
            to_env = lambda action: (middle + half * action).clip(space.low, space.high)
            bounds = np.where(below, -1, space.low), np.where(above, 1, space.high)
            env = gym.wrappers.TransformAction(env, to_env, Box(*bounds, dtype=space.dtype))
        return env

    options = json.loads(args.env_kwargs) | (dict(render_mode="rgb_array") if render else {})
    mode = dict(autoreset_mode=AutoresetMode.SAME_STEP)
    envs = gym.make_vec(args.env_id, num_envs, args.vectorization, mode, [adapt], disable_env_checker=True, **options)
    envs.close = functools.partial(envs.close, timeout=1)  # a worker that hangs is then killed
    for worker in getattr(envs, "processes", ()):
        worker._popen.terminate = worker.kill  # Python's exit calls it, too: workers outlive SIGTERM
    return RecordEpisodeStatistics(envs)


def env_seeds(args: Args, num_envs: int, *key: int) -> list[int]:
    """Return a seed for each env; other run seeds and other keys give other streams."""
    children = np.random.SeedSequence(args.seed, spawn_key=key).spawn(num_envs)
    return [int(child.generate_state(1)[0] >> 1) for child in children]  # 31 bits, to fit a C int


def layer_init(layer: nn.Module, std: float = math.sqrt(2), bias: float = 0.0) -> nn.Module:
    """Orthogonal weights of gain `std` and a constant bias [core 2]."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class Memory(nn.Module):
    """`num_lstms` LSTMs side by side, whose state is zeroed wherever an episode starts [lstm 3]."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, num_lstms: int):
        super().__init__()
        self.lstms = nn.ModuleList(nn.LSTM(input_size, hidden_size, num_layers) for _ in range(num_lstms))
        for name, parameter in self.named_parameters():  # [lstm 1]
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        self.weights = [lstm.all_weights for lstm in self.lstms]  # for --compile, which cannot look into an nn.LSTM

    def initial_state(self, num_envs: int) -> Tensor:
        """Zeros [lstm 2], (num_envs, K, 2, L, H)."""
        lstm = self.lstms[0]
        return lstm.weight_hh_l0.new_zeros(num_envs, len(self.lstms), 2, lstm.num_layers, lstm.hidden_size)

    def forward(self, x: Tensor, state: Tensor, starts: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the features of each LSTM, and the state after it; `starts` is 1. where x opens an episode.

        One step: x (N, F), state (N, K, 2, L, H), starts (N,) -> features (N, H). Sequences: x (M, F), a state each,
        starts (M/S, S), on the CPU -> features (M, H), and the states as given: the rollout has stored the next ones.
        """
        if starts.dim() > 1:
            return self.run_sequences(x, state, starts), state
        state = state * (1 - starts).view(-1, 1, 1, 1, 1)
        features, last = [x] * len(self.lstms), torch.empty_like(state)
        for k, layers in enumerate(self.weights):  # cell by cell, three times as fast as nn.LSTM
            for layer, weights in enumerate(layers):
                features[k], cell = torch.lstm_cell(features[k], state[:, k, :, layer].unbind(1), *weights)
                last[:, k, :, layer] = torch.stack([features[k], cell], 1)
        return features, last

    @torch.compiler.disable
    def run_sequences(self, x: Tensor, state: Tensor, starts: Tensor) -> list[Tensor]:
        """The features of whole sequences, cut into P pieces without a reset; similar ones run together, padded."""
        S, end = starts.shape[1], starts.numel()
        begins = ((starts > 0) | (torch.arange(S) == 0)).flatten().nonzero().squeeze(1)  # (P,), in the flattened x
        lengths = torch.diff(begins, append=torch.tensor([end]))
        carried = (begins % S == 0) * (1 - starts.flatten()[begins])  # 1. for a piece that takes the stored state
        sizes = lengths.clamp(min=16).log2().ceil().long() // 2  # groups: up to 32, 128, 512, ... steps
        outputs, places = [], []  # of each group
        for group in sizes == sizes.unique()[:, None]:
            steps = torch.arange(lengths[group].max())[:, None]
            positions = begins[group] + steps  # (longest, P); past a piece's end: what follows it, ignored
            places.append(torch.where(steps < lengths[group], positions, end).flatten())  # end: padding
            indices = begins[group] // S, carried[group], positions.clamp(max=end - 1)
            sequences, kept, positions = [index.to(x.device, non_blocking=True) for index in indices]
            first = (state[sequences] * kept.view(-1, 1, 1, 1, 1)).movedim(0, 3).contiguous()  # (K, 2, L, P, H)
            outputs.append([lstm(x[positions], (h, c))[0].flatten(0, 1) for lstm, (h, c) in zip(self.lstms, first)])
        rows = torch.cat(places).argsort()[:end].to(x.device, non_blocking=True)  # each step's, without the padding
        return [torch.cat(output).index_select(0, rows) for output in zip(*outputs)]


class Agent(nn.Module):
    """Actor and critic, each an ELU layer after an LSTM, which they share unless `shared_lstm` is off."""

    def __init__(self, envs: VectorEnv, args: Args):
        super().__init__()
        obs_size, H = envs.single_observation_space.shape[0], args.hidden_size
        action_space = envs.single_action_space
        self.bf16 = args.bf16
        self.discrete = isinstance(action_space, Discrete)
        self.memory = Memory(obs_size, H, args.num_layers, num_lstms=1 if args.shared_lstm else 2)
        num_outputs = action_space.n if self.discrete else math.prod(action_space.shape)
        self.critic_hidden = nn.Sequential(layer_init(nn.Linear(H, H)), nn.ELU())
        self.critic = layer_init(nn.Linear(H, 1), std=1.0)
        self.actor_hidden = nn.Sequential(layer_init(nn.Linear(H, H)), nn.ELU())
        self.actor = layer_init(nn.Linear(H, num_outputs), std=0.01)
        if not self.discrete:  # the same standard deviations in all states [cont 2]
            self.actor_logstd = nn.Parameter(torch.ones(action_space.shape) * args.log_std_init, args.learn_log_std)

    def get_value(self, obs: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """V: (N, *O), (N, K, 2, L, H), (N,) -> (N,)."""
        features, _ = self.memory(obs.float(), state, starts)
        return self.critic(self.critic_hidden(features[-1])).squeeze(-1)

    def get_action_and_value(self, obs, state, starts, action=None, deterministic: bool = False):
        """Return action (N, *A), sampled if not given, logprob, entropy, value (N,), next state."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16 and starts.dim() > 1):  # in training
            features, state = self.memory(obs.float(), state, starts)
            actor_hidden, critic_hidden = self.actor_hidden(features[0]), self.critic_hidden(features[-1])
        output, value = self.actor(actor_hidden.float()), self.critic(critic_hidden.float()).squeeze(-1)
        if self.discrete:
            log_probs = output.log_softmax(-1)  # faster than a Categorical
            probs = log_probs.exp()
            if action is None:  # argmax of p / E, E ~ Exp(1): a fast sample from p
                action = (log_probs if deterministic else probs / torch.empty_like(probs).exponential_()).argmax(-1)
            entropy = -(probs * log_probs).sum(-1)
            logprob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return action, logprob, entropy, value, state
        mean = output.unflatten(-1, self.actor_logstd.shape)
        std = self.actor_logstd.exp()
        if action is None:
            action = mean if deterministic else (mean + std * torch.randn_like(mean)).detach()
        log_scale = (self.actor_logstd + 0.5 * math.log(2 * math.pi)).sum()
        logprob = -0.5 * (((action - mean) / std) ** 2).flatten(1).sum(1) - log_scale  # [cont 1] [cont 3]
        entropy = (log_scale + 0.5 * std.numel()).expand(len(mean))  # the same in all states
        return action, logprob, entropy, value, state


def compute_gae(rewards, values, next_values, terminations, dones, gamma: float, gae_lambda: float):
    """Return (advantages, returns) by GAE eq. 16 [core 5]; all are (T, N) float Tensors.

    next_values[t] is V of the obs after step t; if step t truncated the episode, V of its last obs.
    terminations[t] stops the bootstrap; dones[t] (terminated or truncated) stops the recursion.
    """
    deltas = rewards + gamma * next_values * (1 - terminations) - values  # GAE eq. 11
    decays = gamma * gae_lambda * (1 - dones)
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(rewards[0])  # (N,)
    for t in reversed(range(len(rewards))):
        lastgaelam = deltas[t] + decays[t] * lastgaelam
        advantages[t] = lastgaelam
    return advantages, advantages + values


def ppo_loss(new_logprobs, old_logprobs, advantages, new_values, old_values, returns, entropy, args: Args):
    """Return the loss, PPO eq. 9 negated, and a dict of statistics, all 0-d; inputs are (M,)."""
    logratio = new_logprobs - old_logprobs
    ratio = logratio.exp()
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)  # [core 7]

    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()  # PPO eq. 7 [core 8]

    v_loss = (new_values - returns) ** 2
    if args.clip_vloss:  # the larger of two errors [core 9]
        v_clipped = old_values + (new_values - old_values).clamp(-args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - returns) ** 2)
    v_loss = 0.5 * v_loss.mean()

    entropy_loss = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss  # [core 10]
    with torch.no_grad():  # [core 12]
        old_approx_kl = (-logratio).mean()
        approx_kl = ((ratio - 1) - logratio).mean()  # also unbiased, and never negative
        clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
    stats = dict(policy_loss=pg_loss.detach(), value_loss=v_loss.detach(), entropy=entropy_loss.detach())
    return loss, stats | dict(old_approx_kl=old_approx_kl, approx_kl=approx_kl, clipfrac=clipfrac)


def average(x: Tensor) -> Tensor:
    """The mean of x over all processes; on one process, x."""
    if PROCESSES > 1:
        torch.compiler.disable(dist.all_reduce)(x := x.clone())
    return x / PROCESSES


def compute_gradients(agent: Agent, minibatch: list[Tensor], args: Args) -> dict[str, Tensor]:
    """Set a minibatch's gradients, clipped; return statistics. --compile leaves out the LSTM."""
    *rows, starts, states = minibatch  # (M/S, ...)
    obs, actions, logprobs, advantages, values, returns = [x.flatten(0, 1) for x in rows]  # (M, ...)
    _, newlogprob, entropy, newvalue, _ = agent.get_action_and_value(obs, states, starts, actions)
    loss, stats = ppo_loss(newlogprob, logprobs, advantages, newvalue, values, returns, entropy, args)
    loss.backward()
    if PROCESSES > 1:  # each has its part of the minibatch [aux 2]
        gradients = [p.grad for p in agent.parameters() if p.grad is not None]
        nn.utils.vector_to_parameters(average(nn.utils.parameters_to_vector(gradients)), gradients)
    foreach = loss.is_cuda and not torch.compiler.is_compiling()  # one call; slower in a graph
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm, foreach=foreach)  # [core 11]
    return stats | dict(loss=loss.detach(), grad_norm=grad_norm)


def train(args: Args) -> Path:
    """Train an agent, or go on with the run in args.resume, and return the run's folder."""
    with Run(args) as run:
        has = torch.cpu.get_capabilities().get  # an Intel without AMX is faster in float32
        cpu = any((has("amx_bf16"), has("arm_bf16"), has("avx512_bf16") and "Intel" not in has("cpu_name", "")))
        has_bf16 = cpu and run.device.type == "cpu"  # a GPU's LSTM would be float16
        args = run.args = replace(args, bf16=args.bf16 and has_bf16)  # evaluate uses the same
        T, N = args.num_steps, args.num_envs // PROCESSES  # each process has its part of the envs
        S = args.seq_len or T
        envs = run.enter_context(contextlib.closing(make_envs(args, N)))  # closed when the run ends
        torch.manual_seed(args.seed)  # after the envs, which may have seeds of their own
        agent = Agent(envs, args).to(run.device)
        groups = [dict(params=[]), dict(params=[])]  # the actor's, with a shared LSTM, and the critic's
        for name, parameter in agent.named_parameters():
            groups[name.startswith(("critic", "memory.lstms.1"))]["params"].append(parameter)
        optimizer = torch.optim.AdamW(groups, weight_decay=args.weight_decay, eps=1e-5, fused=True)  # [core 3]
        gradient_fn = run.compile(compute_gradients)
        act = torch.inference_mode()(run.compile(agent.get_action_and_value))  # no gradients
        get_value = torch.inference_mode()(agent.get_value)

        to_tensor = functools.partial(torch.as_tensor, device=run.device)
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        obs = to_tensor(np.zeros((T, N, *obs_space.shape), obs_space.dtype))
        action_dtype = torch.long if agent.discrete else torch.float32  # as sampled
        actions = torch.zeros((T, N, *action_space.shape), dtype=action_dtype, device=run.device)
        logprobs, values, final_values = torch.zeros((3, T, N), device=run.device)
        rewards = np.zeros((T, N), np.float32)
        terminations, truncations = np.zeros((2, T, N), bool)
        starts = torch.zeros((T, N))  # 1. where obs opens an episode; on the CPU, see run_sequences
        next_state = agent.memory.initial_state(N)
        states = torch.zeros((T // S, *next_state.shape), device=run.device)  # at the start of each sequence [lstm 5]

        run.begin(agent, optimizer)  # loads what is resumed, makes the folder, saves
        if args.capture_video:
            run.evaluate()  # a baseline, and what cannot be filmed is known now
        for iteration in range(run.iteration + 1, args.num_iterations + 1):
            remaining = 1 - (iteration - 1) / args.num_iterations  # falls linearly from 1 towards 0
            learning_rate = args.learning_rate * remaining if args.anneal_lr else args.learning_rate
            rates = args.learning_rate, args.critic_learning_rate or args.learning_rate
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * remaining if args.anneal_lr else rate  # [core 4]
                group["weight_decay"] = args.weight_decay  # a resumed run may have another
            loss_args = args
            if args.anneal_clip:  # [aux 1]; a tensor: --compile would recompile for each new number
                loss_args = replace(args, clip_coef=to_tensor(np.float64(args.clip_coef * remaining)))

            # rollout
            if run.episodes_restart:
                next_obs = run.reset(envs)  # at first; --exact-resume: after checkpoints, too
                next_starts = torch.ones(N)
            final_values.zero_()  # V of the last observation of each episode that is truncated
            for step in range(T):
                obs[step] = torch.as_tensor(next_obs)
                starts[step] = next_starts
                if step % S == 0:
                    states[step // S] = next_state
                step_starts = next_starts.to(run.device)
                actions[step], logprobs[step], _, values[step], next_state = act(obs[step], next_state, step_starts)
                env_actions = actions[step].cpu().numpy().astype(action_space.dtype)  # a copy
                next_obs, rewards[step], terminations[step], truncations[step], infos = envs.step(env_actions)
                if (cut := truncations[step]).any():
                    final_obs = to_tensor(np.stack(infos["final_obs"][cut]))
                    final_values[step, cut] = get_value(final_obs, next_state[cut], values.new_zeros(len(final_obs)))
                next_starts = torch.as_tensor(terminations[step] | truncations[step]).float()
                run.note_episodes(truncations[step], infos)
            run.require_finite(obs=obs, next_obs=next_obs, rewards=rewards)  # tanh(inf) is finite
            next_values = torch.vstack([values[1:], get_value(to_tensor(next_obs), next_state, to_tensor(next_starts))])
            next_values = torch.where(to_tensor(truncations), final_values, next_values)

            # advantages
            scaled_rewards = to_tensor(rewards).clamp(min=args.reward_floor) * args.reward_scale
            dones = to_tensor(terminations | truncations).float()
            gae_lambda = args.gae_lambda if args.gae else 1.0  # 1: n-step returns
            advantages, returns = compute_gae(
                scaled_rewards, values, next_values, to_tensor(terminations).float(), dones, args.gamma, gae_lambda
            )

            # update
            in_sequences = lambda x: x.unflatten(0, (T // S, S)).transpose(1, 2).flatten(0, 1)  # (B/S, S, ...) [lstm 4]
            batch = [in_sequences(x) for x in (obs, actions, logprobs, advantages, values, returns, starts)]
            batch.append(states.flatten(0, 1))  # (B/S, K, 2, L, H)
            stats = []  # of each minibatch
            for _ in range(args.update_epochs):
                for mb_inds in torch.randperm(T * N // S).chunk(args.num_minibatches):  # [core 6]
                    minibatch = [x.index_select(0, mb_inds.to(x.device, non_blocking=True)) for x in batch]
                    optimizer.zero_grad()
                    stats.append(gradient_fn(agent, minibatch, loss_args))
                    optimizer.step()
                approx_kl = torch.stack([mb["approx_kl"] for mb in stats[-args.num_minibatches :]]).mean()  # this epoch
                if args.target_kl is not None and average(approx_kl) > args.target_kl:  # [aux 3]
                    break

            # log [core 12], save, evaluate, stop
            errors, targets = [torch.cat(gather([x.cpu()])) for x in (returns - values, returns)]  # of all processes
            explained_variance = 1 - errors.var() / targets.var()
            run.log(stats, {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance})
            last = iteration == args.num_iterations or run.stopped()  # a signal, or --patience
            if last or iteration % args.checkpoint_every == 0:
                run.save(agent, optimizer)
            if last or (args.eval_every and iteration % args.eval_every == 0):
                run.evaluate()
            if last:
                break
    return run.folder


def evaluate(checkpoint: Path | str, episodes: int, args: Args | None = None) -> list[float]:
    """Return the undiscounted returns of `episodes` whole episodes of a saved agent in a fresh env.

    `args` are the run's, unless given. With args.capture_video it is filmed, in videos/step_N.mp4
    beside the checkpoint. A signal ends it. Training's random state is left unchanged.
    """
    state = load_checkpoint(checkpoint)
    args = args or Args(**state["args"])
    envs = make_envs(args, 1, render=args.capture_video)
    film = contextlib.nullcontext()
    if args.capture_video:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame then needs no screen
        path = Path(state["path"]).parent / f"videos/step_{state['global_step']}.mp4"
        path.parent.mkdir(exist_ok=True)
        film = imageio.get_writer(path, fps=envs.metadata.get("render_fps", 30), macro_block_size=2)
    returns = []
    with contextlib.closing(envs), film, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(args.seed)  # and not the GPU's
        agent = Agent(envs, args).eval().requires_grad_(False)  # no_grad() would reach into the env
        load_checkpoint(state["path"], agent)
        obs, _ = envs.reset(seed=env_seeds(args, 1, EVALUATION))
        act = functools.partial(agent.get_action_and_value, deterministic=args.deterministic)
        next_state, starts = agent.memory.initial_state(1), torch.ones(1)
        for _ in range(episodes * 100_000):  # then episodes that do not end are given up
            if len(returns) == episodes or SIGNALS:
                break
            if args.capture_video:
                image = np.asarray(envs.render()[0])  # (H, W, C), or (H, W)
                if not image.size or image.ndim < 2 or image.shape[2:] not in ((), (1,), (3,), (4,)):
                    raise UserError(f"cannot film {image.dtype} of shape {image.shape}: render (H, W, 3)")
                scale = 255.0 if image.dtype != np.uint8 and image.max() < 1.5 else 1.0
                film.append_data((image * scale).clip(0, 255).astype(np.uint8))
            action, *_, next_state = act(torch.as_tensor(obs), next_state, starts)
            obs, _, terminations, truncations, infos = envs.step(action.numpy().astype(envs.single_action_space.dtype))
            starts = torch.as_tensor(terminations | truncations).float()
            if "episode" in infos:
                returns += infos["episode"]["r"].tolist()
    mean, std = np.mean(returns or math.nan), np.std(returns or math.nan)
    tell(f"evaluation: mean return {mean:.2f} ± {std:.2f} over {len(returns)} of {episodes} episodes")
    return returns


# --------------------------------------------------------------------------------------------------
# The life of a run: nothing of PPO; the same text in every script.
# --------------------------------------------------------------------------------------------------
import argparse
import atexit
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.nn  # before init: else its default arguments keep the group alive
from gymnasium.vector.utils import concatenate, create_empty_array
from torch.utils.tensorboard import SummaryWriter

PROCESSES = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1  # of torchrun
RANK = int(os.environ["RANK"]) if PROCESSES > 1 else 0  # 0 writes, prints and evaluates
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
with contextlib.suppress(AttributeError, OSError, ValueError):  # where there are these
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # more would hang there
    os.register_at_fork(after_in_child=np.random.seed)  # as Python's own
    quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()  # a container's, or "max"
    CORES = min(CORES, math.ceil(int(quota) / int(period)))
CORES = max(1, CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # for this process
TRAINING, EVALUATION, SAMPLING = range(3)  # keys of the random streams, see env_seeds
SIGNALS = []  # that main() was sent: the run ends after this iteration, an evaluation at once


class UserError(Exception):
    """Bad input: shown as one sentence, with exit code 2; if possible, before anything is written."""


def require(args: Args, names: str, valid: Callable, rule: str) -> None:
    """Raise a UserError if one of these arguments is not valid."""
    for name in names.split():
        with contextlib.suppress(TypeError, ValueError):  # of another type, or no JSON
            if valid(getattr(args, name)):
                continue
        raise UserError(f"--{name.replace('_', '-')} must be {rule}, not {getattr(args, name)}")


def check_args(args: Args) -> None:
    """Refuse values that would fail late or train nonsense, and set what others imply."""
    require(args, "num_envs num_steps num_minibatches update_epochs checkpoint_every", lambda x: x >= 1, "at least 1")
    require(args, "learning_rate clip_coef", lambda x: 0 < x < math.inf, "positive and finite")
    require(args, "max_grad_norm target_kl", lambda x: x is None or x > 0, "positive")
    require(args, "gamma gae_lambda", lambda x: 0 <= x <= 1, "from 0 to 1")
    require(args, "seed torch_threads patience eval_episodes ent_coef vf_coef", lambda x: 0 <= x < 2**63, "0 or more")
    require(args, "eval_every", lambda x: x >= 0 == x % args.checkpoint_every, "a multiple of --checkpoint-every")
    processes = PROCESSES if dist.is_initialized() else 1  # before that, flags may be missing
    require(args, "num_envs", lambda x: x % processes == 0, f"a multiple of {processes} processes")
    require(args, "total_timesteps", lambda x: x >= args.batch_size, f"at least a batch, {args.batch_size} steps")
    divides = lambda x: args.batch_size % (x * processes) == 0 and args.batch_size > x * processes * args.norm_adv
    require(args, "num_minibatches", divides, f"a divisor of {args.batch_size} steps, each with 2 per process")
    require(args, "env_kwargs", lambda x: isinstance(json.loads(x), dict), "a JSON object")
    if args.evaluate or args.capture_video or args.eval_every:
        args.eval_episodes = args.eval_episodes or 10


def gather(items: list) -> list:
    """The items of all processes, one process after the other."""
    lists = [items] * PROCESSES
    if PROCESSES > 1:
        dist.all_gather_object(lists, items)
    return [item for each in lists for item in each]


def load_checkpoint(path: Path | str, *parts: nn.Module | torch.optim.Optimizer) -> dict:
    """Read a checkpoint, or a folder's, onto the CPU, running no code; load agent, optimizer."""
    path = Path(path, "checkpoint.pt" if Path(path).is_dir() else "").absolute()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not dist.is_initialized():  # else main() did, and the old num_envs may not suit now
            Args(**state["args"])
        for part, name in zip(parts, ("agent", "optimizer")):  # those that are given
            part.load_state_dict(state[name])
        return state | dict(kept=state["kept"], global_step=state["global_step"], path=str(path))
    except Exception as error:  # missing, torn, foreign or hostile, or of another network
        why = " ".join(f"{type(error).__name__}: {error}".split()).split(". ")[0]
        raise UserError(f"{path} is no checkpoint of this script and network ({why})") from None


def saved_args(run: Path | str, **changes) -> Args:
    """The arguments of a run, with changes: train(saved_args(folder, gamma=0.9)) resumes it."""
    return Args(**load_checkpoint(run)["args"] | dict(resume=str(run)) | changes)


class CheckedEnv(gym.Wrapper):
    """A user's env: its seed fixes all its randomness; it gives copies, numbers, and no infos."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.unchecked = 2  # the observations of the first reset and of the first step
        self.before = random.getstate(), np.random.get_state()  # close() restores them
        spaces = [space for e in (env, self.unwrapped) for space in (e.action_space, e.observation_space)]
        self.seeders = [random.seed, np.random.seed, *(space.seed for space in spaces)]
        if torch.multiprocessing.current_process().name.startswith("Worker<AsyncVectorEnv"):
            self.seeders.append(torch.default_generator.manual_seed)  # elsewhere it samples actions
            os.setpgrp()  # Ctrl-C in a terminal is for the main process
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, lambda *_: signal.alarm(30))  # the main process ends it first

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            for seeder, number in zip(self.seeders, np.random.SeedSequence(seed).generate_state(7).tolist()):
                seeder(number)
            if not isinstance(self.unwrapped.np_random, np.random.RandomState):
                gym.Env.reset(self.unwrapped, seed=seed)  # its own may not
        return self.call(self.env.reset, seed=seed, options=options)[0], {}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.call(self.env.step, self.action_space.dtype.type(action))
        numbers = [float((x if hasattr(x, "item") else np.asarray(x)).item()) for x in (reward, terminated, truncated)]
        return obs, *numbers, {}

    def call(self, method: Callable, *args, **options):
        try:
            obs, *others = method(*args, **options)
        except (Exception, SystemExit) as error:  # not every error can be sent to another process
            raise RuntimeError(f"an env raised {error!r}; the last checkpoint is good") from error
        if self.unchecked > 0:
            self.unchecked -= 1
            try:  # as gymnasium does for sync envs; for async ones it casts whatever comes
                concatenate(self.observation_space, [obs], create_empty_array(self.observation_space))
            except Exception as error:
                raise UserError(f"{self.spec.id} gave {obs!r:.300}, not of {self.observation_space}: {error}") from None
        return np.array(obs) if isinstance(self.observation_space, gym.spaces.Box) else obs, *others

    def close(self):
        with contextlib.suppress(Exception, SystemExit):  # no reason to lose a run
            self.env.close()
        random.setstate(self.before[0])
        np.random.set_state(self.before[1])


def note_signal(pid: int, signum: int, frame):
    """Have the run end after this iteration; a second Ctrl-C ends it at once."""
    if os.getpid() != pid:  # a process that an env has started
        worker = torch.multiprocessing.current_process().name.startswith("Worker<AsyncVectorEnv")
        return signal.alarm(30) if worker else os._exit(128 + signum)  # an env that is being made waits, too
    SIGNALS.append(signum)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError):  # as in tell()
        os.write(2, b"\nstopping after this iteration; Ctrl-C again stops at once\n")


def tell(text: str) -> None:
    """Print a line, if it can be read: Ctrl-C ends a `| tee` as well, a terminal may be closed."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


class Run(contextlib.ExitStack):
    """Folder, log, checkpoints, evaluations and signals of a run; closes what it opens."""

    def __init__(self, args: Args):
        super().__init__()
        args.__post_init__()  # again: they may have been set since, and the processes are known
        self.args = args
        self.device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
        name = f"{args.env_id}__{args.exp_name}__{args.seed}".replace("/", "-").replace(":", "-")
        self.folder = gather([Path("runs", f"{name}__{time.time_ns() // 10**6}").absolute()])[0]
        args.resume = args.resume and str(Path(args.resume).absolute())  # an env may chdir
        self.callback(os.chdir, os.getcwd())  # for the caller, who may train again
        self.iteration = self.global_step = 0  # done so far
        self.kept = dict(recent=[], score=-math.inf, best_return=-math.inf, best_step=0, progress="no episode ended")
        self.episodes = []  # (return, length) of those that ended in this iteration
        self.episodes_restart = True  # by reset(), before the next rollout
        torch.set_num_threads(args.torch_threads or CORES)
        torch.backends.cudnn.deterministic = args.torch_deterministic
        torch.backends.cudnn.allow_tf32 = False  # float32 is float32

    def __exit__(self, kind, error, trace) -> None:
        """Close everything, and say how the run ended."""
        with contextlib.suppress(EOFError, ConnectionError):  # of envs whose processes have died
            super().__exit__(kind, error, trace)
        if isinstance(error, (SystemExit, EOFError, ConnectionError) if self.folder.exists() else SystemExit):
            why = "an env raised it or called sys.exit(), or its process was killed, perhaps for want of memory"
            raise RuntimeError(f"{error!r}: {why}; a checkpoint in {self.folder} is good, if there is one") from error
        if error is None:
            tell(f"{self.global_step:,} steps, {self.kept['progress']}, in {self.folder}")
        if error is None and SIGNALS and self.iteration < self.args.num_iterations:
            tell(f'stopped by signal {SIGNALS[0]}; to go on: python "{__file__}" --resume "{self.folder}"')
            sys.exit(128 + SIGNALS[0])

    def begin(self, agent: nn.Module, optimizer) -> None:
        """Load what is to be resumed, then make the folder and begin to log."""
        if self.args.resume:
            state = load_checkpoint(self.args.resume, agent, optimizer)
            self.folder = Path(state["path"]).parent
            self.kept |= state["kept"]
            self.global_step = state["global_step"]
            self.iteration = math.ceil(self.global_step / self.args.batch_size)  # of the new size
        self.start_step = self.global_step
        self.start_time = self.last_print = time.perf_counter()
        if RANK == 0:
            self.folder.mkdir(parents=True, exist_ok=bool(self.args.resume))  # else it must be new
            script = self.folder / f"{Path(__file__).stem}_from_{self.global_step}.py"
            script.write_bytes(Path(__file__).read_bytes())  # an edited file is the experiment
            self.wandb = self.start_wandb() if self.args.track else None  # before the writer
            self.writer = self.enter_context(SummaryWriter(self.folder, purge_step=self.global_step + 1))
            plain = {name: x if type(x) in (int, float, str) else str(x) for name, x in asdict(self.args).items()}
            for summary in torch.utils.tensorboard.summary.hparams(plain, {"charts/mean_return_100": 0.0}):
                self.writer.file_writer.add_summary(summary)
            about = dict(command=" ".join(sys.argv), torch=torch.__version__, gymnasium=gym.__version__)
            table = "".join(f"|{name}|{value}|\n" for name, value in (plain | about).items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", self.global_step)
            tell(f"from step {self.global_step:,} of {self.args.total_timesteps:,}: {self.folder} on {self.device}")
        self.save(agent, optimizer)

    def start_wandb(self):
        """Mirror the log to wandb; a run stopped by a signal goes on in it. None if that fails."""
        try:
            import wandb

            settings = zlib.crc32(str(self.args).split("env_id=")[1].encode())  # a group's runs differ in their seeds
            names = dict(project=self.args.wandb_project_name, entity=self.args.wandb_entity, name=self.folder.name)
            names |= dict(group=f"{self.args.env_id}__{self.args.exp_name}__{settings:08x}")
            names |= dict(tags=self.args.wandb_tags.split(), id=self.kept.get("wandb_id"), resume="allow")
            run = wandb.init(**names, config=asdict(self.args), sync_tensorboard=True)
            self.push(lambda kind, *_: wandb.finish(exit_code=1 if kind else 0))
            run.define_metric("*", step_metric="global_step")
            run.log_code(str(self.folder))
            return wandb
        except Exception as error:  # no network, no login
            print(f"wandb is off for this run: {error}", file=sys.stderr)

    def reset(self, envs: VectorEnv) -> np.ndarray:
        """Begin new episodes, on seeds that no other process and no other iteration has."""
        if RANK > 0 or self.iteration > 0:  # so no state of a random generator needs to be saved
            torch.manual_seed(env_seeds(self.args, PROCESSES, SAMPLING, self.iteration)[RANK])
        seeds = env_seeds(self.args, self.args.num_envs, TRAINING, self.iteration)
        return envs.reset(seed=seeds[RANK * envs.num_envs :][: envs.num_envs])[0]

    def note_episodes(self, truncations: np.ndarray, infos: dict) -> None:
        """Note the returns and lengths of the episodes that a step ended."""
        if "episode" in infos:
            self.episodes += zip(*(infos["episode"][name][infos["_episode"]].tolist() for name in "rl"))
            self.require_finite(**{f"final_obs[{i}]": infos["final_obs"][i] for i in np.flatnonzero(truncations)})

    def require_finite(self, **numbers: Tensor | np.ndarray | float) -> None:
        """Stop the run before NaN or infinity is learnt or saved; say where: [step, env, ...]."""
        for name, x in numbers.items():
            x = torch.as_tensor(x)
            if x.is_floating_point() and len(bad := torch.nonzero(~x.isfinite())):
                why = f"{name}{bad[0].tolist() or ''} is not finite after step {self.global_step}"
                raise FloatingPointError(f"{why}; the checkpoint in {self.folder} is good")

    def compile(self, function: Callable, on_cpu: bool = True) -> Callable:
        """With --compile, `function` as a graph, called from C++ or, on a GPU, as a CUDA graph."""
        if not self.args.compile or (self.device.type == "cpu" and not on_cpu):
            return function  # not on_cpu: it is so small that calling its graph takes longer
        torch._dynamo.config.trace_autograd_ops = PROCESSES == 1  # loss.backward() is in the graph
        if self.device.type == "cpu":
            return torch.compile(function, options={"cpp_wrapper": True}, dynamic=False)
        graph = torch.compile(function, options={"triton.cudagraphs": True}, dynamic=False)
        return lambda *args: torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, graph(*args))  # else overwritten

    def log(self, stats: list[dict[str, Tensor]], scalars: dict[str, float]) -> None:
        """Log an iteration: `scalars`, and the means of `stats`, a dict a minibatch."""
        table = torch.stack([torch.stack(list(minibatch.values())) for minibatch in stats])
        means = average(table.mean(0)).tolist()  # fetched together, as this waits for a GPU
        scalars |= {f"losses/{name}": mean for name, mean in zip(stats[0], means)}
        self.require_finite(grad_norm=scalars["losses/grad_norm"])
        self.iteration += 1
        self.global_step += self.args.batch_size
        self.episodes_restart = self.args.exact_resume and self.iteration % self.args.checkpoint_every == 0
        if episodes := gather(self.episodes):
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(episodes, axis=0)
            recent = self.kept["recent"] = [*self.kept["recent"], *episodes][-100:]
            mean_return, mean_length = np.mean(recent, axis=0).tolist()
            scalars["charts/mean_return_100"] = mean_return
            self.kept["progress"] = f"mean return {mean_return:.1f}, length {mean_length:.0f}"
            self.kept["score"] = mean_return if len(recent) == 100 else -math.inf  # too few
        self.episodes = []
        if self.kept["score"] == -math.inf or self.kept["score"] > self.kept["best_return"]:
            self.kept |= dict(best_return=self.kept["score"], best_step=self.global_step)
        now = time.perf_counter()
        sps = scalars["charts/SPS"] = (self.global_step - self.start_step) / (now - self.start_time)
        for tag, value in scalars.items() if RANK == 0 else ():
            self.writer.add_scalar(tag, value, self.global_step)
        if RANK == 0 and now - self.last_print > 5:
            self.last_print = now
            left = timedelta(seconds=round(min((self.args.total_timesteps - self.global_step) / sps, 1e9)))
            tell(f"{self.global_step:,} steps, {sps:,.0f} steps/s, {left} left, {self.kept['progress']}")

    def stopped(self) -> bool:
        """Whether the run ends early: upon a signal to any of the processes, or for --patience."""
        SIGNALS[:] = gather(SIGNALS)
        waited = (self.global_step - self.kept["best_step"]) / self.args.batch_size  # iterations
        return bool(SIGNALS) or 0 < self.args.patience <= waited

    def save(self, agent: nn.Module, optimizer) -> None:
        """Write all that a resumed run needs; a kill or a crash leaves the old file or the new."""
        unscheduled = self.iteration < self.args.num_iterations and self.iteration % self.args.checkpoint_every
        if RANK > 0 or (SIGNALS and self.args.exact_resume and unscheduled):
            return  # resumed from here, it would have a reset that an unbroken run has not
        self.writer.flush()  # the log is never behind the checkpoint
        self.kept["wandb_id"] = self.wandb.run.id if self.wandb and SIGNALS else None  # a killed run may log more steps
        self.kept["best_score"] = max(self.kept["score"], self.kept.get("best_score", -math.inf))
        state = dict(agent=agent.state_dict(), optimizer=optimizer.state_dict(), args=asdict(self.args))
        state |= dict(iteration=self.iteration, global_step=self.global_step, kept=self.kept)
        temporary = self.folder / "checkpoint.tmp"
        for name in ("checkpoint.pt", "best.pt")[: 1 + (self.kept["score"] == self.kept["best_score"])]:
            torch.save(torch.utils._pytree.tree_map_only(np.generic, np.generic.item, state), temporary)
            torch.load(temporary, map_location="cpu", weights_only=True)  # can it be read back?
            os.replace(temporary, self.folder / name)

    def evaluate(self) -> None:
        """Play with the agent just saved, and log the mean return; a signal ends it."""
        if RANK > 0 or not self.args.eval_episodes or SIGNALS:
            return
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # an env may seed
        returns = evaluate(self.folder / "checkpoint.pt", self.args.eval_episodes, self.args)
        for restore, state in zip((random.setstate, np.random.set_state, torch.set_rng_state), before):
            restore(state)
        if returns and not SIGNALS:
            self.writer.add_scalar("eval/episodic_return", np.mean(returns), self.global_step)
        if self.wandb and self.args.capture_video:
            with contextlib.suppress(Exception):  # no failure of wandb stops a run
                film = self.wandb.Video(f"{self.folder}/videos/step_{self.global_step}.mp4")
                self.wandb.log({"eval/videos": film, "global_step": self.global_step})


def main() -> int:
    """Do what the command line says, on top of a run's saved arguments; return an exit code."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, functools.partial(note_signal, os.getpid()))
    sys.path.append(os.getcwd())  # where the module of a "module:Name-v0" may be
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="run")
    run = parser.parse_known_args()[0].run
    args = tyro.cli(Args, default=Args() if run is None else saved_args(run), description=str(__doc__).split("\n\n")[0])
    if PROCESSES > 1:
        if gpus := torch.cuda.device_count():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        sys.stdout = sys.stdout if RANK == 0 else open(os.devnull, "w")  # noqa: SIM115
        backend = None if int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus else "gloo"  # else nccl
        dist.init_process_group(backend, timeout=timedelta(days=1))  # as long as 0 may evaluate
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())  # else its threads may abort
    if not args.evaluate:
        train(args)
    elif RANK == 0:
        torch.set_num_threads(args.torch_threads or CORES)
        evaluate(args.evaluate, args.eval_episodes, args)
    return 128 + SIGNALS[0] if args.evaluate and SIGNALS else 0  # of a run, train() tells


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, gym.error.Error, ModuleNotFoundError, KeyboardInterrupt) as error:
        print(f"error: {str(error) or 'interrupted'}", file=sys.stderr)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 2)
