"""Shapes of quanto's packed weights: groups and parts. Pure arithmetic, no torch.

Facts from optimum-quanto 0.2.7 (nn/qmodule.py, tensor/packed.py, tensor/optimizers), in our own words:

* 8 bits: one code a byte in the weight's shape; one scale per output row, [out, 1, ...], or a scalar for a single row.
* 4 and 2 bits: rows of `group` weights where the input size allows it, else one row per output. Row r of the packed
  bytes holds the rows r, r + R, r + 2R, ... (R packed rows), the first in the low bits. A scale and a shift per row.
* 3 bits is ours (see `_qint3`): `group` weights a row, three bytes for eight of them.
"""

from __future__ import annotations

import math

from ..core import COMPUTE_DTYPES, TensorSpec, Unfit

BITS = {"qint8": 8, "qfloat8": 8, "qint4": 4, "qint3": 3, "qint2": 2}
PACKINGS = {4: "planes4", 3: "threes", 2: "planes2"}  # as `core.packed_layout` names them
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
GROUPS = (128, 96, 64, 32)


def group_of_row(shape: tuple[int, ...]) -> int | None:
    """Return the group size that quanto's modules choose for 4 and 2 bits; None means a scale per output row."""
    row = math.prod(shape[1:])
    if row <= GROUPS[0]:
        return None
    return next((size for size in GROUPS if row % size == 0), None)


def group_of_all(shape: tuple[int, ...], limit: int) -> int:
    """Return the group size for 3 bits: `limit`, or the next smaller one that divides the number of weights.

    Raises:
        Unfit: no group size does.
    """
    count = math.prod(shape)
    for size in GROUPS:
        if size <= limit and count % size == 0:
            return size
    raise Unfit(
        f"{count} weights cannot be split into groups of {limit} or fewer (3 bits need a multiple of {GROUPS[-1]})"
    )


def check(scheme: str, shape: tuple[int, ...], dtype: str) -> None:
    """Raise Unfit if quanto's schemes cannot hold such a weight, or would save nothing."""
    if dtype not in COMPUTE_DTYPES:
        raise Unfit(f"quanto can only quantize {', '.join(COMPUTE_DTYPES)}, not {dtype}")
    if len(shape) < 2 or not math.prod(shape):
        raise Unfit(f"quanto can only quantize non-empty weights of two dimensions or more, not {list(shape)}")
    if scheme in ("qint4", "qint2") and shape[0] == 1 and group_of_row(shape) is None:
        raise Unfit(
            "for a single row without groups, quanto stores a scale and a shift per weight, which saves nothing"
        )


def parts_of(
    scheme: str, shape: tuple[int, ...], dtype: str, group: int | None = None, float8: str = FLOAT8[0]
) -> dict[str, TensorSpec]:
    """Return the parts of a weight of this shape whose scales have `dtype`."""
    bits = BITS[scheme]
    if bits == 8:
        scale = () if shape[0] == 1 else _per_row(shape)
        data = TensorSpec(dtype="int8" if scheme == "qint8" else float8, shape=shape)
        return {"data": data, "scale": TensorSpec(dtype=dtype, shape=scale)}
    packed: tuple[int, ...]
    rows = shape if group is None else (math.prod(shape) // group, group)
    if bits == 3:
        packed, scale = (rows[0], rows[1] * 3 // 8), (rows[0], 1)
    else:
        packed, scale = (-(-rows[0] * bits // 8), *rows[1:]), _per_row(rows)
        if rows[0] == 1:  # quanto then takes the minimum over all dimensions but the last
            scale = (*(1 for _ in rows[1:]), rows[-1])
    floats = TensorSpec(dtype=dtype, shape=scale)
    return {"data": TensorSpec(dtype="uint8", shape=packed), "scale": floats, "shift": floats}


def _per_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *(1 for _ in shape[1:]))
