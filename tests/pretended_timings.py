"""Times of layers as some machine might have them, in place of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdquant.core import registry
from sdquant.kernels import verdicts
from sdquant.planning.estimate import layer_timings, layer_trials

if TYPE_CHECKING:
    import pytest

    from sdquant.planning.estimate.layer_trials import Size

CALL, MANY = 5e-6, 0.8  # seconds; what BASE takes of the unquantized layer with many rows
EACH = {1: 0.2e-9, 16: 0.5e-9, 64: 0.8e-9, 256: 2.5e-9, 1024: 1e-8}  # seconds of a number, by rows


def both(size: Size, dtype: str, scheme: str, compute: str | None, than: str | None = None) -> Sequence[list[float]]:
    """In place of `layer_trials.both`. Coarser schemes are quicker to decode, and integers are twice as fast."""
    of = registry.parse(scheme).scheme
    if of.name == "svdquant_w4a4":
        raise ValueError("made up: it cannot be timed")
    times = [CALL, *(EACH[rows] for rows in size.rows)]
    if than is not None:
        return [times, [1.2, *(0.8 + of.bits / 40 for _ in size.rows)]]
    ratio = MANY / 2 if compute == "int8" else MANY
    return [times, [0.5, *(ratio for _ in size.rows)]]


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let layers take what `both` says, and nothing be known of before."""
    monkeypatch.setenv("SDQUANT_TUNE", "1")
    monkeypatch.setenv("SDQUANT_SETTINGS", str(folder / "settings.json"))
    monkeypatch.setattr(verdicts, "_new", {})
    monkeypatch.setattr(layer_timings, "_failed", set())
    monkeypatch.setattr(layer_trials, "both", both)
    monkeypatch.setattr(layer_trials, "others", lambda: [3e-6, 1.5e-10])
    verdicts._stored.cache_clear()
