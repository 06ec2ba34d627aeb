"""Balanced offload: weights stay on the device as far as a budget allows.

If all weights fit into the budget, they are on the device and nothing moves. Otherwise:
* a component that is called evicts weights of the least recently used components, only as many as it needs;
* a component larger than the budget keeps as many of its blocks as fit, and streams the rest: while one block runs, the
  next one is prefetched.
Weights are constant, so evicting them copies nothing back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import BudgetError
from . import none, streaming_plan
from .mode import ComponentSizes, OffloadMode, OffloadOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .blocks import Component
    from .handle import OffloadHandle
    from .residency import Residency


class BalancedOffload(OffloadMode):
    """Weights on the device take at most a budget: the one of the options, or the free memory less the activations and
    a margin; if the activations are unknown, a larger share is left free."""

    name = "balanced"
    summary = "as much as a budget allows stays on the compute device, the rest is streamed block by block"
    order = 1
    takes_budget = True

    def needed(self, *, total: int, largest: int, least: int) -> int:
        return least

    def peak(self, parts: Mapping[str, ComponentSizes], device: torch.device, budget: int | None) -> dict[str, int]:
        """Simulate two images by the mode's own planner and residency, with units that only count bytes."""
        from .blocks import Component, find_blocks
        from .handle import OffloadHandle
        from .residency import Residency

        total = sum(one.nbytes for one in parts.values())
        if budget is None or total <= budget:
            return none.MODE.peak(parts, device, None)
        handle = OffloadHandle(self.name, str(device), total)
        components: list[Any] = []
        for name, one in parts.items():
            sizes = one.by_module(block for block, _ in find_blocks(one.module))
            rest: Any = _Paper("", sizes.pop("", 0), handle)
            blocks: list[Any] = [_Paper(block, size, handle) for block, size in sizes.items() if size]
            components.append(Component(name, one.module, rest, blocks))
        _refuse_too_small(components, 0, budget)
        residency = Residency(components, (), None, device, handle, budget)  # type: ignore[arg-type]
        moments: dict[str, int] = {}
        for component in (*components, *components):  # twice: the second image starts with what the first left resident
            _run(component, residency, budget)
            moments[component.name] = max(moments.get(component.name, 0), handle.counters.resident)
        return moments

    def apply(
        self, parts: dict[str, nn.Module], handle: OffloadHandle, device: torch.device, options: OffloadOptions
    ) -> None:
        from ..models import call_hooks
        from .balanced_hooks import hook_component
        from .blocks import cut
        from .budget import default_budget
        from .residency import Residency, tier
        from .tensor_refs import tensor_bytes

        limit = options.budget
        if limit is None:
            limit = default_budget(device, _held(parts, device), options.activations)
        handle.facts["budget"] = limit
        if handle.total <= limit:
            none.MODE.apply(parts, handle, device, options)
            return
        components, shared = cut(parts, handle.counters, blocks=True)
        _refuse_too_small(components, sum(tensor_bytes(t) for slot in shared if (t := slot.get()) is not None), limit)
        store = tier(device, options.folder)
        handle.undo.callback(store.close)
        residency = Residency(components, shared, store, device, handle, limit)
        residency.stow()
        for component in components:
            handle.undo.callback(call_hooks.announce(component.module, device))
            hook_component(component, residency, handle, limit - residency.shared_bytes)


def _held(parts: dict[str, nn.Module], device: torch.device) -> int:
    """Return the bytes of weights that are on the device already."""
    from .tensor_refs import slots, tensor_bytes, with_number

    tensors = (tensor for slot in slots(*parts.values()) if (tensor := slot.get()) is not None)
    there = with_number(device)
    return sum(tensor_bytes(tensor) for tensor in tensors if tensor.device == there)


def _refuse_too_small(components: list[Component], shared: int, limit: int) -> None:
    """Raise BudgetError if a component cannot run within `limit` bytes even when its blocks are streamed."""
    worst = max(components, key=streaming_plan.least)
    needed = streaming_plan.least(worst) + shared
    if needed <= limit:
        return
    raise BudgetError(
        f"Cannot use balanced offload with a budget of {limit} bytes",
        f"{worst.name} needs {needed} bytes: its largest block and all that is outside blocks must be on the device",
        f"Give a budget of at least {needed} bytes, quantize {worst.name} to fewer bits, or use offload='sequential'",
    )


class _Paper:
    """Simulated block for `Residency` and `streaming_plan.plan`: tracks bytes only, moves no data."""

    def __init__(self, name: str, nbytes: int, handle: OffloadHandle) -> None:
        self.name, self.nbytes, self._counters = name, nbytes, handle.counters
        self.resident = False

    def read(self, buffer: None, device: torch.device) -> None:
        """Do nothing: there is no data."""

    def place(self, flat: None, *, held: bool) -> None:
        """Count it as resident on the device."""
        self.resident = True
        self._counters.hold(self.nbytes)

    def drop(self, store: None) -> None:
        """Count it as evicted from the device."""
        self.resident = False
        self._counters.hold(-self.nbytes)


def _run(component: Component, residency: Residency, budget: int) -> None:
    """Simulate what a call of the component does on the device; see `balanced_hooks`."""
    units, buffers = component.units, 0
    if component.nbytes > budget:
        plan = streaming_plan.plan(component, budget)
        units, buffers = list(plan.resident), 0 if component.release else plan.buffers * plan.buffer_bytes
    residency.touch(component)
    residency.make_room(sum(unit.nbytes for unit in units if not unit.resident) + buffers, component)
    residency.fetch(units)
    if buffers:

        def release() -> None:
            residency.counters.hold(-buffers)
            component.release = None

        residency.counters.hold(buffers)
        component.release = release


MODE = BalancedOffload()
