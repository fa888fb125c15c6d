"""Film trained agents side by side: one animated GIF made of the evaluated episodes of each run.

Run:   python benchmark/film.py runs/CartPole-v1__ppo__1__* runs/PongNoFrameskip-v4__ppo_atari__1__*

The script that a folder names plays with `--evaluate --capture-video`, which leaves its film in the run's folder.
"""

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

import imageio.v2 as imageio
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent


def film(run_dir: Path, episodes: int, seed: int | None) -> Path:
    """Play with a run's agent; return the film of its episodes, one after the other."""
    _, script, *_ = run_dir.name.split("__")
    command = [sys.executable, str(ROOT / f"{script}.py"), "--evaluate", str(run_dir), "--capture-video"]
    command += ["--eval-episodes", str(episodes)] + (["--seed", str(seed)] if seed is not None else [])
    subprocess.run(command, check=True)
    return max(run_dir.glob("videos/*.mp4"), key=lambda path: path.stat().st_mtime)


def clip(path: Path, skip: float, seconds: float, height: int, fps: float) -> list[Image.Image]:
    """So many seconds of a film after the first `skip`, or its last ones where it is shorter, `fps` pictures each."""
    with imageio.get_reader(path) as reader:
        rate, length = reader.get_meta_data()["fps"], reader.count_frames()
        first = max(0, min(round(skip * rate), length - round(seconds * rate)))
        shown = [first + round(number * rate / fps) for number in range(round(seconds * fps))]
        frames = [frame for number, frame in enumerate(reader) for _ in range(shown.count(number))]
    width = round(frames[0].shape[1] * height / frames[0].shape[0])
    return [Image.fromarray(frame).resize((width, height)) for frame in frames]


def side_by_side(pictures: tuple[Image.Image, ...]) -> Image.Image:
    """One picture of several of the same height."""
    whole = Image.new("RGB", (sum(picture.width for picture in pictures), pictures[0].height))
    left = 0
    for picture in pictures:
        whole.paste(picture, (left, 0))
        left += picture.width
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "agents.gif")
    parser.add_argument("--episodes", type=int, default=1, help="that a film holds, one after the other")
    parser.add_argument("--seed", type=int, help="of the episodes, for others than those of the run's own seed")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--skip", type=float, nargs="+", default=[2], help="seconds left out of the beginning, of each")
    parser.add_argument("--height", type=int, default=160)
    parser.add_argument("--fps", type=int, default=12)
    args = parser.parse_args()
    clips = []
    for run_dir, skip in zip(args.runs, itertools.cycle(args.skip)):
        path = film(run_dir, args.episodes, args.seed)
        clips.append(clip(path, skip, args.seconds, args.height, args.fps))
    first, *others = [side_by_side(pictures) for pictures in zip(*clips)]  # as many as the shortest has
    first.save(args.out, save_all=True, append_images=others, duration=round(1000 / args.fps), loop=0)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
