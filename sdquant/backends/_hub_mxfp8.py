"""MXFP8 of compressed-tensors, ModelOpt, AutoRound and transformers in a header. Imports no torch.

A weight X [out, in] has X.weight, E4M3 [out, in], and X.weight_scale, bytes of E8M0 [out, in / 32] in the order of the
weight. ComfyUI's have the same tensors, but scales in tiles, which are of the same shape where 128 divides both sides:
its marker tells them, and what has no marker and no config is refused. transformers' fine-grained FP8 (since 5.24 also
as "mxfp8") calls the scales X.weight_scale_inv, as nobody else does, with blocks of [1, 32] and scale_fmt "ue8m0".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core import PrequantizedWeight, TensorInfo, leaf
from ._comfy_find import LOW_FIRST, TILED
from ._hub_find import DTYPE, float_dtype, untold
from ._nvfp4_find import swizzle_told

_METHODS = ("compressed-tensors", "modelopt", "auto-round", "intel/auto-round", "mxfp8")
_SCALE, _OF_TRANSFORMERS = "weight_scale", "weight_scale_inv"
_BLOCK = 32
_BYTES = ("uint8", "float8_e8m0fnu")
_HINTS = ("input_scale", "weight_shape", "activation_scale")


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`. `config` may contain "methods", the places that name a method, and the methods.

    Raises:
        UnsupportedFileError: nothing tells the order of the scales.
    """
    declared = config.get("comfy") or {}
    scales = {name: scale_of(name, tensors, config) for name in tensors if name not in declared}
    weights = {name: scale for name, scale in scales.items() if scale is not None}
    by = next((word.lower() for _, word in config.get("methods", ()) if word.lower() in _METHODS), None)
    for name, scale in weights.items():
        if by is None and scale == leaf(name, _SCALE):
            raise untold(
                name,
                f"it is float8 with scales of {_BLOCK} in bytes (MXFP8), and nothing tells whether these lie in the "
                "order of the weight (compressed-tensors, ModelOpt) or in tiles (ComfyUI, whose comfy_quant marker it "
                "lacks)",
                '{"quant_method": "compressed-tensors"}',
            )
    dtype = float_dtype(tensors, set(weights.values()))
    tiled = any(swizzle_told(table) for _, table in config.get("tables", ()))
    order = {TILED: True, LOW_FIRST: True} if tiled else {}
    return [
        PrequantizedWeight(
            name=name, scheme="mxfp8", keys={"codes": name, "scale": scale},
            extra=tuple(key for key in (leaf(name, hint) for hint in _HINTS) if key in tensors),
            evidence=f"{by or 'transformers'}: 8-bit floats (MXFP8), powers of two as scales of {_BLOCK}"
            f"{', in tiles' * tiled}",
            details={DTYPE: dtype, **order},
        )
        for name, scale in weights.items()
    ]  # fmt: skip


def scale_of(name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> str | None:
    """Return the key of the scales beside a float8 weight that has a byte for each 32 of a row; None if it has none.

    Transformers' FP8 may have powers of two as X.weight_scale of other blocks, too, and says so.
    """
    codes = tensors[name]
    if name.rpartition(".")[2] != "weight" or codes.dtype != "float8_e4m3fn" or len(codes.shape) != 2:
        return None
    rows, columns = codes.shape
    is_fine_grained = any(word.lower() == "fp8" for _, word in config.get("methods", ()))
    for last, dtypes in ((_SCALE, _BYTES[: 1 if is_fine_grained else 2]), (_OF_TRANSFORMERS, _BYTES)):
        scale = tensors.get(key := leaf(name, last))
        if scale is not None and scale.dtype in dtypes and scale.shape == (rows, math.ceil(columns / _BLOCK)):
            return key
    return None
