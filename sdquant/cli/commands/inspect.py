"""Say what a file or folder holds: container, family, quantization, evidence, types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...formats import type_histogram
from ...models import bundled_place
from .. import _common

if TYPE_CHECKING:
    import argparse

    from ...models import Detected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the path, and flags for how much of the contents to read."""
    parser.add_argument(
        "path",
        metavar="MODEL",
        help="pipeline or component folder, .safetensors or .gguf file, or digits-sd / digits-flux",
    )
    parser.add_argument("--verify", action="store_true", help="read the contents too: sizes, scales, values")
    parser.add_argument("--allow-pickle", action="store_true", help=_common.help_of("allow_pickle"))
    parser.add_argument("--config", metavar="FILE", help=_common.help_of("config"))
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bars")
    _common.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Detect, and print."""
    from ...models import detect

    path = bundled_place(args.path)
    if args.verify:
        from ...loading import verify

        detected = verify(path, progress=args.progress, allow_pickle=args.allow_pickle, config=args.config)
    else:
        detected = detect(path, allow_pickle=args.allow_pickle, config=args.config)
    if args.json:
        _common.print_json(detected.to_dict() | {"verified": args.verify})
        return 0
    print(detected.path)
    for name, value in _facts(detected).items():
        print(f"  {name + ':':14} {value}")
    if detected.parts:
        rows = [
            (name, part.family or "unknown", _quant(part), _common.size(part.bytes), str(part.tensors), _types(part))
            for name, part in detected.parts.items()
        ]
        header = ("component", "family", "quantization", "weights", "tensors", "types")
        print("\n" + _common.table(header, rows, left=3, last_left=True))
    _print_types(detected)
    print("\nevidence")
    for name, part in (detected.parts or {"": detected}).items():
        for line in part.evidence:
            print(f"  {name + ': ' if name else ''}{line}")
    for line in detected.warnings:
        print(f"\nwarning: {line}")
    if args.verify:
        print("\nverified: every tensor was read and is sound")
    return 0


def _facts(one: Detected) -> dict[str, str]:
    rows = {"container": one.container, "family": one.family or "unknown"}
    if not one.parts:
        rows["component"] = one.component or "unknown"
    rows |= {"quantization": _quant(one), "weights": f"{_common.size(one.bytes)} in {one.tensors} tensors"}
    return rows


def _print_types(detected: Detected) -> None:
    rows = [
        (row.type, str(row.tensors), f"{row.weights:,}", _common.size(row.bytes), f"{row.bits_per_weight:.2f}")
        for row in detected.histogram
    ]
    print("\n" + _common.table(("type", "tensors", "numbers", "size", "bits each"), rows, left=1))
    if not detected.prequantized:
        return
    for name, part in (detected.parts or {"": detected}).items():
        names = part.high_precision
        more = f" and {len(names) - type_histogram.SHOWN} more" if len(names) > type_histogram.SHOWN else ""
        if names:
            print(f"\n{name + ': ' if name else ''}not quantized: {', '.join(names[: type_histogram.SHOWN])}{more}")


def _quant(one: Detected) -> str:
    return f"{one.quant} ({one.backend})" if one.quant else "none"


def _types(one: Detected) -> str:
    """Format dtypes as "bfloat16 x286, uint8 x80", the most frequent first."""
    return ", ".join(f"{name} x{count}" for name, count in sorted(one.types.items(), key=lambda kv: -kv[1]))
