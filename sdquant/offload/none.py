"""No offload: everything stays on the compute device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .mode import ComponentSizes, OffloadMode, OffloadOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .handle import OffloadHandle


class NoOffload(OffloadMode):
    """All weights are on the device; `remove` leaves them there."""

    name = "none"
    summary = "everything stays on the compute device"
    order = 0
    hooks = None

    def needed(self, *, total: int, largest: int, least: int) -> int:
        return total

    def peak(self, parts: Mapping[str, ComponentSizes], device: torch.device, budget: int | None) -> dict[str, int]:
        return dict.fromkeys(parts, sum(one.nbytes for one in parts.values()))

    def apply(
        self, parts: dict[str, nn.Module], handle: OffloadHandle, device: torch.device, options: OffloadOptions
    ) -> None:
        from .tensor_refs import bring, bytes_of_weights, slots

        for name, part in parts.items():
            handle.components[name] = {"bytes": bytes_of_weights(part), "kept": "on the device"}
        handle.counters.fetches += bring(slots(*parts.values()), device)
        handle.counters.hold(handle.total)


MODE = NoOffload()
