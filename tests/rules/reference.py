"""Qwix's formulas in numpy, written from their description and from the formats' own, for single numbers and tiles.

bfloat16 is float32 rounded after each operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


def float32(x: npt.NDArray[np.floating]) -> Array:
    """Rounded to float32."""
    return x.astype(np.float32)


def bfloat16(x: npt.NDArray[np.floating]) -> Array:
    """Rounded to bfloat16, to the nearest, ties to even, kept as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    kept: Array = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
    return kept


ROUNDINGS: dict[str, Callable[[npt.NDArray[np.floating]], Array]] = {"float32": float32, "bfloat16": bfloat16}


def magnitudes(exponent: int, mantissa: int, bias: int, largest: float) -> npt.NDArray[np.float64]:
    """All magnitudes of a small float format, ascending, so that the index is the code without its sign."""
    found = [
        (fraction / 2**mantissa + (power > 0)) * 2.0 ** (max(power, 1) - bias)
        for power in range(2**exponent)
        for fraction in range(2**mantissa)
    ]
    return np.array([one for one in found if one <= largest])


FORMATS = {
    "float8_e4m3fn": magnitudes(4, 3, 7, 448.0),
    "float8_e5m2": magnitudes(5, 2, 15, 57344.0),
    "mxfp8": magnitudes(4, 3, 7, 448.0),
    "mxfp8_16": magnitudes(4, 3, 7, 448.0),
    "mxfp8_ceil": magnitudes(4, 3, 7, 448.0),
    "mxfp4": magnitudes(2, 1, 1, 6.0),
    "mxfp4_ceil": magnitudes(2, 1, 1, 6.0),
    "nvfp4": magnitudes(2, 1, 1, 6.0),
}


def to_format(x: Array, levels: npt.NDArray[np.float64]) -> Array:
    """The nearest value of a float format, ties to the even code, saturated."""
    size = np.minimum(np.abs(x).astype(np.float64), levels[-1])
    above = np.clip(np.searchsorted(levels, size), 1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), x).astype(np.float32)


def bound(qtype: str) -> float:
    """The largest magnitude in units of the scale."""
    if qtype in FORMATS:
        return float(FORMATS[qtype][-1])
    return 1.0 if qtype == "nf4" else 2.0 ** (int(qtype[3:]) - 1) - 0.5 if qtype != "int16" else 32768.0


def bias(qtype: str) -> float:
    """Outlier-aware scaling: what a scale is multiplied by before it becomes the power of two at or below it."""
    return 12 / 7 if qtype == "mxfp4" else 60 / 31


def quantize(
    x: Array, qtype: str, tile: int, dtype: str, method: str = "absmax"
) -> tuple[Array, Array, Array | None, Array]:
    """Rows of x in tiles: values in units of the scale, scales [rows, tiles], zero points, and what they stand for."""
    rounded = ROUNDINGS[dtype]
    name, *words = method.split(",")
    numbers = [rounded(np.array([np.float32(word)]))[0] for word in words]
    values, scales, zeros, back = (np.zeros(x.shape, np.float32), [], [], np.zeros(x.shape, np.float32))
    tiny = rounded(np.sqrt(np.array([np.finfo(np.float32).tiny])))[0]
    for row, start in itertools.product(range(x.shape[0]), range(0, x.shape[1], tile)):
        part = x[row, start : start + tile]
        zero = None
        low, high = limits(part, name, numbers, dtype)
        if name == "minmax" or low != -high:
            bits = int(qtype[3:])
            least, most = -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
            scale = rounded(rounded(np.array([high - low])) / np.float32(most - least))[0]
            scale = np.float32(1) if scale < tiny else scale
            zero = np.clip(np.rint(rounded(np.float32(least) - rounded(np.array([low]) / scale))), least, most)[0]
        else:
            scale = rounded(np.array([high / np.float32(bound(qtype))]))[0]
            scale = np.float32(1) if scale < tiny else scale
            if qtype.startswith("mx") and not qtype.endswith("ceil"):
                biased = rounded(np.array([scale * rounded(np.array([np.float32(bias(qtype))]))[0]]))
                scale = np.float32(2.0 ** np.floor(np.log2(bfloat16(biased)[0].astype(np.float64))))
            elif qtype.startswith("mx"):
                scale = np.float32(2.0 ** np.ceil(rounded(np.array([np.log2(scale)]))[0]))
            elif qtype == "nvfp4":
                scale = to_format(np.array([scale]), FORMATS["float8_e4m3fn"])[0]
        units = rounded(part / scale)
        if zero is not None:
            units = rounded(units + zero)
        made = _codes(units, qtype)
        values[row, start : start + tile] = made
        back[row, start : start + tile] = rounded(rounded(made - (zero if zero is not None else np.float32(0))) * scale)
        scales.append(scale)
        zeros.append(zero)
    count = x.shape[1] // tile
    kept = np.array(zeros, np.float32).reshape(-1, count) if zeros[0] is not None else None
    return values, np.array(scales, np.float32).reshape(-1, count), kept, back


def limits(part: Array, name: str, numbers: list[np.float32], dtype: str) -> tuple[np.float32, np.float32]:
    """The least and the largest number that a tile can hold; the same but for the sign where 0 has the code 0."""
    rounded = ROUNDINGS[dtype]

    def times(value: np.floating, factor: np.float32) -> np.float32:
        return rounded(np.array([np.float32(value) * factor]))[0]

    if name == "fixed":
        return numbers[0], numbers[1]
    if name == "minmax":
        factor = numbers[0] if numbers else np.float32(1)
        return times(min(part.min(), np.float32(0)), factor), times(max(part.max(), np.float32(0)), factor)
    if name == "rms":
        high = times(rounded(np.sqrt(rounded(np.array([np.mean(rounded(part**2))]))))[0], numbers[0])
    else:
        high = times(np.abs(part).max(), numbers[0] if numbers else np.float32(1))
    return -high, high


def _codes(units: Array, qtype: str) -> Array:
    """Values in units of the scale, as the type has them."""
    if qtype == "nf4":
        return NF4[np.abs(NF4[:, None] - units[None]).argmin(0)]
    if qtype in FORMATS:
        return to_format(units, FORMATS[qtype])
    bits = int(qtype[3:])
    return np.clip(np.rint(units), -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1).astype(np.float32)
