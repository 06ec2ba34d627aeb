"""Group offload: groups of layers are on the compute device while they run, by diffusers' group offloading.

Groups are blocks if a component has them, else single layers. Offloaded groups are in RAM if the device is a GPU, and
on disk if it is the CPU, unless diffusers' files cannot hold the weights: see `group_hooks.why_not_disk`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .mode import ComponentSizes, OffloadMode, OffloadOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .handle import OffloadHandle


class GroupOffload(OffloadMode):
    """Every component is hooked; on a GPU the next group is prefetched on a stream of its own."""

    name = "group"
    summary = "groups of layers are on the compute device while they run, by diffusers' own hooks"
    order = 3
    hooks = "diffusers"

    def each_step(self, largest: int, room: int) -> int:
        return largest

    def peak(self, parts: Mapping[str, ComponentSizes], device: torch.device, budget: int | None) -> dict[str, int]:
        """Predict it: weights outside groups and one group, on CUDA two, and components that disk cannot hold."""
        from . import group_hooks

        ahead = 2 if device.type == "cuda" else 1
        away, stays = {}, 0
        for name, one in parts.items():
            blocks = group_hooks.level(one.module) == "block_level"
            sizes = one.by_module(group_hooks.block_names(one.module)) if blocks else one.by_leaf()
            rest = sizes.pop("", 0)
            if device.type == "cpu" and (one.from_library or group_hooks.why_not_disk(one.module)):
                stays += one.nbytes
                away[name] = 0
            else:
                away[name] = rest + sum(sorted(sizes.values())[-ahead:])
        return {name: stays + size for name, size in away.items()}

    def apply(
        self, parts: dict[str, nn.Module], handle: OffloadHandle, device: torch.device, options: OffloadOptions
    ) -> None:
        from .group_hooks import offload_groups
        from .host_store import DiskStore

        # For its folder: diffusers writes the files.
        store = DiskStore(options.folder) if device.type == "cpu" else None
        if store is not None:
            handle.undo.callback(store.close)
        for index, (name, part) in enumerate(parts.items()):
            # A folder per component: diffusers names files by layer, and treats an existing file as its own.
            offload_groups(name, part, handle, device, None if store is None else store.folder / str(index))


MODE = GroupOffload()
