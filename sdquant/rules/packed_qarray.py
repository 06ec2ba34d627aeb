"""Conversion of a quantized weight between `QArray` and the packed tensors of backends (`rules.backend`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import Packed, PackedSpec, dtype_name, dtype_named, registry
from .core.bit_packing import pack, unpack
from .core.numerics import storage
from .core.qarray import QArray, quantize, quantize_with
from .core.qtypes import QType, qtype
from .core.sharding import range_of_weight
from .packed_layout import ACT_SHAPE, SCALES, act_how, weight_how
from .qconfig import QuantizationRule, to_dict

if TYPE_CHECKING:
    from .core.static_range import StaticRange


def encode(weight: Tensor, rule: QuantizationRule, static: StaticRange | None = None) -> Packed:
    """Quantize a float weight; see `layout` for the tensors."""
    shape = tuple(weight.shape)
    array = quantize(weight.detach(), weight_how(rule, shape), range_of_weight)
    return pack_array(array, rule, static)


def pack_array(array: QArray, rule: QuantizationRule, static: StaticRange | None = None) -> Packed:
    """Pack a quantized weight."""
    row, shape = qtype(array.qtype), tuple(array.qvalue.shape)
    codes = array.qvalue
    if row.bits < 8:
        codes = pack(_unsigned(codes, row).reshape(shape[0], -1), row.bits)
    scale = array.scale
    if row.scale_type:
        scale = scale.to(dtype_named(SCALES[row.scale_type]))
    parts = {"qvalue": codes.contiguous(), "scale": scale.contiguous()}
    if array.zero_point is not None:
        parts["zero_point"] = array.zero_point.contiguous()
    details = to_dict(rule)
    if static is not None:
        parts["act_scale"] = static.scale.to(codes.device)
        if static.zero_point is not None:
            parts["act_zero_point"] = static.zero_point.to(codes.device)
        details[ACT_SHAPE] = list(static.scale.shape)
    dtype = dtype_name(array.dtype)
    spec = PackedSpec(scheme=registry.scheme("rules"), shape=shape, dtype=dtype, details=details)
    return Packed(spec=spec, parts=parts)


def weight_of(packed: Packed, rule: QuantizationRule, rows: slice | None = None) -> QArray:
    """Unpack a quantized weight, or some of its rows."""
    assert rule.weight_qtype is not None
    row, (count, *rest) = qtype(rule.weight_qtype), packed.spec.shape
    rows = rows or slice(0, count)
    dtype = getattr(torch, packed.spec.dtype)
    codes = packed.parts["qvalue"][rows]
    if row.bits < 8:
        codes = _signed(unpack(codes, row.bits, math.prod(rest)), row).reshape(-1, *rest)
    scale, zero_point = packed.parts["scale"], packed.parts.get("zero_point")
    if len(scale) == count:
        scale = scale[rows]
        zero_point = None if zero_point is None else zero_point[rows]
    if row.scale_type:
        scale = scale.to(torch.float32 if dtype == torch.float16 else dtype)
    return QArray(qvalue=codes, scale=scale, zero_point=zero_point, qtype=row.name, dtype=dtype)


def activations_of(packed: Packed, rule: QuantizationRule, x: Tensor, *, conv: bool) -> QArray:
    """Quantize activations as the rule says, with the static range if there is one, else with their own."""
    how = act_how(rule, x.ndim, conv=conv)
    scale = packed.parts.get("act_scale")
    if scale is None:
        return quantize(x, how)
    zero_point = packed.parts.get("act_zero_point")
    shape = [1] * (x.ndim - scale.ndim) + list(scale.shape)
    zero_point = None if zero_point is None else zero_point.reshape(shape)
    return quantize_with(x, how.qtype, scale.reshape(shape), zero_point)


def _unsigned(codes: Tensor, row: QType) -> Tensor:
    return codes if row.kind != "int" else (codes + 2 ** (row.bits - 1)).to(torch.uint8)


def _signed(codes: Tensor, row: QType) -> Tensor:
    return codes.to(storage(row)) if row.kind != "int" else codes.to(storage(row)) - 2 ** (row.bits - 1)
