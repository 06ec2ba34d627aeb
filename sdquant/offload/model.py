"""Model offload: one component at a time is on the compute device, from its call until another one is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .mode import ComponentSizes, OffloadMode, OffloadOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .blocks import Component
    from .handle import OffloadHandle
    from .recompute import Recompute


class ModelOffload(OffloadMode):
    """All components are stored, and each is fetched when one of its methods is called. The last one called stays.

    Wrapper tensors (optimum-quanto's) cannot be stored in a file: if the device is the CPU they stay in memory.
    """

    name = "model"
    summary = "one component at a time is on the compute device"
    order = 2
    takes_turns = True

    def needed(self, *, total: int, largest: int, least: int) -> int:
        return largest

    def peak(self, parts: Mapping[str, ComponentSizes], device: torch.device, budget: int | None) -> dict[str, int]:
        stay = {name: one.opaque if device.type == "cpu" else 0 for name, one in parts.items()}
        return {name: sum(stay.values()) + one.nbytes - stay[name] for name, one in parts.items()}

    def apply(
        self, parts: dict[str, nn.Module], handle: OffloadHandle, device: torch.device, options: OffloadOptions
    ) -> None:
        from ..models import call_hooks
        from .backward import gradient_hooks
        from .blocks import cut
        from .recompute import Recompute
        from .residency import Residency, tier
        from .tensor_refs import slots, tensor_bytes

        on_cpu = device.type == "cpu"
        # In RAM they are moved block by block, so that at most one block is in memory twice; files take no memory.
        components, shared = cut(parts, handle.counters, blocks=not on_cpu, leave=lambda slot: on_cpu and slot.opaque)
        store = tier(device, options.folder)
        handle.undo.callback(store.close)
        residency = Residency(components, shared, store, device, handle, limit=None)
        residency.stow()
        if on_cpu:
            opaque = (tensor for slot in slots(*parts.values()) if slot.opaque and (tensor := slot.get()) is not None)
            handle.counters.hold(sum(tensor_bytes(tensor) for tensor in opaque))

        recomputes: dict[str, Recompute] = {}

        def enter(component: Component) -> None:
            if component.depth == 0:
                recomputes[component.name].settle()
                for other in components:
                    if other is not component and other.depth == 0:
                        residency.evict(other.units)
                residency.fetch(component.units)
            component.depth += 1

        def leave(component: Component) -> None:
            component.depth -= 1

        def again(component: Component) -> None:
            enter(component)
            leave(component)

        for component in components:
            recompute = Recompute(component, handle, lambda _, c=component: again(c), lambda: None)  # type: ignore[misc]
            recomputes[component.name] = recompute
            handle.components[component.name] = {"bytes": component.nbytes, "kept": "on the device while it is in use"}
            handle.undo.callback(call_hooks.announce(component.module, device))
            handle.undo.callback(
                call_hooks.wrap(
                    component.module,
                    lambda _, c=component: enter(c),  # type: ignore[misc]
                    lambda _, c=component: leave(c),  # type: ignore[misc]
                    **gradient_hooks(component, handle, recompute),
                )
            )


MODE = ModelOffload()
