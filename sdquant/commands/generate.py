"""Draw images with a model, quantized and offloaded as asked."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..pictures import SUFFIXES, save
from . import _shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model's flags, and those of the drawing."""
    _shared.add_request_flags(parser)
    _shared.add_drawing_flags(parser)
    parser.add_argument("-o", "--out", type=Path, default=Path("sdquant.png"), help="the image (default: %(default)s)")
    parser.add_argument("--count", type=_shared.positive, default=1, help="how many images, with seeds from --seed on")


def run(args: argparse.Namespace) -> int:
    """Load, draw, write. Images are written one by one, each under its name only when it is whole."""
    from ..drawing import draw
    from ..loader import load

    _shared.refuse_target(args.out, SUFFIXES)
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
        save(image, path)
        print(path)
    return 0
