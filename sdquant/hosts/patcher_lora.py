"""LoRAs on quantized layers in Forge Neo and reForge, whose patchers are ComfyUI's of 2025.

The patcher adds a LoRA to the weights that it keeps on the device, and gives the layers that it leaves in RAM a
function to add it each time that the weight is used. A packed weight is not written to: its layer gets the function
wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConflictError

if TYPE_CHECKING:
    from .forge_layers import SwappedLayer
    from .monkeypatch import Patches


def hook_patcher(patches: Patches, base: Any) -> None:
    """Hook into a host's module of its ModelPatcher."""
    attach = partial(_attach, patches.require(base, "LowVramPatch"))
    patches.wrap(base.ModelPatcher, "load", attach)
    patches.wrap(base.ModelPatcher, "partially_unload", attach)  # it adds its functions to those that are there
    patches.wrap(base.ModelPatcher, "unpatch_model", _detach)
    patches.wrap(base.ModelPatcher, "patch_weight_to_device", _merge)


def refuse_packed(modules: tuple[Any, ...], host: str, how: str, fix: str) -> None:
    """Raise ConflictError in place of saving packed weights under the names of float ones; some modules may be None."""
    if any(any(_packed(module)) for module in modules if module is not None):
        why = f"its weights are quantized, and {host} saves float ones"
        raise ConflictError(f"Cannot save this model with {how}", why, fix)


def _attach(function: Any, original: Any, patcher: Any, *args: Any, **kwargs: Any) -> Any:
    done = original(patcher, *args, **kwargs)
    for key, layer in _packed(patcher.model):
        own = [function(key, patcher.patches)] if key in patcher.patches else []
        layer.weight_function = [*own, *patcher.weight_wrapper_patches.get(key, [])]
    return done


def _detach(original: Any, patcher: Any, device_to: Any = None, unpatch_weights: bool = True) -> Any:
    done = original(patcher, device_to, unpatch_weights)
    if unpatch_weights:
        for _, layer in _packed(patcher.model):
            layer.weight_function, layer.bias_function = [], []
    return done


def _merge(original: Any, patcher: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    path, _, leaf = key.rpartition(".")
    if leaf == "weight" and _is_ours(patcher.model.get_submodule(path)):
        return None  # `_attach` has its layer add the LoRA
    return original(patcher, key, *args, **kwargs)


def _packed(model: Any) -> Iterator[tuple[str, SwappedLayer]]:
    """Yield the names of packed weights, and their layers."""
    for path, layer in model.named_modules():
        if _is_ours(layer):
            yield f"{path}.weight", layer


def _is_ours(layer: Any) -> bool:
    from .forge_layers import SwappedLayer

    return isinstance(layer, SwappedLayer)
