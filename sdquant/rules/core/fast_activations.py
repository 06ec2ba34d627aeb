"""Linear activations quantized in one pass by the C kernels, with the bits of `packed_qarray.activations_of`."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core import torch_dtypes
from ...kernels import cpu_int8 as native
from ...kernels import dispatch_guard
from ..packed_layout import act_how
from .how_to_quantize import HowToQuantize, tile_sizes
from .numerics import from_codes
from .qarray import dequantize, quantize
from .qtypes import qtype

if TYPE_CHECKING:
    from ..qconfig import QuantizationRule

log = logging.getLogger(__name__)


def numbers(x: Tensor, rule: QuantizationRule, *, decoded: bool) -> tuple[Tensor, Tensor] | None:
    """Round activations x [..., inputs] as the rule says; return values and scales, both in the dtype of scales.

    Values are in units of the scale [..., 1], or, if `decoded`, dequantized; only then can there be tiles.
    Return None for what is not done here: methods other than "absmax", static ranges, types with scales of
    their own, other devices.
    """
    if (
        rule.act_static_scale
        or x.dtype not in torch_dtypes.COMPUTE_DTYPES
        or not x.is_cpu
        or not x.numel()
        or not x.ndim
    ):
        return None
    how, inputs = act_how(rule, x.ndim, conv=False), x.shape[-1]
    last = x.ndim - 1
    tile = tile_sizes(x.shape, how).get(last, inputs)
    plain = how.calibration_method == "absmax" and len(how.channelwise_axes) == last and not how.row.scale_type
    if not plain or (tile != inputs and not decoded) or native.sizes(64) is None or _kind(how) not in native.KINDS:
        return None
    if not _right(x.dtype, how.qtype, decoded):
        return None
    values, scale = _by_c(x.contiguous(), how, tile, decoded)
    return values, scale.view(*x.shape[:-1], -1).to(values.dtype)


def _kind(how: HowToQuantize) -> str:
    row = how.row
    if row.kind == "int":
        return "int" if row.bits <= 8 else ""
    return row.storage if row.kind == "float" else ""


def _by_c(x: Tensor, how: HowToQuantize, tile: int, decoded: bool) -> tuple[Tensor, Tensor]:
    row = how.row
    return native.numbers_of(x, x.numel() // tile, (row.bound, *row.limits), _kind(how), decoded)


@cache
@dispatch_guard.undisturbed
def _right(dtype: torch.dtype, name: str, decoded: bool) -> bool:
    """Return whether the kernel gives the same numbers as torch; tried once."""
    how = HowToQuantize(qtype=name, channelwise_axes=(0,))
    x = torch.linspace(-4, 4, 7 * 100, dtype=torch.float32).sin()
    x = x.mul(torch.linspace(-9, 3, 7 * 100, dtype=torch.float32).exp()).view(7, 100).to(dtype)
    x[1] = 0
    expected = quantize(x, how)
    result, scale = _by_c(x, how, 100, decoded)
    values = dequantize(expected) if decoded else from_codes(expected.qvalue, qtype(name), expected.scale.dtype)
    same = torch.equal(result.to(values.dtype), values) and torch.equal(
        scale.to(expected.scale.dtype)[:, None], expected.scale
    )
    if not same:
        log.warning(
            "The C kernels do not round activations to %s as torch does; using torch instead, which is slower", name
        )
    return same
