"""Train a PPO agent on Atari games.

Train:     python ppo_atari.py --env-id BreakoutNoFrameskip-v4 --seed 1
Resume:    python ppo_atari.py --resume runs/BreakoutNoFrameskip-v4__ppo_atari__1__1700000000
Evaluate:  python ppo_atari.py --evaluate runs/BreakoutNoFrameskip-v4__ppo_atari__1__1700000000 --capture-video

Differs from ppo.py in: the env (ale-py's native vector env, lives, FIRE), the network (one CNN for both heads, in
bfloat16 where the hardware has it), and the defaults of the Atari experiments.

"PPO" is Schulman et al. 2017, arXiv:1707.06347; "GAE" is Schulman et al. 2016, arXiv:1506.02438; a tag such as [core 7]
is a detail of Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization".
Shapes: T num_steps, N num_envs, B = T*N batch_size, M minibatch_size, *O the observation's, *A the action's.
With `torchrun --nproc-per-node 2 ppo_atari.py` two processes share the work; N, B and M are then of each.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0",
#   "gymnasium==1.4.0",
#   "ale-py==0.12.1",
#   "opencv-python-headless==5.0.0.93",
#   "numpy==2.4.6",
#   "tyro==1.0.17",
#   "tensorboard==2.21.0",
#   "wandb==0.31.0",
#   "tqdm==4.70.1",
#   "moviepy==2.2.1",
# ]
# ///

import argparse
import contextlib
import ctypes
import difflib
import io
import math
import os
import shlex
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, RecordVideo
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

TRAINING, EVALUATION, SAMPLING = range(3)  # keys of the random streams, see env_seeds


class UserError(ValueError):
    """Bad input: shown as one sentence, with exit code 2, before anything is written."""


@dataclass
class Args:
    # experiment

    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # fixes the network's init, the sampled actions and every env's stream
    torch_deterministic: bool = True  # deterministic cuDNN kernels
    cuda: bool = True  # use a GPU if there is one
    torch_threads: int = 0  # CPU threads of torch, 0 for one per core
    bf16: bool = True  # compute the CNN in bfloat16 where the hardware has it: about twice as fast
    compile: bool = False  # torch.compile the policy and the loss; pays off in long runs
    track: bool = False  # log to wandb too
    wandb_project_name: str = "ppo"  # wandb project
    wandb_entity: str | None = None  # wandb team; None: your own account
    resume: str | None = None  # run folder to continue; its arguments hold, except those given anew
    exact_resume: bool = False  # restart the envs at each checkpoint, so that a resumed run ends bit-identical
    checkpoint_every: int = 100  # iterations between checkpoints
    evaluate: str | None = None  # run folder whose agent is to play, instead of training
    eval_episodes: int = 0  # whole episodes to play at the end of training, or of --evaluate (10 there if 0)
    eval_every: int = 0  # iterations between evaluations, a multiple of --checkpoint-every; 0: at the end only
    deterministic: bool = False  # evaluate with the most likely action instead of a sample
    capture_video: bool = False  # record the evaluated episodes as mp4 in RUN_DIR/videos

    # environment

    env_id: str = "BreakoutNoFrameskip-v4"  # NameNoFrameskip-v4, or ALE/Name-v5 for sticky actions
    num_envs: int = 8  # N, parallel games [core 1]; 8 to 128
    env_threads: int = 0  # threads that emulate the games, 0 for one per core

    # algorithm

    total_timesteps: int = 10_000_000  # env steps in the whole run, each of 4 frames
    learning_rate: float = 2.5e-4  # Adam's step size; 1e-4 to 2e-3
    num_steps: int = 128  # T, steps per env and rollout; 32 to 2048
    anneal_lr: bool = True  # learning rate falls linearly to 0 [core 4]
    gamma: float = 0.99  # discount per step; 0.9 to 0.999
    gae: bool = True  # generalised advantage estimation; off: n-step returns, to the end of the rollout
    gae_lambda: float = 0.95  # bias (0) against variance (1) in GAE; 0.8 to 1
    num_minibatches: int = 4  # minibatches per epoch; 1 to 32
    update_epochs: int = 4  # passes over each batch; 3 to 20
    norm_adv: bool = True  # normalise the advantages of each minibatch [core 7]
    clip_coef: float = 0.1  # epsilon of PPO eq. 7; 0.1 to 0.3
    anneal_clip: bool = False  # clip_coef falls linearly to 0 as well [aux 1]
    clip_vloss: bool = True  # clip the change of the value too [core 9]; in no paper, rarely helps
    ent_coef: float = 0.01  # weight of the entropy bonus; 0 to 0.01
    vf_coef: float = 0.5  # weight of the value loss; 0.25 to 1
    max_grad_norm: float = 0.5  # bound of the gradient's global norm [core 11]
    target_kl: float | None = None  # mean KL above which an update's epochs end early; 0.01 to 0.05

    batch_size: tyro.conf.Suppress[int] = field(init=False)
    minibatch_size: tyro.conf.Suppress[int] = field(init=False)
    num_iterations: tyro.conf.Suppress[int] = field(init=False)

    def __post_init__(self):
        def require(names: str, valid, rule: str):
            for name in names.split():
                if not valid(getattr(self, name)):
                    raise UserError(f"--{name.replace('_', '-')} must be {rule}, not {getattr(self, name)}")

        require("num_envs num_steps num_minibatches update_epochs checkpoint_every", lambda x: x >= 1, "at least 1")
        require("learning_rate clip_coef max_grad_norm", lambda x: 0 < x < math.inf, "a positive number")
        require("target_kl", lambda x: x is None or x > 0, "a positive number")
        require("gamma gae_lambda", lambda x: 0 <= x <= 1, "between 0 and 1")
        require(
            "ent_coef vf_coef seed torch_threads env_threads eval_episodes eval_every",
            lambda x: 0 <= x < math.inf,
            "0 or more",
        )
        require("seed", lambda x: x < 2**63, "less than 2^63")
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        batch = f"a batch of --num-envs x --num-steps = {self.batch_size} steps"
        require("total_timesteps", lambda x: x >= self.batch_size, f"at least {batch}")
        require("num_minibatches", lambda x: self.batch_size % x == 0, f"a divisor of {batch}")
        require("num_minibatches", lambda _: not self.norm_adv or self.minibatch_size > 1, f"less than half of {batch}")
        require("eval_every", lambda x: x % self.checkpoint_every == 0, "a multiple of --checkpoint-every")
        if (self.evaluate or self.capture_video or self.eval_every) and not self.eval_episodes:
            self.eval_episodes = 10


class AtariLives(VectorWrapper):
    """Ends the value's horizon, but not the game, at a lost life [atari 3], and gives rewards by their sign [atari 6].

    The first action of each life is FIRE, in games that have it, whatever the agent chose [atari 4]: a game that waits
    for FIRE would else never go on. To the agent this is how the env works, so training stays on-policy.
    """

    def __init__(self, envs: VectorEnv, fire: int | None):
        super().__init__(envs)
        self.fire = fire

    def reset(self, *, seed=None, options=None):
        if isinstance(self.unwrapped, AtariVectorEnv) and seed is not None:
            seed = np.asarray(seed)
        obs, infos = self.env.reset(seed=seed, options=options)
        self.lives, self.life_starts = infos["lives"], np.ones(self.num_envs, bool)
        return obs, infos

    def step(self, actions):
        if self.fire is not None:
            actions = np.where(self.life_starts, self.fire, actions)
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        # a finished game has been reset: its lives are full again, and so have not fallen
        life_lost = (infos["lives"] > 0) & (infos["lives"] < self.lives)
        self.lives, self.life_starts = infos["lives"], life_lost | terminations | truncations
        return obs, np.sign(rewards), terminations | life_lost, truncations, infos


def make_envs(args: Args, num_envs: int, video_dir: Path | None = None) -> VectorEnv:
    """Return `num_envs` games in SAME_STEP autoreset, with the unclipped returns of whole games in their infos.

    Observations are (4, 84, 84) uint8: grey, resized [atari 5], the last four stacked [atari 7]. A game begins with up
    to 30 no-ops [atari 1]; an action lasts 4 frames, of which the last two are max-pooled [atari 2]; 108,000 frames
    truncate a game. infos["final_obs"] is valid only where a game ended. `video_dir` is where the games are recorded,
    if given: then they run in gymnasium's own wrappers, whose observations are the same. Raises UserError for an id
    that is no Atari game.
    """
    try:
        gym.register_envs(ale_py)
        spec = gym.spec(args.env_id)
    except gym.error.Error as error:
        near = ", ".join(difflib.get_close_matches(args.env_id, gym.registry)) or "none"
        raise UserError(f"cannot make the env {args.env_id}: {error} (registered ids like it: {near})") from None
    if spec.entry_point != "ale_py.env:AtariEnv" or not isinstance(spec.kwargs["frameskip"], int):
        raise UserError(
            f"{args.env_id} is no Atari game with a fixed frame skip: give an id like BreakoutNoFrameskip-v4 or "
            "ALE/Breakout-v5, or use ppo.py for Discrete actions and vectors, ppo_continuous_action.py for Box actions"
        )
    frame_skip = spec.kwargs["frameskip"] if spec.kwargs["frameskip"] > 1 else 4

    def make_recorded_env() -> gym.Env:
        env = gym.make(args.env_id, frameskip=1, render_mode="rgb_array", disable_env_checker=True)
        env = AtariPreprocessing(env, noop_max=30, frame_skip=frame_skip)
        asked_for, fps = lambda episode: episode < args.eval_episodes, 60 // frame_skip
        env = RecordVideo(env, str(video_dir), episode_trigger=asked_for, fps=fps, disable_logger=True)
        return FrameStackObservation(env, 4, padding_type="zero")

    if video_dir:
        envs = SyncVectorEnv([make_recorded_env] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    else:
        envs = AtariVectorEnv(
            **spec.kwargs | dict(frameskip=frame_skip),
            num_envs=num_envs,
            num_threads=num_threads(args.env_threads),
            autoreset_mode=AutoresetMode.SAME_STEP,
            noop_max=30,
            reward_clipping=False,  # AtariLives does it, after the returns were recorded
            use_fire_reset=False,  # AtariLives does it, at every life
        )
    with contextlib.closing(gym.make(args.env_id)) as env:
        actions = env.unwrapped.get_action_meanings()
    return AtariLives(RecordEpisodeStatistics(envs), actions.index("FIRE") if "FIRE" in actions else None)


def env_seeds(args: Args, num_envs: int, *key: int) -> list[int]:
    """Return a seed for each env; other run seeds and other keys give other streams."""
    children = np.random.SeedSequence(args.seed, spawn_key=key).spawn(num_envs)
    return [int(child.generate_state(1)[0] >> 1) for child in children]  # 31 bits, to fit a C int


def layer_init(layer: nn.Module, std: float = math.sqrt(2), bias: float = 0.0) -> nn.Module:
    """Orthogonal weights of gain `std` and a constant bias [core 2]."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; where it does not, float32 is faster."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))


class Agent(nn.Module):
    """The CNN of Mnih et al. 2015, shared by an actor and a critic [atari 8]."""

    bf16 = False

    def __init__(self, envs: VectorEnv):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)
        self.actor = layer_init(nn.Linear(512, envs.single_action_space.n), std=0.01)

    def encode(self, obs: Tensor) -> Tensor:
        """Features: (N, 4, 84, 84) uint8 -> (N, 512) float32."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            pixels = obs.to(torch.bfloat16 if self.bf16 else torch.float32) / 255  # [atari 9]
            if not self.bf16:  # channels last in memory: on a CPU float32 convolutions are 1.6 times as fast so
                pixels = pixels.contiguous(memory_format=torch.channels_last)
            return self.network(pixels).float()

    def get_value(self, obs: Tensor) -> Tensor:
        """V: (N, *O) -> (N,)."""
        return self.critic(self.encode(obs)).squeeze(-1)

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None, deterministic: bool = False):
        """Return the action (N, *A), sampled unless given, its log-probability, the entropy and the value, all (N,)."""
        hidden = self.encode(obs)
        log_probs = self.actor(hidden).log_softmax(-1)  # of all actions; a Categorical in the open, and faster
        if action is None:
            action = log_probs.argmax(-1) if deterministic else log_probs.exp().multinomial(1).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return action, log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy, self.critic(hidden).squeeze(-1)


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

    next_values[t] is V of the observation that step t led to; where step t truncated an episode, of its own last one.
    terminations[t] stops the bootstrap; dones[t], terminated or truncated by step t, stops the recursion.
    """
    deltas = rewards + gamma * next_values * (1 - terminations) - values  # GAE eq. 12
    decays = gamma * gae_lambda * (1 - dones)
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(rewards[0])  # (N,)
    for t in reversed(range(len(rewards))):
        advantages[t] = lastgaelam = deltas[t] + decays[t] * lastgaelam
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
    """Return the loss, PPO eq. 9 negated, and its parts and diagnostics, all 0-d; every tensor given is (M,)."""
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
        approx_kl = ((ratio - 1) - logratio).mean()  # unbiased as well, and never negative
        clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
    stats = dict(policy_loss=pg_loss.detach(), value_loss=v_loss.detach(), entropy=entropy_loss.detach())
    return loss, stats | dict(old_approx_kl=old_approx_kl, approx_kl=approx_kl, clipfrac=clipfrac)


def rank_and_size() -> tuple[int, int]:
    """This process's rank, and the number of processes that torchrun started together; (0, 1) without it."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def num_threads(wanted: int) -> int:
    """`wanted`; where that is 0, one thread per core, of which each process on this machine gets its share."""
    return wanted or max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def gather(items: list) -> list:
    """The items of all processes, one process after the other."""
    lists = [items] * rank_and_size()[1]
    if dist.is_initialized():
        dist.all_gather_object(lists, items)
    return [item for items in lists for item in items]


def average(x: Tensor) -> Tensor:
    """The mean of x over all processes; on one process, x."""
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def average_gradients(agent: nn.Module) -> None:
    """Replace each gradient by its mean over all processes, which is that of the whole minibatch."""
    if dist.is_initialized():
        gradients = [p.grad for p in agent.parameters() if p.grad is not None]
        nn.utils.vector_to_parameters(average(nn.utils.parameters_to_vector(gradients)), gradients)


def evaluate(checkpoint: Path, episodes: int, deterministic: bool = False, capture_video: bool = False) -> list[float]:
    """Return the undiscounted returns of `episodes` whole episodes of a saved agent, on a fresh env with its own seed.

    Videos go to the folder `videos` beside the checkpoint. Training's random stream is left where it was.
    """
    state = load_checkpoint(checkpoint)
    args = Args(**state["args"])
    torch.set_num_threads(num_threads(args.torch_threads))
    video_dir = checkpoint.parent / f"videos/step_{state['global_step']}" if capture_video else None
    args.eval_episodes = episodes
    returns = []
    with contextlib.closing(make_envs(args, 1, video_dir)) as envs, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(args.seed)
        agent = Agent(envs)
        load_checkpoint(checkpoint, agent)
        obs, _ = envs.reset(seed=env_seeds(args, 1, EVALUATION))
        while len(returns) < episodes:
            action, _, _, _ = agent.get_action_and_value(torch.as_tensor(obs), deterministic=deterministic)
            obs, _, _, _, infos = envs.step(action.numpy())
            if "episode" in infos:
                returns += infos["episode"]["r"].tolist()
    print(
        f"evaluation: mean return {np.mean(returns):.2f} ± {np.std(returns):.2f}, "
        f"min {min(returns):.2f}, max {max(returns):.2f} over {episodes} episodes"
    )
    return returns


def save_checkpoint(path: Path, args: Args, agent: Agent, optimizer: torch.optim.Optimizer, progress: dict) -> None:
    """Write all that a resumed run needs; a kill or a full disk leaves the old file or this one, never a torn one."""
    rng = dict(cpu=torch.get_rng_state(), cuda=torch.cuda.get_rng_state() if torch.cuda.is_available() else None)
    plain_args = {f.name: getattr(args, f.name) for f in fields(args) if f.init} | dict(resume=None, evaluate=None)
    state = dict(agent=agent.state_dict(), optimizer=optimizer.state_dict(), args=plain_args, rng=rng, **progress)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        with open(path.with_suffix(".tmp"), "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".tmp"), path)
    except OSError as error:
        sys.exit(f"error: cannot write {path}: {error.strerror}; the checkpoint before it, if any, is still good")


def load_checkpoint(path: Path, agent: Agent | None = None) -> dict:
    """Read a checkpoint onto the CPU, without running code from it, and load its parameters into `agent`, if given.

    Raises UserError for a file that is missing, torn, foreign or hostile, and for a network that is not the agent's.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        Args(**state["args"])
        if missing := {"agent", "optimizer", "iteration", "global_step", "rng"} - state.keys():
            raise KeyError(*missing)
    except FileNotFoundError:
        raise UserError(f"there is no {path}: give a run's folder, as printed when the run began") from None
    except Exception as error:  # whatever a stranger's file may raise
        raise UserError(f"{path} is no checkpoint of this script ({type(error).__name__})") from None
    if agent:
        try:
            agent.load_state_dict(state["agent"])
        except RuntimeError:
            raise UserError(f"{path} holds another network than this one: undo the change or start a new run") from None
    return state


@contextlib.contextmanager
def catch_signals():
    """Yield a list that collects SIGINT and SIGTERM; a second SIGINT raises KeyboardInterrupt at once."""
    received = []

    def handler(signum, frame):
        received.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, old_handler in previous.items():
            signal.signal(signum, old_handler)


def start_wandb(args: Args, run_dir: Path, run_id: str | None):
    """Mirror TensorBoard's log to a wandb run, `run_id` if given, and return that run, or None where wandb fails."""
    try:
        import wandb

        names = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=run_dir.name, dir=run_dir.parent)
        return wandb.init(**names, id=run_id, resume="allow", config=vars(args), sync_tensorboard=True)
    except Exception as error:  # no network, no login: no reason to stop training
        print(f"wandb is off for this run: {error}", file=sys.stderr)


def log_videos(wandb_run, video_dir: Path) -> None:
    """Send recorded videos to wandb, if it is on; explicitly, for its monitor_gym breaks current gymnasium."""
    if wandb_run and video_dir.exists():
        import wandb

        wandb_run.log({"eval/videos": [wandb.Video(str(path)) for path in sorted(video_dir.glob("*.mp4"))]})


def keep_freed_memory() -> None:
    """Have glibc keep what torch frees: to fetch it anew, page by page, can take longer than to compute with it."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no mallopt
        for parameter, value in ((-1, 2**31 - 1), (-2, 2**26), (-3, 2**25)):  # trim threshold, top pad, mmap threshold
            ctypes.CDLL("libc.so.6").mallopt(parameter, value)


def print_args(args: Args) -> None:
    """Print the arguments, those that differ from their default with a star and the default beside them."""
    for f in fields(args):
        value = getattr(args, f.name)
        changed = f.init and value != f.default
        print(f"{'*' if changed else ' '} {f.name:20} {value}" + (f"  (default {f.default})" if changed else ""))


def train(args: Args) -> Path:
    """Train an agent, or go on with the one of args.resume, and return the run's folder."""
    rank, processes = rank_and_size()  # rank 0 writes the log and the checkpoints, and evaluates
    if args.num_envs % processes or args.minibatch_size % processes:
        raise UserError(f"--num-envs and the minibatches' {args.minibatch_size} steps must be multiples of {processes}")
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.set_num_threads(num_threads(args.torch_threads))
    keep_freed_memory()
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)
    T, N = args.num_steps, args.num_envs // processes
    envs = make_envs(args, N)
    agent = Agent(envs).to(device)
    agent.bf16 = args.bf16 and has_bf16(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)  # [core 3]
    policy = torch.compile(agent.get_action_and_value) if args.compile else agent.get_action_and_value
    loss_fn = torch.compile(ppo_loss) if args.compile else ppo_loss

    global_step, wandb_id, recent_returns = 0, None, deque(maxlen=100)
    if args.resume:
        run_dir = Path(args.resume)
        state = load_checkpoint(run_dir / "checkpoint.pt", agent)
        if state["args"]["env_id"] != args.env_id:
            raise UserError(f"{run_dir} trains on {state['args']['env_id']}: start a new run for {args.env_id}")
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"]["cpu"])
        if device.type == "cuda" and state["rng"]["cuda"] is not None:
            torch.cuda.set_rng_state(state["rng"]["cuda"])
        global_step, wandb_id = state["global_step"], state["wandb_id"]
        recent_returns.extend(state["recent_returns"])
    else:
        name, now = f"{args.env_id}__{args.exp_name}__{args.seed}".replace("/", "-"), int(time.time())
        while (run_dir := Path(f"runs/{name}__{now}")).exists():
            now += 1
    run_dir = gather([run_dir])[0]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        tracked = args.track and rank == 0
        wandb_run = start_wandb(args, run_dir, wandb_id) if tracked else None  # it listens to the writer made next
        writer = SummaryWriter(run_dir, purge_step=global_step + 1) if rank == 0 else contextlib.nullcontext()
    except OSError as error:
        raise UserError(f"cannot write to {run_dir}: {error.strerror}") from None
    print_args(args)
    together = f", {processes} processes" if processes > 1 else ""
    print(f"{'resuming' if args.resume else 'starting'} {run_dir} on {device}{together}")

    to_tensor = lambda array: torch.as_tensor(array, device=device)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    obs = to_tensor(np.zeros((T, N, *obs_space.shape), obs_space.dtype))
    actions = to_tensor(np.zeros((T, N, *action_space.shape), action_space.dtype))
    logprobs, values, final_values = torch.zeros((3, T, N), device=device)
    rewards = np.zeros((T, N), np.float32)
    terminations, truncations = np.zeros((2, T, N), bool)

    path, start_step, start_time, last_print = run_dir / "checkpoint.pt", global_step, time.time(), time.time()
    iteration = global_step // args.batch_size

    def reset_envs() -> np.ndarray:
        """Begin new episodes, on seeds that no other process and no other iteration has."""
        if rank:  # rank 0 goes on with the stream of the checkpoint
            torch.manual_seed(env_seeds(args, processes, SAMPLING, iteration)[rank])
        return envs.reset(seed=env_seeds(args, args.num_envs, TRAINING, iteration)[rank * N :][:N])[0]

    next_obs = reset_envs()
    hide_bar = True if rank else None  # None: where there is no terminal
    with (
        contextlib.closing(envs),
        catch_signals() as signals,
        writer,
        tqdm(
            total=args.total_timesteps, initial=global_step, unit=" steps", disable=hide_bar, dynamic_ncols=True
        ) as bar,
    ):
        while True:  # iteration counts those completed
            stop = gather(signals)
            finished = iteration >= args.num_iterations
            due = finished or iteration % args.checkpoint_every == 0
            if rank == 0 and (due or (stop and not args.exact_resume)):
                writer.flush()  # the log is never behind the checkpoint
                progress = dict(iteration=iteration, global_step=global_step, recent_returns=list(recent_returns))
                progress["wandb_id"] = wandb_run.id if wandb_run else wandb_id
                save_checkpoint(path, args, agent, optimizer, progress)
            if due and args.exact_resume:  # cuts the episodes as a time limit would; next_values has bootstrapped them
                next_obs = reset_envs()
            eval_due = finished or (args.eval_every and iteration % args.eval_every == 0 and global_step > start_step)
            if rank == 0 and args.eval_episodes and eval_due and not stop:
                eval_returns = evaluate(path, args.eval_episodes, args.deterministic, args.capture_video)
                writer.add_scalar("eval/episodic_return", np.mean(eval_returns), global_step)
                log_videos(wandb_run, run_dir / f"videos/step_{global_step}")
            if finished or stop:
                break

            remaining = 1 - iteration / args.num_iterations  # from 1 down to 1 / num_iterations
            optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)  # [core 4]
            loss_args = replace(args, clip_coef=remaining * args.clip_coef) if args.anneal_clip else args

            # rollout
            episodes = []  # (return, length) of each that ends in this rollout
            with torch.inference_mode():
                for step in range(T):
                    obs[step] = torch.as_tensor(next_obs)
                    actions[step], logprobs[step], _, values[step] = policy(obs[step])
                    env_actions = actions[step].cpu().numpy()
                    next_obs, rewards[step], terminations[step], truncations[step], infos = envs.step(env_actions)
                    if (cut := truncations[step]).any():  # V of where the episode stopped, not of the next one's start
                        final_values[step, cut] = agent.get_value(to_tensor(np.stack(infos["final_obs"][cut])))
                    if "episode" in infos:
                        ended = infos["_episode"]
                        episodes += zip(infos["episode"]["r"][ended].tolist(), infos["episode"]["l"][ended].tolist())
                next_values = torch.cat([values[1:], agent.get_value(to_tensor(next_obs))[None]])
                next_values = torch.where(to_tensor(truncations), final_values, next_values)
            global_step += args.batch_size
            iteration += 1

            # advantages
            dones = to_tensor(terminations | truncations).float()
            gae_lambda = args.gae_lambda if args.gae else 1.0  # with lambda 1 the returns are n-step returns
            advantages, returns = compute_gae(
                to_tensor(rewards), values, next_values, to_tensor(terminations).float(), dones, args.gamma, gae_lambda
            )

            # update
            batch = [x.flatten(0, 1) for x in (obs, actions, logprobs, advantages, values, returns)]  # (B, ...)
            stats = []
            for _ in range(args.update_epochs):
                for mb_inds in torch.randperm(T * N, device=device).split(args.minibatch_size // processes):  # [core 6]
                    mb = (x.index_select(0, mb_inds) for x in batch)  # x[mb_inds], but copied by whole rows: faster
                    mb_obs, mb_actions, mb_logprobs, mb_advantages, mb_values, mb_returns = mb
                    _, newlogprob, entropy, newvalue = policy(mb_obs, mb_actions)
                    loss, mb_stats = loss_fn(
                        newlogprob, mb_logprobs, mb_advantages, newvalue, mb_values, mb_returns, entropy, loss_args
                    )
                    optimizer.zero_grad()
                    loss.backward()
                    average_gradients(agent)
                    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # [core 11]
                    if not torch.isfinite(grad_norm):
                        hint = "look for NaN in observations and rewards, or lower --learning-rate"
                        raise FloatingPointError(
                            f"loss or gradient not finite at step {global_step}: {hint}; {path} is good"
                        )
                    optimizer.step()
                    stats.append(mb_stats)
                epoch_kls = [mb_stats["approx_kl"] for mb_stats in stats[-args.num_minibatches :]]
                if args.target_kl is not None and average(torch.stack(epoch_kls).mean()) > args.target_kl:  # [aux 3]
                    break

            # log: means over the whole update, fetched at once [core 12]
            means = average(torch.stack([torch.stack(list(mb_stats.values())) for mb_stats in stats]).mean(0)).tolist()
            scalars = {f"losses/{name}": mean for name, mean in zip(mb_stats, means)}
            scalars["losses/explained_variance"] = average(1 - (returns - values).var() / returns.var()).item()
            scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            scalars["charts/SPS"] = (global_step - start_step) / (time.time() - start_time)
            if episodes := gather(episodes):
                scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(episodes, axis=0)
                recent_returns.extend(episode_return for episode_return, _ in episodes)
            for tag, value in scalars.items() if rank == 0 else ():
                writer.add_scalar(tag, value, global_step)
            mean_return = np.mean(recent_returns or [math.nan])
            bar.set_postfix_str(f"mean return {mean_return:.1f}", refresh=False)
            bar.update(args.batch_size)
            if bar.disable and time.time() - last_print > 5:  # no terminal: a plain line instead of the bar
                last_print, sps = time.time(), scalars["charts/SPS"]
                left = f"{(args.total_timesteps - global_step) / sps:,.0f} s left"
                print(f"{global_step:,} steps, {sps:,.0f} steps/s, {left}, mean return {mean_return:.1f}", flush=True)

    if wandb_run:
        wandb_run.finish()
    mean_return = np.mean(recent_returns or [math.nan])
    print(f"{global_step:,} steps, {time.time() - start_time:.0f} s, mean return {mean_return:.1f}, in {run_dir}")
    if stop and not finished:
        launcher = ["python"] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes)]
        command = [*launcher, os.path.relpath(__file__), "--resume", str(run_dir)]
        print(f"stopped by signal {stop[0]}; to go on: {shlex.join(command)}")
        sys.exit(128 + stop[0])
    return run_dir


def parse_args() -> Args:
    """Read the command line, upon the arguments of the run to resume, if there is one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    run_dir = parser.parse_known_args()[0].resume
    default = Args(**load_checkpoint(Path(run_dir) / "checkpoint.pt")["args"]) if run_dir else Args()
    return replace(tyro.cli(Args, default=default, description=__doc__.split("\n\n")[0]))  # replace: derived sizes anew


def join_processes() -> None:
    """Join those that torchrun started beside this one, if it did: a GPU for each, and the first one speaks."""
    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(timeout=timedelta(days=1))  # they wait while the first one evaluates
        if dist.get_rank():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    try:
        args = parse_args()
        if args.evaluate:
            checkpoint = Path(args.evaluate) / "checkpoint.pt"
            evaluate(checkpoint, args.eval_episodes, args.deterministic, args.capture_video)
        else:
            join_processes()
            train(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
