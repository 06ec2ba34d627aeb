"""Quantized layers for Forge, whose memory manager swaps single layers between RAM and the GPU.

A layer with the attribute `parameters_manual_cast` may be left in RAM; while the attribute is true, the layer copies
its weight to the input's device each time it runs. Layers without it stay on the GPU. In reForge the attribute has
another name, and the class has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import dtype_name, torch_dtypes
from ..models import quantize_weight
from ..nn import QuantizedConv1d, QuantizedConv2d, QuantizedConv3d, QuantizedLayer, QuantizedLinear, packed_tensor
from ..planning import planner
from ..utils.malloc_trim import Trimmer, trim

if TYPE_CHECKING:
    from ..core import Packed, QuantSpec

_SWAPS = ("parameters_manual_cast", "ldm_patched_cast_weights")
# Forge builds it for each CLIP. Files of SD 1.5 have none, and its memory is left as it was: any numbers, not used.
_NOT_IN_EVERY_FILE = "text_projection"


class Named(packed_tensor.PackedTensor):
    """Packed weight in a state dict. Forge Neo sums up `nelement() * element_size()` for the memory that it takes."""

    def nelement(self) -> int:
        """Return a number of elements whose size is at least that of the packed tensors."""
        return -(-self.packed.nbytes // self.element_size())


class SwappedLayer(QuantizedLayer):
    """Layer that runs on its input's device, whichever device its weight is on."""

    parameters_manual_cast: bool
    ldm_patched_cast_weights = False

    def _packed_for(self, x: Tensor) -> Packed:
        return self.packed.to(x.device)

    def _bias(self, x: Tensor) -> Tensor | None:
        bias = self._parameters.get("bias")
        return None if bias is None else bias.to(x.device, x.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save under the names of the float weights: Forge looks them up for LoRAs."""
        destination[f"{prefix}weight"] = Named(self.packed, self.compute_dtype, self._path)
        bias = self._parameters.get("bias")
        if bias is not None:
            destination[f"{prefix}bias"] = bias if keep_vars else bias.detach()


class SwappedLinear(SwappedLayer, QuantizedLinear):
    """[..., in] -> [..., out]."""


class SwappedConv1d(SwappedLayer, QuantizedConv1d):
    """[b, in, l] -> [b, out, l']."""


class SwappedConv2d(SwappedLayer, QuantizedConv2d):
    """[b, in, h, w] -> [b, out, h', w']."""


class SwappedConv3d(SwappedLayer, QuantizedConv3d):
    """[b, in, d, h, w] -> [b, out, d', h', w']."""


_CONVS: dict[type[nn.Module], type[SwappedLayer]] = {
    nn.Conv1d: SwappedConv1d, nn.Conv2d: SwappedConv2d, nn.Conv3d: SwappedConv3d
}  # fmt: skip


def quantize(model: nn.Module, spec: QuantSpec, skip: tuple[str, ...]) -> int:
    """Quantize Forge's linear and convolution layers in place, one at a time.

    Returns:
        The number of layers that were quantized.
    """
    layers = dict(_layers(model))
    shapes = {
        f"{path}.weight": (tuple(layer.weight.shape), dtype_name(layer.weight.dtype)) for path, layer in layers.items()
    }
    weights, _ = planner.select(shapes, spec, "plain", skip, type(model).__name__)
    trimmer = Trimmer()
    for row in weights:
        path = row.name.removesuffix(".weight")
        layer = layers.pop(path)
        weight = layer.weight.data
        new_layer = _swapped(layer, quantize_weight.encode(row.name, weight, spec))
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new_layer)
        trimmer.add(weight.numel() * weight.element_size())
        del layer, weight
    trim()
    return len(weights)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield Forge's own layers that have a float weight. Its linear ones are not `nn.Linear`."""
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if not path or weight is None or weight.dtype not in torch_dtypes.COMPUTE_DTYPES:
            continue
        if not any(hasattr(module, name) for name in _SWAPS):
            continue
        if path.endswith(_NOT_IN_EVERY_FILE):
            continue
        if isinstance(module, tuple(_CONVS)) or (hasattr(module, "in_features") and hasattr(module, "out_features")):
            yield path, module


def _swapped(layer: Any, packed: Packed) -> QuantizedLayer:
    """Create the quantized layer for one of Forge's."""
    kind = next((swapped for base, swapped in _CONVS.items() if isinstance(layer, base)), SwappedLinear)
    result: Any = kind.__new__(kind)
    nn.Module.__init__(result)
    result._adopt(layer, packed, getattr(torch, packed.spec.dtype))  # its settings, parameters_manual_cast among them
    assert isinstance(result, QuantizedLayer)
    return result
