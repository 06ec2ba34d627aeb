"""ComfyUI's `asym_w4a8_int8`: 4-bit or 6-bit codes of the rotated weight, which stand for 8-bit integers.

A code is an index of a table (without a table, or with 6 bits, the code less half its range). The integer is

    i = round(value * s_rel), at most 127 in magnitude

with a scale `s_rel` for each group of columns, and the rotated weight is i * s_channel: the rounding is part of the
value, and products with 8-bit activations are those of integers.

Format: `AsymW4A8Int8Layout` of comfy-kitchen. What is made is what that makes in float32, of 4 bits with the table that
it takes for all weights but those whose groups are heavy-tailed even after the rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import (
    ROTATION,
    ExpansionParts,
    Packed,
    PackedSpec,
    TensorSpec,
    Unfit,
    bit_fields,
    dtype_name,
    hadamard,
    leaf,
    registry,
)
from ..errors import BadFileError
from ..kernels import expand_rows, scratch
from ..kernels import hadamard as fast_hadamard
from ..utils.device_constants import constant
from ..utils.tensors import divided
from . import _comfy_find
from ._bnb_codec import bad, require, scales
from ._chunks import by_rows, row_chunks
from ._comfy_codec import ComfyCodec, dtype_of, marker, require_matrix
from ._comfy_int4 import nibbles
from ._comfy_rotation import rotation_in
from ._float8_values import floats_of

if TYPE_CHECKING:
    from ..core import Expansion, PrequantizedWeight, QuantSpec

# Lloyd's and Max's levels for groups of numbers from a normal distribution, divided by the largest of each group.
_LEVELS = (
    -0.980602, -0.794529, -0.638165, -0.500986, -0.377321, -0.263187, -0.155210, -0.050720,
    0.052541, 0.156985, 0.265284, 0.379533, 0.502636, 0.638953, 0.794876, 0.980671,
)  # fmt: skip
_SIXTH = tuple(range(-31, 32))  # the levels of 6 bits
_INPUTS = {"w4a8": 16, "w6a8": 32}  # of which the kernels of the format want a multiple
_LARGEST = 127
_LARGEST_FLOAT8 = 0x7E  # as bits
_LEAST = 1e-8  # the smallest scale
_STEPS = 2  # alternations between scales and codes


class W4A8(ComfyCodec):
    """The codec of w4a8 and w6a8.

    Parts:
        codes: uint8 [out, in / 2], the even column in the low half. Of w6a8 [out, in * 3 / 4]: the low four bits so,
            then the upper two of four columns in a byte, the first lowest.
        s_rel: float8_e4m3fn or float32 [out, groups]. s_channel: float32 [out, 1].
        codebook: float32 [16], or [out, 16] for some rows of a weight; not all weights of w4a8 have one.
    """

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        require_matrix(shape, dtype)
        inputs, six = _INPUTS[spec.scheme.name], spec.scheme.name == "w6a8"
        if shape[1] % inputs:
            raise Unfit(f"it has {shape[1]} inputs, and {spec.scheme} needs a multiple of {inputs}")
        parts = {
            "codes": TensorSpec(dtype="uint8", shape=(shape[0], shape[1] * 3 // 4 if six else shape[1] // 2)),
            "s_rel": TensorSpec(dtype="float8_e4m3fn", shape=(shape[0], shape[1] // _comfy_find.GROUP)),
            "s_channel": TensorSpec(dtype="float32", shape=(shape[0], 1)),
        }
        return parts if six else {**parts, "codebook": TensorSpec(dtype="float32", shape=(16,))}

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        shape, dtype = tuple(weight.shape), dtype_name(weight.dtype)
        layout = self.layout(spec, shape, dtype)
        described = PackedSpec(
            scheme=spec.scheme, shape=shape, dtype=dtype, details=_comfy_find.details_of(spec.scheme.name, shape[1])
        )
        six = spec.scheme.name == "w6a8"
        table = _levels(_SIXTH if six else _LEVELS, weight.device)

        def encode(rows: Tensor) -> dict[str, Tensor]:
            return (_encode_six if six else _encode)(hadamard.rotate_by_matrix(rows.float(), described.rotation), table)

        parts = by_rows(weight.detach(), {name: part for name, part in layout.items() if name != "codebook"}, encode)
        return Packed(spec=described, parts=parts if six else {**parts, "codebook": table.clone()})

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        return None  # the description does not say whether there is a codebook

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        rotation, channel = packed.spec.rotation, packed.parts["s_channel"]
        for rows in row_chunks(packed.parts["codes"], packed.spec.shape[1]):
            values = _integers(packed, rows) * channel[rows]
            out[rows].copy_(fast_hadamard.rotate(values, rotation) if rotation else values)

    def integers(self, packed: Packed) -> Expansion[Packed]:
        return _Expansion(packed)

    def by_row(self, packed: Packed) -> bool:
        codebook = packed.parts.get("codebook")
        return codebook is None or codebook.ndim == 2

    def cuttable(self, packed: Packed) -> Packed:
        if self.by_row(packed):
            return packed
        codebook = packed.parts["codebook"].expand(packed.spec.shape[0], -1).contiguous()
        return Packed(spec=packed.spec, parts={**packed.parts, "codebook": codebook})

    def export(self, name: str, packed: Packed) -> dict[str, Tensor]:
        parts = packed.parts
        table = {leaf(name, "weight_codebook"): parts["codebook"]} if "codebook" in parts else {}
        return {
            name: parts["codes"].view(torch.int8),
            leaf(name, "weight_s_rel"): parts["s_rel"],
            leaf(name, "weight_s_channel"): parts["s_channel"].reshape(-1),
            **table,
            **marker(name, packed.spec),
        }

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        key, codes = require(found, "codes", get)
        if codes.dtype not in (torch.int8, torch.uint8) or codes.ndim != 2 or not codes.numel():
            raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, not a matrix of bytes")
        group, bits = _group_size(found), 6 if found.scheme == "w6a8" else 4
        key, relative = require(found, "s_rel", get)
        if relative.ndim != 2 or relative.dtype not in (torch.float8_e4m3fn, torch.uint8, torch.float32):
            raise bad(key, f"it is {dtype_name(relative.dtype)} {list(relative.shape)}, not a matrix of float8")
        if relative.dtype == torch.uint8:
            relative = relative.view(torch.float8_e4m3fn)
        if not bool(relative.float().isfinite().all()):
            raise bad(key, "a scale is infinite or not a number")
        stored = (len(codes), relative.shape[1] * group)
        shape = stored if shape is None else tuple(shape)
        if shape != stored or len(relative) != stored[0] or codes.shape[1] * 8 != stored[1] * bits:
            raise bad(
                found.name,
                f"its codes {list(codes.shape)} and scales {list(relative.shape)} of groups of {group} do not make a "
                f"weight of {list(shape)} in {bits} bits",
            )
        key, channel = require(found, "s_channel", get)
        if channel.numel() != shape[0]:
            raise bad(key, f"it has {channel.numel()} scales, but the weight has {shape[0]} rows")
        parts = {"codes": codes.view(torch.uint8), "s_rel": relative, "s_channel": scales(key, channel).reshape(-1, 1)}
        if "codebook" in found.keys:
            key, codebook = require(found, "codebook", get)
            if bits == 6 or tuple(codebook.shape) not in ((16,), (shape[0], 16)):
                raise bad(key, f"its shape is {list(codebook.shape)}, but a table has 16 values, for codes of 4 bits")
            parts["codebook"] = scales(key, codebook)
        details = {"group_size": group, ROTATION: rotation_in(found, shape[1])}
        spec = PackedSpec(scheme=registry.scheme(found.scheme), shape=shape, dtype=dtype_of(found), details=details)
        return Packed(spec=spec, parts=parts)


class _Expansion:
    """See `core.Expansion`."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def __call__(self) -> Packed:
        packed, rotation = self.packed, self.packed.spec.rotation
        # No kernel has anything in the workspace of this dtype; that of int8 is for products.
        codes = scratch(packed.spec.shape, torch.uint8, packed.device).view(torch.int8)
        spec = PackedSpec(
            scheme=registry.scheme("int8_convrot" if rotation else "int8_row"),
            shape=packed.spec.shape,
            dtype=packed.spec.dtype,
            details={ROTATION: rotation} if rotation else {},
        )
        rows = slice(0, packed.spec.shape[0])
        return Packed(spec=spec, parts={"codes": _integers(packed, rows, codes), "scale": packed.parts["s_channel"]})

    def decoded(self, dtype: torch.dtype) -> Tensor | None:
        packed = self.packed
        if packed.device.type == "cpu":
            return None
        out = scratch(packed.spec.shape, dtype, packed.device)
        return out if _expand(packed, slice(0, len(out)), out, packed.parts["s_channel"]) else None

    def sources(self) -> ExpansionParts:
        packed, bits = self.packed, _bits(self.packed)
        table = "codebook" if "codebook" in packed.parts else ""
        levels = _plain_levels(packed.device) if bits == 4 and not table else None
        return ExpansionParts(bits=bits, codes="codes", scale="s_rel", channel="s_channel", table=table, levels=levels)


def _group_size(found: PrequantizedWeight) -> int:
    group: Any = found.details.get("group_size", _comfy_find.GROUP)
    if type(group) is not int or group < 4 or (group % 16 and 16 % group):
        raise BadFileError(
            f"Cannot read weight {found.name!r}",
            f"its group size is {group!r}, but groups have 4, 8 or a multiple of 16 columns",
            "Download the file again from its source",
        )
    return group


def _integers(packed: Packed, rows: slice, out: Tensor | None = None) -> Tensor:
    """Return the 8-bit integers that the codes of some rows stand for: int8 [rows, in], in `out` if it is given."""
    if out is None:
        codes = packed.parts["codes"][rows]
        out = codes.new_empty(len(codes), packed.spec.shape[1], dtype=torch.int8)
    return out if _expand(packed, rows, out) else out.copy_(_integers_by_torch(packed, rows))


def _expand(packed: Packed, rows: slice, out: Tensor, channel: Tensor | None = None) -> bool:
    """Do as `expand_rows` for some rows of a weight."""
    parts, bits = packed.parts, _bits(packed)
    stored, scale, codebook = parts["codes"][rows], parts["s_rel"][rows], parts.get("codebook")
    if bits == 4 and codebook is None:
        codebook = _plain_levels(stored.device)
    elif codebook is not None and codebook.ndim == 2:
        codebook = codebook[rows]
    return expand_rows(stored, bits, scale, codebook, out, channel)


def _bits(packed: Packed) -> int:
    return 6 if packed.spec.scheme.name == "w6a8" else 4


def _integers_by_torch(packed: Packed, rows: slice) -> Tensor:
    """Return the same in float32, by torch's operations."""
    parts, columns = packed.parts, packed.spec.shape[1]
    stored, codebook = parts["codes"][rows], parts.get("codebook")
    codes = nibbles(stored[:, : columns // 2])
    if packed.spec.scheme.name == "w6a8":
        upper = stored[:, columns // 2 :]
        codes |= bit_fields.split(upper, (0, 2, 4, 6), 3, 2).flatten(1) << 4
    if codebook is None:
        values = codes.float().sub_(32 if packed.spec.scheme.name == "w6a8" else 8)
    elif codebook.ndim == 2:
        values = codebook[rows].gather(1, codes.long())
    else:
        values = codebook.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    scale = parts["s_rel"][rows]
    wide = scale if scale.dtype == torch.float32 else floats_of(scale)
    values = values.view(len(values), scale.shape[1], -1).mul_(wide.unsqueeze(-1))
    return values.view(len(values), columns).round_().clamp_(-_LARGEST, _LARGEST)


def _encode(rotated: Tensor, table: Tensor) -> dict[str, Tensor]:
    """Quantize some rows of the rotated weight to 4 bits: scales and codes by turns, then the codes once more, for the
    integers that the scales in 8 bits give."""
    groups = rotated.view(len(rotated), -1, _comfy_find.GROUP)
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp_(min=_LEAST)
    scale, channel = _alternated(groups, scale, table, lambda values: _nearest(table, values))
    relative = (scale.squeeze(-1) / channel).to(torch.float8_e4m3fn)
    found, _ = _on_grid(groups / channel.unsqueeze(-1), relative.float(), table)
    bits = found.view(rotated.shape).to(torch.uint8)
    return {"codes": bits[:, ::2] | bits[:, 1::2] << 4, "s_rel": relative, "s_channel": channel}


def _encode_six(rotated: Tensor, table: Tensor) -> dict[str, Tensor]:
    """Quantize some rows of the rotated weight to 6 bits: as to 4, but each group takes, of its scale in 8 bits and the
    next smaller and larger one, the one whose integers are nearest to it."""
    groups = rotated.view(len(rotated), -1, _comfy_find.GROUP)
    scale = divided(groups.abs().amax(dim=-1, keepdim=True), _SIXTH[-1]).clamp_(min=_LEAST)

    def nearest(values: Tensor) -> Tensor:
        # A value that is not a number has any code: its scale shows it.
        return values.round_().nan_to_num_(0.0).clamp_(_SIXTH[0], _SIXTH[-1]).add_(_SIXTH[-1]).int()

    scale, channel = _alternated(groups, scale, table, nearest)
    targets = groups / channel.unsqueeze(-1)
    middle = (scale.squeeze(-1) / channel).to(torch.float8_e4m3fn).view(torch.uint8)
    best = middle
    codes = least = torch.empty_like(scale)
    for number in (middle, (middle - 1).clamp_(min=1), (middle + 1).clamp_(max=_LARGEST_FLOAT8)):
        found, levels = _on_grid(targets, number.view(torch.float8_e4m3fn).float(), table)
        error = levels.gather(2, found).sub_(targets).pow_(2).sum(-1)
        if number is middle:
            codes, least = found, error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best, codes = torch.where(better, number, best), torch.where(better.unsqueeze(-1), found, codes)
    bits = codes.view(rotated.shape).to(torch.uint8) + 1  # a code is the level with 32 added
    lower, upper = bits & 15, (bits >> 4).view(len(bits), -1, 4)
    packed = upper[..., 0] | upper[..., 1] << 2 | upper[..., 2] << 4 | upper[..., 3] << 6
    codes = torch.cat([lower[:, ::2] | lower[:, 1::2] << 4, packed], dim=1)
    return {"codes": codes, "s_rel": best.view(torch.float8_e4m3fn), "s_channel": channel}


def _alternated(
    groups: Tensor, scale: Tensor, table: Tensor, nearest: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Improve the scales of groups [rows, groups, columns], [rows, groups, 1], by turns with codes. Return them and the
    scales of rows, [rows, 1]."""
    codes = nearest(groups / scale)
    for _ in range(_STEPS):
        values = table[codes]
        scale = (groups * values).sum(-1, keepdim=True) / (values * values).sum(-1, keepdim=True).clamp_(min=_LEAST)
        scale = scale.clamp_(min=_LEAST)
        codes = nearest(groups / scale)
    channel = divided((table[codes] * scale).abs().amax(dim=(1, 2)), _LARGEST).clamp_(min=_LEAST)
    return scale, channel.unsqueeze(1)


def _on_grid(targets: Tensor, relative: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes whose integers are nearest to the targets [rows, groups, columns], and the integers of all codes
    for scales [rows, groups]."""
    levels = (table * relative.unsqueeze(-1)).round_().clamp_(-_LARGEST, _LARGEST)
    found = _nearest(levels.view(-1, len(table)), targets.view(-1, targets.shape[-1]))
    return found.view(targets.shape), levels


def _nearest(levels: Tensor, values: Tensor) -> Tensor:
    """Return the indices of the levels, sorted along the last axis, that are nearest to the values; ties to the lower
    one. levels: [16], or a row of them for each row of the values."""
    last = levels.shape[-1] - 1
    place = torch.searchsorted(levels, values.contiguous())
    below, above = (place - 1).clamp_(0, last), place.clamp_(0, last)
    if levels.ndim == 1:
        low, high = levels[below], levels[above]
    else:
        low, high = levels.gather(-1, below), levels.gather(-1, above)
    return torch.where((values - high).abs() < (values - low).abs(), above, below)


@constant
def _plain_levels(device: torch.device) -> Tensor:
    """Return what codes of 4 bits without a table stand for."""
    return torch.arange(-8, 8, dtype=torch.float32, device="cpu").to(device)


@constant
def _levels(table: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device="cpu").to(device)
