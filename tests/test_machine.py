"""What the machine is taken for: the cores that this process may use, and whether there is a screen."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, read_scalars, small_args


@pytest.fixture
def share(monkeypatch):
    """Set the cores that the process may use, the container's quota, the host's cores, the processes beside it."""

    def set_share(affinity=64, quota="max", host=64, processes=None):
        read_text = Path.read_text
        text = f"{quota} 100000\n"
        fake = lambda path, *args: text if str(path) == "/sys/fs/cgroup/cpu.max" else read_text(path, *args)
        monkeypatch.setattr(Path, "read_text", fake)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: host)
        if processes:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))

    return set_share


@pytest.mark.parametrize(
    ("machine", "threads"),
    [
        (dict(), 64),
        (dict(affinity=4), 4),
        (dict(quota="200000"), 2),
        (dict(quota="150000"), 2),
        (dict(quota="10000"), 1),
        (dict(affinity=1, quota="800000"), 1),
        (dict(processes=8), 8),
        (dict(affinity=2, processes=4), 1),
    ],
)
def test_threads_are_those_of_the_share(script, share, machine, threads):
    """Catches: 64 threads on the 4 cores that a cluster or a container gives, 11 times slower than 4."""
    share(**machine)
    assert script.num_threads(0) == threads
    assert script.num_threads(3) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="the OpenMP of torch for Linux tells its settings")
@pytest.mark.parametrize("name", ["ppo_atari", "ppo_atari_lstm"])
@pytest.mark.parametrize("wanted", ["10000", "300000"])
def test_threads_that_wait_soon_sleep(name, wanted):
    """Catches: a limit that is set when torch has read it already, or against the user's own."""
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"} | {"OMP_DISPLAY_ENV": "VERBOSE"}
    if wanted != "10000":
        environment["GOMP_SPINCOUNT"] = wanted
    command = [sys.executable, "-c", f"import {name}"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    assert f"GOMP_SPINCOUNT = '{wanted}'" in told


@pytest.mark.parametrize("path", sorted(ROOT.glob("ppo*.py")), ids=lambda path: path.stem)
def test_who_takes_several_threads_has_them_soon_sleep(path):
    """Catches: threads that wait for each other by default, with nothing said of how: beside other work they crawl."""
    text = path.read_text()
    assert ("GOMP_SPINCOUNT" in text) == ("torch_threads: int = 0" in text)


def test_where_no_share_is_known(script, share, monkeypatch):
    """Catches: a crash on systems without affinity or cgroups."""
    share(host=6)
    monkeypatch.delattr(os, "sched_getaffinity")

    def fail(path, *args):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", fail)
    assert script.num_threads(0) == 6


def test_a_run_takes_its_share(script, share, monkeypatch):
    """Catches: a number of threads that is computed, and then not set."""
    share(affinity=3)
    seen, compute_gae = [], script.compute_gae

    def spy(*args):
        seen.append(torch.get_num_threads())
        return compute_gae(*args)

    monkeypatch.setattr(script, "compute_gae", spy)
    args = small_args(script, torch_threads=0)
    script.train(small_args(script, torch_threads=0, total_timesteps=args.batch_size))
    assert seen == [3]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have a screen, or their own ways")
@pytest.mark.parametrize(
    ("given", "libraries", "expected"),
    [
        ({}, "EGL OpenGL", "egl dummy"),
        ({}, "EGL GL", "egl dummy"),
        ({}, "EGL", "None dummy"),
        ({}, "GL", "None dummy"),
        ({"DISPLAY": ":0"}, "EGL GL", "None None"),
        ({"MUJOCO_GL": "osmesa"}, "EGL GL", "osmesa dummy"),
    ],
)
def test_without_a_screen_videos_are_drawn_all_the_same(given, libraries, expected):
    """Catches: ten hours of training that end at `an OpenGL platform library has not been loaded`; none without it."""
    names = {"DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"}
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    command = f"""
import ctypes.util, os
ctypes.util.find_library = lambda name: name in {libraries.split()}
import ppo
print(os.environ.get("MUJOCO_GL"), os.environ.get("SDL_VIDEODRIVER"))
if os.environ.get("MUJOCO_GL") is None:
    import mujoco
"""
    result = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == expected


def test_a_clock_that_is_set_back(script, monkeypatch):
    """Catches: a speed below 0, or a division by 0, where the machine's clock is corrected during a run."""
    begun = time.time()
    moments = iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: begun - next(moments))
    scalars = read_scalars(script.train(small_args(script)))
    assert all(speed > 0 for _, speed in scalars["charts/SPS"])


@torch.backends.mkldnn.flags(enabled=False)  # whose LSTM in bfloat16 wants AVX-512, and may not be there
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("script", ["ppo_lstm", "ppo_atari", "ppo_atari_lstm", "ppo_multidiscrete"], indirect=True)
def test_bfloat16_is_used_where_the_hardware_has_it(script, there, monkeypatch):
    """Catches: an emulated half precision, many times slower; a run whose arguments do not say how it was computed."""
    init, agents = script.Agent.__init__, []
    monkeypatch.setattr(script, "has_bf16", lambda device: there)
    monkeypatch.setattr(script.Agent, "__init__", lambda self, *given: (agents.append(self), init(self, *given))[1])
    run_dir = script.train(small_args(script, bf16=True))
    assert agents[0].bf16 == there
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["args"]["bf16"] == there
