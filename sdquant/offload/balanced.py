"""Balanced offload: weights stay on the device as far as a budget allows.

If all weights fit into the budget, they are on the device and nothing moves. Otherwise:
* a component that is called evicts weights of the least recently used components, only as many as it needs;
* a component larger than the budget keeps as many of its blocks as fit, and streams the rest: while one block runs, the
  next one is prefetched.
Weights are constant, so evicting them copies nothing back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import BudgetError
from ..models.call_hooks import announce, wrap
from . import none
from .backward import gradient_hooks, keeping
from .block_streamer import Streamer
from .blocks import Component, cut
from .budget import default_budget
from .recompute import Recompute
from .residency import Residency, tier
from .streaming_plan import least
from .tensor_refs import slots, tensor_bytes, with_number

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import torch
    from torch import nn

    from .blocks import Unit
    from .handle import OffloadHandle


def apply(
    parts: dict[str, nn.Module],
    handle: OffloadHandle,
    device: torch.device,
    *,
    budget: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    activations: int | None = None,
) -> None:
    """Keep the weights on `device` within `budget` bytes.

    Args:
        budget: None for the free memory of the device less `activations` and a margin.
        activations: peak bytes of activations; None if unknown, for which a larger share is left free.

    Raises:
        BudgetError: a component cannot run within the budget, even streamed.
    """
    limit = default_budget(device, _held(parts, device), activations) if budget is None else budget
    handle.facts["budget"] = limit
    if handle.total <= limit:
        none.apply(parts, handle, device)
        return
    components, shared = cut(parts, handle.counters, blocks=True)
    refuse_too_small(components, sum(tensor_bytes(t) for slot in shared if (t := slot.get()) is not None), limit)
    store = tier(device, folder)
    handle.undo.callback(store.close)
    residency = Residency(components, shared, store, device, handle, limit)
    residency.stow()
    for component in components:
        handle.undo.callback(announce(component.module, device))
        _hook(component, residency, handle, limit - residency.shared_bytes)


def _hook(component: Component, residency: Residency, handle: OffloadHandle, room: int) -> None:
    streamer: Streamer | None = None
    row: dict[str, Any] = {"bytes": component.nbytes, "kept": "on the device while there is room"}
    if component.nbytes > room:
        streamer = Streamer(component, room, residency)
        component.release = streamer.release
        handle.undo.callback(streamer.close)
        row |= {"kept": "in part on the device, in part streamed", "blocks": len(component.blocks)} | _facts(streamer)
        for unit in component.blocks:
            assert unit.module is not None
            handle.undo.callback(
                wrap(
                    unit.module,
                    lambda _, u=unit, s=streamer: s.enter(u),  # type: ignore[misc]
                    lambda _, u=unit, s=streamer: s.leave(u),  # type: ignore[misc]
                    names=("forward",),
                    lock=handle.lock,
                    around=lambda u=unit: keeping([u]),  # type: ignore[misc]
                )
            )
    handle.components[component.name] = row

    def kept() -> Sequence[Unit]:
        return component.units if streamer is None else streamer.plan.resident

    def enter(method: str) -> None:
        residency.touch(component)
        if component.depth == 0:
            recompute.settle()
            if streamer is not None:
                streamer.renew()
                row.update(_facts(streamer))
            missing = sum(unit.nbytes for unit in kept() if not unit.resident)
            if streamer is not None:
                missing += streamer.missing
            residency.make_room(missing, component)
            residency.fetch(kept())
            if streamer is not None:
                streamer.begin(method)
        component.depth += 1

    def leave(method: str) -> None:
        component.depth -= 1
        if component.depth == 0:
            residency.renew(kept())
            if streamer is not None:
                streamer.end()

    again: list[Unit] = []  # streamed blocks that backward has fetched

    def bring(unit: Unit) -> None:
        if streamer is not None:
            streamer.release()  # nothing is streamed now, and its memory is needed
            residency.evict(again)
            again[:] = [unit] if unit in streamer.plan.streamed else []
        residency.make_room(unit.nbytes, component)
        residency.fetch([unit])

    recompute = Recompute(component, handle, bring, lambda: residency.evict(again))
    handle.undo.callback(wrap(component.module, enter, leave, **gradient_hooks(component, handle, recompute)))


def _facts(streamer: Streamer) -> dict[str, int]:
    return {"streamed": len(streamer.plan.streamed), "buffers": streamer.plan.buffers}


def _held(parts: dict[str, nn.Module], device: torch.device) -> int:
    tensors = (tensor for slot in slots(*parts.values()) if (tensor := slot.get()) is not None)
    there = with_number(device)
    return sum(tensor_bytes(tensor) for tensor in tensors if tensor.device == there)


def refuse_too_small(components: list[Component], shared: int, limit: int) -> None:
    """Raise BudgetError if a component cannot run within `limit` bytes even when its blocks are streamed."""
    worst = max(components, key=least)
    needed = least(worst) + shared
    if needed <= limit:
        return
    raise BudgetError(
        f"Cannot use balanced offload with a budget of {limit} bytes",
        f"{worst.name} needs {needed} bytes: its largest block and all that is outside blocks must be on the device",
        f"Give a budget of at least {needed} bytes, quantize {worst.name} to fewer bits, or use offload='sequential'",
    )
