"""The quantized types, one table entry each. Bounds are Qwix's (at aa623acb, core/numerics.py). No torch.

A symmetric integer type reaches from -B to B with B = qmax + 0.5, so that the largest bucket is as wide as the others.
The largest number of a channel is then a tie: it is rounded to even, and saturated.

Scales that are powers of two are chosen as Qwix has chosen them since 901efed: the power of two at or below the scale
times `bias` (arXiv 2603.08713), so that large numbers may saturate and small ones are kept better. The release 0.1.8
took that at or above the scale: its types have names of their own, ending in _ceil. How codes are read is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...errors import SettingsError
from ...utils.suggestions import did_you_mean


@dataclass(frozen=True, kw_only=True)
class QType:
    """A type.

    Attributes:
        name: as rules say it.
        kind: "int", "float", "nf4" or "e2m1".
        bits: of a number.
        storage: name of the torch dtype that its codes have, before they are packed.
        bound: the largest magnitude, in units of the scale, of what is represented.
        asymmetric: whether it can have a zero point.
        tile: the only tile size it is defined for; None if any.
        scale_type: what its scales are rounded to: "" (as computed), "power of two" or "float8_e4m3fn".
        bias: of a scale, before it is rounded down to a power of two; None to round it up as it is.
    """

    name: str
    kind: str
    bits: int
    storage: str
    bound: float
    asymmetric: bool = False
    tile: int | None = None
    scale_type: str = ""
    bias: float | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """Return the least and the largest value of an integer type, or the finite range of a float type."""
        if self.kind == "int":
            return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        return -self.bound, self.bound


def _int(bits: int, storage: str, *, asymmetric: bool = False) -> QType:
    bound = 2.0 ** (bits - 1) - 0.5
    return QType(name=f"int{bits}", kind="int", bits=bits, storage=storage, bound=bound, asymmetric=asymmetric)


_MX8, _MX4 = 60 / 31, 12 / 7


def _mx(name: str, tile: int, bias: float | None) -> QType:
    """Make an MX type: float8 or e2m1 numbers with power-of-two scales."""
    four = name.startswith("mxfp4")
    return QType(
        name=name, kind="e2m1" if four else "float", bits=4 if four else 8,
        storage="uint8" if four else "float8_e4m3fn", bound=6.0 if four else 448.0,
        tile=tile, scale_type="power of two", bias=bias,
    )  # fmt: skip


QTYPES = (
    _int(2, "int8"),
    _int(3, "int8"),
    _int(4, "int8", asymmetric=True),
    _int(5, "int8"),
    _int(6, "int8"),
    _int(7, "int8"),
    _int(8, "int8", asymmetric=True),
    QType(name="int16", kind="int", bits=16, storage="int16", bound=32768.0, asymmetric=True),
    QType(name="float8_e4m3fn", kind="float", bits=8, storage="float8_e4m3fn", bound=448.0),
    QType(name="float8_e5m2", kind="float", bits=8, storage="float8_e5m2", bound=57344.0),
    QType(name="nf4", kind="nf4", bits=4, storage="uint8", bound=1.0),
    _mx("mxfp8", 32, _MX8),
    _mx("mxfp8_16", 16, _MX8),
    _mx("mxfp4", 32, _MX4),
    _mx("mxfp8_ceil", 32, None),
    _mx("mxfp4_ceil", 32, None),
    QType(name="nvfp4", kind="e2m1", bits=4, storage="uint8", bound=6.0, tile=16, scale_type="float8_e4m3fn"),
)


@lru_cache(maxsize=64)
def qtype(name: str) -> QType:
    """Return the type of this name; torch's own names ("torch.int8") work too.

    Raises:
        SettingsError: there is no such type.
    """
    short = str(name).strip().lower().removeprefix("torch.")
    for row in QTYPES:
        if row.name == short:
            return row
    known = [row.name for row in QTYPES]
    raise SettingsError(
        f"Unknown type {name!r}",
        f"the types are {', '.join(known)}",
        did_you_mean(short, known, "Use one of them"),
    )
