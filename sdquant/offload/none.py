"""No offload: everything stays on the compute device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .tensor_refs import bring, bytes_of_weights, slots

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .handle import OffloadHandle


def apply(parts: dict[str, nn.Module], handle: OffloadHandle, device: torch.device, **unused: Any) -> None:
    """Move all weights to the device. `remove` leaves them there."""
    for name, part in parts.items():
        handle.components[name] = {"bytes": bytes_of_weights(part), "kept": "on the device"}
    handle.counters.fetches += bring(slots(*parts.values()), device)
    handle.counters.hold(handle.total)
