"""Say what this machine can run, what is missing, and what helps on this platform."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from .. import _common

if TYPE_CHECKING:
    import argparse

    from ...evaluation import Tuned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json and --tune."""
    _common.add_json_flag(parser)
    parser.add_argument(
        "--tune",
        action="store_true",
        help="measure anew which implementations of 8-bit products are faster here, which takes a minute or two",
    )


def run(args: argparse.Namespace) -> int:
    """Examine, and print. Exit code 1 if no backend can run here."""
    from ...compat import hardware
    from .. import doctor_report

    report = doctor_report.examine(hardware.probe())
    tuned = _tuned() if args.tune else []
    if args.json:
        _common.print_json({**report.to_dict(), **({"tuned": [asdict(row) for row in tuned]} if args.tune else {})})
    else:
        print(report.render(), end="")
        if args.tune:
            print("\nProducts in 8-bit integers, and the faster implementation:\n\n" + _table(tuned), end="")
    return 0 if any(row.schemes for row in report.backends) else 1


def _tuned() -> list[Tuned]:
    import torch

    from ...errors import SettingsError
    from ...evaluation import tune
    from ...kernels import verdicts

    if not verdicts.tunes():
        raise SettingsError(
            "Cannot tune", f"{verdicts.SWITCH}=0 in the environment turns it off", f"Unset {verdicts.SWITCH}"
        )
    return list(tune(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")))


def _table(tuned: list[Tuned]) -> str:
    names = {True: "torch's", False: "sdquant's", None: "sdquant's, the only one"}
    rows = [
        (row.scheme, f"{row.inputs} to {row.outputs}", str(row.rows), f"{row.seconds * 1e3:.2f}", names[row.by_torch])
        for row in tuned
    ]
    return _common.table(("scheme", "layer", "rows", "ms", "faster"), rows, last_left=True)
