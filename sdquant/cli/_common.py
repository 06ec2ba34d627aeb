"""Helpers shared by the commands: flags from the fields of Request, bundled models by name, human-readable sizes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..models import bundled_place
from ..planning import AUTO, Request, make_request
from ..utils.arguments import ANSWERS
from ..utils.byte_sizes import size as size
from ..utils.suggestions import nearest

_SHORT = {"quant": "-q"}
_ONE = {"parts": "part"}  # flags that are given once for each
_NO_FLAG = ("path", "progress")


def add_request_flags(
    parser: argparse.ArgumentParser,
    *,
    only: tuple[str, ...] | None = None,
    without: tuple[str, ...] = (),
    helps: Mapping[str, str] | None = None,
) -> None:
    """Add the path and a flag for each field of Request, with that field's default, help and choices.

    Args:
        only: the fields to add as flags; None for all. without: fields to leave out.
        helps: help texts that replace those of Request, by field.
    """
    rows = {row.name: row for row in dataclasses.fields(Request)}
    parser.add_argument("path", metavar="MODEL", help=rows["path"].metadata["help"] + ", or digits-sd / digits-flux")
    for name, row in rows.items():
        if name in (*_NO_FLAG, *without) or (only is not None and name not in only):
            continue
        flags = [*filter(None, [_SHORT.get(name)]), flag(name)]
        help, choices = (helps or {}).get(name, row.metadata["help"]), row.metadata["choices"]
        if row.default is False:
            parser.add_argument(*flags, dest=name, action="store_true", help=help)
        elif name in ("quant", "components", "skip", "parts"):
            parser.add_argument(
                *flags, dest=name, action="append", metavar=row.metadata["metavar"] or "NAME", help=help
            )
        else:
            parser.add_argument(
                *flags,
                dest=name,
                default=row.default,
                choices=choices or None,
                metavar=row.metadata["metavar"],
                help=help,
            )
    if only is None or "progress" in only:
        parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bars")


def add_drawing_flags(parser: argparse.ArgumentParser) -> None:
    """Add the prompt and the image settings."""
    parser.add_argument("prompt", metavar="PROMPT", help="what to draw")
    add_image_flags(parser)


def add_image_flags(parser: argparse.ArgumentParser, seed_of: str = "the noise") -> None:
    """Add the image settings: steps, seed, guidance, size."""
    parser.add_argument("--steps", type=positive, default=20, help="denoising steps (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help=f"of {seed_of} (default: %(default)s)")
    parser.add_argument("--guidance", type=float, help="guidance scale (default: the pipeline's)")
    parser.add_argument("--width", type=positive, help="pixels (default: the model's)")
    parser.add_argument("--height", type=positive, help="pixels (default: the model's)")


def flag(name: str) -> str:
    """Return the flag for a field of Request."""
    return "--" + _ONE.get(name, name).replace("_", "-")


def flags_meant(words: Sequence[str]) -> dict[str, str]:
    """Return the flags of Request that unknown ones probably mean: another loader's name for them, or a typo."""
    flags = {flag(row.name): row.name for row in dataclasses.fields(Request) if row.name not in _NO_FLAG}
    suggestions = {}
    for word in (word.partition("=")[0] for word in words if word.startswith("--")):
        answer = ANSWERS.get(word.lstrip("-").replace("-", "_"))
        same = [name for name, field in flags.items() if answer is not None and field == answer.use]
        near = same[0] if same else nearest(word, flags)
        if near and near != word:
            suggestions[word] = near
    return suggestions


def help_of(name: str) -> str:
    """Return the help text of a field of Request."""
    return str(Request.__dataclass_fields__[name].metadata["help"])


def request_of(args: argparse.Namespace, **fixed: Any) -> Request:
    """Build a Request from parsed flags; `fixed` overrides them."""
    names = {row.name for row in dataclasses.fields(Request)} - {"path"}
    values = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    values |= fixed
    if isinstance(values.get("quant"), list):
        values["quant"] = quant_of(values["quant"])
    if "base" in values:
        values["base"] = bundled_place(values["base"])
    return make_request(bundled_place(args.path), **values)


def refuse_auto(load_request: Request, why: str) -> None:
    """Raise SettingsError if the request leaves the choice of an offload mode to sdquant."""
    if load_request.offload == AUTO:
        raise SettingsError("Cannot use offload='auto' here", why, "Name an offload mode, or omit it")


def quant_of(words: list[str]) -> str | dict[str, str]:
    """Parse repeated --quant flags: one scheme ("nf4", "int4,group_size=32"), or component=scheme for each."""
    each: dict[str, str] = {}
    for word in words:
        head, sign, tail = word.partition("=")
        # In "int4,group_size=32" the sign belongs to an option.
        name, scheme = (head.strip(), tail) if sign and "," not in head else ("*", word)
        if name in each:
            raise SettingsError(
                f"Cannot combine --quant {each[name]} and --quant {scheme}",
                "a component has only one scheme" if name == "*" else f"{name} has only one scheme",
                "Use one, or component=scheme for each, such as --quant unet=nf4 --quant text_encoder=int8",
            )
        each[name] = scheme
    return each["*"] if set(each) == {"*"} else each


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def print_json(value: Any) -> None:
    """Print one JSON document to stdout."""
    print(json.dumps(value, indent=2))


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, left: int = 1, last_left: bool = False) -> str:
    """Format columns of text: the first `left` (and the last with `last_left`) left-aligned, the rest right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def cell(text: str, column: int) -> str:
        lefty = column < left or (last_left and column == len(header) - 1)
        return text.ljust(widths[column]) if lefty else text.rjust(widths[column])

    lines = [header, tuple("-" * width for width in widths), *rows]
    return "\n".join("  ".join(cell(text, i) for i, text in enumerate(line)).rstrip() for line in lines)


def positive(text: str) -> int:
    """Parse a whole number above zero, for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def seed(text: str) -> int:
    """Parse a seed that torch accepts, for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**63 - 1")
    return int(text)


def refuse_target(path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raise SettingsError if nothing can be written to `path`: before the work, not after it."""
    what = f"Cannot write {path}"
    if suffixes and path.suffix.lower() not in suffixes:
        raise SettingsError(
            what, f"its extension is not one of {', '.join(suffixes)}", f"Name it {path.with_suffix(suffixes[0])}"
        )
    if suffixes and path.is_dir():
        raise SettingsError(what, "it is a folder", "Choose another path")
    home = next(folder for folder in path.absolute().parents if folder.exists())
    if not home.is_dir() or not os.access(home, os.W_OK):
        raise SettingsError(what, f"{home} is not a folder that you can write to", "Choose another path")
