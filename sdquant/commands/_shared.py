"""What several commands share: flags made from Request's fields, shipped models by name, sizes as people write them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from .. import demo
from ..errors import MissingComponentError
from ..request import Request, request

_SHORT = {"quant": "-q"}
_NO_FLAG = ("path", "rules", "progress")


def add_request_flags(parser: argparse.ArgumentParser, *, only: tuple[str, ...] | None = None) -> None:
    """The path and a flag for each field of Request, its default, help and choices taken from there."""
    rows = {row.name: row for row in dataclasses.fields(Request)}
    parser.add_argument("path", metavar="MODEL", help=rows["path"].metadata["help"] + ", or digits-sd / digits-flux")
    for name, row in rows.items():
        if name in _NO_FLAG or (only is not None and name not in only):
            continue
        flags = [*filter(None, [_SHORT.get(name)]), "--" + name.replace("_", "-")]
        help, choices = row.metadata["help"], row.metadata["choices"]
        if row.default is False:
            parser.add_argument(*flags, dest=name, action="store_true", help=help)
        elif name in ("quant", "components", "skip"):
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


def request_of(args: argparse.Namespace, **fixed: Any) -> Request:
    """The Request of parsed flags; `fixed` overrides."""
    names = {row.name for row in dataclasses.fields(Request)} - {"path", "rules"}
    values = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    values |= fixed
    if isinstance(values.get("quant"), list):
        values["quant"] = quant_of(values["quant"])
    return request(place(args.path), **values)


def quant_of(words: list[str]) -> str | dict[str, str]:
    """Repeated --quant flags: one scheme, or component=scheme for each."""
    pairs = [word.partition("=") for word in words]
    if len(words) == 1 and ("," in pairs[0][0] or not pairs[0][1]):
        return words[0]
    return {(head if sign and "," not in head else "*"): (tail if sign else head) for head, sign, tail in pairs}


def place(path: str) -> str:
    """The path as given, or the shipped model of that name where no such file exists."""
    if path in demo.MODELS and not Path(path).exists():
        return str(demo.path(path))
    return path


def size(nbytes: float) -> str:
    """Bytes as people read them: "3.8 MB"."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns of text, the first left-aligned, the rest right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(tuple("-" * width for width in widths)), *map(line, rows)])


def shipped(path: str) -> str | None:
    """The name of the shipped model a path is, if it is one."""
    for name in demo.MODELS:
        try:
            if Path(path).resolve() == demo.path(name).resolve():
                return name
        except MissingComponentError:
            continue
    return None
