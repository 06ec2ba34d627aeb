"""Draw the same picture with several schemes, and show what each one saves and changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ...core import AUTO
from ...errors import SettingsError
from ...planning import NOT_QUANTIZED
from ...utils.byte_sizes import size
from ...utils.images import SUFFIXES, save
from ...utils.progress import report_bar
from .. import _common

if TYPE_CHECKING:
    import argparse

    from ...evaluation import Comparison, ComparisonRow
    from ...planning import Quant

HEADER = ("scheme", "weights", "of bf16", "load", "draw", "PSNR", "largest difference")
OUT = Path("sdquant-compare.png")
JOIN = "+"  # between the components of one scheme

_QUANT = (
    f"scheme to compare (repeat); components are joined by {JOIN}, as in -q nf4 -q unet=nf4{JOIN}text_encoder=int8; "
    "auto,size=6GB is a mix (default: those of nf4, int8, qint8 and fp8 that the matrix allows here)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model's flags, those of the image, and the output file."""
    _common.add_request_flags(parser, helps={"quant": _QUANT})
    _common.add_drawing_flags(parser)
    parser.add_argument(
        "--reference", metavar="S", help="scheme that the others are held to (default: the model as found)"
    )
    parser.add_argument(
        "--curve", action="store_true", help="predict quality against bytes for the model, which reads its weights once"
    )
    parser.add_argument(
        "-o", "--out", type=Path, help=f"the picture (default: {OUT}, and none with --json)", metavar="FILE"
    )
    _common.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Draw with each scheme, write the picture, print the table. Nothing is written before all schemes are done."""
    from ...evaluation import compare
    from ...utils.figure import require

    out = args.out if args.out is not None or args.json else OUT
    if out is not None:
        _common.refuse_target(out, SUFFIXES)
        require()
    # The first request has all that is not the scheme, checked.
    mix = {"size": args.size, "quality": args.quality}
    request = _common.request_of(args, quant=None, **dict.fromkeys(mix))
    _common.refuse_auto(request, "all schemes are compared in the same offload mode")
    quants = [one(word) for word in args.quant] if args.quant else compare.allowed_for(request)
    said = next((name for name, value in mix.items() if value is not None), None)
    if said is not None and not args.curve and AUTO not in (args.reference, *quants):
        raise SettingsError(
            f"Cannot use --{said} here", "no scheme is auto, and only that chooses formats by it", "Add -q auto"
        )
    values = {row.name: getattr(request, row.name) for row in dataclasses.fields(request)}
    with report_bar("Comparing", "step", args.progress) as on_progress:
        comparison = compare.compare(
            values.pop("path"),
            quants,
            prompt=args.prompt,
            seed=args.seed,
            steps=args.steps,
            guidance=args.guidance,
            width=args.width,
            height=args.height,
            reference=None if args.reference is None else one(args.reference),
            on_progress=on_progress,
            curve=args.curve,
            **{name: value for name, value in values.items() if name != "quant"} | mix,
        )
    if out is not None:
        save(compare.sheet(comparison), out, optimize=True)
    if args.json:
        _common.print_json({"picture": None if out is None else str(out), **comparison.to_dict()})
    else:
        print(render(comparison), end=f"\n\npicture: {out}\n")
    return 0 if comparison.drawn or len(comparison.rows) == 1 else 1


def one(word: str) -> Quant:
    """Parse one --quant: "nf4", or "unet=nf4+text_encoder=int8"."""
    return _common.quant_of(word.split(JOIN))


def render(comparison: Comparison) -> str:
    """Format the table as text, with the reasons why schemes gave no image."""
    lines = [
        f"{comparison.model}, {comparison.prompt!r}, seed {comparison.seed}, {comparison.steps} steps",
        _common.table(HEADER, [_cells(row) for row in comparison.rows]),
    ]
    if comparison.curve is not None:
        lines.append("\npredicted quality of the outputs, by size")
        lines.append(_common.table(("stored as", "weights", "quality"), comparison.curve.rows()))
    lines += [f"no image: {row.label}: {row.error}" for row in comparison.rows if row.error is not None]
    return "\n".join(lines)


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    name = "not quantized" if row.label == NOT_QUANTIZED else row.label
    weights = size(row.bytes) if row.bytes is not None else "-"
    share = f"{row.bytes / row.bytes_bf16:.2f}" if row.bytes is not None and row.bytes_bf16 else "-"
    if row.error is not None:
        return (name, weights, share, "-", "-", "no image", "")
    far = (
        ("-", "-") if row.psnr is None else ("same", "0") if row.identical else (f"{row.psnr:.1f} dB", f"{row.largest}")
    )
    return (name, weights, share, f"{row.load_seconds:.2f} s", f"{row.draw_seconds:.2f} s", *far)
