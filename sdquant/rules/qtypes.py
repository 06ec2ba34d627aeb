"""The types that numbers are rounded into: a row each. Bounds and rounding are Qwix's (0.1.8, core/numerics.py).

A symmetric integer type reaches from -B to B with B = qmax + 0.5, so that the largest bucket is as wide as the others.
The largest number of a channel is then a tie: it is rounded to even, and saturated.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..backends._bnb_tables import NF4
from ..errors import SettingsError

# The magnitudes of E2M1, of the OCP Microscaling formats 1.0; bit 3 of a code is the sign.
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, kw_only=True)
class QType:
    """A type.

    Attributes:
        name: as rules say it.
        kind: "int", "float", "nf4" or "e2m1".
        bits: of a number.
        storage: what its codes are kept in, before they are packed.
        bound: the largest magnitude, in units of the scale, of what is represented.
        asymmetric: whether it can have a zero point.
        tile: the only tile size it is defined for; None if any.
        scale_type: what its scales are rounded to: "" (as computed), "power of two" or "float8_e4m3fn".
    """

    name: str
    kind: str
    bits: int
    storage: torch.dtype
    bound: float
    asymmetric: bool = False
    tile: int | None = None
    scale_type: str = ""

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest value of an integer type, or the finite range of a float type."""
        if self.kind == "int":
            return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        return -self.bound, self.bound


def _int(bits: int, storage: torch.dtype, *, asymmetric: bool = False) -> QType:
    bound = 2.0 ** (bits - 1) - 0.5
    return QType(name=f"int{bits}", kind="int", bits=bits, storage=storage, bound=bound, asymmetric=asymmetric)


QTYPES = (
    _int(2, torch.int8),
    _int(3, torch.int8),
    _int(4, torch.int8, asymmetric=True),
    _int(5, torch.int8),
    _int(6, torch.int8),
    _int(7, torch.int8),
    _int(8, torch.int8, asymmetric=True),
    QType(name="int16", kind="int", bits=16, storage=torch.int16, bound=32768.0, asymmetric=True),
    QType(name="float8_e4m3fn", kind="float", bits=8, storage=torch.float8_e4m3fn, bound=448.0),
    QType(name="float8_e5m2", kind="float", bits=8, storage=torch.float8_e5m2, bound=57344.0),
    QType(name="nf4", kind="nf4", bits=4, storage=torch.uint8, bound=1.0),
    QType(
        name="mxfp8", kind="float", bits=8, storage=torch.float8_e4m3fn, bound=448.0, tile=32, scale_type="power of two"
    ),
    QType(name="mxfp4", kind="e2m1", bits=4, storage=torch.uint8, bound=6.0, tile=32, scale_type="power of two"),
    QType(name="nvfp4", kind="e2m1", bits=4, storage=torch.uint8, bound=6.0, tile=16, scale_type="float8_e4m3fn"),
)


@lru_cache(maxsize=64)
def qtype(name: str) -> QType:
    """The row of this name; torch's own names ("torch.int8") mean the same.

    Raises:
        SettingsError: there is none.
    """
    short = str(name).strip().lower().removeprefix("torch.")
    for row in QTYPES:
        if row.name == short:
            return row
    near = difflib.get_close_matches(short, [row.name for row in QTYPES], n=1, cutoff=0.5)
    raise SettingsError(
        f"The type {name!r} was asked for",
        f"the types are {', '.join(row.name for row in QTYPES)}",
        f"Did you mean {near[0]!r}?" if near else "Use one of them",
    )


def to_codes(x: Tensor, row: QType, noise: Callable[[torch.Size], Tensor] | None = None) -> Tensor:
    """Numbers in units of the scale, rounded into the type and saturated.

    Args:
        x: any float dtype and shape.
        noise: for stochastic rounding of integers: gives float32 of a shape, which is added before rounding.

    Returns:
        Codes of `row.storage`, shaped like x.
    """
    if row.kind == "nf4":
        return _nearest(x, NF4)
    if row.kind == "e2m1":
        return _to_e2m1(x)
    low, high = row.limits
    if row.kind == "float":
        return x.clamp(low, high).to(row.storage)
    if noise is not None:
        x = x.float() + noise(x.shape)  # in bfloat16 the sum itself would be rounded, and not evenly
    # XLA's cast saturates and takes NaN for 0; torch's would wrap.
    return torch.nan_to_num(torch.round(x).float(), nan=0.0).clamp(low, high).to(row.storage)


def from_codes(codes: Tensor, row: QType, dtype: torch.dtype) -> Tensor:
    """What the codes stand for, in units of the scale, as `dtype`."""
    if row.kind == "nf4":
        return torch.tensor(NF4, dtype=torch.float32, device=codes.device)[codes.long()].to(dtype)
    if row.kind == "e2m1":
        levels = torch.tensor((*E2M1_LEVELS, *(-one for one in E2M1_LEVELS)), dtype=dtype, device=codes.device)
        return levels[codes.long()]
    return codes.to(dtype)


def _nearest(x: Tensor, levels: tuple[float, ...]) -> Tensor:
    """The index of the nearest level, the lower of two that are as near. Distances are float32's."""
    table = torch.tensor(levels, dtype=torch.float32, device=x.device)
    best = (x.float() - table[0]).abs()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for index in range(1, len(levels)):
        distance = (table[index] - x.float()).abs()
        nearer = distance < best
        codes = torch.where(nearer, torch.full_like(codes, index), codes)
        best = torch.where(nearer, distance, best)
    return codes


def _to_e2m1(x: Tensor) -> Tensor:
    """The nearest magnitude, ties to the even code, saturated; a sign bit above it."""
    magnitude = x.float().abs()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for index, (below, above) in enumerate(itertools.pairwise(E2M1_LEVELS)):
        border = (below + above) / 2
        # The upper of the two has an odd index where the lower has an even one: a tie stays below then.
        codes += (magnitude > border if index % 2 == 0 else magnitude >= border).to(torch.uint8)
    return codes | (torch.signbit(x).to(torch.uint8) << 3)
