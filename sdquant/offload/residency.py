"""Which units are on the compute device: the book that the modes share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..errors import BudgetError
from ..utils.malloc_trim import trim
from .async_copy import streams
from .host_store import DiskStore, PinnedStore, Store
from .pinned_memory import pinning
from .pinned_staging import Staging
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
    """Where weights wait for this device: a file for the CPU, RAM for a GPU, pinned where it copies while computing."""
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
    """Fetches units and gives them up, keeping to a limit.

    Args:
        components: all there are.
        shared: slots that several components use; they are on the device all the time.
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
        """Bytes that are always resident."""
        return sum(tensor_bytes(tensor) for slot in self._shared if (tensor := slot.get()) is not None)

    def stow(self) -> None:
        """Put everything into the store, unit by unit, so that no more than one unit is in memory twice."""
        bring(self._shared, self.device)
        self.counters.hold(self.shared_bytes)
        for component in self.components:
            for unit in component.units:
                unit.stow(self.store)
                trim()
        if isinstance(self.store, PinnedStore):
            self._facts |= {"pinned": self.store.pinned, "pageable": self.store.pageable}

    def touch(self, component: Component) -> None:
        """The component is in use now."""
        self._clock += 1
        component.used = self._clock

    def fetch(self, units: Iterable[Unit]) -> None:
        """Bring those of the units to the device that are not there."""
        for unit in units:
            if not unit.resident:
                unit.place(unit.read(None, self.device), held=True)

    def evict(self, units: Iterable[Unit]) -> None:
        """Give up those of the units that are on the device."""
        for unit in units:
            if unit.resident:
                unit.drop(self.store)

    def renew(self, units: Iterable[Unit]) -> None:
        """Take over weights that a library has replaced with others (its own repacking, at a first forward)."""
        for unit in units:
            if unit.resident and unit.changed():
                unit.drop(self.store)
                self.fetch([unit])

    def make_room(self, nbytes: int, component: Component) -> None:
        """Give up units until `nbytes` more fit: of the component used longest ago first, and only as many as needed.

        Within a component its last blocks go first. Components that are running are left alone.
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
                unit.free(self.store)
        trim()
