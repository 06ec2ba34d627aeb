"""Hook a component that shares a budget with others, and stream what does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..models import call_hooks
from .backward import gradient_hooks, keeping
from .block_streamer import Streamer
from .recompute import Recompute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .blocks import Component, Unit
    from .handle import OffloadHandle
    from .residency import Residency


def hook_component(component: Component, residency: Residency, handle: OffloadHandle, room: int) -> None:
    """Fetch a component when it is called, and stream its blocks if it has more than `room` bytes."""
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
                call_hooks.wrap(
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
    handle.undo.callback(
        call_hooks.wrap(component.module, enter, leave, **gradient_hooks(component, handle, recompute))
    )


def _facts(streamer: Streamer) -> dict[str, int]:
    return {"streamed": len(streamer.plan.streamed), "buffers": streamer.plan.buffers}
