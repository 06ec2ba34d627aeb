"""The scale of a layer's activations that a file has beside a weight, from calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import Packed

INPUT_SCALE = "input_scale"  # key in the details of a packed weight: what codes of 8-bit floats are multiplied by
_LEAST = 2.0**-126  # the least normal number of float32


def input_scale_of(packed: Packed) -> float | None:
    """Return the scale of all activations of a weight's layer; None if each row gets its own."""
    return packed.spec.details.get(INPUT_SCALE)


def usable_scale(value: Any) -> float | None:
    """Return a scale of activations as it stands in a file; None for what says nothing: 1, which tools write that have
    calibrated nothing, and what is no positive number that a float32 can hold and divide by."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value == 1:
        return None
    return float(value) if _LEAST <= value < 1 / _LEAST else None
