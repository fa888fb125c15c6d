"""Shared by all tests: the scripts on sys.path, a fresh working folder for each test, a small run of each script."""

import importlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from launcher import Launcher
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmark")]
own_paths = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []  # where packages may lie
os.environ |= {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *own_paths]),  # subprocesses find probe_envs as well
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}

torch.set_num_threads(1)  # where a test calls the network itself: two threads crawl on a machine that is busy

SHORT_GAMES = '{"max_num_frames_per_episode": 400}'  # of Atari, so that an evaluation of whole games is short

# arguments that make a run of each script small: 4 iterations of a few dozen steps
SMALL = {
    "ppo": dict(total_timesteps=128, num_envs=2, num_steps=16, num_minibatches=2),
    "ppo_continuous_action": dict(
        env_id="Pendulum-v1", total_timesteps=128, num_envs=2, num_steps=16, num_minibatches=2, update_epochs=4
    ),
    "ppo_atari": dict(
        env_kwargs=SHORT_GAMES,
        total_timesteps=64,
        num_envs=2,
        num_steps=8,
        num_minibatches=2,
        bf16=False,
        torch_threads=1,
    ),
    "ppo_lstm": dict(
        total_timesteps=128, num_envs=2, num_steps=16, num_minibatches=2, update_epochs=4, seq_len=8, hidden_size=16
    ),
    "ppo_atari_lstm": dict(
        env_kwargs=SHORT_GAMES,
        total_timesteps=64,
        num_envs=2,
        num_steps=8,
        num_minibatches=2,
        seq_len=4,
        bf16=False,
        torch_threads=1,
    ),
    "ppo_multidiscrete": dict(
        env_id="probe_envs:CartPoleMultiDiscrete-v0",
        total_timesteps=128,
        num_envs=2,
        num_steps=16,
        num_minibatches=2,
        target_kl=None,
        bf16=False,
        torch_threads=1,
    ),
}
SCRIPTS = list(SMALL)
ATARI_SCRIPTS = [name for name in SCRIPTS if "atari" in name]

# What is below the fold is the same text in every script, see test_consistency.py: two scripts stand for all.
FOLD_SCRIPTS = ["ppo", "ppo_lstm"]
OF_THE_FOLD = {
    "test_checkpoint",
    "test_command_line",
    "test_evaluation_ends",
    "test_failures",
    "test_faults",
    "test_flags",
    "test_global_state",
    "test_library",
    "test_machine",
    "test_restarts",
    "test_run_folder",
    "test_signals",
    "test_wandb",
}

# ppo_atari_lstm.py joins two scripts; tests of what it has from them leave it out, for a game takes a second to start.
FIVE_SCRIPTS = [name for name in SCRIPTS if name != "ppo_atari_lstm"]
OF_FIVE = {"test_arguments", "test_determinism", "test_evaluate", "test_resume"}
# So do tests of the training loop with ppo_atari.py: but for a line it has ppo.py's, see test_consistency.py.
FOUR_SCRIPTS = [name for name in SCRIPTS if name not in ATARI_SCRIPTS]
OF_FOUR = {"test_agent", "test_user_envs"}

# the scripts that train on probe_envs.py: the action space's name there, and the arguments that turn off what would
# change the observations or the rewards
PROBED = {
    "ppo": ("", {}),
    "ppo_continuous_action": ("Box", dict(norm_obs=False, norm_reward=False, num_minibatches=4, update_epochs=4)),
    "ppo_multidiscrete": ("MultiDiscrete", dict(clip_coef=0.2, target_kl=None, torch_threads=1)),
}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    """Each test runs in an empty folder, where its runs/ goes."""
    monkeypatch.chdir(tmp_path)


def pytest_configure(config):
    """The tests are of the CPU, but for those of `-m cuda`."""
    if config.getoption("markexpr") != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_generate_tests(metafunc):
    """`script` is each script in turn, or fewer, as said above, unless the test names them itself."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "script" in metafunc.fixturenames and "script" not in named:
        file = metafunc.module.__name__
        names = FIVE_SCRIPTS if file in OF_FIVE else FOUR_SCRIPTS if file in OF_FOUR else SCRIPTS
        names = FOLD_SCRIPTS if file in OF_THE_FOLD else names
        metafunc.parametrize("script", names, indirect=True)


@pytest.fixture
def script(request):
    """The module of a script, see pytest_generate_tests."""
    return importlib.import_module(request.param)


@pytest.fixture(params=PROBED)
def probed_script(request):
    """In turn, the module of each script that trains on any vector env."""
    return importlib.import_module(request.param)


@pytest.fixture(params=ATARI_SCRIPTS)
def atari_script(request):
    """In turn, the module of each script that trains on Atari games."""
    return importlib.import_module(request.param)


@pytest.fixture(scope="session")
def launcher():
    """Starts scripts as processes, fast."""
    launcher = Launcher(*SCRIPTS)
    yield launcher
    launcher.close()


def probe_args(module, env_name: str, **changes):
    """Args of a run of the script on an env of probe_envs.py."""
    actions, options = PROBED[module.__name__]
    return module.Args(env_id=f"probe_envs:{env_name}{actions}-v0", **options | changes)


def small_args(module, **changes):
    """Args of a small run of the script."""
    return module.Args(**SMALL[module.__name__] | changes)


def flags(**arguments) -> list[str]:
    """Arguments as the command line takes them."""
    result = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        result += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return result


def run_script(name: str, *argv: str, timeout: float = 600) -> subprocess.CompletedProcess:
    """Run a script as a user does, in the current folder."""
    command = [sys.executable, str(ROOT / f"{name}.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def read_log(run_dir: Path) -> EventAccumulator:
    """A run's TensorBoard log.

    TensorBoard reads a run's files by their names, which order them by second, then by process as text: those of one
    second, as only tests have them, get names in the order of their beginning.
    """
    begun = {path: next(iter(EventFileLoader(str(path)).Load())).wall_time for path in run_dir.glob("*tfevents*")}
    with tempfile.TemporaryDirectory() as folder:
        for k, path in enumerate(sorted(begun, key=begun.get)):
            Path(folder, f"events.out.tfevents.{k:010d}").symlink_to(path.absolute())
        return EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The (step, value) pairs of each tag of a run's TensorBoard log."""
    events = read_log(run_dir)
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def parameters(run_dir: Path) -> dict[str, torch.Tensor]:
    """The agent's parameters in a run's checkpoint."""
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]


def same_parameters(run_dir: Path, other_dir: Path) -> bool:
    """Whether two runs ended with the same parameters, bit for bit."""
    ours, theirs = parameters(run_dir), parameters(other_dir)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def pytest_collection_modifyitems(items):
    """MicroRTS comes last: once its JVM runs in this process, with threads of its own, no test should fork."""
    items.sort(key=lambda item: "microrts" in item.path.name)


@pytest.fixture
def compiled(monkeypatch):
    """Has torch.compile capture graphs without compiling them; counts how often for which function."""
    counts, compile = Counter(), torch.compile

    def spy(function, **options):
        def backend(graph, inputs):
            counts[function.__name__] += 1
            return graph.forward

        return compile(function, backend=backend)

    monkeypatch.setattr(torch, "compile", spy)
    torch._dynamo.reset()
    yield counts
    torch._dynamo.reset()
