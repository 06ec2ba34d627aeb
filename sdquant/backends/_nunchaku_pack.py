"""Tensors in the order of Nunchaku's kernels, the inverse of `_nunchaku_order`, and layers as `nunchaku_lite` has them.

diffusers' `nunchaku_lite` (0.40 and later) has a module SVDQW4A4Linear for each layer that its config lists. Its sizes
are those of the layer, so that nothing can be padded, and all have the same precision and rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import FACTOR, Packed, dtype_name
from ._comfy_int4 import SIGNS
from ._nunchaku_find import NVFP4, SVDQUANT
from ._nunchaku_order import TILE

if TYPE_CHECKING:
    from collections.abc import Sequence

METHOD = "nunchaku_lite"
_DEPTH = 64
_BRANCH = ("smooth", "down", "up")


def _scattered(rows: Tensor, sizes: Sequence[int], order: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Undo `x.reshape(sizes).permute(order)`: return x, of `shape`."""
    back = [order.index(place) for place in range(len(order))]
    return rows.reshape([sizes[place] for place in order]).permute(back).reshape(*shape)


def pack_codes(rows: Tensor) -> Tensor:
    """Return uint8 [out, in / 2], the even column in the low half of a byte, as qweight: int8 of that shape."""
    height, width = rows.shape
    sizes = (height // TILE, width * 2 // _DEPTH, 8, 8, 4, 2, 2, 4)
    return _scattered(rows, sizes, (0, 2, 5, 3, 1, 6, 4, 7), rows.shape).view(torch.int8)


def pack_vector(values: Tensor) -> Tensor:
    """Return [n] as biases, factors of smoothing and wcscales are stored."""
    return _scattered(values, (len(values) // TILE, 8, 4, 2, 2), (0, 1, 3, 2, 4), values.shape)


def pack_scales(rows: Tensor) -> Tensor:
    """Return scales of 64 inputs, [out, in / 64], as wscales: [in / 64, out]."""
    height, groups = rows.shape
    return _scattered(rows, (height // TILE, groups, 8, 4, 2, 2), (0, 2, 4, 3, 5, 1), (groups, height))


def pack_small_scales(rows: Tensor) -> Tensor:
    """Return scales of 16 inputs, float8 [out, in / 16], as wscales: [in / 16, out]."""
    height, groups = rows.shape
    sizes = (height // TILE, groups // 4, 8, 4, 4, 4)
    return _scattered(rows.view(torch.uint8), sizes, (0, 4, 3, 2, 1, 5), (groups, height)).view(rows.dtype)


def pack_down(rows: Tensor) -> Tensor:
    """Return the lower factor [in, rank] as proj_down, of that shape."""
    sizes = (rows.shape[0] // 16, rows.shape[1] // 16, 8, 4, 2, 2, 2)
    return _scattered(rows, sizes, (0, 5, 3, 6, 1, 4, 2), rows.shape)


def pack_up(rows: Tensor) -> Tensor:
    """Return the upper factor [out, rank] as proj_up, of that shape."""
    sizes = (rows.shape[0] // 16, rows.shape[1] // 16, 8, 4, 2, 2, 2)
    return _scattered(rows, sizes, (0, 4, 2, 1, 5, 3, 6), rows.shape)


def lite(path: str, packed: Packed, bias: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of the layer at `path`, by their keys. The bias is [out], in any dtype."""
    parts = packed.parts
    floats = parts["smooth"].dtype
    tensors = {
        "smooth_factor": pack_vector(parts["smooth"]), "proj_down": pack_down(parts["down"]),
        "proj_up": pack_up(parts["up"]),
    }  # fmt: skip
    if packed.spec.scheme.name == NVFP4:
        rows = parts["rows"] if "rows" in parts else torch.ones(packed.spec.shape[0], dtype=floats)
        tensors |= {
            "qweight": pack_codes(parts["codes"]), "wscales": pack_small_scales(parts["scale"]),
            "wcscales": pack_vector(rows), "wtscale": torch.tensor([packed.spec.details[FACTOR]], dtype=floats),
        }  # fmt: skip
    else:
        tensors |= {"qweight": pack_codes(parts["codes"] ^ SIGNS), "wscales": pack_scales(parts["scale"])}
    if bias is not None:
        tensors["bias"] = pack_vector(bias.to(floats))
    return {f"{path}.{name}": tensor.contiguous() for name, tensor in tensors.items()}


def lite_config(weights: Mapping[str, Packed]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the `quantization_config` of as many of these weights as one can describe, by name, and their names: those
    of the most common precision, rank and dtype. ({}, nothing) if there are none."""
    kinds = {name: kind for name, packed in weights.items() if (kind := _kind(packed)) is not None}
    if not kinds:
        return {}, frozenset()
    most = Counter(kinds.values()).most_common(1)[0][0]
    names = frozenset(name for name, kind in kinds.items() if kind == most)
    scheme, rank, dtype = most
    targets = sorted(name.removesuffix(".weight") for name in names)
    precision, group = ("nvfp4", 16) if scheme == NVFP4 else ("int4", 64)
    layers = {"precision": precision, "group_size": group, "rank": rank, "targets": targets}
    return {"quant_method": METHOD, "compute_dtype": dtype, "svdq_w4a4": layers}, names


def _kind(packed: Packed) -> tuple[str, int, str] | None:
    """Return the scheme, the rank and the dtype of floats of a weight; None if no layer of nunchaku_lite is so."""
    parts, shape = packed.parts, packed.spec.shape
    if packed.spec.scheme.name not in SVDQUANT or len(shape) != 2 or any(size % TILE for size in shape):
        return None
    floats = [part for name, part in parts.items() if name in (*_BRANCH, "rows")]
    is_nvfp4 = packed.spec.scheme.name == NVFP4
    dtype, rank = parts["smooth"].dtype, parts["down"].shape[1]
    scale_dtype = torch.float8_e4m3fn if is_nvfp4 else dtype
    if dtype not in (torch.float16, torch.bfloat16) or {part.dtype for part in floats} != {dtype} or rank % 16:
        return None
    if parts["scale"].dtype != scale_dtype or (is_nvfp4 and not _is_exact(packed.spec.details[FACTOR], dtype)):
        return None
    return packed.spec.scheme.name, rank, dtype_name(dtype)


def _is_exact(number: float, dtype: torch.dtype) -> bool:
    return math.isfinite(number) and torch.tensor(number, dtype=dtype).item() == number
