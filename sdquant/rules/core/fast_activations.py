"""Linear activations quantized in one pass by the C kernels, or Triton's on a card, with the bits of
`packed_qarray.activations_of`."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core import FloatRounding, torch_dtypes
from ...kernels import cpu_int8 as native
from ...kernels import dispatch_guard, scheme_numbers
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
    if not x.numel() or not x.ndim:
        return None
    of = rounding_of(rule, tuple(x.shape), x.dtype, x.device, decoded=decoded)
    if of is None:
        return None
    values, scale = _rounded(x.contiguous(), of)
    return values, scale.view(*x.shape[:-1], -1).to(values.dtype)


def rounding_of(
    rule: QuantizationRule, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, decoded: bool
) -> FloatRounding | None:
    """Return how `numbers` rounds activations of a shape; None as there."""
    if rule.act_static_scale or dtype not in torch_dtypes.COMPUTE_DTYPES or device.type not in ("cpu", "cuda"):
        return None
    how, inputs, last = act_how(rule, len(shape), conv=False), shape[-1], len(shape) - 1
    tile = tile_sizes(shape, how).get(last, inputs)
    plain = how.calibration_method == "absmax" and len(how.channelwise_axes) == last and not how.row.scale_type
    if not plain or (tile != inputs and not decoded) or not _rounds(_kind(how), device):
        return None
    return _of(how, tile, decoded) if _right(dtype, how.qtype, decoded, device) else None


def _of(how: HowToQuantize, tile: int, decoded: bool) -> FloatRounding:
    return FloatRounding(limits=(how.row.bound, *how.row.limits), kind=_kind(how), tile=tile, decoded=decoded)


def _kind(how: HowToQuantize) -> str:
    row = how.row
    if row.kind == "int":
        return "int" if row.bits <= 8 else ""
    return row.storage if row.kind == "float" else ""


def _rounds(kind: str, device: torch.device) -> bool:
    if device.type == "cpu":
        return native.sizes(64) is not None and kind in native.KINDS
    return scheme_numbers.rounds(kind, device)


def _rounded(x: Tensor, of: FloatRounding) -> tuple[Tensor, Tensor]:
    by = native.numbers_of if x.is_cpu else scheme_numbers.numbers_of
    return by(x, x.numel() // of.tile, of.limits, of.kind, of.decoded)


@cache
@dispatch_guard.undisturbed
def _right(dtype: torch.dtype, name: str, decoded: bool, device: torch.device) -> bool:
    """Return whether the kernel gives the same numbers as torch; tried once."""
    how = HowToQuantize(qtype=name, channelwise_axes=(0,))
    x = torch.linspace(-4, 4, 7 * 100, dtype=torch.float32, device="cpu").sin()
    x = x.mul(torch.linspace(-9, 3, 7 * 100, dtype=torch.float32, device="cpu").exp()).view(7, 100).to(device, dtype)
    x[1] = 0
    expected = quantize(x, how)
    try:
        result, scale = _rounded(x, _of(how, 100, decoded))
    except Exception as error:  # whatever it is: Triton's kernel does not work here, and torch does
        log.warning(
            "Activations are rounded to %s by torch, which is slower: %s: %s", name, type(error).__name__, error
        )
        return False
    values = dequantize(expected) if decoded else from_codes(expected.qvalue, qtype(name), expected.scale.dtype)
    same = torch.equal(result.to(values.dtype), values) and torch.equal(
        scale.to(expected.scale.dtype)[:, None], expected.scale
    )
    if not same:
        log.warning(
            "The kernels do not round activations to %s as torch does on %s; using torch instead, which is slower",
            name,
            device.type,
        )
    return same
