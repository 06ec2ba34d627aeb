"""Forge Neo's LoRAs on quantized layers.

Neo adds a LoRA to the weights that it keeps on the device, and gives the layers that it leaves in RAM a function to add
it each time that the weight is used. A packed weight is not written to: its layer gets the function wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import ConflictError
from . import display

if TYPE_CHECKING:
    from .forge_layers import SwappedLayer
    from .monkeypatch import Patches

_BASE = "backend.patcher.base"


def install(patches: Patches) -> None:
    """Hook into the patcher of Forge Neo, which Forge and its other forks do not have."""
    if not display.has(_BASE) or not hasattr(display.module(_BASE), "LowVramPatch"):
        return
    base = display.module(_BASE)
    patches.wrap(base.ModelPatcher, "load", _attach)
    patches.wrap(base.ModelPatcher, "partially_unload", _attach)  # Neo adds its functions to those that are there
    patches.wrap(base.ModelPatcher, "unpatch_model", _detach)
    patches.wrap(base.ModelPatcher, "patch_weight_to_device", _merge)
    engine = display.module("backend.diffusion_engine.base").ForgeDiffusionEngine
    patches.wrap(engine, "save_unet", _save)
    patches.wrap(engine, "save_checkpoint", _save)


def _attach(original: Any, patcher: Any, *args: Any, **kwargs: Any) -> Any:
    done = original(patcher, *args, **kwargs)
    function = display.module(_BASE).LowVramPatch
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


def _save(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise ConflictError in place of saving packed weights under float weights' names."""
    objects = engine.forge_objects
    for module in (objects.unet.model, getattr(objects.clip, "cond_stage_model", None)):  # some models have no clip
        if module is not None and any(_packed(module)):
            raise ConflictError(
                "Cannot save this model with 'Save Current Model'",
                "its weights are quantized, and Neo saves float ones",
                "Set sdquant's schemes to 'as found' and load the model again, or run: sdquant quantize",
            )
    return original(engine, *args, **kwargs)


def _packed(model: Any) -> Iterator[tuple[str, SwappedLayer]]:
    """Yield the names of packed weights, and their layers."""
    for path, layer in model.named_modules():
        if _is_ours(layer):
            yield f"{path}.weight", layer


def _is_ours(layer: Any) -> bool:
    from .forge_layers import SwappedLayer

    return isinstance(layer, SwappedLayer)
