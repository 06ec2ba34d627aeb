"""ComfyUI's ModelPatcher for models with packed weights: a LoRA is applied when a weight is used, not merged into it.

ComfyUI merges patches into the weights that it keeps on the device, and attaches the others to layers as functions. A
patch cannot be merged into a packed weight, so its layer always gets the function: for the patches of a model, and for
those of hooks (a LoRA for some prompts or steps only), which ComfyUI writes into the weights while it samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ConflictError
from .comfy_ops import ComfyPackedLayer

if TYPE_CHECKING:
    from torch import Tensor


class Patch:
    """Function that applies the patches of one weight to its dequantized values."""

    def __init__(self, key: str, patches: Mapping[str, Any]) -> None:
        self.key, self.patches = key, patches

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the patched weight, in place if the patches allow it."""
        import comfy.lora  # type: ignore[import-not-found]

        done: Tensor = comfy.lora.calculate_weight(self.patches[self.key], weight, self.key, **self._more())
        return done

    def _more(self) -> dict[str, Any]:
        return {}


class HookPatch(Patch):
    """Function that applies the patches of hooks. `layer`: some patches are differences from its unpatched weight."""

    def __init__(self, key: str, patches: Mapping[str, Any], layer: ComfyPackedLayer) -> None:
        super().__init__(key, patches)
        self.layer = layer

    def _more(self) -> dict[str, Any]:
        return {"original_weights": {self.key: [(self.layer.weight, _as_it_is)]}}


def _as_it_is(weight: Tensor, **_: Any) -> Tensor:
    return weight


def packed_layers(model: Any) -> dict[str, ComfyPackedLayer]:
    """Return the packed layers of a model, by the names of their weights."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, ComfyPackedLayer)}


def refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    """Refuse to save a model with ComfyUI's own nodes, which call this in place of `state_dict_for_saving`.

    Raises:
        ConflictError: always.
    """
    raise ConflictError(
        "Cannot save a model loaded by sdquant with ComfyUI's own node",
        "that node writes float weights, and these are packed",
        "Use 'Save Diffusion Model (sdquant)'",
    )


@cache
def patcher_class() -> type:
    """Return the patcher class, derived from ModelPatcher of the running ComfyUI."""
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

        def patch_hooks(self, hooks: Any) -> Any:
            done = super().patch_hooks(hooks)
            self._hook(hooks)
            return done

        def unpatch_hooks(self, *args: Any, **kwargs: Any) -> Any:
            done = super().unpatch_hooks(*args, **kwargs)
            self._hook(None)
            return done

        def patch_hook_weight_to_device(
            self, hooks: Any, combined_patches: Any, key: str, *args: Any, **kw: Any
        ) -> Any:
            if self._packed(key) is None:
                return super().patch_hook_weight_to_device(hooks, combined_patches, key, *args, **kw)
            return None  # see `_hook`

        def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
            refuse_to_save()

        def _packed(self, key: str) -> ComfyPackedLayer | None:
            path, _, leaf = key.rpartition(".")
            layer = self.model.get_submodule(path) if leaf == "weight" else None
            return layer if isinstance(layer, ComfyPackedLayer) else None

        def _attach(self) -> None:
            for key, layer in packed_layers(self.model).items():
                patch = [Patch(key, self.patches)] if key in self.patches else []
                layer.weight_function = patch + list(getattr(self, "weight_wrapper_patches", {}).get(key, []))
            self._hook(self.current_hooks)

        def _hook(self, hooks: Any) -> None:
            """Make the layers apply the patches of `hooks` only, after the model's own patches and before wrappers."""
            combined = self.get_combined_hook_patches(hooks)
            for key, layer in packed_layers(self.model).items():
                rest = [function for function in layer.weight_function if not isinstance(function, HookPatch)]
                at = sum(isinstance(function, Patch) for function in rest)
                patch = [HookPatch(key, combined, layer)] if key in combined else []
                layer.weight_function = [*rest[:at], *patch, *rest[at:]]

    return SdquantModelPatcher
