"""Train a PPO agent on vector observations and Discrete actions.

Train:     python ppo.py --env-id CartPole-v1 --seed 1
Resume:    python ppo.py --resume runs/CartPole-v1__ppo__1__1700000000
Evaluate:  python ppo.py --evaluate runs/CartPole-v1__ppo__1__1700000000 --eval-episodes 10 --capture-video

"PPO" is Schulman et al. 2017, arXiv:1707.06347; "GAE" is Schulman et al. 2016, arXiv:1506.02438; a tag such as [core 7]
is a detail of Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization".
Shapes: T num_steps, N num_envs, B = T*N batch_size, M minibatch_size, *O an observation's shape, *A an action's.
With `torchrun --nproc-per-node 2 ppo.py` each of two processes has half of N, B and M.

You may stop reading at the line "The life of a run": what follows is not PPO, and is the same in every script.
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
#   "tqdm==4.70.1",
#   "moviepy==2.2.1",
# ]
# ///

import contextlib
import functools
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn


@dataclass
class Args:
    # experiment

    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # fixes the network's init, the sampled actions and every env's random stream
    torch_deterministic: bool = True  # deterministic cuDNN kernels
    cuda: bool = True  # use a GPU if there is one
    torch_threads: int = 1  # CPU threads of torch, 0 for one per core; a small network is fastest on one
    compile: bool = False  # torch.compile the policy, the loss and its gradient; pays off in long runs
    track: bool = False  # log to wandb too
    wandb_project_name: str = "ppo"  # wandb project
    wandb_entity: str | None = None  # wandb team; None: your own account
    wandb_tags: str = ""  # tags of the wandb run, separated by spaces
    resume: str | None = None  # run folder to resume, with its own arguments except those you give
    exact_resume: bool = False  # reset the envs at each checkpoint, so that a run resumes bit-identically (on a CPU)
    checkpoint_every: int = 100  # iterations between checkpoints
    evaluate: str | None = None  # run folder whose agent to evaluate, instead of training
    eval_episodes: int = 0  # episodes per evaluation; 0: none, but 10 with --evaluate, --eval-every or --capture-video
    eval_every: int = 0  # iterations between evaluations, a multiple of --checkpoint-every; 0: at the end only
    deterministic: bool = False  # evaluate with the most likely action instead of a sample
    capture_video: bool = False  # record the evaluated episodes as mp4 in RUN_DIR/videos

    # environment

    env_id: str = "CartPole-v1"  # a registered id, or "module:Name-v0" to import the module that registers it
    env_kwargs: str = "{}"  # keyword arguments for the env, as JSON: '{"sutton_barto_reward": true}'
    num_envs: int = 4  # N, parallel envs [core 1]; 1 to 64
    vectorization: Literal["sync", "async"] = "sync"  # async: one process per env, for steps of more than about 1 ms

    # algorithm

    total_timesteps: int = 500_000  # env steps in the whole run
    patience: int = 0  # end the run after so many iterations without a better mean return; 0: never
    learning_rate: float = 2.5e-4  # Adam's step size; 1e-4 to 2e-3
    num_steps: int = 128  # T, steps per env and rollout; 32 to 2048
    anneal_lr: bool = True  # learning rate falls linearly to 0 [core 4]
    gamma: float = 0.99  # discount per step; 0.9 to 0.999
    gae: bool = True  # generalised advantage estimation; off: n-step returns, to the end of the rollout
    gae_lambda: float = 0.95  # bias (0) against variance (1) in GAE; 0.8 to 1
    num_minibatches: int = 4  # minibatches per epoch, a divisor of the batch; 1 to 32
    update_epochs: int = 4  # passes over each batch; 3 to 20
    norm_adv: bool = True  # normalise the advantages of each minibatch [core 7]
    clip_coef: float = 0.2  # epsilon of PPO eq. 7; 0.1 to 0.3
    anneal_clip: bool = False  # clip_coef falls linearly to 0 as well [aux 1]
    clip_vloss: bool = True  # clip the change of the value too [core 9]; not in the PPO paper, rarely helps
    ent_coef: float = 0.01  # weight of the entropy bonus; 0 to 0.01
    vf_coef: float = 0.5  # weight of the value loss; 0.25 to 1
    max_grad_norm: float = 0.5  # bound of the gradient's global norm [core 11]
    target_kl: float | None = None  # end an update after an epoch with a mean KL above this; 0.01 to 0.05

    batch_size: tyro.conf.Suppress[int] = field(init=False)
    minibatch_size: tyro.conf.Suppress[int] = field(init=False)
    num_iterations: tyro.conf.Suppress[int] = field(init=False)

    def __post_init__(self):
        check_args(self)
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size


def make_envs(args: Args, num_envs: int, video_dir: Path | None = None) -> VectorEnv:
    """Return `num_envs` copies of the env with SAME_STEP autoreset, whose infos hold the returns of whole episodes.

    Every transition is a real one: where an episode ends, its last observation is in infos["final_obs"], and the
    returned one opens the next episode. Episodes are recorded in `video_dir`, if given. Raises UserError for an id that
    cannot be made, and for spaces that this script does not handle.
    """

    def make_env() -> gym.Env:
        options = json.loads(args.env_kwargs) | (dict(render_mode="rgb_array") if video_dir else {})
        env = gym.make(args.env_id, disable_env_checker=True, **options)
        if isinstance(env.action_space, Discrete) and (start := env.action_space.start):  # the policy counts from 0
            env = gym.wrappers.TransformAction(env, lambda action: action + start, Discrete(env.action_space.n))
        if not isinstance(env.observation_space, Box):  # Discrete ones become one-hot, Dict and Tuple ones are joined
            env = gym.wrappers.FlattenObservation(env)
        return env

    envs = vectorize(make_env, args, num_envs, video_dir)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not (isinstance(obs_space, Box) and len(obs_space.shape) == 1 and isinstance(action_space, Discrete)):
        raise unfit_env(args, envs)
    return RecordEpisodeStatistics(envs)


def layer_init(layer: nn.Module, std: float = math.sqrt(2), bias: float = 0.0) -> nn.Module:
    """Orthogonal weights of gain `std` and a constant bias [core 2]."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    """An actor and a critic that share nothing [core 13]."""

    def __init__(self, envs: VectorEnv, args: Args):
        super().__init__()

        def mlp(out_features: int, std: float) -> nn.Sequential:
            hidden1 = layer_init(nn.Linear(envs.single_observation_space.shape[0], 64))
            hidden2 = layer_init(nn.Linear(64, 64))
            return nn.Sequential(hidden1, nn.Tanh(), hidden2, nn.Tanh(), layer_init(nn.Linear(64, out_features), std))

        self.critic = mlp(1, std=1.0)
        self.actor = mlp(envs.single_action_space.n, std=0.01)  # small: the first policy is almost uniform

    def get_value(self, obs: Tensor) -> Tensor:
        """V: (N, *O) -> (N,)."""
        return self.critic(obs.float()).squeeze(-1)

    def get_action(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """A sample from the policy, or its most likely action: (N, *O) -> (N, *A)."""
        logits = self.actor(obs.float())
        if not deterministic:  # argmax of p / E, E ~ Exp(1), is a sample from p: like multinomial, but faster
            logits = logits.softmax(-1) / torch.empty_like(logits).exponential_()
        return logits.argmax(-1)

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None, deterministic: bool = False):
        """Return the action (N, *A), sampled unless given, its log-probability, the entropy and the value, all (N,)."""
        if action is None:
            action = self.get_action(obs, deterministic)
        log_probs = self.actor(obs.float()).log_softmax(-1)  # of all actions; faster than a Categorical
        probs = log_probs.exp()
        entropy = -(probs * log_probs).sum(-1)
        logprob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return action, logprob, entropy, self.get_value(obs)


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminations: Tensor,
    dones: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) by generalised advantage estimation, GAE eq. 16 [core 5]; all (T, N), float.

    next_values[t] is V of the observation after step t; if step t truncated the episode, V of the episode's last one.
    terminations[t] stops the bootstrap; dones[t] (step t terminated or truncated the episode) stops the recursion.
    """
    deltas = rewards + gamma * next_values * (1 - terminations) - values  # GAE eq. 11
    decays = gamma * gae_lambda * (1 - dones)
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(rewards[0])  # (N,)
    for t in reversed(range(len(rewards))):
        lastgaelam = deltas[t] + decays[t] * lastgaelam
        advantages[t] = lastgaelam
    return advantages, advantages + values


def ppo_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    new_values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    entropy: Tensor,
    args: Args,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, PPO eq. 9 negated, and its parts and diagnostics, all 0-d; every input tensor is (M,)."""
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


def compute_gradients(agent: Agent, minibatch: list[Tensor], args: Args) -> dict[str, Tensor]:
    """Set the agent's gradients to a minibatch's, clipped, and return the statistics; --compile makes it one graph."""
    obs, actions, logprobs, advantages, values, returns = minibatch
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions)
    loss, stats = ppo_loss(newlogprob, logprobs, advantages, newvalue, values, returns, entropy, args)
    loss.backward()
    average_gradients(agent)
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm, foreach=loss.is_cuda)  # [core 11]
    return stats | dict(loss=loss.detach(), grad_norm=grad_norm)


def train(args: Args) -> Path:
    """Train an agent, or resume the run in args.resume, and return the run's folder."""
    with Run(args) as run:
        args = run.args  # on resume those of the checkpoint, except those given
        T, N = args.num_steps, run.share("num_envs")  # N is this process's part, if torchrun started several
        minibatch_size = run.share("minibatch_size")
        envs = make_envs(args, N)
        agent = Agent(envs, args).to(run.device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)  # [core 3]
        gradient_fn = run.compile(compute_gradients)
        act = torch.inference_mode()(run.compile(agent.get_action, on_cpu=False))  # faster, without gradients
        get_value = torch.inference_mode()(agent.get_value)

        to_tensor = functools.partial(torch.as_tensor, device=run.device)
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        obs = to_tensor(np.zeros((T, N, *obs_space.shape), obs_space.dtype))
        actions = torch.zeros((T, N, *action_space.shape), dtype=torch.long, device=run.device)
        final_values = torch.zeros((T, N), device=run.device)
        rewards = np.zeros((T, N), np.float32)
        terminations, truncations = np.zeros((2, T, N), bool)

        for iteration in run.iterations(agent, optimizer, envs):
            remaining = 1 - (iteration - 1) / args.num_iterations  # from 1 down to 1 / num_iterations
            learning_rate = args.learning_rate * remaining if args.anneal_lr else args.learning_rate
            optimizer.param_groups[0]["lr"] = learning_rate  # [core 4]
            loss_args = args
            if args.anneal_clip:  # [aux 1]; a tensor: --compile would recompile for each new number
                loss_args = replace(args, clip_coef=to_tensor(np.float64(args.clip_coef * remaining)))

            # rollout
            if run.episodes_restart:
                next_obs = run.reset(envs)  # at first; with --exact-resume after each checkpoint, too
            final_values.zero_()  # V of the last observation of each episode that is truncated
            for step in range(T):
                obs[step] = torch.as_tensor(next_obs)
                actions[step] = act(obs[step])
                env_actions = actions[step].cpu().numpy()
                next_obs, rewards[step], terminations[step], truncations[step], infos = envs.step(env_actions)
                if (cut := truncations[step]).any():
                    final_values[step, cut] = get_value(to_tensor(np.stack(infos["final_obs"][cut])))
                run.note_episodes(truncations[step], infos)
            run.require_finite(obs, next_obs, rewards)  # else an infinity could be hidden by a tanh or a clip
            with torch.no_grad():  # for the whole rollout at once, which is faster than step by step
                _, logprobs, _, values = agent.get_action_and_value(obs.flatten(0, 1), actions.flatten(0, 1))
            logprobs, values = logprobs.view(T, N), values.view(T, N)
            next_values = torch.vstack([values[1:], get_value(to_tensor(next_obs))])
            next_values = torch.where(to_tensor(truncations), final_values, next_values)  # where terminated, unused

            # advantages
            dones = to_tensor(terminations | truncations).float()
            gae_lambda = args.gae_lambda if args.gae else 1.0  # with lambda 1 the returns are n-step returns
            advantages, returns = compute_gae(
                to_tensor(rewards), values, next_values, to_tensor(terminations).float(), dones, args.gamma, gae_lambda
            )

            # update
            batch = [x.flatten(0, 1) for x in (obs, actions, logprobs, advantages, values, returns)]  # (B, ...)
            stats = []  # of each minibatch
            for _ in range(args.update_epochs):
                for mb_inds in torch.randperm(T * N, device=run.device).split(minibatch_size):  # [core 6]
                    minibatch = [x.index_select(0, mb_inds) for x in batch]  # x[mb_inds], but faster: whole rows
                    optimizer.zero_grad()
                    stats.append(gradient_fn(agent, minibatch, loss_args))
                    optimizer.step()
                approx_kl = torch.stack([mb["approx_kl"] for mb in stats[-args.num_minibatches :]]).mean()  # this epoch
                if args.target_kl is not None and average(approx_kl) > args.target_kl:  # [aux 3]
                    break

            # log [core 12]
            explained_variance = 1 - variance(returns - values) / variance(returns)
            run.log(stats, {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance})
    return run.folder


def evaluate(
    checkpoint: Path, episodes: int, deterministic: bool = False, capture_video: bool = False, seed: int | None = None
) -> list[float]:
    """Return the undiscounted returns of `episodes` whole episodes of a saved agent, on a fresh env with its own seed.

    A `seed` other than that of training (None) gives another sample. Videos go to `videos/step_N` beside the
    checkpoint. Training's random state is left unchanged.
    """
    state = load_checkpoint(checkpoint)
    args = replace(Args(**state["args"]), eval_episodes=episodes)
    args.seed = args.seed if seed is None else seed
    video_dir = Path(checkpoint).parent / f"videos/step_{state['global_step']}" if capture_video else None
    returns = []
    with contextlib.closing(make_envs(args, 1, video_dir)) as envs, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(args.seed)  # torch.manual_seed would reseed the GPU, too
        agent = Agent(envs, args).eval()
        load_checkpoint(checkpoint, agent)
        obs, _ = envs.reset(seed=env_seeds(args, 1, EVALUATION))
        for _ in range(episodes * EPISODE_LIMIT):
            if len(returns) == episodes:
                break
            action, *_ = agent.get_action_and_value(torch.as_tensor(obs), deterministic=deterministic)
            obs, _, _, _, infos = envs.step(action.numpy())
            if "episode" in infos:
                returns += infos["episode"]["r"].tolist()
    report(returns, episodes)
    return returns


# ----------------------------------------------------------------------------------------------------------------------
# The life of a run: nothing of PPO; the same text in every script.
# ----------------------------------------------------------------------------------------------------------------------
# ruff: noqa: E402

import atexit
import ctypes
import difflib
import errno
import gc
import importlib
import io
import itertools
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from dataclasses import asdict, fields
from datetime import datetime, timedelta

import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame and MuJoCo then render without a screen
    if find_library("EGL") and (find_library("OpenGL") or find_library("GL")):  # else MuJoCo trains, but is not filmed
        os.environ.setdefault("MUJOCO_GL", "egl")

TRAINING, EVALUATION, SAMPLING = range(3)  # keys of the random streams, see env_seeds
EPISODE_LIMIT = 100_000  # env steps; an evaluation whose episodes take more on average is given up
ARGUMENTS = [f.name for f in fields(Args) if f.init]  # all but the sizes that follow from them
BEGUN_WITH = {"env_id", "exp_name", "norm_obs", "log_std_init", "mask_velocity"}  # a resume cannot change these


class UserError(Exception):
    """Bad input: shown as one sentence, with exit code 2, before anything is written."""


def require(args: Args, names: str, valid: Callable, rule: str) -> None:
    """Raise a UserError if one of these arguments is not valid."""
    for name in names.split():
        value = getattr(args, name)
        if not valid(value):
            raise UserError(f"--{name.replace('_', '-')} must be {rule}, not {value}")


def check_args(args: Args) -> None:
    """Raise a UserError for values that no script can use, and set what others imply."""
    for name, value in vars(args).items():
        if isinstance(value, np.generic):  # as from a sweep over np.logspace: a checkpoint cannot hold them
            setattr(args, name, value := value.item())
        if isinstance(value, float) and value != getattr(type(args), name):
            require(args, name, math.isfinite, "a finite number")
    require(args, "resume evaluate", lambda x: x != "", "a run's folder")
    require(args, "num_envs num_steps num_minibatches update_epochs checkpoint_every", lambda x: x >= 1, "at least 1")
    require(args, "learning_rate clip_coef max_grad_norm", lambda x: 0 < x < math.inf, "a positive number")
    require(args, "target_kl", lambda x: x is None or x > 0, "a positive number")
    require(args, "gamma gae_lambda", lambda x: 0 <= x <= 1, "between 0 and 1")
    require(args, "ent_coef vf_coef patience", lambda x: 0 <= x < math.inf, "0 or more")
    require(args, "seed torch_threads eval_episodes eval_every", lambda x: 0 <= x < 2**63, "from 0 to 2^63 - 1")
    try:
        options = json.loads(args.env_kwargs)
    except (TypeError, ValueError):  # no text; no JSON
        options = None
    require(args, "env_kwargs", lambda _: isinstance(options, dict), "a JSON object, as in --help")
    if args.resume:
        return  # the rest depends on arguments that are still in the checkpoint
    size = args.num_envs * args.num_steps
    batch = f"a batch of --num-envs x --num-steps = {size} steps"
    require(args, "total_timesteps", lambda x: x >= size, f"at least {batch}")
    require(args, "num_minibatches", lambda x: size % x == 0, f"a divisor of {batch}")
    require(args, "num_minibatches", lambda x: not args.norm_adv or x < size, f"at most half of {batch}")
    require(args, "eval_every", lambda x: x % args.checkpoint_every == 0, "a multiple of --checkpoint-every")
    if not args.eval_episodes and (args.evaluate or args.capture_video or args.eval_every):
        args.eval_episodes = 10


@contextlib.contextmanager
def refusing(args: Args, *known: str) -> Iterator[None]:
    """Raise a UserError where an env cannot be made; `known` are ids that gymnasium does not know."""
    usual = (gym.error.Error, ImportError, TypeError, NotImplementedError)
    try:
        yield
    except Exception as error:  # an env that is given arguments may raise anything
        if isinstance(error, UserError) or (args.env_kwargs == "{}" and not isinstance(error, usual)):
            raise
        name = args.env_id.rpartition(":")[2]
        near = difflib.get_close_matches(name, [*known, *gym.registry])
        hint = f" (registered ids like it: {', '.join(near)})" if near and name not in near else ""
        reason = " ".join((str(error) if isinstance(error, usual) else repr(error)).split())  # on one line
        raise UserError(f"cannot make the env {args.env_id}: {reason}{hint}") from None


def vectorize(make_env: Callable, args: Args, num_envs: int, video_dir: Path | None, *known: str) -> VectorEnv:
    """Envs with SAME_STEP autoreset, filmed if there is a `video_dir`; one process each with --vectorization async."""

    def make_one() -> gym.Env:
        prepare_process(args)
        env = gym.wrappers.TransformObservation(make_env(), np.array, None)  # a copy: reset() may overwrite the last
        if video_dir:
            if "camera" not in args.env_kwargs:
                with contextlib.suppress(AttributeError, KeyError):  # MuJoCo's camera stands still, runners leave it
                    env.unwrapped.mujoco_renderer.camera_id = env.unwrapped.model.camera("track").id
            env = Film(env, str(video_dir), lambda episode: episode < args.eval_episodes)
        return env

    parallel = args.vectorization == "async" and not video_dir
    vector_env = gym.vector.AsyncVectorEnv if parallel else gym.vector.SyncVectorEnv
    with refusing(args, *known):
        envs = vector_env([make_one] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    close = envs.close  # a worker that hangs in its env is killed after a second, or by a second Ctrl-C at once
    envs.close = lambda **given: close(**dict(timeout=1, terminate=sys.exc_info()[0] is KeyboardInterrupt) | given)
    return envs


class Film(gym.wrappers.RecordVideo):
    """RecordVideo, but each frame is written at once: kept until the episode ends, an Atari game's take gigabytes."""

    writer = None

    def _capture_frame(self) -> None:
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        frame = self.env.render()
        if not isinstance(frame, np.ndarray):
            raise TypeError(f"it renders a {type(frame).__name__}, not an image")
        if not self.writer:
            path = f"{self.video_folder}/{self._video_name}.mp4"
            self.writer = FFMPEG_VideoWriter(path, frame.shape[1::-1], self.frames_per_sec)
        self.writer.write_frame(frame[..., :3].astype(np.uint8))

    def stop_recording(self) -> None:
        """End the video."""
        writer, self.writer, self.recording = self.writer, None, False
        with contextlib.suppress(BrokenPipeError):  # a terminal's Ctrl-C stops the encoder, too
            if writer:
                writer.close()


def unfit_env(args: Args, envs: VectorEnv) -> UserError:
    """The error for an env with spaces that this script does not handle; closes the env."""
    envs.close()
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    spaces = f"{type(obs_space).__name__}{obs_space.shape} observations and {action_space} actions"
    scripts = {"Discrete": "ppo.py", "Box": "ppo_continuous_action.py", "MultiDiscrete": "ppo_multidiscrete.py"}
    script, own = scripts.get(type(action_space).__name__), Path(__file__).name
    advice = f"use {script}"
    if len(obs_space.shape or ()) > 1 and script != "ppo_multidiscrete.py":
        advice = "flatten the observations, or allow them in make_envs and give Agent a CNN"
    elif script in (None, own):
        advice = "it takes vectors (ppo_multidiscrete.py: or grids from 5x5 cells); Box actions must be float vectors"
    return UserError(f"{args.env_id} has {spaces}, which {own} does not handle: {advice}")


def prepare_process(args: Args) -> None:
    """Before gymnasium makes an env: refuse ids of other scripts; shield async workers from Ctrl-C; quieten MuJoCo."""
    if args.env_id.startswith("ALE/") or "NoFrameskip" in args.env_id:
        raise UserError(f"{args.env_id} is an Atari game: use ppo_atari.py or ppo_atari_lstm.py")
    if args.env_id.startswith("Microrts") and "multidiscrete" not in __file__:
        raise UserError(f"{args.env_id} is a MicroRTS task: use ppo_multidiscrete.py")
    if multiprocessing.current_process().name.startswith("Worker<AsyncVectorEnv") and hasattr(os, "setpgrp"):
        os.setpgrp()
    spec = gym.registry.get(args.env_id)
    if spec and "mujoco" in str(spec.entry_point):
        show = lambda text: None if "deprecated" in text else print(text, file=sys.stderr)
        importlib.import_module("mujoco").set_mju_user_warning(show)


def env_seeds(args: Args, num_envs: int, *key: int) -> list[int]:
    """Return a seed for each env; other run seeds and other keys give other streams."""
    children = np.random.SeedSequence(args.seed, spawn_key=key).spawn(num_envs)
    return [int(child.generate_state(1)[0] >> 1) for child in children]  # 31 bits, to fit a C int


def num_threads(wanted: int) -> int:
    """`wanted`, or if that is 0 one thread per core that this process may use, shared with its sibling processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):  # a container's share; "max" where there is no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return wanted or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; where it does not, float32 is faster."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))


def keep_freed_memory() -> None:
    """Have glibc keep what torch frees: fetching it again, page by page, can take longer than computing with it."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no mallopt
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: give nothing back
        mallopt(-2, 2**26)  # M_TOP_PAD: fetch 64 MB at a time
        mallopt(-4, 0)  # M_MMAP_MAX: the same for large blocks


def num_processes() -> int:
    """How many processes share this run: as many as torchrun started, or one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def average(x: Tensor) -> Tensor:
    """The mean of x over all processes; on one process, x."""
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= num_processes()
    return x


def average_gradients(agent: nn.Module) -> None:
    """Replace each gradient by its mean over all processes, which is that of the whole minibatch [aux 2]."""
    if num_processes() > 1:
        gradients = [p.grad for p in agent.parameters() if p.grad is not None]
        exchange = torch.compiler.disable(average)  # --compile makes graphs of what comes before it, and after
        nn.utils.vector_to_parameters(exchange(nn.utils.parameters_to_vector(gradients)), gradients)


def gather(items: list) -> list:
    """The items of all processes, one process after the other."""
    if not dist.is_initialized():
        return items
    lists = [None] * num_processes()
    dist.all_gather_object(lists, items)
    return [item for each in lists for item in each]


def variance(x: Tensor) -> Tensor:
    """The unbiased variance of x over all processes."""
    return torch.cat(gather([x.cpu()])).var()


def load_checkpoint(path: Path, agent: nn.Module | None = None, optimizer=None) -> dict:
    """Read a checkpoint onto the CPU, without running code from it; load the agent and the optimizer that are given.

    Raises UserError for a file that is missing, torn, foreign or hostile, or does not fit the agent or the optimizer.
    """
    author = ""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        author = f", written by {state['script']}," if "script" in state else ""
        unknown = state["args"].keys() - ARGUMENTS
        if missing := {"agent", "optimizer", "iteration", "global_step", "rng"} - state.keys():
            raise KeyError(*missing)
        if not unknown:
            Args(**state["args"])
    except FileNotFoundError:
        raise UserError(f"there is no {path}: give a run's folder, as printed when the run began") from None
    except Exception as error:  # whatever a stranger's file may raise
        raise UserError(f"{path}{author} is not a checkpoint of this script ({type(error).__name__})") from None
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UserError(f"{path}{author} has arguments that {Path(__file__).name} lacks: {names}")
    try:
        if agent:
            agent.load_state_dict(state["agent"])
        if optimizer:
            optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError) as error:
        what = "network" if isinstance(error, RuntimeError) else "optimizer"
        raise UserError(f"{path}{author} has another {what} than asked for: undo the change or start anew") from None
    return state


def saved_args(folder: str) -> dict:
    """The arguments in a run's checkpoint; prints those of this script that are newer, so at their defaults."""
    saved = load_checkpoint(run_folder(folder) / "checkpoint.pt")["args"]
    if added := [name for name in ARGUMENTS if name not in saved]:
        print(f"arguments newer than the checkpoint, at their defaults unless given: {', '.join(added)}")
    return saved


def upon_checkpoint(args: Args) -> Args:
    """The arguments of a resumed run: those of its checkpoint, except where `args` differs from the defaults."""
    default = Args()
    given = {name: getattr(args, name) for name in ARGUMENTS if getattr(args, name) != getattr(default, name)}
    merged = Args(**saved_args(args.resume) | given | dict(resume=None))
    merged.resume = args.resume
    return merged


def try_camera(args: Args) -> None:
    """Film one frame, as a check before hours of training; raise UserError if that fails."""
    try:
        with tempfile.TemporaryDirectory() as name, contextlib.closing(make_envs(args, 1, Path(name, "film"))) as envs:
            envs.reset(seed=[0])
    except Exception as error:  # whatever an env, a renderer or an encoder may raise
        reason = str(error) or type(error).__name__
        hint = "on a bare Linux: apt install libegl1 libopengl0 fontconfig"
        raise UserError(f"--capture-video cannot film {args.env_id}: {reason} ({hint})") from None


def say(text: str) -> None:
    """Print a line above the progress bar; the run goes on if nobody reads it: Ctrl-C ends a `| tee`, too."""
    try:
        if sys.stdout:  # None where a run was started with it closed
            tqdm.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(returns: list[float], episodes: int) -> None:
    """Print the result of an evaluation that should have taken `episodes` episodes."""
    if len(returns) < episodes:
        steps = f"{episodes * EPISODE_LIMIT:,} steps"
        say(f"evaluation: given up after {steps}, in which {len(returns)} of {episodes} episodes ended")
    if returns:
        spread = f"± {np.std(returns):.2f}, min {min(returns):.2f}, max {max(returns):.2f}"
        say(f"evaluation: mean return {np.mean(returns):.2f} {spread} over {len(returns)} episodes")


class Run(contextlib.ExitStack):
    """Folder, log, checkpoints, evaluations, signals and processes of a run; closes what it opens."""

    def __init__(self, args: Args):
        super().__init__()
        if args.resume and not hasattr(args, "spelled_out"):
            args = upon_checkpoint(args)
        self.args = args
        self.rank = dist.get_rank() if dist.is_initialized() else 0  # 0 writes, evaluates and prints
        self.processes = num_processes()
        self.device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
        self.iteration = self.global_step = 0  # done so far; inside the loop, including the current one
        self.last_log = 0  # when the latest log of a resumed run was begun
        self.episodes_restart = True  # by reset(), before the next rollout
        self.episodes = []  # (return, length) of those that ended in this iteration
        self.ended = math.inf  # how many ended since the envs were last reset; at first no reset cuts any
        self.warned = False
        self.kept = dict(best_return=-math.inf, best_step=0, recent_returns=[], recent_lengths=[])  # saved; add yours
        self.signals = []
        self.evaluating = False
        self.wandb_run = self.wandb_id = None
        enough = lambda _: not args.norm_adv or args.minibatch_size > self.processes
        require(args, "num_minibatches", enough, f"low enough for each of {self.processes} processes to get 2 steps")
        self.enter_context(torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []))
        torch.manual_seed(args.seed)
        self.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(num_threads(args.torch_threads))
        for name, value in dict(deterministic=args.torch_deterministic, allow_tf32=False).items():  # float32 is float32
            self.callback(setattr, torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
            setattr(torch.backends.cudnn, name, value)
        keep_freed_memory()

    def share(self, name: str) -> int:
        """This process's part of the argument `name`."""
        total = getattr(self.args, name)
        if total % self.processes:
            what = "--num-envs" if name == "num_envs" else f"{name} (change --num-minibatches)"
            raise UserError(f"{what} must be a multiple of {self.processes}, the number of processes, not {total}")
        return total // self.processes

    def iterations(self, agent: nn.Module, optimizer, envs: VectorEnv) -> Iterator[int]:
        """Yield the number, from 1, of each iteration to run; save and evaluate in between.

        A signal ends the run after the current iteration: the run is saved, and SystemExit raised.
        """
        args = self.args
        self.callback(envs.close)
        self.open(agent, optimizer)
        self.catch_signals()
        while True:
            stop = self.stop_signal()
            waited = self.global_step - self.kept["best_step"]
            finished = self.iteration >= args.num_iterations or 0 < args.patience * args.batch_size <= waited
            save_due = finished or self.iteration % args.checkpoint_every == 0
            if self.rank == 0 and (save_due or (stop and not args.exact_resume)):
                self.save(agent, optimizer)
            eval_due = args.eval_every and self.iteration % args.eval_every == 0 and self.global_step > self.start_step
            if args.eval_episodes and (finished or eval_due) and not stop:
                self.evaluate()
                stop = self.stop_signal()
            if finished or stop:
                break
            self.episodes_restart |= save_due and args.exact_resume  # as after a time limit
            self.iteration += 1
            self.global_step += args.batch_size
            yield self.iteration
            if args.compile and self.global_step == self.start_step + args.batch_size:
                gc.freeze()  # a collection, which MicroRTS's Java asks for often, would search what was compiled: 0.1 s
                self.callback(gc.unfreeze)
        self.close()
        seconds = time.perf_counter() - self.start_time
        say(f"{self.global_step:,} steps, {seconds:.0f} s, {self.progress()}, in {self.folder}")
        if stop and not finished:
            launcher = "python" if self.processes == 1 else f"torchrun --nproc-per-node {self.processes}"
            resume = shlex.join([__file__, "--resume", str(self.folder)])
            say(f"stopped by signal {stop}; to go on: {launcher} {resume}")
            sys.exit(128 + stop)

    def open(self, agent: nn.Module, optimizer) -> None:
        """Restore what there is to resume, then make the folder and begin to write: all input has been checked."""
        args = self.args
        self.folder = run_folder(args.resume) if args.resume else None
        if args.resume:
            self.restore(agent, optimizer)
        if args.capture_video and self.rank == 0:
            try_camera(args)
        self.start_step, self.start_time, self.last_print = self.global_step, time.perf_counter(), 0
        try:
            if self.rank == 0:
                self.folder = self.folder or self.make_folder()
                self.keep_script()
                if args.track:
                    self.start_wandb()  # it listens to the writer made next
                self.start_writer()
        except OSError as error:
            raise UserError(f"cannot write to {self.folder or 'runs/'}: {error.strerror}") from None
        self.folder = gather([self.folder])[0]
        for f in fields(args):  # a star marks what differs from its default
            value = getattr(args, f.name)
            changed = f.init and value != f.default
            print(f"{'*' if changed else ' '} {f.name:20} {value}" + (f"  (default {f.default})" if changed else ""))
        together = f", {self.processes} processes" if self.processes > 1 else ""
        print(f"{'resuming' if args.resume else 'starting'} {self.folder} on {self.device}{together}")
        total = args.num_iterations * args.batch_size
        rounded = f", of {args.total_timesteps:,} asked for" if total < args.total_timesteps else ""
        print(f"{total:,} steps: {args.num_iterations:,} iterations of {args.batch_size:,}{rounded}")
        hide = True if self.rank or not sys.stderr else None  # None: where there is no terminal
        bar = tqdm(total=total, initial=self.global_step, unit=" steps", disable=hide, dynamic_ncols=True)
        self.bar = self.enter_context(bar)

    def make_folder(self) -> Path:
        """Make a folder that no other run has, even one that begins in the same second."""
        name = f"{self.args.env_id}__{self.args.exp_name}__{self.args.seed}".replace("/", "-").replace(":", "-")
        Path("runs").mkdir(exist_ok=True)
        for now in itertools.count(int(time.time())):
            with contextlib.suppress(FileExistsError):
                folder = Path("runs", f"{name}__{now}")
                folder.mkdir()
                return folder

    def keep_script(self) -> None:
        """Keep a copy of the script, as an edited file is the experiment, and note command, versions and commit."""
        script = Path(__file__)
        if is_edited(self.folder):
            print(f"{script.name} has changed since this run began: the folder keeps both versions")
            (self.folder / f"{script.stem}_from_{self.global_step}.py").write_bytes(script.read_bytes())
        elif not (self.folder / script.name).exists():
            (self.folder / script.name).write_bytes(script.read_bytes())
        command = ["git", "-C", str(script.parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        commit = ""
        with contextlib.suppress(OSError):  # no git
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        versions = f"Python {platform.python_version()}, torch {torch.__version__}, gymnasium {gym.__version__}"
        with open(self.folder / "command.txt", "a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}: {shlex.join(sys.argv)}\n")
            file.write(f"{versions}, git commit {commit or 'unknown'}\n")

    def start_writer(self) -> None:
        """Begin the TensorBoard log, with the arguments as a text and, to compare runs by, as hparams."""
        hook = threading.excepthook
        self.callback(setattr, threading, "excepthook", hook)  # of the writer's thread: a full disk is reported once
        threading.excepthook = lambda args: None if issubclass(args.exc_type, OSError) else hook(args)
        while int(time.time()) <= self.last_log:
            time.sleep(0.05)  # logs are read in the order of their names, which tell the time to the second
        self.writer = self.enter_context(SummaryWriter(self.folder, purge_step=self.global_step + 1))
        if not self.args.resume:
            values = asdict(self.args)
            rows = [f"|{name}|{value}|" for name, value in values.items()]
            self.writer.add_text("hyperparameters", "\n".join(["|param|value|", "|-|-|", *rows]))
            plain = {name: x if isinstance(x, bool | int | float | str) else str(x) for name, x in values.items()}
            for summary in hparams(plain, {"charts/episodic_return": 0.0}):
                self.writer.file_writer.add_summary(summary)

    def start_wandb(self) -> None:
        """Mirror the log to wandb, to the run of the checkpoint if there is one; no failure of it stops a run."""

        def finish(kind, *_) -> None:
            with contextlib.suppress(Exception):
                wandb.finish(exit_code=1 if kind else 0)

        try:
            import wandb

            args = self.args
            names = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=self.folder.name)
            names |= dict(group=f"{args.env_id}__{args.exp_name}", job_type="train", tags=args.wandb_tags.split())
            names |= dict(id=self.wandb_id, resume="allow", save_code=True)
            self.wandb_run = wandb.init(**names, config=asdict(args), sync_tensorboard=True)
            self.push(finish)
            self.wandb_run.define_metric("*", step_metric="global_step")
            self.wandb_run.log_code(str(self.folder))  # save_code finds a script in or below the current folder only
            self.wandb_id = self.wandb_run.id
        except Exception as error:  # no network, no login
            self.wandb_run = None
            print(f"wandb is off for this run: {error}", file=sys.stderr)

    def catch_signals(self) -> None:
        """Note SIGINT and SIGTERM until the iteration is done; a second SIGINT raises KeyboardInterrupt at once."""

        def note(signum, frame):
            self.signals.append(signum)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.rank == 0:  # print() is not for signal handlers
                with contextlib.suppress(OSError):
                    os.write(2, b"\nstopping after this iteration; Ctrl-C again stops at once\n")
            if self.evaluating:
                raise KeyboardInterrupt

        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            for signum in (signal.SIGINT, signal.SIGTERM):
                self.callback(signal.signal, signum, signal.signal(signum, note))

    def stop_signal(self) -> int:
        """The signal that any of the processes got, or 0: one stops all."""
        return max(gather(self.signals), default=0)

    def save(self, agent: nn.Module, optimizer) -> None:
        """Write all that a resumed run needs; a kill or a full disk leaves a valid file, the old one or the new."""
        self.writer.flush()  # the log is never behind the checkpoint
        args = {name: getattr(self.args, name) for name in ARGUMENTS}
        rng = dict(cpu=torch.get_rng_state(), cuda=torch.cuda.get_rng_state() if self.device.type == "cuda" else None)
        state = dict(agent=agent.state_dict(), optimizer=optimizer.state_dict(), rng=rng)
        state |= dict(args=args | dict(resume=None, evaluate=None), script=Path(__file__).name, wandb_id=self.wandb_id)
        state |= dict(iteration=self.iteration, global_step=self.global_step)
        if taken := self.kept.keys() & state.keys():
            raise UserError(f"run.kept: {', '.join(taken)} is a name that the checkpoint itself uses, choose another")
        state |= tree_map_only(np.generic, lambda number: number.item(), self.kept)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)  # raises if it cannot be read back
        path = self.folder / "checkpoint.pt"
        try:
            with open(path.with_suffix(".tmp"), "wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(path.with_suffix(".tmp"), path)
        except OSError as error:
            sys.exit(f"error: cannot write {path}: {error.strerror}; the previous checkpoint, if any, is still good")

    def restore(self, agent: nn.Module, optimizer) -> None:
        """Go on where the checkpoint was; the envs begin new episodes."""
        state = load_checkpoint(self.folder / "checkpoint.pt")
        for name in BEGUN_WITH & state["args"].keys():
            begun = state["args"][name]
            require(self.args, name, lambda x, begun=begun: x == begun, f"{begun} in {self.folder} (else start anew)")
        logs = self.folder.glob("events.out.tfevents.*")
        self.last_log = max((int(path.name.split(".")[3]) for path in logs), default=0)
        if self.last_log > time.time() + 60:
            raise UserError(f"the clock is behind the log in {self.folder}, which would hide what is logged now")
        options = [group.copy() for group in optimizer.param_groups]
        load_checkpoint(self.folder / "checkpoint.pt", agent, optimizer)
        for group, given in zip(optimizer.param_groups, options):  # weight decay, betas, epsilon may change on resume
            group.update(given, lr=group["lr"])  # the loop sets the learning rate, or adapts it
        torch.set_rng_state(state["rng"]["cpu"])
        if self.device.type == "cuda" and state["rng"]["cuda"] is not None:
            torch.cuda.set_rng_state(state["rng"]["cuda"])
        self.global_step, self.wandb_id = state["global_step"], state["wandb_id"]
        done = f"at least the {self.global_step} steps already done"
        require(self.args, "total_timesteps", lambda total: total >= self.global_step, done)
        left = (self.args.total_timesteps - self.global_step) // self.args.batch_size  # whatever the batch was before
        self.iteration = self.args.num_iterations - left
        for name, begun in self.kept.items():
            value = state.get(name, begun)
            self.kept[name] = value.to(begun.device) if isinstance(begun, Tensor) else value

    def evaluate(self) -> None:
        """Play with the agent of the checkpoint just written, and log the mean return; a signal ends it."""
        if self.rank:
            return
        args, path = self.args, self.folder / "checkpoint.pt"
        try:
            self.evaluating = True
            if self.signals:  # one came since the loop looked
                raise KeyboardInterrupt
            returns = evaluate(path, args.eval_episodes, args.deterministic, args.capture_video)
            self.evaluating = False
        except KeyboardInterrupt:
            self.evaluating, returns = False, []
        if returns:
            self.writer.add_scalar("eval/episodic_return", np.mean(returns), self.global_step)
        videos = sorted(self.folder.glob(f"videos/step_{self.global_step}/*.mp4"))
        if videos and self.wandb_run:  # sent explicitly: wandb's monitor_gym breaks current gymnasium
            import wandb

            with contextlib.suppress(Exception):
                films = [wandb.Video(str(video)) for video in videos]
                self.wandb_run.log({"eval/videos": films, "global_step": self.global_step})

    def reset(self, envs: VectorEnv) -> np.ndarray:
        """Begin new episodes, on seeds that no other process and no other iteration has; return their observations."""
        done = self.iteration - 1
        if self.ended < envs.num_envs and not self.warned:
            self.warned = True
            lost = f"cuts {envs.num_envs} episodes, and only {self.ended} ended since the previous checkpoint"
            say(f"warning: --exact-resume {lost}: the returns are biased, raise --checkpoint-every")
        self.episodes_restart = False
        self.ended = 0
        if self.rank:  # rank 0 goes on with the stream of the checkpoint
            torch.manual_seed(env_seeds(self.args, self.processes, SAMPLING, done)[self.rank])
        seeds = env_seeds(self.args, self.args.num_envs, TRAINING, done)
        return envs.reset(seed=seeds[self.rank * envs.num_envs :][: envs.num_envs])[0]

    def note_episodes(self, truncations: np.ndarray, infos: dict) -> None:
        """Note the episodes that a step ended, and check the last observations of those that it truncated."""
        if "episode" in infos:
            ended = infos["_episode"]
            self.ended += ended.sum()
            self.episodes += zip(infos["episode"]["r"][ended].tolist(), infos["episode"]["l"][ended].tolist())
            if truncations.any():
                self.require_finite(*infos["final_obs"][truncations])

    def compile(self, function: Callable, on_cpu: bool = True) -> Callable:
        """With --compile, `function` as a graph that is called from C++, or on a GPU replayed by CUDA graphs."""
        if not self.args.compile or (self.device.type == "cpu" and not on_cpu):
            return function  # not on_cpu: it is so small that calling its graph takes longer
        whole = self.processes == 1  # loss.backward() is part of the graph, unless gradients are averaged after it
        self.enter_context(torch._dynamo.config.patch(trace_autograd_ops=whole))
        if not shutil.which(compiler := os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")):
            raise UserError(f"--compile needs {compiler}, a C++ compiler: install it, or set CXX to another")
        if self.device.type == "cpu":
            return torch.compile(function, options={"cpp_wrapper": True}, dynamic=False)
        options = {"triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": True}
        graph = torch.compile(function, options=options, dynamic=False)

        def replay(*args):
            torch.compiler.cudagraph_mark_step_begin()
            return tree_map_only(Tensor, Tensor.clone, graph(*args))  # the next replay overwrites the graph's outputs

        return replay

    def require_finite(self, *numbers: Tensor | np.ndarray | float) -> None:
        """Stop the run before NaN or infinity is learnt from, logged or saved."""
        tensors = map(torch.as_tensor, numbers)
        if not all(math.isfinite(x.sum(dtype=torch.float64)) for x in tensors if x.is_floating_point()):
            what = "an observation, a reward, the loss or its gradient is not finite"
            hint = "look for NaN in observations and rewards, or lower --learning-rate"
            good = f"{self.folder / 'checkpoint.pt'} is good"
            raise FloatingPointError(f"{what} in the iteration up to step {self.global_step}: {hint}; {good}")

    def log(self, stats: list[dict[str, Tensor]], scalars: dict[str, float]) -> None:
        """Log an iteration: the mean of `stats`, one dict a minibatch, as losses/NAME, and `scalars` by their tags."""
        table = torch.stack([torch.stack(list(minibatch.values())) for minibatch in stats])  # (minibatches, names)
        means = average(table.mean(0)).tolist()  # fetched together, as this waits for a GPU
        scalars |= {f"losses/{name}": mean for name, mean in zip(stats[0], means)}
        self.require_finite(scalars["losses/grad_norm"])
        seconds = time.perf_counter() - self.start_time
        scalars["charts/SPS"] = (self.global_step - self.start_step) / seconds
        episodes = gather(self.episodes)
        self.episodes = []
        if episodes:
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(episodes, axis=0)
        for name, recent in zip(("recent_returns", "recent_lengths"), zip(*episodes)):
            self.kept[name] = [*self.kept[name], *recent][-100:]
        mean_return = float(np.mean(self.kept["recent_returns"] or -math.inf))
        if mean_return > self.kept["best_return"] or len(self.kept["recent_returns"]) < 100:  # too few to judge by
            self.kept.update(best_return=mean_return, best_step=self.global_step)
        if self.rank == 0:
            for tag, value in scalars.items():
                self.writer.add_scalar(tag, value, self.global_step)
        self.bar.set_postfix_str(self.progress(), refresh=False)
        self.bar.update(self.args.batch_size)
        if self.bar.disable and seconds - self.last_print > 5:  # no terminal: a plain line instead of the bar
            self.last_print, sps = seconds, scalars["charts/SPS"]
            left = timedelta(seconds=round((self.bar.total - self.global_step) / sps))
            say(f"{self.global_step:,} steps, {sps:,.0f} steps/s, {left} left, {self.progress()}")

    def progress(self) -> str:
        """The mean return and length of the last 100 episodes, in words."""
        returns, lengths = self.kept["recent_returns"], self.kept["recent_lengths"]
        means = f"mean return {np.mean(returns or 0):.1f}, length {np.mean(lengths or 0):.0f}"
        return means if lengths else "no episode has ended yet"


def run_folder(name: str) -> Path:
    """The folder of a run, given by that folder or by its checkpoint."""
    return Path(name).parent if Path(name).name == "checkpoint.pt" else Path(name)


def is_edited(folder: Path) -> bool:
    """Whether a run's folder has copies of this script, none of which is the current one."""
    texts = [path.read_bytes() for path in folder.glob("*.py")]
    return bool(texts) and Path(__file__).read_bytes() not in texts


def spell_out(argv: list[str]) -> list[str]:
    """The command line as tyro reads it, from --x, --no-x or --x=false for a boolean, and 1e6 for a whole number."""
    types = {f.name: f.type for f in fields(Args)}
    booleans = {name for name, kind in types.items() if kind in (bool, bool | None)}
    flag = lambda word: word[2:].replace("-", "_") if word.startswith("--") else ""  # no value that looks like one
    words = []
    for word in argv:
        words += word.split("=", 1) if word.startswith("--") else [word]
    result = []
    for word, next_word in itertools.pairwise([*words, "--"]):
        name, before = flag(word), flag(result[-1]) if result else ""
        if name in booleans and next_word.startswith("--"):
            result += [word, "True"]
        elif name.removeprefix("no_") in booleans - {name}:
            result += [f"--{name.removeprefix('no_')}", "False"]
        elif before in booleans:
            result.append(word.capitalize())
        elif types.get(before) is int and re.fullmatch(r"\d+\.?\d*[eE]\+?\d+", word) and float(word).is_integer():
            result.append(str(int(float(word))))
        else:
            result.append(word)
    return result


def parse_args() -> Args:
    """Read the command line, on top of the arguments of the run to resume or to evaluate, if there is one."""
    argv = spell_out(sys.argv[1:])
    values = {flag: word for flag, word in itertools.pairwise(argv) if not word.startswith("--")}
    folder = values.get("--evaluate") or values.get("--resume")
    saved = saved_args(folder) if folder else {}
    if values.get("--evaluate"):
        saved |= dict(eval_episodes=0, eval_every=0, deterministic=False, capture_video=False)
    default = Args(**saved)
    what = (__doc__ or "").split("\n\n")[0]  # python -OO leaves it out
    args = tyro.cli(Args, default=default, description=what, args=argv, config=(tyro.conf.FlagConversionOff,))
    if args.evaluate:
        heeded = {"evaluate", "eval_episodes", "deterministic", "capture_video", "seed", "torch_threads", "cuda"}
        ignored = [name for name in ARGUMENTS if name not in heeded and getattr(args, name) != getattr(default, name)]
        if ignored:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
            raise UserError(f"--evaluate plays the agent as it was trained: leave out {flags}")
    args = replace(args, resume=None)  # recomputes the derived sizes, checks all rules
    args.resume = values.get("--resume")
    args.spelled_out = True  # upon_checkpoint() is done
    return args


def join_processes(args: Args) -> None:
    """Join the processes that torchrun started, if it did: each takes a GPU, and only the first one prints."""
    if dist.is_torchelastic_launched():
        gpus = torch.cuda.device_count() if args.cuda else 0
        if gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        backend = None if int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus else "gloo"  # nccl wants a GPU for each
        dist.init_process_group(backend, timeout=timedelta(days=1))  # they wait while the first one evaluates
        atexit.register(dist.destroy_process_group)
        if dist.get_rank():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def main() -> None:
    """Do what the command line asks for."""
    sys.path.append(os.getcwd())  # where the module of a "module:Name-v0" may be
    args = parse_args()
    if not args.cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that torch's Adam sees, it asks at each step
    if not args.evaluate:
        join_processes(args)
        train(args)
    elif os.environ.get("RANK", "0") == "0":
        torch.set_num_threads(num_threads(args.torch_threads))
        folder = run_folder(args.evaluate)
        if args.capture_video:
            try_camera(args)
        if is_edited(folder):
            print(f"{Path(__file__).name} has changed since this run was trained")
        evaluate(folder / "checkpoint.pt", args.eval_episodes, args.deterministic, args.capture_video, args.seed)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.exit(f"error: {error.strerror}; the last checkpoint is good")
