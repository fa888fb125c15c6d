"""What the machine is taken for: the cores that this process may use, bfloat16, and that there may be no screen."""

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, small_args


@pytest.fixture
def cores(monkeypatch):
    """What a script takes for its cores, given the affinity, the container's quota, the host's cores, the processes."""

    def read(affinity=64, quota="max", host=64, processes=None) -> int:
        original = Path.read_text

        def read_text(path, *args, **options):
            if str(path) != "/sys/fs/cgroup/cpu.max":
                return original(path, *args, **options)
            if quota is None:
                raise FileNotFoundError(path)
            return f"{quota} 100000\n"

        monkeypatch.setattr(Path, "read_text", read_text)
        if affinity:
            monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
        else:
            monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: host)
        if processes:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        return runpy.run_path(str(ROOT / "ppo.py"))["CORES"]

    return read


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (dict(), 64),
        (dict(affinity=4), 4),
        (dict(quota="200000"), 2),
        (dict(quota="150000"), 2),
        (dict(quota="10000"), 1),
        (dict(affinity=1, quota="800000"), 1),
        (dict(processes=8), 8),
        (dict(affinity=2, processes=4), 1),
        (dict(affinity=None, quota=None, host=6), 6),
    ],
)
def test_cores_are_those_of_the_share(cores, machine, expected):
    """Catches: 64 threads on the 4 cores that a cluster gives, 11 times slower than 4; a crash where none is known."""
    assert cores(**machine) == expected


@pytest.mark.parametrize(("wanted", "threads"), [(0, 3), (2, 2)])
def test_a_run_takes_its_share(monkeypatch, wanted, threads):
    """Catches: a number of threads that is computed, or given, and then not set."""
    ppo, seen = importlib.import_module("ppo"), []
    monkeypatch.setattr(ppo, "CORES", 3)
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    ppo.train(small_args(ppo, torch_threads=wanted, total_timesteps=32))
    assert seen == [threads]


@pytest.mark.skipif(sys.platform != "linux", reason="the OpenMP of torch for Linux tells its settings")
@pytest.mark.parametrize("wanted", ["10000", "300000"])
def test_threads_that_wait_soon_sleep(wanted):
    """Catches: a limit that is set when torch has read it already, or against the user's own."""
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"} | {"OMP_DISPLAY_ENV": "VERBOSE"}
    if wanted != "10000":
        environment["GOMP_SPINCOUNT"] = wanted
    lines = (ROOT / "ppo_atari.py").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("import torch"))
    code = "\n".join(lines[: first + 1])  # what follows is of no concern here, and takes seconds to import
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{wanted}'" in told.stderr


@pytest.mark.parametrize("path", sorted(ROOT.glob("ppo*.py")), ids=lambda path: path.stem)
def test_who_takes_several_threads_has_them_soon_sleep(path):
    """Catches: threads that wait for each other by default, with nothing said of how: beside other work they crawl."""
    before_torch, _, _ = path.read_text().partition("\nimport torch\n")
    assert ("GOMP_SPINCOUNT" in before_torch) == ("torch_threads: int = 0" in path.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have a screen, or their own ways")
@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_lstm"])
@pytest.mark.parametrize("given", [{}, {"MUJOCO_GL": "osmesa", "SDL_VIDEODRIVER": "x11"}], ids=str)
def test_only_to_film_a_screen_is_done_without(name, given, monkeypatch):
    """Catches: ten hours of training that end at `an OpenGL platform library has not been loaded`, or need one."""
    script = importlib.import_module(name)
    importlib.import_module("mujoco")  # which loads the library that is asked for, and OSMesa may not be there
    names = ("MUJOCO_GL", "SDL_VIDEODRIVER")
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key not in names} | given)
    env_id = "CartPole-v1" if name == "ppo_lstm" else "Pendulum-v1"
    run_dir = script.train(small_args(script, env_id=env_id, total_timesteps=32))
    assert {key: os.environ[key] for key in names if key in os.environ} == given
    script.evaluate(run_dir / "checkpoint.pt", 1, script.saved_args(run_dir, capture_video=True))
    assert {key: os.environ[key] for key in names} == {"MUJOCO_GL": "egl", "SDL_VIDEODRIVER": "dummy"} | given


@torch.backends.mkldnn.flags(enabled=False)  # whose LSTM in bfloat16 wants AVX-512, and may not be there
@pytest.mark.parametrize(
    ("cpu", "faster"),
    [
        (dict(avx512_bf16=False), False),
        (dict(avx512_bf16=True, cpu_name="AMD EPYC"), True),
        (dict(avx512_bf16=True, cpu_name="Intel Xeon"), False),
        (dict(avx512_bf16=True, amx_bf16=True, cpu_name="Intel Xeon"), True),
    ],
)
@pytest.mark.parametrize("script", ["ppo_lstm", "ppo_atari", "ppo_atari_lstm", "ppo_multidiscrete"], indirect=True)
def test_bfloat16_is_used_where_it_is_faster(script, cpu, faster, monkeypatch):
    """Catches: half precision that is emulated, or no faster; a run whose arguments do not say how it was computed."""
    init, agents = script.Agent.__init__, []
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr(script.Agent, "__init__", lambda self, *given: (agents.append(self), init(self, *given))[1])
    run_dir = script.train(small_args(script, bf16=True, total_timesteps=small_args(script).batch_size))
    assert agents[0].bf16 == faster
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["args"]["bf16"] == faster
