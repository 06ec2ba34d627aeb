"""Say what this machine can run, what is missing, and what helps on this platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _common

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    _common.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Examine, and print. Exit code 1 if no backend can run here."""
    from ...compat import hardware
    from .. import doctor_report

    report = doctor_report.examine(hardware.probe())
    if args.json:
        _common.print_json(report.to_dict())
    else:
        print(report.render(), end="")
    return 0 if any(row.schemes for row in report.backends) else 1
