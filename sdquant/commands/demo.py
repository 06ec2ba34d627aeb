"""Draw the same digits with every backend, and show the memory each one saves."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import demo
from . import _shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models, how much, and where to."""
    parser.add_argument("--model", choices=(*demo.MODELS, "both"), default="both", help="default: %(default)s")
    parser.add_argument("-o", "--out", type=Path, default=Path("sdquant-demo.png"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps (default: %(default)s)")
    parser.add_argument("--images", type=int, default=20, help="images a scheme (default: %(default)s)")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bars")
    _shared.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Draw, write the picture, print the table."""
    from ..demo import grid, show

    names = demo.MODELS if args.model == "both" else (args.model,)
    results = [show.run(name, steps=args.steps, images=args.images, progress=args.progress) for name in names]
    grid.write(results, args.out)
    if args.json:
        _shared.print_json({"picture": str(args.out), "models": [result.to_dict() for result in results]})
        return 0
    for result in results:
        rows = [
            (
                row.label,
                _shared.size(row.bytes),
                f"{row.bytes / row.bytes_bf16:.2f}",
                f"{row.load_seconds:.2f} s",
                f"{row.image_seconds * 1000:.0f} ms",
                f"{row.right}/{row.images}",
                "-" if row.psnr is None else f"{row.psnr:.1f} dB",
            )
            for row in result.rows
        ]
        print(
            f"\n{result.model}: {args.steps} steps, judged by a classifier that is right on {result.judge:.1%} of real digits"
        )
        print(_shared.table(("scheme", "weights", "of bf16", "load", "image", "digits right", "PSNR"), rows))
    print(f"\npicture: {args.out}")
    return 0
