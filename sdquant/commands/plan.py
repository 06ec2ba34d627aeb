"""Say what a load would do, and the bytes of it, before anything is loaded."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import TYPE_CHECKING

from . import _shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..planner import ComponentPlan

NAMED = 2  # weights that are named where many stay as they are; --json names all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a load."""
    _shared.add_request_flags(parser)
    _shared.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, and print."""
    from ..preparation import prepare

    made = prepare(_shared.request_of(args))
    if args.json:
        _shared.print_json(made.to_dict())
        return 0
    as_bf16 = sum(part.bytes_bf16 for part in made.components)
    rows = [_row(part) for part in made.components]
    rows.append(("total", "", "", "", _shared.size(as_bf16), _shared.size(made.bytes), f"{made.bytes / as_bf16:.2f}"))
    print(made.path)
    facts = (made.family or "unknown family", f"offload {made.offload}", f"device {made.device}")
    print(", ".join(facts) + (f", budget {_shared.size(made.budget)}" if made.budget is not None else ""))
    print()
    header = ("component", "quantization", "runtime", "quantized", "as bf16", "planned", "of bf16")
    print(_shared.table(header, rows, left=3))
    kept = [line for part in made.components for line in _kept(part)]
    if kept:
        print("\nstay as they are")
        print("\n".join(kept))
    for line in made.warnings:
        print(f"\nwarning: {line}")
    return 0


def _row(part: ComponentPlan) -> tuple[str, ...]:
    done = {"keep": "as it is", "found": f"{part.scheme}, as found"}.get(part.action, f"{part.spec} ({part.mode})")
    return (
        part.name,
        done,
        (f"{part.runtime}, {part.compute}" if part.compute else part.runtime) if part.weights else "-",
        f"{len(part.weights)} weights" if part.weights else "-",
        _shared.size(part.bytes_bf16),
        _shared.size(part.bytes),
        f"{part.bytes / part.bytes_bf16:.2f}",
    )


def _kept(part: ComponentPlan) -> Iterator[str]:
    """A line for each reason why weights of a component are not quantized."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, reason in part.kept.items():
        groups[reason].append(name)
    for reason, names in groups.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        yield f"  {part.name}: {', '.join(names[:NAMED])}{more}\n    {reason}"
