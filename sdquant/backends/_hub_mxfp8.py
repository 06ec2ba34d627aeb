"""MXFP8 of compressed-tensors, ModelOpt and AutoRound in a header. Imports no torch.

A weight X [out, in] has X.weight, E4M3 [out, in], and X.weight_scale, bytes of E8M0 [out, in / 32] in the order of the
weight. ComfyUI's have the same tensors, but scales in tiles, which are of the same shape where 128 divides both sides:
its marker tells them, and what has no marker and no config is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core import PrequantizedWeight, TensorInfo, leaf
from ._comfy_find import LOW_FIRST, TILED
from ._hub_find import DTYPE, float_dtype, untold
from ._nvfp4_find import swizzle_told

_METHODS = ("compressed-tensors", "modelopt", "auto-round", "intel/auto-round")
_BLOCK = 32
_HINTS = ("input_scale", "weight_shape")


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`. `config` may contain "methods", the places that name a method, and the methods.

    Raises:
        UnsupportedFileError: nothing tells the order of the scales.
    """
    declared = config.get("comfy") or {}
    names = [name for name in tensors if is_mxfp8(name, tensors, config) and name not in declared]
    if not names:
        return []
    by = [word.lower() for _, word in config.get("methods", ()) if word.lower() in _METHODS]
    if not by:
        raise untold(
            names[0],
            f"it is float8 with scales of {_BLOCK} in bytes (MXFP8), and nothing tells whether these lie in the order "
            "of the weight (compressed-tensors, ModelOpt) or in tiles (ComfyUI, whose comfy_quant marker it lacks)",
            '{"quant_method": "compressed-tensors"}',
        )
    dtype = float_dtype(tensors, {leaf(name, "weight_scale") for name in names})
    tiled = any(swizzle_told(table) for _, table in config.get("tables", ()))
    order = {TILED: True, LOW_FIRST: True} if tiled else {}
    return [
        PrequantizedWeight(
            name=name, scheme="mxfp8", keys={"codes": name, "scale": leaf(name, "weight_scale")},
            extra=tuple(key for key in (leaf(name, hint) for hint in _HINTS) if key in tensors),
            evidence=f"{by[0]}: 8-bit floats (MXFP8), powers of two as scales of {_BLOCK}{', in tiles' * tiled}",
            details={DTYPE: dtype, **order},
        )
        for name in names
    ]  # fmt: skip


def is_mxfp8(name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> bool:
    """Return whether a tensor is float8 with a byte of scale for each 32 weights of a row.

    Transformers' FP8 may have powers of two as scales of blocks, too, and says so.
    """
    codes, scale = tensors[name], tensors.get(leaf(name, "weight_scale"))
    if name.rpartition(".")[2] != "weight" or codes.dtype != "float8_e4m3fn" or scale is None or len(codes.shape) != 2:
        return False
    rows, columns = codes.shape
    is_fine_grained = any(word.lower() == "fp8" for _, word in config.get("methods", ()))
    is_byte = scale.dtype == "uint8" or (scale.dtype == "float8_e8m0fnu" and not is_fine_grained)
    return is_byte and scale.shape == (rows, math.ceil(columns / _BLOCK))
