"""Film trained agents side by side: one animated GIF made of an evaluated episode of each run.

Run:   python benchmark/film.py runs/CartPole-v1__ppo__1__1700000000 runs/PongNoFrameskip-v4__ppo_atari__1__1700000000

The script that a folder names plays with `--evaluate --capture-video`, which leaves its videos in the run's folder.
"""

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

from moviepy import VideoFileClip, clips_array

ROOT = Path(__file__).resolve().parent.parent


def film(run_dir: Path, episodes: int, seed: int | None) -> Path:
    """Play with a run's agent; return the video of the longest of its episodes."""
    _, script, *_ = run_dir.name.split("__")
    command = [sys.executable, str(ROOT / f"{script}.py"), "--evaluate", str(run_dir), "--capture-video"]
    command += ["--eval-episodes", str(episodes)] + (["--seed", str(seed)] if seed is not None else [])
    subprocess.run(command, check=True)
    return max(run_dir.glob("videos/step_*/*.mp4"), key=lambda path: VideoFileClip(str(path)).duration)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "agents.gif")
    parser.add_argument("--episodes", type=int, default=3, help="of which the longest is shown")
    parser.add_argument("--seed", type=int, help="of the episodes, for others than those of the run's own seed")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--skip", type=float, nargs="+", default=[2], help="seconds left out of the beginning, of each")
    parser.add_argument("--height", type=int, default=160)
    parser.add_argument("--fps", type=int, default=12)
    args = parser.parse_args()
    clips = []
    for run_dir, skip in zip(args.runs, itertools.cycle(args.skip)):
        clip = VideoFileClip(str(film(run_dir, args.episodes, args.seed)))
        begin = max(0.0, min(skip, clip.duration - args.seconds))
        clip = clip.subclipped(begin, min(clip.duration, begin + args.seconds)).resized(height=args.height)
        clips.append(clip)
    shortest = min(clip.duration for clip in clips)
    clips_array([[clip.subclipped(0, shortest) for clip in clips]]).write_gif(str(args.out), fps=args.fps)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
