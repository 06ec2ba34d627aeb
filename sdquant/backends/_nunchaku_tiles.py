"""Weights whose parts are those of diffusers' layers for Nunchaku's kernels, in the order of these kernels.

A layer that they multiply (`_nunchaku_library`) holds its weight so, for it takes too long to order it for each product
and too much memory to hold it twice. It moves, is copied and is saved as any other, and becomes the parts that files
have (`natural`) where something else is to be done with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import Packed, dtype_name
from . import _nunchaku_order as order
from . import _nunchaku_pack as pack
from ._comfy_int4 import SIGNS
from ._nunchaku_find import GROUP_SIZE, NVFP4, SVDQUANT
from ._nunchaku_kernels import CODES

if TYPE_CHECKING:
    from collections.abc import Mapping

AWQ = "awq_w4a16"
_AWQ_GROUP = 64  # of the kernels
_ZERO = 8  # taken off the codes of comfy-kitchen's AWQ, and not of Nunchaku's


def is_tiled(packed: Packed) -> bool:
    """Return whether the weight is as `tiled` returns it."""
    return CODES in packed.parts


def tiled(packed: Packed) -> Packed:
    """Return the weight in the kernels' order; the same number of bytes."""
    if is_tiled(packed):
        return packed
    parts, name = packed.parts, packed.spec.scheme.name
    tiles = _awq_tiles(parts) if name == AWQ else pack.svdquant_tiles(parts, is_nvfp4=name == NVFP4)
    return Packed(spec=packed.spec, parts=tiles)


def natural(packed: Packed) -> Packed:
    """Return the weight with the parts that files have: the inverse of `tiled`, bit for bit."""
    if not is_tiled(packed):
        return packed
    parts, name = packed.parts, packed.spec.scheme.name
    if name == AWQ:
        return Packed(spec=packed.spec, parts=_awq_rows(parts))
    is_nvfp4 = name == NVFP4
    codes = order.codes(parts[CODES])
    rows = {
        "codes": codes if is_nvfp4 else codes ^ SIGNS,
        "scale": (order.small_scales if is_nvfp4 else order.scales)(parts["wscales"]),
        "smooth": order.vector(parts["smooth_factor"]),
        "down": order.down(parts["proj_down"]),
        "up": order.up(parts["proj_up"]),
        **({"rows": order.vector(parts["wcscales"])} if "wcscales" in parts else {}),
    }
    return Packed(spec=packed.spec, parts={name: part.contiguous() for name, part in rows.items()})


def can_tile(packed: Packed, dtype: torch.dtype) -> bool:
    """Return whether the kernels multiply activations of `dtype` by such a weight: whole tiles, ranks of 16s, groups
    of 64 or 16, and factors that have enough room in `dtype`, which the kernels have all of them in."""
    name = packed.spec.scheme.name
    if name in SVDQUANT and "down" in packed.parts:
        kind = pack.lite_kind(packed, dtype_name(dtype))
        return kind is not None and kind.group == (16 if name == NVFP4 else 64) and kind.dtype == dtype_name(dtype)
    return name == AWQ and _fits_awq(packed, dtype)


def _fits_awq(packed: Packed, dtype: torch.dtype) -> bool:
    (rows, columns), parts = packed.spec.shape, packed.parts
    if packed.spec.details.get(GROUP_SIZE) != _AWQ_GROUP or rows % order.TILE or columns % _AWQ_GROUP:
        return False
    if not (parts["scale"].dtype == dtype and dtype in (torch.float16, torch.bfloat16)):
        return False
    zero, scale = parts["zero"], parts["scale"]
    rounded = _without_eight(zero, scale).to(dtype)
    return torch.equal(_with_eight(rounded, scale).to(zero.dtype), zero)


def _awq_tiles(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    zero, scale = parts["zero"], parts["scale"]
    return {
        CODES: pack.pack_awq_codes(parts["codes"]),
        "wscales": scale.T.contiguous(),
        "wzeros": _without_eight(zero, scale).to(zero.dtype).T.contiguous(),
    }


def _awq_rows(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    zero, scale = parts["wzeros"].T, parts["wscales"].T.contiguous()
    return {
        "codes": order.awq_codes(parts[CODES]).contiguous(), "scale": scale,
        "zero": _with_eight(zero, scale).to(zero.dtype).contiguous(),
    }  # fmt: skip


def _without_eight(zero: Tensor, scale: Tensor) -> Tensor:
    return zero.float() - _ZERO * scale.float()


def _with_eight(zero: Tensor, scale: Tensor) -> Tensor:
    return zero.float() + _ZERO * scale.float()
