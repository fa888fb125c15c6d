"""A whole run of each script against a second implementation of PPO, in float64, that shares no line with it.

It is given the run's first parameters, what the envs returned and the actions that they got, and the permutations that
the minibatches were cut from, and must end with the run's last parameters. It is slow and plain: step by step and
sample by sample, advantages as the sums that define them, torch's distributions, Adam written out.
"""

import importlib
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import parameters
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch.distributions import Categorical, Independent, Normal
from torch.nn import functional as F

NVEC = 3, 4


class Walk(gym.Env):
    """A random walk, or random grids, terminated or truncated by chance; some MultiDiscrete actions are invalid."""

    def __init__(self, action_space, shape=(3,)):
        self.action_space = action_space
        self.is_grid = len(shape) == 3
        self.observation_space = Box(0, 1, shape, np.uint8) if self.is_grid else Box(-np.inf, np.inf, shape, np.float32)
        if isinstance(action_space, MultiDiscrete):
            self.action_masks = lambda: self.valid

    def observe(self):
        self.valid = self.np_random.random(sum(NVEC)) < 0.5
        self.valid[[0, NVEC[0]]] = True
        self.position = self.position + self.np_random.normal(size=3)
        if self.is_grid:
            return (self.np_random.random(self.observation_space.shape) < 0.3).astype(np.uint8)
        return self.position.astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.zeros(3)
        return self.observe(), {}

    def step(self, action):
        self.position[0] += np.ravel(action)[0]
        reward, chance = self.position[0] + self.np_random.normal(), self.np_random.random()
        return self.observe(), reward, chance < 0.1, 0.1 <= chance < 0.2, {}


gym.register("Walk-v0", lambda: Walk(Discrete(3)))
gym.register("WalkBox-v0", lambda: Walk(Box(-0.5, 0.5, (2,), np.float32)))
gym.register("WalkMulti-v0", lambda: Walk(MultiDiscrete(NVEC)))
gym.register("WalkGrid-v0", lambda: Walk(MultiDiscrete(NVEC), shape=(7, 9, 4)))

WALK = dict(total_timesteps=192, num_envs=2, num_steps=32, num_minibatches=2, update_epochs=3)
SHORT_GAMES = '{"max_num_frames_per_episode": 160}'
GAME = dict(env_kwargs=SHORT_GAMES, total_timesteps=160, num_envs=2, num_steps=40, num_minibatches=2, update_epochs=2)
RUNS = {
    "ppo": [WALK | dict(env_id="Walk-v0"), WALK | dict(env_id="Walk-v0", gae=False, clip_vloss=False, norm_adv=False)],
    "ppo_continuous_action": [
        WALK | dict(env_id="WalkBox-v0", num_envs=1, num_steps=64, ent_coef=0.01),
        WALK | dict(env_id="WalkBox-v0", norm_obs=False, norm_reward=False, log_std_init=-0.5),
    ],
    "ppo_lstm": [
        WALK
        | dict(
            env_id="Walk-v0", seq_len=8, hidden_size=8, shared_lstm=False, weight_decay=0.01, critic_learning_rate=2e-3
        ),
        WALK | dict(env_id="WalkBox-v0", seq_len=0, hidden_size=8, clip_vloss=True),
        WALK | dict(env_id="Walk-v0", seq_len=16, hidden_size=8, num_layers=2, reward_floor=-1.0, reward_scale=0.5),
    ],
    "ppo_multidiscrete": [
        WALK | dict(env_id="WalkMulti-v0", target_kl=None),
        WALK | dict(env_id="WalkGrid-v0", target_kl=None, anneal_ent=True),
    ],
    "ppo_atari": [GAME, GAME | dict(negative_slope=0.5)],
    "ppo_atari_lstm": [GAME | dict(seq_len=10, hidden_size=8, negative_slope=0.1)],
}


class Recorder(gym.vector.VectorWrapper):
    """Keeps what each step was given and what it returned.

    At every ninth step it says that all episodes are cut, some of which are terminated as well: each then had a last
    observation of its own, and goes on as a new one.
    """

    def reset(self, **options):
        self.steps = []
        self.single_observation_space.seed(0)
        self.obs, infos = self.env.reset(**options)
        self.obs = self.obs.copy()
        return self.obs, infos

    def step(self, actions):
        multi = isinstance(self.single_action_space, MultiDiscrete)
        masks = self.env.unwrapped.call("action_masks") if multi else [None] * self.num_envs
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        cuts, rest = divmod(len(self.steps), 9)
        if rest == 8:
            terminations = terminations | ((np.arange(self.num_envs) + cuts) % 3 == 0)
            truncations = np.ones(self.num_envs, bool)
            infos["final_obs"] = np.stack([self.single_observation_space.sample() for _ in truncations])
        last = {n: infos["final_obs"][n].copy() for n in np.flatnonzero(truncations & ~terminations)}
        self.steps.append([self.obs, actions.copy(), masks, rewards.copy(), terminations, truncations, last])
        self.obs = obs.copy()
        return obs, rewards, terminations, truncations, infos


class Reference:
    """A second implementation, of all scripts."""

    def __init__(self, name, args, space, initial, trainable):
        self.name, self.args, self.space = name, args, space
        self.recurrent, self.atari = "lstm" in name, "atari" in name
        self.p = {key: value.double().clone().requires_grad_(key in trainable) for key, value in initial.items()}
        self.trainable = trainable
        self.moments = {key: [torch.zeros_like(self.p[key]), torch.zeros_like(self.p[key])] for key in trainable}
        self.updates = 0
        self.seen, self.sums = [], []  # by the normalisation: observations, discounted sums of rewards
        self.running, self.starts, self.memory = np.zeros(args.num_envs), np.ones(args.num_envs, bool), {}
        if self.recurrent:
            zeros = torch.zeros(args.num_envs, args.hidden_size).double()
            lstms = 1 if self.atari or args.shared_lstm else 2
            self.memory = {(k, layer): (zeros, zeros) for k in range(lstms) for layer in range(args.num_layers)}

    def linear(self, layer, x):
        return F.linear(x, self.p[f"{layer}.weight"], self.p[f"{layer}.bias"])

    def perceive(self, obs):
        """What the network is given, (M, F): of one or several steps of one or several envs."""
        x = torch.as_tensor(np.stack(obs)).double()
        convolve = lambda i, x, stride: F.conv2d(x, self.p[f"network.{i}.weight"], self.p[f"network.{i}.bias"], stride)
        if self.atari:
            bend = lambda x: torch.where(x > 0, x, self.args.negative_slope * x)
            x = bend(convolve(4, bend(convolve(2, bend(convolve(0, x / 255, 4)), 2)), 1))
            return bend(self.linear("network.7", x.flatten(1)))
        if x.dim() == 4:  # a grid (H, W, C), and flattened as such
            x = convolve(2, convolve(0, x.permute(0, 3, 1, 2), 2).relu(), 1).relu()
            return self.linear("hidden", x.permute(0, 2, 3, 1).flatten(1)).relu()
        if "continuous" in self.name and self.args.norm_obs and self.seen:
            seen = np.concatenate(self.seen).astype(np.float64)
            x = ((x - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)).clamp(-10, 10)
        return x

    def remember(self, x, memory, starts):
        """A step of the LSTMs: x (M, F), memory {(k, layer): (h, c)}, starts (M,) bool -> their outputs, the memory."""
        outputs, after = {}, {}
        for k, layer in memory:
            at, y = f"memory.lstms.{k}.%s_l{layer}", outputs.get(k, x)  # what the layer below gave
            h, c = (torch.where(torch.as_tensor(starts)[:, None], 0.0, part) for part in memory[k, layer])
            gates = F.linear(y, self.p[at % "weight_ih"], self.p[at % "bias_ih"])
            gates = gates + F.linear(h, self.p[at % "weight_hh"], self.p[at % "bias_hh"])
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            outputs[k] = o.sigmoid() * c.tanh()
            after[k, layer] = outputs[k], c
        return list(outputs.values()), after

    def head(self, which, x):
        if f"{which}_hidden.0.weight" in self.p:
            return self.linear(which, F.elu(self.linear(f"{which}_hidden.0", x)))
        if f"{which}.weight" in self.p:
            return self.linear(which, x)
        return self.linear(f"{which}.4", self.linear(f"{which}.2", self.linear(f"{which}.0", x).tanh()).tanh())

    def look(self, obs, memory, starts):
        """The policy's output (M, A), the values (M,) and the memory after a step."""
        x = self.perceive(obs)
        outputs, memory = self.remember(x, memory, starts) if self.recurrent else ([x], memory)
        policy = "actor_mean" if "continuous" in self.name else "actor"
        return self.head(policy, outputs[0]), self.head("critic", outputs[-1])[:, 0], memory

    def judge(self, output, actions, masks):
        """The log-probabilities of the actions and the entropies, (M,)."""
        actions = torch.as_tensor(np.stack(actions))
        if isinstance(self.space, MultiDiscrete):
            logprobs, entropies = [], []
            for row, action, mask in zip(output, actions, masks):
                parts, start = [], 0
                for size, choice in zip(NVEC, action.tolist()):
                    valid = np.flatnonzero(mask[start : start + size]).tolist()
                    policy = Categorical(logits=row[start : start + size][valid])
                    parts.append((policy.log_prob(torch.tensor(valid.index(choice))), policy.entropy()))
                    start += size
                logprobs.append(sum(logprob for logprob, _ in parts))
                entropies.append(sum(entropy for _, entropy in parts))
            return torch.stack(logprobs), torch.stack(entropies)
        policy = Categorical(logits=output)
        if isinstance(self.space, Box):
            policy = Independent(Normal(output, self.p["actor_logstd"].exp()), 1)
        return policy.log_prob(actions), policy.entropy()

    def advantages(self, rewards, values, next_values, dones):
        """The sums of discounted TD errors, up to the episode's or the rollout's end, (T, N)."""
        args, advantages = self.args, torch.zeros_like(next_values)
        T, N = advantages.shape
        for t in range(T):
            for n in range(N):
                weight = 1.0
                for later in range(t, T):
                    delta = rewards[later, n] + args.gamma * next_values[later, n] - values[later][n]
                    advantages[t, n] += weight * delta
                    weight *= args.gamma * (args.gae_lambda if args.gae else 1)
                    if dones[later][n]:
                        break
        return advantages

    def learn(self, steps, permutations, last_obs, progress):
        """Learn from one rollout, a list of a Recorder's steps."""
        args, N, T = self.args, self.args.num_envs, self.args.num_steps
        obs, actions, masks, rewards, terminations, truncations, last = (list(column) for column in zip(*steps))
        dones = [a | b for a, b in zip(terminations, truncations)]
        S = (args.seq_len or T) if self.recurrent else 1

        values, logprobs, next_values, memories, starts = [], [], torch.zeros(T, N).double(), [], []
        with torch.no_grad():
            for t in range(T):
                starts.append(self.starts)
                memories.append(self.memory)
                output, value, self.memory = self.look(obs[t], self.memory, self.starts)
                values.append(value)
                logprobs.append(self.judge(output, actions[t], masks[t])[0])
                for n, final_obs in last[t].items():
                    own = {key: [part[[n]] for part in parts] for key, parts in self.memory.items()}
                    next_values[t, n] = self.look([final_obs], own, np.zeros(1, bool))[1][0]
                self.starts = dones[t]
            values.append(self.look(last_obs, self.memory, self.starts)[1])
        for t in range(T):
            for n in np.flatnonzero(~dones[t]):
                next_values[t, n] = values[t + 1][n]  # 0 after a termination

        rewards = self.scale(np.array(rewards, np.float64), np.array(dones))
        advantages = self.advantages(rewards, values, next_values, dones)
        rate, clip = args.learning_rate * progress, args.clip_coef * progress  # both are annealed
        ent_coef = args.ent_coef * (progress if getattr(args, "anneal_ent", False) else 1)
        for permutation in permutations:
            for chosen in permutation.split(len(permutation) // args.num_minibatches):
                rows = [(i // N * S, i % N) for i in chosen.tolist()]  # (first step, env)
                memory = {
                    key: [torch.stack([memories[t][key][part][n] for t, n in rows]) for part in (0, 1)]
                    for key in self.memory
                }
                samples, new = [], []  # of each step of the sequences
                for s in range(S):
                    columns = obs, actions, masks, starts, logprobs, values, advantages
                    own_obs, own_actions, own_masks, opens, *old = ([x[t + s][n] for t, n in rows] for x in columns)
                    output, value, memory = self.look(own_obs, memory, np.array(opens))
                    new.append([*self.judge(output, own_actions, own_masks), value])
                    samples.append([torch.stack(x) for x in old])
                old_logprobs, V, A = (torch.cat(x) for x in zip(*samples))
                new_logprobs, entropy, new_values = (torch.cat(x) for x in zip(*new))
                target = A + V
                if args.norm_adv:
                    A = (A - A.mean()) / (A.std() + 1e-8)
                ratio = (new_logprobs - old_logprobs).exp()
                objective = torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A).mean()
                error = (new_values - target) ** 2
                if args.clip_vloss:
                    error = torch.maximum(error, (V + (new_values - V).clamp(-clip, clip) - target) ** 2)
                loss = -objective + args.vf_coef * error.mean() / 2 - ent_coef * entropy.mean()
                self.descend(loss, rate, progress)
        self.seen.append(np.concatenate(obs))

    def scale(self, rewards, dones):
        """The rewards that are learnt from."""
        args = self.args
        if "continuous" in self.name and args.norm_reward:
            for reward, done in zip(rewards, dones):
                self.running = args.gamma * self.running + reward
                self.sums.append(self.running)
                self.running = np.where(done, 0, self.running)
            return (rewards / math.sqrt(np.var(self.sums) + 1e-8)).clip(-10, 10)
        if self.name == "ppo_lstm":
            return np.maximum(rewards, args.reward_floor) * args.reward_scale
        return rewards

    def descend(self, loss, rate, progress):
        """A step of Adam on the clipped gradient."""
        args = self.args
        gradients = dict(zip(self.trainable, torch.autograd.grad(loss, [self.p[key] for key in self.trainable])))
        norm = math.sqrt(sum((g**2).sum().item() for g in gradients.values()))
        self.updates += 1
        for key, g in gradients.items():
            g = g * min(1.0, args.max_grad_norm / norm)
            m, v = self.moments[key]
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g**2)
            own = rate
            if self.name == "ppo_lstm" and args.critic_learning_rate and key.startswith(("critic", "memory.lstms.1")):
                own = args.critic_learning_rate * progress
            with torch.no_grad():
                if self.name == "ppo_lstm":
                    self.p[key] *= 1 - own * args.weight_decay
                step = m / (1 - 0.9**self.updates) / ((v / (1 - 0.999**self.updates)).sqrt() + 1e-5)
                self.p[key] -= own * step


@pytest.mark.parametrize(("name", "options"), [(name, options) for name in RUNS for options in RUNS[name]])
def test_a_run_ends_with_the_parameters_of_a_second_implementation(name, options, monkeypatch):
    """Catches: parts that are put together wrongly; final observations swapped; an end both ways that is no end."""
    script = importlib.import_module(name)
    recorders, permutations, begun = [], [], []
    make_envs, randperm, Agent = script.make_envs, torch.randperm, script.Agent

    class Spy(Agent):
        def __init__(self, *given):
            super().__init__(*given)
            begun.append({key: value.clone() for key, value in self.state_dict().items()})
            begun.append([key for key, _ in self.named_parameters()])

    def record(*given):
        recorders.append(Recorder(make_envs(*given)))
        return recorders[-1]

    def permute(*given, **kwargs):
        permutations.append(randperm(*given, **kwargs))
        return permutations[-1]

    monkeypatch.setattr(script, "Agent", Spy)
    monkeypatch.setattr(script, "make_envs", record)
    monkeypatch.setattr(torch, "randperm", permute)
    options = dict(learning_rate=1e-3, anneal_clip=True, torch_threads=1) | options
    args = script.Args(**options | (dict(bf16=False) if hasattr(script.Args, "bf16") else {}))
    ended = parameters(script.train(args))
    initial, trainable = begun
    (recorder,) = recorders
    reference = Reference(name, args, recorder.single_action_space, initial, trainable)
    T, epochs = args.num_steps, args.update_epochs
    assert len(recorder.steps) == T * args.num_iterations > T
    terminations, truncations = (np.stack([step[column] for step in recorder.steps]) for column in (4, 5))
    ends = terminations & ~truncations, truncations & ~terminations, terminations & truncations
    assert all(end.any() for end in ends), "episodes end by termination, by truncation, and both ways at once"
    assert (truncations & ~terminations).all(1).any(), "all envs are truncated in the same step"
    for iteration in range(args.num_iterations):
        steps = recorder.steps[iteration * T : (iteration + 1) * T]
        last_obs = [*recorder.steps, [recorder.obs]][(iteration + 1) * T][0]
        own = permutations[iteration * epochs : (iteration + 1) * epochs]
        reference.learn(steps, own, last_obs, 1 - iteration / args.num_iterations)
    for key in trainable:
        learnt = reference.p[key].detach()
        assert (ended[key] - learnt).norm() < 2e-3 * (learnt - initial[key]).norm(), key
