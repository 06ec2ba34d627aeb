"""SDNQ's codes: the storage of each kind.

Their values: `_sdnq_numbers`. Which kinds there are: every one that sdnq 0.2.8 writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from ._sdnq_bits import Field, fields, words


@dataclass(frozen=True, kw_only=True)
class Code:
    """SDNQ's storage of codes of one kind.

    Attributes:
        sdnq: SDNQ's name of the dtype.
        bits: of a code.
        dtype: torch dtype name of the stored tensor.
        low: number added to a stored code to get its value.
        zero_point: whether each scale comes with a zero point.
        fields: for packed codes, the bits of each of the codes in a unit: see `core.bit_fields`. Empty if a code is
            a tensor element.
        unit: words in a unit.
        exponent, mantissa: bits of a float that torch has no dtype for, below a sign bit if it has no zero point; it
            has no infinities and NaNs. 0 exponent bits: it is no such float.
    """

    sdnq: str
    bits: int
    dtype: str
    low: int = 0
    zero_point: bool = False
    fields: tuple[tuple[Field, ...], ...] = ()
    unit: int = 1
    exponent: int = 0
    mantissa: int = 0


# Floats of torch's own; codes are their own values.
_OF_TORCH = {
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float16": 16, "bfloat16": 16, "float32": 32,
}  # fmt: skip
# SDNQ's short names. Of its floats with and without a sign: the exponent bits, by all bits.
_SHORT = {
    "fp8": "float8_e4m3fn", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp1": "float1_e1m0fnu",
    "int1": "uint1", "bool": "uint1",
}  # fmt: skip
_EXPONENT = {2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3, 9: 4, **dict.fromkeys(range(10, 16), 5)}
_EXPONENT_UNSIGNED = {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3, 8: 4, 9: 4, **dict.fromkeys(range(10, 17), 5)}


@cache
def code_named(name: str) -> Code | None:
    """Return the storage that SDNQ calls `name`; None if there is none."""
    name = _long(name)
    if name in _OF_TORCH:
        return Code(sdnq=name, bits=_OF_TORCH[name], dtype=name)
    whole = re.fullmatch(r"(u?)int(\d+)", name)
    if whole is not None and (int(whole[2]) in range(1 if whole[1] else 2, 17) or whole[2] == "32"):
        bits, unsigned = int(whole[2]), bool(whole[1])
        if bits in (8, 16, 32):
            return Code(sdnq=name, bits=bits, dtype=name, zero_point=unsigned)
        return _packed(name, bits, low=0 if unsigned else -(1 << (bits - 1)), zero_point=unsigned)
    parts = re.fullmatch(r"float(\d+)_e([1-5])m(\d+)fn(u?)(_sdnq)?", name)
    if parts is None or (parts[5] is not None) != (name == "float8_e4m3fn_sdnq"):
        return None
    bits, exponent, mantissa, unsigned = int(parts[1]), int(parts[2]), int(parts[3]), bool(parts[4])
    if bits > 16 or bits != exponent + mantissa + (not unsigned):
        return None
    return _packed(name, bits, zero_point=unsigned, exponent=exponent, mantissa=mantissa)


def _long(name: str) -> str:
    """Return SDNQ's full name of a dtype."""
    short = re.fullmatch(r"(u?)fp(\d+)", name)
    if name in _SHORT or short is None:
        return _SHORT.get(name, name)
    bits, unsigned = int(short[2]), bool(short[1])
    exponent = (_EXPONENT_UNSIGNED if unsigned else _EXPONENT).get(bits)
    if exponent is None:
        return name
    return f"float{bits}_e{exponent}m{bits - exponent - (not unsigned)}fn{short[1]}"


def _packed(
    name: str, bits: int, *, low: int = 0, zero_point: bool, exponent: int = 0, mantissa: int = 0
) -> Code:  # fmt: skip
    if bits in (8, 16):
        return Code(
            sdnq=name, bits=bits, dtype=f"uint{bits}", zero_point=zero_point, exponent=exponent, mantissa=mantissa
        )
    return Code(
        sdnq=name,
        bits=bits,
        dtype="uint8" if bits < 8 else "int16",
        low=low,
        zero_point=zero_point,
        fields=fields(bits),
        unit=words(bits),
        exponent=exponent,
        mantissa=mantissa,
    )


def _known(name: str) -> Code:
    code = code_named(name)
    assert code is not None, name
    return code


CODES = {
    "sdnq-int8": _known("int8"),
    "sdnq-fp8": _known("float8_e4m3fn"),
    "sdnq-int6": _known("int6"),
    "sdnq-int4": _known("int4"),
    "sdnq-uint4": _known("uint4"),
    "sdnq-uint3": _known("uint3"),
}
OF_DTYPE = {code.sdnq: name for name, code in CODES.items()}
