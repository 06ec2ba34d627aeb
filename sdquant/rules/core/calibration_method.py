"""Calibration methods as rules write them: "absmax", "minmax", "rms,7", "fixed,-10,10". No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...errors import SettingsError

METHODS = ("absmax", "minmax", "rms", "fixed")


@dataclass(frozen=True)
class CalibrationMethod:
    """A calibration method: its name and its numbers, as in "fixed,-10,10".

    Attributes:
        name: "absmax" (the largest magnitude, times a factor if one is given), "minmax" (least and largest, 0 among
            them), "rms" (the root of the mean square times a factor) or "fixed" (a given range, for the whole tensor).
    """

    name: str
    numbers: tuple[float, ...] = ()

    @property
    def asymmetric(self) -> bool:
        """Return whether its ranges need a zero point."""
        return self.name == "minmax" or (self.name == "fixed" and sum(self.numbers) != 0)


@lru_cache(maxsize=256)
def method(text: str) -> CalibrationMethod:
    """Parse "<method>[,<numbers>]".

    Raises:
        SettingsError: no such method, or numbers that it cannot have.
    """
    name, *words = str(text).strip().lower().split(",")
    what = f"Invalid calibration method {text!r}"
    try:
        numbers = tuple(float(word) for word in words)
    except ValueError as error:
        raise SettingsError(what, "what follows the name is not a number", 'Write it like "absmax,0.9"') from error
    if name not in METHODS:
        raise SettingsError(what, f"the methods are {', '.join(METHODS)}", 'Use one of them, for example "absmax"')
    if name == "rms" and len(numbers) != 1:
        raise SettingsError(
            what, "rms needs one factor, by which the root of the mean square is multiplied", 'Write it like "rms,7"'
        )
    if name in ("absmax", "minmax") and len(numbers) > 1:
        raise SettingsError(what, f"{name} takes at most one factor", f'Write it like "{name},0.9"')
    if name == "fixed":
        numbers = _fixed(what, numbers)
    return CalibrationMethod(name, numbers)


def _fixed(what: str, numbers: tuple[float, ...]) -> tuple[float, float]:
    fix = 'Write it like "fixed,10" or "fixed,-10,10"'
    if len(numbers) not in (1, 2):
        raise SettingsError(what, "fixed needs one or two numbers", fix)
    low, high = (-numbers[0], numbers[0]) if len(numbers) == 1 else numbers
    if low > 0 or high < 0 or low >= high:
        raise SettingsError(what, "the range must contain 0 and not be empty", fix)
    return low, high
