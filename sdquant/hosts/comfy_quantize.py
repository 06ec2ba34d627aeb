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


def quantized_patcher(patcher: Any, quant: str) -> Any:
    """Return a ModelPatcher of a new model with packed weights; the given one stays as it is.

    Args:
        patcher: of a model with float weights. Its patches are merged; its other changes are carried over.
        quant: a scheme, with options ("nf4,double_quant").

    Raises:
        ConflictError: weights are quantized already. SdquantError: see `comfy_load.checked`.
    """
    import comfy.model_management  # type: ignore[import-not-found]
    import comfy.utils  # type: ignore[import-not-found]

    from .comfy_patcher import packed_layers

    device = comfy.model_management.get_torch_device()
    spec = comfy_load.checked(quant, device)
    if packed_layers(patcher.model):
        _refuse(quant)
    entries = patcher.get_key_patches(_PREFIX)
    for weight, *_ in (rows[0] for rows in entries.values()):
        if _is_quantized(weight):
            _refuse(quant)
    bar = comfy.utils.ProgressBar(sum(rows[0][0].nbytes for rows in entries.values()))
    tensors = _Merged(entries)
    state = comfy_state.quantize_tensors(tensors, spec, device, bar.update)
    log.info("%d of %d tensors are packed (%s)", state.packed, len(state.tensors), spec)
    new_patcher = comfy_load.patcher_of(state, _SHOWN, spec)
    new_patcher.object_patches = dict(patcher.object_patches)
    new_patcher.model_options = _copied(patcher.model_options)
    return new_patcher


def _refuse(quant: str) -> None:
    raise ConflictError(
        f"Cannot quantize the model to {quant}",
        "its weights are already quantized",
        "Load it with float weights (weight_dtype: default), or save it as it is",
    )


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
