"""Ratios of signals to their errors."""

from __future__ import annotations

import math


def decibels(signal: float, noise: float) -> float:
    """Return the ratio of two powers or energies in dB: 10 log10(signal / noise). It is infinite without noise."""
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio else -math.inf
