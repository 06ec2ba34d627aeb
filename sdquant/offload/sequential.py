"""Sequential offload: one leaf module at a time is on the compute device, by accelerate's hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .mode import ComponentSizes, OffloadMode, OffloadOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .handle import OffloadHandle


class SequentialOffload(OffloadMode):
    """Every leaf of every component is hooked. On the CPU leaves compute from the mapped file without a copy."""

    name = "sequential"
    summary = "one leaf module at a time is on the compute device: least memory, slowest"
    order = 4
    hooks = "accelerate"

    def each_step(self, largest: int, room: int) -> int:
        return largest

    def peak(self, parts: Mapping[str, ComponentSizes], device: torch.device, budget: int | None) -> dict[str, int]:
        if device.type == "cpu":
            return dict.fromkeys(parts, 0)
        return {name: max(one.by_leaf().values()) for name, one in parts.items()}

    def apply(
        self, parts: dict[str, nn.Module], handle: OffloadHandle, device: torch.device, options: OffloadOptions
    ) -> None:
        from ..models import call_hooks
        from ..utils.malloc_trim import trim
        from .backward import refusing
        from .residency import tier
        from .sequential_hooks import offload_leaves
        from .tensor_refs import bytes_of_weights

        store = tier(device, options.folder)
        handle.undo.callback(store.close)
        for name, part in parts.items():
            handle.components[name] = {"bytes": bytes_of_weights(part), "kept": "stored; fetched leaf by leaf"}
            offload_leaves(part, store, handle, device)
            handle.undo.callback(call_hooks.serialize(part, handle.lock, refusing(handle, name)))
            trim()


MODE = SequentialOffload()
