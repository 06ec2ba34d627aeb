"""The memory that weights may take on the compute device where the user does not say."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import torch
from torch import nn

from ..compat import hardware
from ..errors import SdquantError, SettingsError
from ..models import activation_memory as activations
from ..models import components, pipelines
from ..models.pipelines import components_of
from ..nn.weights import quantized

log = logging.getLogger(__name__)

# What is left free beside weights and activations: pieces that an allocator cannot use, workspaces of libraries, and
# what other programs take meanwhile. A share of the device's memory, and bytes at the least.
MARGIN, LEAST_MARGIN = 0.02, 256 << 20


# Where nobody could tell the activations: shares of the whole device's memory, and bytes at the least.
RESERVE, LEAST_RESERVE = 0.15, 1 << 30


def default_budget(device: torch.device, held: int, activations: int | None = None) -> int:
    """Bytes of weights that `device` can take beside activations: what is free, less those and a margin.

    Args:
        held: bytes of the weights that are there already.
        activations: the most that computing takes, in bytes; None where that is not known, which takes a guess.

    Raises:
        SettingsError: a device that does not say how much of its memory is free.
    """
    free, total = _free(device)
    return room(free + held, total, activations)


def _free(device: torch.device) -> tuple[int, int]:
    """Bytes that this process can have of the device's memory, and those it has."""
    if device.type == "cpu":
        total, free = hardware.ram()
        return free, total
    if device.type == "mps":
        return hardware.mps_memory()
    api: Any = getattr(torch, device.type, None)
    why = "torch does not report how much of its memory is free"
    if hasattr(api, "mem_get_info"):
        try:
            return hardware.card_memory(api, device)
        except RuntimeError as error:  # some of Intel's drivers
            why = f"its driver does not report how much of its memory is free: {error}"
    raise SettingsError(
        f"Cannot choose a memory budget for {device}", why, "Set how much weights may take, such as budget='6GB'"
    )


def room(free: int, total: int, activations: int | None) -> int:
    """What of `free` bytes, on a device of `total`, weights may take."""
    if activations is None:
        return max(0, free - max(LEAST_RESERVE, int(RESERVE * total)))
    return max(0, free - activations - max(LEAST_MARGIN, int(MARGIN * total)))


def activations_of(model: Any) -> int | None:
    """Bytes that computing takes at the most in a loaded pipeline, besides its weights.

    None if nobody can tell, as of a component alone: the rest of its pipeline will want room, too.
    """
    if not pipelines.is_pipeline(model):
        return None
    parts = components_of(model)
    twin = copy.copy(model)
    try:
        for name, part in parts.items():
            object.__setattr__(twin, name, _without_weights(part))  # past diffusers, which would write its config
    except SdquantError as error:
        log.debug("Cannot estimate the memory of activations: %s", error)
        return None
    known = [trace.peak for trace in activations.of_pipeline(twin).values() if trace is not None]
    return max(known) + max(_scratch(part) for part in parts.values()) if known else None


def _without_weights(part: nn.Module) -> nn.Module:
    config: Any = part.config
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    module = components.empty(type(part).__module__.partition(".")[0], type(part).__name__, values)
    usual_dtypes = (torch.float32, torch.float16, torch.bfloat16)
    floats = {n: p.dtype for n, p in part.named_parameters() if p.dtype in usual_dtypes}
    same = [floats[name] for name, _ in module.named_parameters() if name in floats]
    usual = max(set(same), key=same.count, default=torch.bfloat16)
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(floats.get(name, usual))
    return module


def _scratch(part: nn.Module) -> int:
    return max((2 * math.prod(packed.spec.shape) for _, packed in quantized(part)), default=0)
