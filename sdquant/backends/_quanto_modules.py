"""Conversion between packed weights and quanto's own modules, QLinear and QConv2d."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..core import Packed, PackedSpec, dtype_name, registry
from ..kernels import flop_counts
from ..utils.tensors import put_parameter
from ._quanto_extension import without_compiler
from ._quanto_layout import BITS


def to_library(module: nn.Module, packed: Packed) -> nn.Module:
    """Build quanto's frozen module around the packed parts; nothing is requantized."""
    from optimum import quanto

    flop_counts.declare_of_library("quanto")
    without_compiler()
    _let_copy()
    if not isinstance(module, (nn.Linear, nn.Conv2d)):
        raise NotImplementedError(
            f"optimum-quanto only has QLinear and QConv2d, not {type(module).__name__}; use runtime='plain'"
        )
    layer_class = quanto.QLinear if isinstance(module, nn.Linear) else _conv2d()
    weight = _tensor(packed, quanto)
    layer: Any = layer_class.qcreate(module, weights=weight.qtype, device=torch.device("meta"))
    put_parameter(layer, "weight", nn.Parameter(weight, requires_grad=False))
    layer.weight_group_size = packed.spec.details.get("group_size")
    put_parameter(layer, "bias", module._parameters.get("bias"))
    for name in ("input_scale", "output_scale"):
        setattr(layer, name, torch.ones((), dtype=weight.dtype, device=weight.device))
    layer.train(module.training)
    assert isinstance(layer, nn.Module)
    return layer


@lru_cache(maxsize=1)
def _let_copy() -> None:
    """Make `copy.deepcopy` copy quanto's tensors. torch's own way needs a `clone` that returns the same class; quanto's
    returns floats."""
    from optimum import quanto
    from optimum.quanto.tensor.packed import PackedTensor

    for kind in (quanto.QTensor, PackedTensor):
        if kind.__deepcopy__ is torch.Tensor.__deepcopy__:
            kind.__deepcopy__ = _copied


def _copied(tensor: Any, memo: dict[int, Any]) -> Any:
    """Copy one of quanto's tensors, with its parts copied bit for bit."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    names, described = tensor.__tensor_flatten__()
    parts = {name: copy.deepcopy(getattr(tensor, name), memo) for name in names}
    clone = type(tensor).__tensor_unflatten__(parts, described, tensor.size(), tensor.stride())
    if isinstance(tensor, nn.Parameter):
        clone = nn.Parameter(clone, requires_grad=tensor.requires_grad)
    memo[id(tensor)] = clone
    return clone


@lru_cache(maxsize=1)
def _conv2d() -> Any:
    """Return a `QConv2d` of quanto's whose class can be called to create a float convolution.

    PEFT creates the two layers of a convolution's LoRA by `type(base_layer)(...)`. quanto's own class would create a
    module without a quantized weight, which fails when it is called.
    """
    from optimum import quanto

    class QConv2d(quanto.QConv2d):  # type: ignore[misc]  # the base is only known at run time
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if (args or kwargs) and kwargs.get("weights") is None:
                return nn.Conv2d(*args, **kwargs)
            return super().__new__(cls)

    QConv2d.__module__, QConv2d.__qualname__ = __name__, "QConv2d"  # where pickle looks for it
    return QConv2d


def __getattr__(name: str) -> Any:
    if name == "QConv2d":
        return _conv2d()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _tensor(packed: Packed, quanto: Any) -> Any:
    """Return quanto's tensor in its generic layout, whose parts are ours, bit for bit.

    quanto itself turns it into a device's own layout when it is moved to another device.
    """
    from optimum.quanto.tensor.packed import PackedTensor

    spec, parts = packed.spec, packed.parts
    size = torch.Size(spec.shape)
    stride = _stride(size)
    data, scale = _aligned(parts["data"]), parts["scale"]
    if BITS[spec.scheme.name] == 8:
        axis = 0 if scale.ndim else None
        return quanto.WeightQBytesTensor(_qtype(spec.scheme.name, data, quanto), axis, size, stride, data, scale, None)
    qtype = quanto.qtypes[spec.scheme.name]
    group = spec.details["group_size"]
    rows = torch.Size((size.numel() // group, group)) if group else size
    codes = PackedTensor(data, qtype.bits, rows, _stride(rows))
    return quanto.WeightQBitsTensor(qtype, 0, group, size, stride, codes, scale, parts["shift"])


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """Return the codes at an address that is a multiple of 64.

    A tensor mapped from a file can have any alignment, and torch's `_weight_int8pack_mm`, which quanto calls for bf16
    on the CPU, crashes the process if its vector loads are misaligned (seen with torch 2.13).
    """
    return data if data.data_ptr() % 64 == 0 else data.clone()


def _qtype(scheme: str, data: torch.Tensor, quanto: Any) -> Any:
    return quanto.qtypes["qint8" if scheme == "qint8" else f"q{dtype_name(data.dtype)}"]


def _stride(size: torch.Size) -> tuple[int, ...]:
    return torch.empty(size, device="meta", dtype=torch.float32).stride()


def from_library(module: nn.Module) -> Packed | None:
    """Return the packed weight of a frozen quanto module, whatever its layout; None for any other module."""
    from optimum import quanto

    if not isinstance(module, quanto.QModuleMixin) or not module.frozen:
        return None
    without_compiler()
    weight: Any = module.weight
    with torch.no_grad():
        if weight.qtype.bits == 8:
            if type(weight) is not quanto.WeightQBytesTensor:
                weight = weight.weight_qbytes_tensor()
            scheme = "qint8" if weight.qtype.name == "qint8" else "qfloat8"
            parts, details = {"data": weight._data, "scale": weight._scale}, {}
        else:
            if type(weight) is not quanto.WeightQBitsTensor:
                weight = weight.weight_qbits_tensor()
            scheme = weight.qtype.name
            parts = {"data": weight._data._data, "scale": weight._scale, "shift": weight._shift}
            details = {"group_size": weight._group_size}
    dtype = dtype_name(weight.dtype)
    spec = PackedSpec(scheme=registry.scheme(scheme), shape=tuple(weight.shape), dtype=dtype, details=details)
    return Packed(spec=spec, parts={name: part.detach().contiguous() for name, part in parts.items()})
