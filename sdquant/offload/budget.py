"""Default budget: the memory that weights may take on the compute device if the user sets none."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import torch
from torch import nn

from ..compat import hardware
from ..core import torch_dtypes
from ..errors import SdquantError, SettingsError
from ..models import activation_memory, components, components_of, pipelines
from ..nn import quantized

log = logging.getLogger(__name__)

# Memory left free besides weights and activations: fragmentation, workspaces of libraries, and other programs. A share
# of the device's memory, and the minimum in bytes.
MARGIN, LEAST_MARGIN = 0.02, 256 << 20


# If the activations are unknown: the share of the device's memory left free, and the minimum in bytes.
RESERVE, LEAST_RESERVE = 0.15, 1 << 30

_UNREPORTED = "torch does not report how much of its memory is free"


def default_budget(device: torch.device, resident: int, activations: int | None = None) -> int:
    """Return the bytes of weights that fit on `device`: its free memory less activations and a margin.

    Args:
        resident: bytes of weights that are on the device already.
        activations: peak bytes of activations; None if unknown, for which a share of the memory is reserved.

    Raises:
        SettingsError: the device does not report how much of its memory is free.
    """
    free, total = _free(device)
    return room(free + resident, total, activations)


def _free(device: torch.device) -> tuple[int, int]:
    """Return the free bytes of the device's memory, and its total bytes."""
    if device.type == "cpu":
        total, free = hardware.ram()
        return free, total
    if device.type == "mps":
        return hardware.mps_memory()
    api: Any = getattr(torch, device.type, None)
    why = _UNREPORTED
    if hasattr(api, "mem_get_info"):
        try:
            return hardware.card_memory(api, device)
        except RuntimeError as error:  # some of Intel's drivers
            why = f"its driver does not report how much of its memory is free: {error}"
    raise _no_budget(str(device), why)


def _no_budget(device: str, why: str) -> SettingsError:
    fix = "Set how much weights may take, such as budget='6GB'"
    return SettingsError(f"Cannot choose a memory budget for {device}", why, fix)


def budget_on(device: hardware.Device, activations: int | None) -> int:
    """Return the bytes of weights that fit on a device as described, of this machine or of another; see `room`.

    Raises:
        SettingsError: the description lacks how much of its memory is free.
    """
    if device.memory_free is None or device.memory_total is None:
        raise _no_budget(device.torch_name, _UNREPORTED)
    return room(device.memory_free, device.memory_total, activations)


def room(free: int, total: int, activations: int | None) -> int:
    """Return the bytes that weights may take on a device with `free` of `total` bytes."""
    if activations is None:
        return max(0, free - max(LEAST_RESERVE, int(RESERVE * total)))
    return max(0, free - activations - max(LEAST_MARGIN, int(MARGIN * total)))


def activations_of(model: Any) -> int | None:
    """Return the peak bytes of activations in a loaded pipeline.

    None if unknown, as for a component alone: the rest of its pipeline will need memory, too.
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
    known = [trace.peak for trace in activation_memory.of_pipeline(twin).values() if trace is not None]
    return max(known) + max(_scratch(part) for part in parts.values()) if known else None


def _without_weights(part: nn.Module) -> nn.Module:
    config: Any = part.config
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    module = components.empty(type(part).__module__.partition(".")[0], type(part).__name__, values)
    floats = {n: p.dtype for n, p in part.named_parameters() if p.dtype in torch_dtypes.COMPUTE_DTYPES}
    same = [floats[name] for name, _ in module.named_parameters() if name in floats]
    usual = max(set(same), key=same.count, default=torch.bfloat16)
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(floats.get(name, usual))
    return module


def _scratch(part: nn.Module) -> int:
    return max((2 * math.prod(packed.spec.shape) for _, packed in quantized(part)), default=0)
