"""Quantized layers in the place of float ones, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core import registry
from ..kernels import int8_linear
from ..utils.tensors import put_parameter
from . import sdpa_hook
from .layer_checks import settings_of
from .quantized_layers import (
    QuantizedConv1d,
    QuantizedConv2d,
    QuantizedConv3d,
    QuantizedEmbedding,
    QuantizedLayer,
    QuantizedLinear,
)

if TYPE_CHECKING:
    from ..core import Packed

_LAYERS: dict[type[nn.Module], type[QuantizedLayer]] = {
    nn.Linear: QuantizedLinear,
    nn.Conv1d: QuantizedConv1d,
    nn.Conv2d: QuantizedConv2d,
    nn.Conv3d: QuantizedConv3d,
    nn.Embedding: QuantizedEmbedding,
}
# Settings that float layers do not have.
_OURS = ("spec", "part_names", "compute", "float_class", "weight_function", "bias_function")


def quantized_layer(
    module: nn.Module,
    packed: Packed,
    dtype: torch.dtype | None = None,
    compute: str | None = None,
    *,
    path: str = "",
) -> QuantizedLayer:
    """Build the quantized layer for `module` (whose own weight may be on the meta device) with a packed weight.

    Args:
        dtype: see `QuantizedLayer.compute_dtype`; None for that of the weight before quantization.
        compute: see `set_compute`. path: the module's in its model, for errors.
    """
    for base, layer in _LAYERS.items():
        if isinstance(module, base):
            quantized: Any = layer.__new__(layer)
            nn.Module.__init__(quantized)
            quantized._adopt(module, packed, dtype or getattr(torch, packed.spec.dtype))
            quantized._path = path
            assert isinstance(quantized, QuantizedLayer)
            set_compute(quantized, compute)
            return quantized
    raise TypeError(f"no quantized layer for {type(module).__name__}")


def float_layer(layer: QuantizedLayer, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the `torch.nn` layer with the dequantized weight of a quantized one: the inverse of `quantized_layer`.

    Args:
        dtype: of its weight and bias; None for the one that the layer computes in.
    """
    return _with_weight(layer, layer.dequantize(dtype or layer.compute_dtype))


def empty_float_layer(layer: QuantizedLayer) -> nn.Module:
    """Build the `torch.nn` layer like a quantized one on the meta device: its type, settings and shapes."""
    return _with_weight(layer, torch.empty(layer.spec.shape, dtype=layer.compute_dtype, device="meta"))


def _with_weight(layer: QuantizedLayer, weight: torch.Tensor) -> nn.Module:
    base = next(base for base, quantized in _LAYERS.items() if isinstance(layer, quantized))
    kind = layer.float_class if isinstance(layer, QuantizedEmbedding) else base
    floats = kind.__new__(kind)
    nn.Module.__init__(floats)
    floats.__dict__.update({k: v for k, v in settings_of(layer).items() if k not in _OURS})
    if isinstance(layer, QuantizedEmbedding):
        floats._buffers.update(layer._buffers)
        floats._non_persistent_buffers_set.update(layer._non_persistent_buffers_set)
    floats.training = layer.training
    put_parameter(floats, "weight", nn.Parameter(weight, requires_grad=False))
    if base is not nn.Embedding:
        bias = layer._parameters.get("bias")
        put_parameter(floats, "bias", None if bias is None else nn.Parameter(bias.data.to(weight), False))
    return floats


def set_compute(model: nn.Module, compute: str | None) -> None:
    """Set how the quantized layers of a model compute: "int8", "fp8", "fp4", or None or "float" for the dequantized
    weight.

    Layers of a scheme with its own arithmetic, and embeddings, do not change. With "int8" attention, too, is computed
    by the fastest kernel that there is: see `sdpa_hook`.
    """
    sdpa_hook.ask(model, compute == int8_linear.NAME)
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer) and not layer._backend.computes(layer.spec):
            layer.compute = None if compute == "float" else compute
            layer._prepared = layer._prepared_for = None


def packed_of(module: nn.Module) -> Packed | None:
    """Return the packed weight of a layer, sdquant's or a library's; None if its weight is not quantized."""
    if isinstance(module, QuantizedLayer):
        return module.packed
    for backend in registry.backends():
        packed = backend.from_library(module)
        if packed is not None:
            return packed
    return None
