"""Packed weights as OpenVINO's constants, in the patterns that its CPU plugin knows as compressed weights.

    codes (u8, i8 or u4) -> Convert f16 -> Subtract zero point -> Multiply by scale -> Reshape -> Convert f32

This is what NNCF itself puts into an OpenVINO model. The constants are views of the packed tensors: nothing is copied
or dequantized. Tensors and constants share memory for as long as one of them is in use.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from .library import library

if TYPE_CHECKING:
    from torch import Tensor

    from ...core import Packed

SCHEMES = frozenset({"int8", "int8_sym", "int4", "int4_sym"})
MIDDLE = 8  # NNCF adds it to the symmetric codes of 4 bits


def constant(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Any:
    """Return an OpenVINO constant that shares and keeps alive a tensor's memory.

    Args:
        shape: of the constant; None for the tensor's.
    """
    values = tensor.detach().contiguous().numpy()
    return library().ov.op.Constant(values if shape is None else values.reshape(shape), True)


def _codes(tensor: Tensor, shape: tuple[int, ...], four: bool, keep_alive: list[Any]) -> Any:
    """Return a constant of codes or zero points.

    Args:
        four: each byte holds two 4-bit codes, the first in the low bits, as in OpenVINO's u4.
        keep_alive: objects that the constant refers to but does not own are appended.
    """
    if not four:
        return constant(tensor, shape)
    ov, values = library().ov, tensor.detach().contiguous().view(-1).numpy()
    keep_alive.append(values)
    return ov.op.Constant(ov.Tensor(values, list(shape), ov.Type.u4), True)


def decompressed(packed: Packed, keep_alive: list[Any]) -> Any:
    """Return the node of the dequantized weight, f32 in `packed.spec.shape`.

    Args:
        keep_alive: objects that must outlive the model are appended.
    """
    ops = library().ops
    shape, parts = packed.spec.shape, packed.parts
    out, row, groups = shape[0], math.prod(shape[1:]), parts["scale"].shape[1]
    four = packed.spec.scheme.name.startswith("int4")
    grouped = (out, groups, row // groups) if groups > 1 else (out, row)
    each = (out, groups, 1) if groups > 1 else (out, 1)
    floats = ops.convert(_codes(parts["codes"], grouped, four, keep_alive), "f16")
    if "zero_point" in parts:
        floats = ops.subtract(floats, ops.convert(_codes(parts["zero_point"], each, four, keep_alive), "f16"))
    elif four:
        middle = torch.full((1,) * len(each), MIDDLE, dtype=torch.uint8, device="cpu")
        floats = ops.subtract(floats, ops.convert(constant(middle), "f16"))
    floats = ops.multiply(floats, constant(parts["scale"], each))
    if grouped != shape:
        floats = ops.reshape(floats, list(shape), False)
    return ops.convert(floats, "f32")


def in_graph(packed: Packed) -> bool:
    """Return whether `decompressed` supports the weight's scheme."""
    return packed.spec.scheme.name in SCHEMES
