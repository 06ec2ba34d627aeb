"""Quantize a diffusion model that ComfyUI has loaded, such as that of a checkpoint, with the LoRAs that are on it."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from ..errors import ConflictError
from . import comfy_load, comfy_state

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_PREFIX = "diffusion_model."
_SHOWN = "the model"
# What ComfyUI reads from other tensors of a checkpoint than the diffusion model's, such as `v_pred` and `ztsnr`.
_KEPT = ("model_type", "model_sampling", "latent_format")
# Where nodes put what holds the float layers, or what a patcher of another model would not have.
_CHANGES = ("wrappers", "callbacks", "injections", "additional_models", "hook_patches", "weight_wrapper_patches")


def quantized_patcher(patcher: Any, quant: str) -> Any:
    """Return a ModelPatcher of a new model with packed weights; the given one stays as it is.

    Args:
        patcher: of a model with float weights. Its patches are merged; its options and samplers are carried over.
        quant: a scheme, with options ("nf4,double_quant").

    Raises:
        ConflictError: weights are quantized already, or other nodes changed layers of the model.
        SdquantError: see `comfy_load.checked`.
    """
    import comfy.model_management  # type: ignore[import-not-found]
    import comfy.utils  # type: ignore[import-not-found]

    from .comfy_patcher import packed_layers

    device = comfy.model_management.get_torch_device()
    spec = comfy_load.checked(quant, device)
    if packed_layers(patcher.model):
        _refuse(quant)
    _refuse_changes(patcher, quant)
    entries = patcher.get_key_patches(_PREFIX)
    for weight, *_ in (rows[0] for rows in entries.values()):
        if _is_quantized(weight):
            _refuse(quant)
    bar = comfy.utils.ProgressBar(sum(rows[0][0].nbytes for rows in entries.values()))
    tensors = _Merged(entries)
    state = comfy_state.quantize_tensors(tensors, spec, device, bar.update)
    log.info("%d of %d tensors are packed (%s)", state.packed, len(state.tensors), spec)
    result = comfy_load.patcher_of(state, _SHOWN, spec)
    for name in _KEPT:
        if hasattr(patcher.model, name):
            setattr(result.model, name, copy.deepcopy(patcher.get_model_object(name)))
    result.object_patches = dict(patcher.object_patches)
    result.model_options = _copied(patcher.model_options)
    return result


def _refuse(quant: str) -> None:
    raise ConflictError(
        f"Cannot quantize the model to {quant}",
        "its weights are already quantized",
        "Load it with float weights (weight_dtype: default), or save it as it is",
    )


def _refuse_changes(patcher: Any, quant: str) -> None:
    """Raise ConflictError if nodes put something into the model that would go on with its float layers, or be lost."""
    changes = [
        name
        for name, value in patcher.object_patches.items()
        if name.startswith(_PREFIX.rstrip(".")) and not isinstance(value, str | int | float | None)
    ]
    changes += [name for name in _CHANGES if _holds(getattr(patcher, name, None))]
    if changes:
        raise ConflictError(
            f"Cannot quantize the model to {quant}",
            f"nodes before this one changed how its float layers run ({', '.join(changes[:3])})",
            "Put 'Quantize Model (sdquant)' right behind the node that loads the model, and those nodes behind it",
        )


def _holds(rows: Any) -> bool:
    return any(map(_holds, rows.values())) if isinstance(rows, dict) else bool(rows)


def _is_quantized(weight: Tensor) -> bool:
    """Return whether a weight is one of ComfyUI's quantized tensors, or codes of 8 bits."""
    import torch

    return type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.element_size() == 1


class _Merged(dict[str, "Tensor"]):
    """Weights by name, each with the patches on it merged when it is asked for, and not kept."""

    def __init__(self, entries: dict[str, list[Any]]) -> None:
        super().__init__({key.removeprefix(_PREFIX): rows[0][0].detach() for key, rows in entries.items()})
        self.patches = {key.removeprefix(_PREFIX): rows[1:] for key, rows in entries.items() if rows[1:]}

    def __getitem__(self, name: str) -> Tensor:
        weight = super().__getitem__(name)
        if name not in self.patches:
            return weight
        import comfy.lora  # type: ignore[import-not-found]

        merged: Tensor = comfy.lora.calculate_weight(self.patches[name], weight.float().clone(), _PREFIX + name)
        return merged.to(weight.dtype)


def _copied(options: dict[str, Any]) -> dict[str, Any]:
    """Copy a patcher's options as its clone does: their containers, and not what nodes put there."""
    import comfy.model_patcher  # type: ignore[import-not-found]

    of_theirs = getattr(comfy.model_patcher, "create_model_options_clone", copy.deepcopy)
    return dict(of_theirs(options))
