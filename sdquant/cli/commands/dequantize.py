"""Dequantize a model and write its float weights: a .safetensors for a file, a folder for a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...core import COMPUTE_DTYPES
from .. import _common

if TYPE_CHECKING:
    import argparse

    from ...saving import DequantizationReport

_FLAGS = ("progress", "allow_pickle", "variant", "revision", "subfolder", "token")
_AS_STORED = "stored"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the output path, the dtype and the config."""
    _common.add_request_flags(parser, only=_FLAGS)
    parser.add_argument("target", type=Path, metavar="OUT", help="file ending in .safetensors, or a folder")
    parser.add_argument(
        "--dtype",
        choices=(*COMPUTE_DTYPES, _AS_STORED),
        default="float32",
        help="of all floats; stored: what each weight was quantized from (default: %(default)s)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the quantization_config, or the model's config.json, where the model has none: a JSON file, or JSON text",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    _common.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Dequantize, write, say what was written and what it is worth."""
    from ...planning import locate
    from ...saving import dequantize_to, model_files

    _common.refuse_target(args.target)
    model_files.refuse_existing(args.target, args.overwrite)
    result = dequantize_to(
        locate.resolve_references(_common.request_of(args, dtype=None, config=None)), args.target,
        config=args.config, dtype=None if args.dtype == _AS_STORED else args.dtype, overwrite=args.overwrite,
        allow_pickle=args.allow_pickle, variant=args.variant, progress=args.progress,
    )  # fmt: skip
    if args.json:
        _common.print_json(result.to_dict())
    else:
        print("\n".join(_sentences(result)))
    return 0


def _sentences(result: DequantizationReport) -> list[str]:
    dtype = result.dtype or "the dtype that each had"
    lines = [f"{result.path}: {result.tensors} tensors, floats in {dtype}, {_common.size(result.bytes)}"]
    if not result.schemes:
        return [*lines, "Nothing in it was quantized: only the dtype may have changed."]
    each = ", ".join(f"{count} from {scheme}" for scheme, count in sorted(result.schemes.items()))
    rounded = "" if result.dtype == "float32" else f" Rounding them to {dtype} is a further small loss."
    count = sum(result.schemes.values())
    weights = f"{count} weight{'' if count == 1 else 's'}"
    return [
        *lines,
        f"Dequantized {weights} ({each}). They have the values of the quantized weights: "
        f"what quantization lost does not come back.{rounded}",
    ]
