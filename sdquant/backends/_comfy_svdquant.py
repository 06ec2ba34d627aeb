"""comfy-kitchen's `svdquant_w4a4`: 4-bit integers of what a low-rank branch leaves of the smoothed weight.

A weight is code * scale / smooth + up down^T. A layer computes the branch as two narrow products beside that with the
codes (`core.low_rank`). In a file tensors are in natural order or in tiles of 128 outputs (kitchen_tile_packed_w4a4).

Format: `TensorCoreSVDQuantW4A4Layout` of comfy-kitchen, and what comfy-quants writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import LowRank, Packed, PackedLayout, PackedSpec, TensorSpec, dtype_name, dtype_named, leaf, registry
from . import _svdquant
from ._bnb_codec import bad, require, scales
from ._chunks import by_rows, row_chunks
from ._comfy_codec import ComfyCodec, dtype_of, marker
from ._comfy_int4 import SIGNS, ZERO, nibbles

if TYPE_CHECKING:
    from ..core import PrequantizedWeight, QuantSpec

_GROUP = 64
_LARGEST = 7  # code; the least is one less, which comfy-kitchen does not make and its and Nunchaku's kernels read
_SHARES = (1.0, 0.9, 0.8, 0.7)  # of the scale with which the largest number fits, that are tried: 1 dB
_ROWS, _QUAD = 128, 4  # of a tile, and of those that lie together in it
_BYTES = _GROUP // 2


class SvdQuant(ComfyCodec):
    """Parts: codes, uint8 [out, in / 2], with 8 added, the even column in the low half; scale [out, in / 64], or finer
    where 64 does not divide; smooth [in]; down [in, rank]; up [out, rank]; all of these in the file's float dtype. Of
    linear layers, and convolutions of one pixel."""

    group = _GROUP
    scales = ""  # their dtype; "" for that of the other floats

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        parts = _svdquant.layout(spec, shape, dtype, self.group)
        scales = TensorSpec(dtype=self.scales or parts["up"].dtype, shape=(shape[0], shape[1] // self.group))
        return {"codes": parts.pop("codes"), "scale": scales, **parts}

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        shape, dtype, weight = tuple(weight.shape), dtype_name(weight.dtype), weight.detach()
        layout = self.layout(spec, shape, dtype)  # raises Unfit
        floats = dtype_named(layout["up"].dtype)
        branch = _svdquant.branch_of(weight, spec["rank"], floats, spec.magnitudes(shape[1]))
        parts, details = self.encode_left(branch.left_of(weight), layout)
        described = PackedSpec(scheme=spec.scheme, shape=shape, dtype=dtype, details=details)
        return Packed(spec=described, parts={**parts, **branch.parts})

    def encode_left(
        self, left: Tensor, layout: Mapping[str, TensorSpec]
    ) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Return codes and scales of what a branch leaves of the weight, float32 [out, in], and the details."""
        residual, dtype = {name: layout[name] for name in ("codes", "scale")}, dtype_named(layout["scale"].dtype)
        return by_rows(left, residual, lambda rows: _encode(rows, dtype)), {}

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        return None  # neither the rank nor the magnitudes of inputs are described

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

    def rows_by(self, packed: Packed, chosen: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {name: part if name in ("smooth", "down") else chosen(part) for name, part in packed.parts.items()}

    def export(self, name: str, packed: Packed) -> dict[str, Tensor]:
        """In natural order, spelled as comfy-quants has it. For activations that are not shifted."""
        parts = packed.parts
        return {
            name: (parts["codes"] ^ SIGNS).view(torch.int8),
            leaf(name, "weight_scale"): parts["scale"].T.contiguous(),
            leaf(name, "smooth_factor"): parts["smooth"],
            leaf(name, "proj_down"): parts["down"],
            leaf(name, "proj_up"): parts["up"],
            **marker(name, packed.spec),
        }

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


def _encode(rows: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Quantize some rows: with the scale of a few that leaves the least squares of differences in its group."""
    groups = rows.view(len(rows), -1, _GROUP)
    low, high = torch.aminmax(groups, dim=-1)
    largest = torch.maximum(high / _LARGEST, -low / (_LARGEST + 1))
    best = codes = least = None
    # float16 has less than its least normal number; what float32 has less may count as 0.
    smallest = max(torch.finfo(dtype).tiny * torch.finfo(dtype).eps, torch.finfo(torch.float32).tiny)
    for share in _SHARES:
        scale = (largest * share).clamp_(min=smallest).to(dtype)
        step = scale.float().unsqueeze(-1)
        tried = (groups / step).round_().clamp_(-_LARGEST - 1, _LARGEST)
        error = (tried * step).sub_(groups).square_().sum(dim=-1)
        if best is None or codes is None or least is None:
            best, codes, least = scale, tried, error
            continue
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
        codes = torch.where(better.unsqueeze(-1), tried, codes)
    assert best is not None and codes is not None
    flat = codes.add_(ZERO).to(torch.uint8).flatten(1)
    return {"codes": flat[:, ::2] | flat[:, 1::2] << 4, "scale": best}


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
