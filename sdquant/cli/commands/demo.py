"""Draw the same digits with every backend, and show the memory each one saves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...models import BUNDLED_MODELS
from .. import _common

if TYPE_CHECKING:
    import argparse

    from ...demo import DemoRow, Result, SkippedCase

HEADER = ("scheme", "backend", "weights", "of bf16", "quantized part", "load", "an image", "digits right", "PSNR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the models, the number of steps and images, and the output file."""
    parser.add_argument("--model", choices=(*BUNDLED_MODELS, "both"), default="both", help="default: %(default)s")
    parser.add_argument("-o", "--out", type=Path, default=Path("sdquant-demo.png"), help="default: %(default)s")
    parser.add_argument("--steps", type=_common.positive, default=10, help="denoising steps (default: %(default)s)")
    parser.add_argument("--images", type=_common.positive, help="images a scheme (default: 20, and 10 for digits-flux)")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bars")
    _common.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Draw, write the picture, print a table for each model."""
    from ...demo import figure
    from ...demo import run as show

    _common.refuse_target(args.out, (".png",))
    results = []
    for name in BUNDLED_MODELS if args.model == "both" else (args.model,):
        results.append(show.run(name, steps=args.steps, images=args.images, progress=args.progress))
        if not args.json:
            print(render_demo(results[-1]), end="\n\n", flush=True)
    figure.write(results, args.out)
    if args.json:
        _common.print_json({"picture": str(args.out), "models": [result.to_dict() for result in results]})
    else:
        print(f"picture: {args.out}")
    return 0


def render_demo(result: Result) -> str:
    """Format the table of one model as text."""
    lines = [
        f"{result.model}, {result.steps} steps; the judge is right on {result.judge:.1%} of real digits",
        _common.table(HEADER, [_cells(case) for case in result.cases], left=2),
    ]
    lines += [f"skipped: {case.label}: {case.why}. {case.fix}" for case in result.skipped]
    return "\n".join(lines)


def _cells(case: DemoRow | SkippedCase) -> tuple[str, ...]:
    from ...demo import SkippedCase

    if isinstance(case, SkippedCase):
        return (case.label, case.backend, "skipped", *("",) * (len(HEADER) - 3))
    return (
        case.label,
        case.backend,
        _common.size(case.bytes),
        f"{case.bytes / case.bytes_bf16:.2f}",
        f"{case.packed / case.packed_bf16:.2f}" if case.packed_bf16 else "-",
        f"{case.load_seconds:.2f} s",
        f"{case.image_seconds * 1000:.0f} ms",
        f"{case.right}/{case.images}",
        "-" if case.psnr is None else "same" if case.psnr == float("inf") else f"{case.psnr:.1f} dB",
    )
