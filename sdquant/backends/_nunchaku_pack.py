"""Tensors in the order of Nunchaku's kernels, the inverse of `_nunchaku_order`, and layers as `nunchaku_lite` has them.

diffusers' `nunchaku_lite` (0.40 and later) has a module SVDQW4A4Linear for each layer that its config lists. Its sizes
are those of the layer, so that nothing can be padded, and all have the same precision and rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import FACTOR, Packed, dtype_name, dtype_named
from ._comfy_int4 import SIGNS
from ._nunchaku_find import NVFP4, SVDQUANT
from ._nunchaku_order import TILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DEPTH = 64
_BRANCH = ("smooth", "down", "up")
_FLOATS = (torch.float16, torch.bfloat16)


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


def pack_awq_codes(rows: Tensor) -> Tensor:
    """Return uint8 [out, in / 2], the even column in the low half of a byte, as AWQ's qweight: int32 [out / 4,
    in / 2]."""
    height, width = rows.shape[0], rows.shape[1] * 2
    nibbles = torch.stack((rows & 15, rows >> 4), dim=-1).view(height, width)
    sizes = (height // 4, width // _DEPTH, 4, 2, 8, 2, 2)  # [.., row, half, word, byte, nibble]
    apart = _scattered(nibbles, sizes, (0, 2, 1, 3, 5, 6, 4), sizes)
    return (apart[..., 0] | apart[..., 1] << 4).reshape(height // 4, width * 2).view(torch.int32)


@dataclass(frozen=True, kw_only=True)
class LiteKind:
    """What the layers of a model have in common. precision, group, rank: as in the config. dtype: of its floats, in
    which it computes, by name."""

    precision: str
    group: int
    rank: int
    dtype: str


def lite(packed: Packed, dtype: str, bias: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of a layer, by the last words of their keys.

    Args:
        dtype: of its floats. bias: [out], in any dtype.
    """
    parts, floats = dict(packed.parts), dtype_named(dtype)
    is_nvfp4 = packed.spec.scheme.name == NVFP4
    if is_nvfp4:
        parts.setdefault("rows", torch.ones(packed.spec.shape[0], dtype=floats, device=packed.device))
    cast = {name: part if name == "codes" or (is_nvfp4 and name == "scale") else part.to(floats)
            for name, part in parts.items()}  # fmt: skip
    tensors = svdquant_tiles(cast, is_nvfp4=is_nvfp4)
    if is_nvfp4:
        tensors["wtscale"] = torch.tensor([packed.spec.details[FACTOR]], dtype=floats, device=packed.device)
    if bias is not None:
        tensors["bias"] = pack_vector(bias.to(floats)).contiguous()
    return tensors


def svdquant_tiles(parts: Mapping[str, Tensor], *, is_nvfp4: bool) -> dict[str, Tensor]:
    """Return the parts of an SVDQuant weight in the kernels' order, by the names of nunchaku_lite."""
    tensors = {
        "qweight": pack_codes(parts["codes"] if is_nvfp4 else parts["codes"] ^ SIGNS),
        "wscales": (pack_small_scales if is_nvfp4 else pack_scales)(parts["scale"]),
        "smooth_factor": pack_vector(parts["smooth"]),
        "proj_down": pack_down(parts["down"]),
        "proj_up": pack_up(parts["up"]),
        **({"wcscales": pack_vector(parts["rows"])} if "rows" in parts else {}),
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def lite_kind(packed: Packed, computing: str) -> LiteKind | None:
    """Return what a layer is of as nunchaku_lite has it; None if it has no such layers.

    Args:
        computing: the dtype that the layer computes in, by name, which its floats become: the kernels take no other.
            (They have only those of 16 bits. A layer that computes in float32 keeps its own.)
    """
    parts, shape = packed.parts, packed.spec.shape
    if packed.spec.scheme.name not in SVDQUANT or len(shape) != 2 or any(size % TILE for size in shape):
        return None
    is_nvfp4, rank = packed.spec.scheme.name == NVFP4, parts["down"].shape[1]
    small = (torch.float8_e4m3fn,) if is_nvfp4 else _FLOATS
    dtype = dtype_named(computing) if dtype_named(computing) in _FLOATS else parts["smooth"].dtype
    if rank % 16 or dtype not in _FLOATS or parts["scale"].dtype not in small:
        return None
    if is_nvfp4 and not _is_exact(packed.spec.details[FACTOR], dtype):
        return None
    cast = [*_BRANCH, *(() if is_nvfp4 else ("scale",)), *(("rows",) if "rows" in parts else ())]
    if not all(_survives(parts[name], dtype, each=name not in ("down", "up")) for name in cast):
        return None
    precision, group = ("nvfp4", 16) if is_nvfp4 else ("int4", shape[1] // parts["scale"].shape[1])
    return LiteKind(precision=precision, group=group, rank=rank, dtype=dtype_name(dtype)) if group in (16, 64) else None


def _survives(values: Tensor, dtype: torch.dtype, *, each: bool) -> bool:
    """Return whether values in `dtype` are as exact as in bfloat16.

    Args:
        each: every one; else their differences together, as in a sum of products.
    """
    if values.dtype == dtype:
        return True
    rounded, values = values.to(dtype).float(), values.float()
    errors, limits = (rounded - values).abs(), values.abs() * (torch.finfo(torch.bfloat16).eps / 2)
    return bool((errors <= limits).all()) if each else bool(errors.norm() <= limits.norm())


def _is_exact(number: float, dtype: torch.dtype) -> bool:
    return math.isfinite(number) and torch.tensor(number, dtype=dtype, device="cpu").item() == number
