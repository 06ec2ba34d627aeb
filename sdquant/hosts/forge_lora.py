"""Forge's LoRAs on quantized layers.

Forge finds what a LoRA changes among a model's parameters, by name, and adds it to them; for quantized files it has
layers add it each time that they are used, "online". A packed weight is no parameter and is not written to: its layer
gets what Forge has for it as a function that changes the dequantized weight, and Forge counts and moves the LoRA as an
online one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import ConflictError
from . import display

if TYPE_CHECKING:
    from torch import Tensor

    from .forge_layers import SwappedLayer
    from .monkeypatch import Patches


def hook_patcher(patches: Patches) -> None:
    """Hook into the patcher of Forge; Forge Neo's is another."""
    if not display.has("backend.patcher.lora"):
        return
    loader = getattr(display.module("backend.patcher.lora"), "LoraLoader", None)
    if loader is None:
        return
    patches.wrap(display.module("backend.patcher.base").ModelPatcher, "add_patches", _add)
    patches.wrap(loader, "refresh", _refresh)
    engine = display.module("backend.diffusion_engine.base").ForgeDiffusionEngine
    for kind in (engine, *engine.__subclasses__()):
        for name in {"save_unet", "save_checkpoint"} & vars(kind).keys():
            patches.wrap(kind, name, _refuse_save)


@dataclass(frozen=True)
class PatchChange:
    """What one LoRA adds to a weight. `patches`: Forge's rows of all weights, which it moves in place."""

    patches: Mapping[str, Any]
    key: str

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the changed weight."""
        merge = display.module("backend.patcher.lora").merge_lora_to_weight
        changed: Tensor = merge(self.patches[self.key], weight, self.key, computation_dtype=weight.dtype)
        return changed


def _add(original: Any, patcher: Any, *, patches: Mapping[Any, Any], online_mode: bool = False, **more: Any) -> Any:
    """Add the patches of packed weights as online ones, the others as Forge adds those of float weights."""
    names = {name for name, _ in _packed(patcher.model)}
    if not names:
        return original(patcher, patches=patches, online_mode=online_mode, **more)
    shown = SimpleNamespace(
        model=SimpleNamespace(named_parameters=lambda: [(name, None) for name in names]),
        lora_patches=patcher.lora_patches,
    )
    ours = {key: patch for key, patch in patches.items() if (key if isinstance(key, str) else key[0]) in names}
    rest = {key: patch for key, patch in patches.items() if key not in ours}
    online_keys = original(shown, patches=ours, online_mode=True, **more)
    return online_keys | original(patcher, patches=rest, online_mode=False, **more)


def _refresh(original: Any, loader: Any, lora_patches: Mapping[Any, Any], *args: Any, **kwargs: Any) -> None:
    """Attach the patches of packed weights to their layers, in the place of those before; Forge does the others."""
    layers = dict(_packed(loader.model))
    rest = {
        file: {key: patch for key, patch in patches.items() if key not in layers}
        for file, patches in lora_patches.items()
    }
    original(loader, rest, *args, **kwargs)
    for key, layer in layers.items():
        layer.weight_function = tuple(PatchChange(patches, key) for patches in lora_patches.values() if key in patches)


def _refuse_save(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise ConflictError in place of saving packed weights under the names of float ones."""
    objects = engine.forge_objects
    if any(True for part in (objects.unet.model, objects.clip.cond_stage_model) for _ in _packed(part)):
        raise ConflictError(
            "Cannot save this model as a checkpoint",
            "its weights are quantized by sdquant, and Forge's checkpoints hold float ones",
            "Set sdquant's schemes to 'as found', so that the model is loaded again, and save that; "
            "sdquant quantize writes quantized files",
        )
    return original(engine, *args, **kwargs)


def _packed(model: Any) -> Iterator[tuple[str, SwappedLayer]]:
    """Yield the names of packed weights, and their layers."""
    from .forge_layers import SwappedLayer

    for path, layer in model.named_modules():
        if isinstance(layer, SwappedLayer):
            yield f"{path}.weight", layer
