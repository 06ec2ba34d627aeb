"""Measured image quality of each scheme, as stars, and layer times on a card. `tools/quality.py` writes the table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("image_quality.json")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a scheme.

    Attributes:
        snr: signal-to-noise ratio, in dB, of its images to those of the unquantized model; None if not measured.
        card: time of a layer on a graphics card relative to the unquantized one; None if not measured.
    """

    snr: float | None = None
    card: float | None = None


@dataclass(frozen=True, kw_only=True)
class Grade:
    """A number of stars: the least SNR for it, in dB, and what images look like."""

    stars: int
    least: float
    text: str


# What the images of bench/results/fidelity.json look like at these SNRs.
GRADES = (
    Grade(stars=5, least=35, text="looks like the original"),
    Grade(stars=4, least=27, text="differs in fine details only"),
    Grade(stars=3, least=16, text="same picture, some details differ"),
    Grade(stars=2, least=10, text="visibly different"),
    Grade(stars=1, least=float("-inf"), text="often wrong"),
)


@cache
def _table() -> Mapping[str, Measured]:
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: Measured(**row) for name, row in rows.items()}


def measured(scheme: str) -> Measured:
    """Return the measurements of a scheme, given by its name and options; of its name alone where those are unknown."""
    table = _table()
    return table.get(scheme) or table.get(scheme.partition(",")[0]) or Measured()


def grade(snr: float) -> Grade:
    """Return the grade of an SNR in dB."""
    return next(row for row in GRADES if snr >= row.least)
