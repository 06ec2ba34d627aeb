"""Show every scheme for a model: its size, whether it fits and how, quality, speed, or why it cannot be used."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ...core import NO_OFFLOAD
from ...offload import mode_named
from ...planning import CHOSEN, GROUPS, NOT_QUANTIZED, SORTS
from ...utils.byte_sizes import budget_text
from .. import _common
from .._command_words import in_command_words as said

if TYPE_CHECKING:
    import argparse

    from ...compat import Machine
    from ...planning import SchemeRow, SchemeTable

# Flags of a load that change the table. Schemes and offload modes are what it is about.
_FLAGS = (
    "base", "parts", "runtime", "compute", "device", "dtype", "budget", "allow_pickle", "variant", "revision",
    "subfolder", "token",
)  # fmt: skip
_OF_CALL = ("base", "parts", "variant", "revision", "subfolder", "token")
_WIDTH = 110
_NEAR = 0.04  # of the original's time: no difference that anybody notices
_HEAD = ("scheme", "size", "fits", "quality", "time", "what it is")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the memory that it is to fit, and the order."""
    _common.add_request_flags(parser, only=_FLAGS)
    parser.add_argument("--memory", metavar="8GB", help="free memory of the device (default: what this machine's has)")
    parser.add_argument("--for", dest="role", choices=CHOSEN, help="only for this part (default: model, text_encoder)")
    parser.add_argument("--sort", choices=tuple(SORTS), help="order in each group (default: by library)")
    _common.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Make the table, and print."""
    from ...compat import hardware
    from ...planning import AUTO, Settings, scheme_table

    request = _common.request_of(args)
    call = {name: getattr(request, name) for name in _OF_CALL}
    settings = Settings(
        {name: getattr(request, name) for name in _FLAGS if name not in _OF_CALL} | {"offload": AUTO}
    )  # fmt: skip
    table = scheme_table(
        request.path, settings, _machine(args.memory, request.device, hardware.probe()),
        roles=(args.role,) if args.role else CHOSEN, progress=False, **call,
    )  # fmt: skip
    rows = sorted(table.rows, key=SORTS[args.sort][1]) if args.sort else list(table.rows)
    if args.json:
        _common.print_json(_document(args.path, table, rows))
        return 0
    print("\n".join(_lines(args, table, rows)))
    return 0


def _machine(memory: str | None, device: str | None, here: Machine) -> Machine:
    """Return the machine, with as much memory free on the device as the flag says."""
    from ...compat import hardware
    from ...utils.byte_sizes import parse_size

    if memory is None:
        return here
    free, name = parse_size(memory, "--memory"), here.device(device or hardware.default_device(here)).torch_name
    devices = tuple(
        dataclasses.replace(one, memory_free=free) if one.torch_name == name else one for one in here.devices
    )
    return dataclasses.replace(here, devices=devices)


def _lines(args: argparse.Namespace, table: SchemeTable, rows: list[SchemeRow]) -> Iterator[str]:
    room = "" if table.room is None else f"; room for {_common.size(table.room)} of weights on {table.device}"
    yield f"{args.path}: {_common.size(table.bytes)} as it is{room}\n"
    usable = [row for row in rows if not row.refused]
    cells: list[tuple[str, ...]] = []
    for group in GROUPS:
        members = [_cells(row, table) for row in usable if row.group == group.name]
        if members:
            cells += [(group.title, *("",) * (len(_HEAD) - 1)), *members]
    yield _common.table(_HEAD, cells, last_left=True)
    yield from _refusals(row for row in rows if row.refused)
    least = min((row for row in usable if row.bytes is not None), key=lambda row: row.bytes or 0)
    if table.room is not None and not any(row.offload for row in usable):
        yield f"\nNone of them fits; the smallest, {least.scheme}, is still {_common.size(least.bytes or 0)}."
    yield "\nrecommended"
    for row in table.recommended:
        yield f"  {row.scheme}: {' and '.join(text.lower() for text in row.praise)}"
        yield f"    {_command(args, row, table.room)}"
    yield "\nquality: stars of 5, of the pictures of the small models. time: of a step, the original's is 1."
    if any(row.moved for row in usable):
        yield "a step: what is copied to the device in every step, which takes time."


def _cells(row: SchemeRow, table: SchemeTable) -> tuple[str, ...]:
    share = f" ({row.bytes / table.bytes:.0%})" if row.bytes is not None and table.bytes else ""
    stars = "*****" if row.scheme == NOT_QUANTIZED else "*" * row.grade.stars if row.grade else "not measured"
    name = "original" if row.scheme == NOT_QUANTIZED else row.scheme
    return f"  {name}", f"{_common.size(row.bytes or 0)}{share}", _fit(row), stars, _time(row), row.summary


def _fit(row: SchemeRow) -> str:
    if not row.fit:
        return "unknown"
    if row.offload in ("", NO_OFFLOAD):
        return "yes" if row.offload else "no"
    return f"{row.offload} offload" + (f", {_common.size(row.moved)} a step" if row.moved else "")


def _time(row: SchemeRow) -> str:
    if row.speed is None:
        return "not measured"
    return "1" if abs(row.speed - 1) <= _NEAR else f"{row.speed:.2g}"


def _refusals(rows: Iterable[SchemeRow]) -> Iterator[str]:
    """Yield each reason once, with the schemes that it refuses."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        reasons.setdefault((said(row.why).rstrip("."), said(row.fix).rstrip(".")), []).append(row.scheme)
    if reasons:
        yield "\nnot for this model on this machine"
    for (why, fix), names in reasons.items():
        yield textwrap.fill(", ".join(names), _WIDTH, initial_indent="  ", subsequent_indent="  ")
        yield f"    why: {why}" + (f"\n    fix: {fix}" if fix else "")


def _command(args: argparse.Namespace, row: SchemeRow, room: int | None) -> str:
    """Return what to type to draw with a scheme."""
    words = ["sdquant generate", args.path, '"a prompt"']
    if row.scheme != NOT_QUANTIZED:
        words.append(f"--quant {row.scheme}")
    if row.offload not in ("", NO_OFFLOAD):
        words.append(f"--offload {row.offload}")
        if room is not None and (args.memory or args.budget) and mode_named(row.offload).takes_budget:
            words.append(f"--budget {budget_text(room)}")
    words += [f"--base {args.base}"] if args.base else []
    return " ".join(words + [f"--part {part}" for part in args.parts or ()])


def _document(path: str, table: SchemeTable, rows: Iterable[SchemeRow]) -> dict[str, Any]:
    return {
        "path": path, "device": table.device, "bytes": table.bytes, "room": table.room,
        "rows": [
            {
                "scheme": row.scheme, "group": row.group, "summary": row.summary, "bits": row.bits, "bytes": row.bytes,
                "fits": row.fit != "no" if row.fit else None, "offload": row.offload or None, "moved": row.moved,
                "stars": row.grade.stars if row.grade else None, "snr": row.measured.snr, "speed": row.speed,
                "verdict": row.verdict, "why": row.why or None, "fix": row.fix or None, "recommended": list(row.praise),
            }
            for row in rows
        ],
    }  # fmt: skip
