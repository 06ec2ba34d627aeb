"""Keys of where results go."""

from __future__ import annotations

from ....errors import SettingsError
from ..value_types import MAXDIFFUSION, Key


def _name(value: str) -> None:
    if value in ("", ".", "..") or any(mark in value for mark in "/\\\0"):
        raise SettingsError(
            f"Cannot use run_name={value!r}", "it must be the name of one folder", 'Use a name such as "first-try"'
        )


def _folder(value: str) -> None:
    if not value:
        raise SettingsError("Cannot use output_dir=''", "results need a folder", 'Use "." for the current folder')


KEYS = (
    Key(
        name="run_name", kind="str", default="run", origin=MAXDIFFUSION, check=_name,
        help="name of the folder in output_dir that results are written to",
    ),
    Key(
        name="output_dir", kind="str", default="sdquant-output", origin=MAXDIFFUSION, check=_folder,
        help="folder of all runs",
    ),
)  # fmt: skip
