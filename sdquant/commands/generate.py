"""Draw images with a model, quantized and offloaded as asked."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import SettingsError
from . import _shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model's flags, and those of the drawing."""
    _shared.add_request_flags(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="what to draw")
    parser.add_argument("-o", "--out", type=Path, default=Path("sdquant.png"), help="the image (default: %(default)s)")
    parser.add_argument("--steps", type=_positive, default=20, help="denoising steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: %(default)s)")
    parser.add_argument("--count", type=_positive, default=1, help="images, with seeds from --seed on")
    parser.add_argument("--guidance", type=float, help="guidance scale (default: the pipeline's)")
    parser.add_argument("--width", type=_positive, help="pixels (default: the model's)")
    parser.add_argument("--height", type=_positive, help="pixels (default: the model's)")


def run(args: argparse.Namespace) -> int:
    """Load, draw, write."""
    from ..drawing import draw
    from ..loader import load

    suffixes = (".png", ".jpg", ".jpeg", ".webp")
    if args.out.suffix.lower() not in suffixes:
        raise SettingsError(f"{args.out} was to be written", "its ending names no image format", f"Use {suffixes[0]}")
    pipe = load(_shared.request_of(args))
    images = draw(
        pipe,
        [args.prompt] * args.count,
        seeds=range(args.seed, args.seed + args.count),
        steps=args.steps,
        guidance=args.guidance,
        width=args.width,
        height=args.height,
        progress=args.progress,
    )
    for number, image in enumerate(images):
        path = args.out if args.count == 1 else args.out.with_stem(f"{args.out.stem}-{args.seed + number}")
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        print(path)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
