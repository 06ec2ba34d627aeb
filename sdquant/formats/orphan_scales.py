"""Leftover tensors of quantized weights: the scale of an unquantized weight, codes that nobody reads.

Loaded as an unquantized model, such a file would use codes as weights or leave out a scale, and generate noise.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..core import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..core import TensorInfo

# Keys that only quantized weights have, by the weight's own name or by its module's.
_OF_WEIGHT = re.compile(
    r"(.*[^.])(?:\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)|_format"
    r"|\._(?:data|data\._data|scale|shift)|\.(?:array\.)?(?:qvalue|scale|zero_point)|_(?:qvalue|zero_point))"
)
_OF_MODULE = re.compile(r"(.*\.|)(?:SCB|scale_weight|weight_scale|weight_scale_inv)")
# Those that by their names are about codes, whoever writes them, beside a weight that has none.
_BESIDE = re.compile(
    r"(.*\.|)(?:\w*_quant|qzeros|qscales?|w?scales|w?zeros|zero_points?|g_idx|codebook"
    r"|weight_(?:scale|zero|shift|qtype|quant|codebook|packed)\w*)"
)
CODES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_INDEXES = ("int32", "int64")  # those that models' tables of positions have, too
# What the scales of a parameter are called after it, as those of experts are, and what codes are called after theirs.
_OF_PARAMETER = re.compile(
    r"(.+)[._](?:q?w?scales?(?:_inv|_?\d)?|scaling_factors?|q?w?zeros?|q?zero_points?|absmax|amax|codebook|quant_map)"
)
_PACKED = re.compile(r"(.+)[._](?:packed|blocks|quantized|quant|qdata|data|codes|qweight|q|int\d+|fp\d+)")


def stray_of(plain: Mapping[str, TensorInfo]) -> tuple[str, str] | None:
    """Return the first plain tensor (one of no known quantized weight) whose name is that of a part of a quantized
    weight, and a description of what is there in place of that weight; None if there is no such tensor."""
    for key in sorted(plain):
        weight = _weight_of(key) or _beside(key, plain)
        if weight is not None:
            info = plain.get(weight)
            beside = f"{weight!r} is {info.dtype} {list(info.shape)}" if info is not None else f"there is no {weight!r}"
            return key, beside
    return None


def unread_codes(plain: Mapping[str, TensorInfo]) -> tuple[str, str | None] | None:
    """Return the first plain tensor that consists of codes, and the key of its scales; None if there is none.

    Those are integers of two and more dimensions, but tables of indexes, and integers or float8 with scales beside
    them; the key is None for integers that have none.
    """
    scales = {match[1]: key for key in sorted(plain) if (match := _OF_PARAMETER.fullmatch(key))}
    for key, info in plain.items():
        if info.dtype not in CODES and not info.dtype.startswith("float8"):
            continue
        if _OF_PARAMETER.fullmatch(key):  # of codes, such as the zero points of the ranges that `rules` keeps
            continue
        packed = _PACKED.fullmatch(key)
        scale = scales.get(key) or (scales.get(packed[1]) if packed else None)
        is_matrix = len(info.shape) > 1 and info.dtype in CODES and info.dtype not in _INDEXES
        if scale is not None or is_matrix:
            return key, scale
    return None


def _weight_of(key: str) -> str | None:
    """Return the weight that a key is a part of, by its name alone; None for all others."""
    if match := _OF_WEIGHT.fullmatch(key):
        return match[1] if match[1].rpartition(".")[2] == "weight" else None
    match = _OF_MODULE.fullmatch(key)
    return f"{match[1]}weight" if match else None


def _beside(key: str, plain: Mapping[str, TensorInfo]) -> str | None:
    """Return the unquantized weight in whose module there is a tensor of a quantized one; None for all other keys."""
    match = _BESIDE.fullmatch(key)
    weight = plain.get(f"{match[1]}weight") if match else None
    return f"{match[1]}weight" if match and weight is not None and weight.dtype in FLOATS else None
