"""Say what a load would do, and the bytes of it, before anything is loaded."""

from __future__ import annotations

import argparse

from . import _shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a load."""
    _shared.add_request_flags(parser)
    _shared.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, and print."""
    from ..loader import prepare

    made = prepare(_shared.request_of(args))
    if args.json:
        _shared.print_json(made.to_dict())
        return 0
    rows = []
    for part in made.components:
        done = {"keep": "as it is", "found": f"{part.scheme}, as found"}.get(part.action, f"{part.spec} ({part.mode})")
        rows.append(
            (
                part.name,
                done,
                part.runtime if part.weights else "-",
                str(len(part.weights)),
                _shared.size(part.bytes_bf16),
                _shared.size(part.bytes),
            )
        )
    as_bf16 = sum(part.bytes_bf16 for part in made.components)
    rows.append(("total", "", "", "", _shared.size(as_bf16), _shared.size(made.bytes)))
    print(f"{made.path}: {made.family or 'unknown family'}, offload {made.offload}, device {made.device}")
    print(_shared.table(("component", "quantization", "runtime", "weights", "bf16", "planned"), rows))
    for part in made.components:
        for name, reason in part.kept.items():
            print(f"kept: {part.name}.{name}: {reason}")
    for line in made.warnings:
        print(f"warning: {line}")
    return 0
