"""comfy-kitchen's `svdquant_w4a4`: 4-bit integers of what a low-rank branch leaves of the smoothed weight.

A weight is code * scale / smooth + up down^T. A layer computes the branch as two narrow products beside that with the
codes (`core.low_rank`). In a file tensors are in natural order or in tiles of 128 outputs (kitchen_tile_packed_w4a4).

Format: `TensorCoreSVDQuantW4A4Layout` of comfy-kitchen, and what comfy-quants writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import LowRank, Packed, PackedLayout, PackedSpec, TensorSpec, Unfit, dtype_name, registry
from ._bnb_codec import bad, require, scales
from ._chunks import row_chunks
from ._comfy_codec import ComfyCodec, dtype_of
from ._comfy_int4 import SIGNS, ZERO, nibbles

if TYPE_CHECKING:
    from ..core import PrequantizedWeight, QuantSpec

_GROUP = 64
_ROWS, _QUAD = 128, 4  # of a tile, and of those that lie together in it
_BYTES = _GROUP // 2


class SvdQuant(ComfyCodec):
    """Parts: codes, uint8 [out, in / 2], with 8 added, the even column in the low half; scale [out, in / 64], or finer
    where 64 does not divide; smooth [in]; down [in, rank]; up [out, rank]; all of these in the file's float dtype. Of
    linear layers, and convolutions of one pixel."""

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        raise Unfit("sdquant reads it from files, and does not make it")

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        raise Unfit("sdquant reads it from files, and does not make it")

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        return None

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        parts, (width, groups) = packed.parts, (packed.spec.shape[1], packed.parts["scale"].shape[1])
        for rows in row_chunks(parts["codes"], width):
            values = nibbles(parts["codes"][rows]).float().sub_(ZERO).view(-1, groups, width // groups)
            values = values.mul_(parts["scale"][rows].float().unsqueeze(-1)).flatten(1)
            if "down" in parts:
                values = values.div_(parts["smooth"].float())
                values = values.addmm_(parts["up"][rows].float(), parts["down"].float().T)
            out[rows].copy_(values.view(out[rows].shape))

    def form(self, packed: Packed) -> PackedLayout | None:
        if "down" in packed.parts:
            return None
        rows, columns = packed.spec.shape[:2]
        return PackedLayout(
            rows=rows, columns=columns, codes="codes", packing="nibbles-low",
            group=columns // packed.parts["scale"].shape[1], scale="scale", zero=ZERO,
        )  # fmt: skip

    def by_row(self, packed: Packed) -> bool:
        return "down" not in packed.parts

    def low_rank(self, packed: Packed) -> LowRank | None:
        if "down" not in packed.parts:
            return None
        return LowRank(residual=("codes", "scale"), smooth="smooth", down="down", up="up")

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        key, codes = require(found, "codes", get)
        is_own = codes.dtype == torch.uint8
        if codes.dtype not in (torch.int8, torch.uint8) or not codes.numel():
            raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, not bytes")
        tensors = {part: require(found, part, get) for part in ("scale", "smooth", "down", "up")}
        for part, (name, tensor) in tensors.items():
            scales(name, tensor)  # float, and finite
            if part == "smooth" and not bool((tensor > 0).all()):
                raise bad(name, "a factor for smoothing is not positive")
        scale, up = tensors["scale"][1], tensors["up"][1]
        if codes.ndim == 4:
            codes, scale, up = _rows_of(key, codes), _scales_of(scale), _columns_of(up)
        if codes.ndim != 2:
            raise bad(key, f"its shape is {list(codes.shape)}, which is neither a matrix nor tiles of {_ROWS} rows")
        stored = (len(codes), codes.shape[1] * 2)
        shape = stored if shape is None else tuple(shape)
        scale = scale if is_own else scale.T.contiguous()
        finer = is_own and scale.ndim == 2 and scale.shape[1] > 0 and stored[1] % scale.shape[1] == 0
        group = stored[1] // scale.shape[1] if finer else _GROUP
        if shape[:2] != stored or any(size != 1 for size in shape[2:]) or _GROUP % group or shape[1] % group:
            raise bad(key, f"it has 4-bit codes of {list(stored)}, but the model needs {list(shape)}")
        rank = tensors["down"][1].shape[-1] if tensors["down"][1].ndim else 0
        expected = {
            "scale": (scale, (shape[0], shape[1] // group)),
            "smooth": (tensors["smooth"][1], (shape[1],)),
            "down": (tensors["down"][1], (shape[1], rank)),
            "up": (up, (shape[0], rank)),
        }
        for part, (tensor, size) in expected.items():
            if tuple(tensor.shape) != size:
                raise bad(
                    tensors[part][0], f"its shape is {list(tensor.shape)}, but {list(size)} belongs to the weight"
                )
        parts = {part: tensor.contiguous() for part, (tensor, _) in expected.items()}
        codes = codes if is_own else codes.contiguous().view(torch.uint8) ^ SIGNS
        spec = PackedSpec(scheme=registry.scheme(found.scheme), shape=shape, dtype=dtype_of(found))
        return Packed(spec=spec, parts={"codes": codes, **parts})


def _rows_of(key: str, tiles: Tensor) -> Tensor:
    """Return codes in tiles [out / 128, in / 64, 32, 128] row by row: [out, in / 2]."""
    down, across, quads, size = tiles.shape
    if (quads, size) != (_ROWS // _QUAD, _QUAD * _BYTES):
        raise bad(key, f"its shape is {list(tiles.shape)}, but tiles are {_ROWS // _QUAD} x {_QUAD * _BYTES}")
    rows = tiles.reshape(down, across, quads, _QUAD, _BYTES).permute(0, 2, 3, 1, 4)
    return rows.reshape(down * _ROWS, across * _BYTES)


def _scales_of(tiles: Tensor) -> Tensor:
    """Return scales in tiles [out / 128, in / 64, 128] as in natural order: [in / 64, out]."""
    return tiles.permute(1, 0, 2).flatten(1) if tiles.ndim == 3 else tiles


def _columns_of(tiles: Tensor) -> Tensor:
    """Return the upper factor in tiles [out / 128, rank, 128] as in natural order: [out, rank]."""
    return tiles.permute(0, 2, 1).flatten(0, 1) if tiles.ndim == 3 else tiles
