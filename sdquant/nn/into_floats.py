"""Load the state dict of a quantized module into an unquantized one, as diffusers does to build models from others
(a ControlNet or AnimateDiff's UNet from a UNet): packed weights are dequantized for layers that are not quantized.

torch has no hook for the state dict that is passed in, so `nn.Module.load_state_dict` is wrapped.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import NUMBERS, Packed
from ..errors import IncompatibleError
from .layer_factory import packed_of
from .quantized_layers import QuantizedLayer
from .state_dict import PREFIX, is_alike

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger(__name__)


@functools.cache
def watch() -> None:
    """Wrap `nn.Module.load_state_dict` so that it converts packed weights; once per process."""
    load = nn.Module.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return load(self, for_module(self, state_dict), *args, **kwargs)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


def for_module(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict for a module, with packed weights dequantized for layers that are not quantized, or quantized
    in another way, of which some have the same parts.

    Raises:
        IncompatibleError: the state dict does not come from a model's `state_dict()` (it was read from a file, or
            rebuilt), so the schemes are unknown.
    """
    owner = getattr(state, "owner", None)
    if owner is None:
        _refuse_packed(module, state)
        return state
    taken: OrderedDict[str, Any] = OrderedDict(state)
    count = 0
    for path, layer in owner.named_modules():
        target = _at(module, path)
        if target is None:
            continue
        packed = _packed(layer, state, path)
        if packed is None:
            continue
        if isinstance(target, QuantizedLayer):  # which quantizes floats as its weight is
            if is_alike(packed.spec, target.spec) or packed.spec.shape != target.spec.shape:
                continue
        elif packed_of(target) is not None:
            continue
        prefix = f"{path}." if path else ""
        for key in [key for key in taken if key.startswith(prefix) and key != f"{prefix}bias"]:
            del taken[key]
        taken[f"{prefix}weight"] = _decoded(packed, target)
        count += 1
    if not count:
        return state
    log.warning(
        "%s loads %d quantized weights as floats, because its layers are not quantized, or in another way",
        type(module).__name__,
        count,
    )
    if hasattr(state, "_metadata"):
        taken._metadata = state._metadata  # type: ignore[attr-defined]
    return taken


def _packed(layer: nn.Module, state: Mapping[str, Any], path: str) -> Packed | None:
    """Return the layer's packed weight from the state dict, since the layer's own may be offloaded by now."""
    if not isinstance(layer, QuantizedLayer):
        return packed_of(layer)
    prefix = f"{path}.{PREFIX}" if path else PREFIX
    parts = {name: part for name in layer.part_names if isinstance(part := state.get(prefix + name), Tensor)}
    if len(parts) < len(layer.part_names):
        return None
    spec = layer.spec
    for name in NUMBERS:
        if name in spec.details and isinstance(state.get(prefix + name), Tensor):
            spec = replace(spec, details={**spec.details, name: state[prefix + name].item()})
    return Packed(spec=spec, parts=parts)


def _decoded(packed: Packed, target: nn.Module) -> Tensor:
    weight = getattr(target, "weight", None)
    dtype = weight.dtype if isinstance(weight, Tensor) else getattr(torch, packed.spec.dtype)
    return packed.spec.scheme.codec.decode(packed, dtype)


def _at(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _refuse_packed(module: nn.Module, state: Mapping[str, Any]) -> None:
    for key in _packed_keys(state):
        path, _, leaf = key.rpartition(".")
        target = _at(module, path)
        if target is None or isinstance(target, QuantizedLayer) or "weight" not in target._parameters:
            continue
        if leaf not in target._parameters and leaf not in target._buffers:
            raise IncompatibleError(
                f"Cannot load the quantized weight {key!r} into a {type(target).__name__}",
                "its layer is not quantized, and the state dict does not say how to dequantize the weight",
                "Pass the unchanged state_dict() of the quantized model, or quantize this model the same way "
                "first (sdquant.quantize)",
            )


def _packed_keys(state: Mapping[str, Any]) -> Iterator[str]:
    return (key for key in state if key.rpartition(".")[2].startswith(PREFIX))
