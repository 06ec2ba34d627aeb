"""Print the compatibility matrix: every scheme, mode, offload and runtime, with its verdict."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .. import _common

if TYPE_CHECKING:
    import argparse

VERDICTS = ("works", "slow", "untested", "breaks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the filters."""
    parser.add_argument("--device", help="device kind: cuda, rocm, xpu, mps, cpu, directml (default: this machine's)")
    parser.add_argument("--scheme", help="only this scheme")
    parser.add_argument("--verdict", choices=VERDICTS, help="only cells with this verdict")
    _common.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Look every cell up, and print."""
    from ... import compat
    from ...compat import OFFLOADS, hardware
    from ...core import registry

    device = args.device or hardware.device_kind(hardware.default_device(hardware.probe()))
    scheme = registry.scheme(args.scheme).name if args.scheme else None
    cells = [
        cell
        for cell in compat.matrix(device=device)
        if (scheme is None or cell.scheme == scheme) and (args.verdict is None or cell.verdict == args.verdict)
    ]
    if args.json:
        _common.print_json([cell.to_dict() for cell in cells])
        return 0
    lines: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for cell in cells:
        lines[cell.scheme, cell.mode, cell.runtime][cell.offload] = cell.verdict
    rows = [(*key, *(verdicts.get(name, "") for name in OFFLOADS)) for key, verdicts in lines.items()]
    print(f"device: {device}\n")
    print(_common.table(("scheme", "mode", "runtime", *OFFLOADS), rows, left=3))
    reasons = {(cell.why.rstrip("."), cell.fix.rstrip(".")) for cell in cells if cell.verdict == "breaks"}
    if reasons:
        print("\nwhat breaks, and why")
    for why, fix in sorted(reasons):
        print(f"  {why}.\n    {fix}.")
    return 0
