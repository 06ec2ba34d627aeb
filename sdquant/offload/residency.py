"""Track which units are on the compute device; shared by the modes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..errors import BudgetError
from ..utils.malloc_trim import trim
from .async_copy import streams
from .host_store import DiskStore, PinnedStore, Store
from .pinned_memory import Staging, pinning
from .tensor_refs import bring, tensor_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    import torch

    from .blocks import Component, Unit
    from .handle import OffloadHandle
    from .tensor_refs import Slot

log = logging.getLogger(__name__)


def tier(device: torch.device, folder: str | os.PathLike[str] | None) -> Store:
    """Return the store for this device: files for the CPU, RAM for a GPU, pinned if copies can overlap computing."""
    if device.type == "cpu":
        return DiskStore(folder)
    api = streams(device)
    if api is None:
        return PinnedStore()
    try:
        return PinnedStore(pinning(device), staging=Staging(api, device))
    except RuntimeError as error:
        log.warning("No RAM can be pinned, so offloaded weights move more slowly: %s", error)
        return PinnedStore()


class Residency:
    """Fetches and evicts units, within a limit.

    Args:
        components: all components of the mode.
        shared: slots that several components use; they always stay on the device.
        limit: bytes that may be resident; None for no limit.
    """

    def __init__(
        self,
        components: Sequence[Component],
        shared: Sequence[Slot],
        store: Store,
        device: torch.device,
        handle: OffloadHandle,
        limit: int | None,
    ) -> None:
        self.components, self.store, self.device = components, store, device
        self.limit = limit
        self.counters = handle.counters
        self._facts = handle.facts
        self._shared = shared
        self._clock = 0
        handle.undo.callback(self._free)

    @property
    def shared_bytes(self) -> int:
        """Return the bytes that are always resident."""
        return sum(tensor_bytes(tensor) for slot in self._shared if (tensor := slot.get()) is not None)

    def stow(self) -> None:
        """Put everything into the store, unit by unit, so that at most one unit is in memory twice."""
        bring(self._shared, self.device)
        self.counters.hold(self.shared_bytes)
        for component in self.components:
            for unit in component.units:
                unit.stow(self.store)
                trim()
        if isinstance(self.store, PinnedStore):
            self._facts |= {"pinned": self.store.pinned, "pageable": self.store.pageable}

    def touch(self, component: Component) -> None:
        """Mark the component as the most recently used."""
        self._clock += 1
        component.used = self._clock

    def fetch(self, units: Iterable[Unit]) -> None:
        """Fetch those of the units that are not on the device."""
        for unit in units:
            if not unit.resident:
                unit.place(unit.read(None, self.device), held=True)

    def evict(self, units: Iterable[Unit]) -> None:
        """Evict those of the units that are on the device."""
        for unit in units:
            if unit.resident:
                unit.drop(self.store)

    def renew(self, units: Iterable[Unit]) -> None:
        """Store and fetch again weights that a library has replaced (repacking at the first forward)."""
        for unit in units:
            if unit.resident and unit.changed():
                unit.drop(self.store)
                self.fetch([unit])

    def make_room(self, nbytes: int, component: Component) -> None:
        """Evict units until `nbytes` more fit, only as many as needed, least recently used component first.

        Within a component the last blocks are evicted first. Running components are left alone.
        """
        if self.limit is None:
            return
        idle = (other for other in self.components if other is not component and other.depth == 0)
        for other in sorted(idle, key=lambda other: other.used):
            if self.counters.resident + nbytes > self.limit and other.release is not None:
                other.release()
            for unit in reversed(other.units):
                if self.counters.resident + nbytes <= self.limit:
                    return
                self.evict([unit])
        if self.counters.resident + nbytes > self.limit:
            running = [other.name for other in self.components if other.depth and other is not component]
            raise BudgetError(
                f"Cannot run {component.name} with a budget of {self.limit} bytes",
                f"it needs {nbytes} bytes, and {self.counters.resident} are in use"
                + (f" by {', '.join(running)}, which called it" if running else ""),
                f"Give a budget of at least {self.counters.resident + nbytes} bytes",
            )

    def _free(self) -> None:
        for component in self.components:
            for unit in component.units:
                unit.free()
        trim()
