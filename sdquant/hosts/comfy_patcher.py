"""ComfyUI's ModelPatcher for models with packed weights: a LoRA is applied when a weight is used, not merged into it.

ComfyUI merges patches into the weights that it keeps on the device, and attaches the rest to layers as functions. A
packed weight has nothing to merge into, so that its layer always gets the function.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from .comfy_ops import PackedLayer

if TYPE_CHECKING:
    from torch import Tensor


class Patch:
    """Applies the patches of one weight to its decoded values."""

    def __init__(self, key: str, patches: Mapping[str, Any]) -> None:
        self.key, self.patches = key, patches

    def __call__(self, weight: Tensor) -> Tensor:
        """The patched weight, in the memory of `weight` where patches allow it."""
        import comfy.lora  # type: ignore[import-not-found]

        done: Tensor = comfy.lora.calculate_weight(self.patches[self.key], weight, self.key)
        return done


def packed_layers(model: Any) -> dict[str, PackedLayer]:
    """The layers of a model that are packed, by the names of their weights."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, PackedLayer)}


@cache
def patcher_class() -> type:
    """The class, made from ModelPatcher of the ComfyUI that is running."""
    import comfy.model_patcher  # type: ignore[import-not-found]

    class SdquantModelPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
        def load(self, *args: Any, **kwargs: Any) -> Any:
            done = super().load(*args, **kwargs)
            self._attach()
            return done

        def partially_unload(self, *args: Any, **kwargs: Any) -> Any:
            done = super().partially_unload(*args, **kwargs)
            self._attach()  # ComfyUI added its own to what was there
            return done

        def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
            done = super().unpatch_model(device_to, unpatch_weights)
            if unpatch_weights:
                for layer in packed_layers(self.model).values():
                    layer.weight_function = []
            return done

        def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
            layer = self._packed(key)
            if layer is None:
                return super().patch_weight_to_device(key, *args, **kwargs)
            if not kwargs.get("return_weight"):
                return None  # see the module
            device = kwargs.get("device_to") or (args[0] if args else None) or layer.packed.device
            weight = layer.decoded(layer.compute_dtype, device)
            return Patch(key, self.patches)(weight) if key in self.patches else weight

        def _packed(self, key: str) -> PackedLayer | None:
            path, _, leaf = key.rpartition(".")
            layer = self.model.get_submodule(path) if leaf == "weight" else None
            return layer if isinstance(layer, PackedLayer) else None

        def _attach(self) -> None:
            for key, layer in packed_layers(self.model).items():
                patch = [Patch(key, self.patches)] if key in self.patches else []
                layer.weight_function = patch + list(getattr(self, "weight_wrapper_patches", {}).get(key, []))

    return SdquantModelPatcher
