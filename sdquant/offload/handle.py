"""What `apply` gives back: the way to undo an offload mode, and to see what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import SettingsError
from ..inference import ordinary


@dataclass
class Counters:
    """What was moved, in bytes and times.

    Attributes:
        fetched, fetches: brought to the compute device.
        evicted, evictions: given up there; nothing is copied back.
        prefetched: fetches of a block that were started before the block was called.
        waited: of those, how many were not finished when the block was called.
        mispredicted: prefetched blocks that were not the next one called.
        stored: bytes written to the store.
        resident, peak: weights on the compute device now, and the most there ever were, buffers included.
    """

    fetched: int = 0
    fetches: int = 0
    evicted: int = 0
    evictions: int = 0
    prefetched: int = 0
    waited: int = 0
    mispredicted: int = 0
    stored: int = 0
    resident: int = 0
    peak: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def hold(self, nbytes: int) -> None:
        """`nbytes` more are on the device (fewer, if negative)."""
        with self._lock:
            self.resident += nbytes
            self.peak = max(self.peak, self.resident)

    def to_dict(self) -> dict[str, int]:
        """All of them by name."""
        return {row.name: getattr(self, row.name) for row in fields(self) if row.repr}


class OffloadHandle:
    """An offload mode at work on a model.

    Attributes:
        mode: its name.
        device: the compute device, as text.
        undo: what `remove` calls, the last first. A mode pushes here whatever takes back what it did.
        lock: re-entrant. Whoever moves weights, or computes with them, holds it: a method of a component from the time
            that its weights are fetched, a mode while it is put on, suspended or taken off. Other threads wait.
    """

    def __init__(self, mode: str, device: str, total: int) -> None:
        self.mode, self.device = mode, device
        self.total = total
        self.counters = Counters()
        self.lock = threading.RLock()
        self.undo = ExitStack()
        self.components: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}
        self.active = True
        self.engage: Callable[[], None] = lambda: None  # does what the mode does; `apply` sets it

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The weights in ordinary memory and no hooks; afterwards the mode is at work again, on what is there then."""
        with self.lock:
            if not self.active or self.mode == "none":
                yield
                return
            self._undo()
            try:
                yield
            finally:
                self.engage()

    @ordinary
    def _undo(self) -> None:
        self.undo.close()

    def remove(self) -> None:
        """Take every hook off again, bring weights back into ordinary memory, delete files. Twice is as good as once.

        Weights that waited elsewhere are in CPU memory afterwards; those that never moved stay where they are.
        """
        with self.lock:
            if not self.active:
                return
            self.active = False
            self._undo()
        if self.mode != "none":
            from ..memory import give_back

            give_back()

    def __deepcopy__(self, memo: object) -> OffloadHandle:
        """Copies of a model that is not offloaded share the handle: it has nothing to undo."""
        self.refuse("copied")
        return self

    def __reduce__(self) -> Any:
        """Pickled with a model that is not offloaded, it is the handle of a mode with nothing to undo."""
        self.refuse("pickled")
        return OffloadHandle, ("none", self.device, self.total)

    def refuse(self, what: str) -> None:
        """Raise SettingsError if the model's weights are held by hooks."""
        if self.mode == "none" or not self.active:
            return
        raise SettingsError(
            f"A model with offload={self.mode!r} was to be {what}",
            "its weights are held by hooks that belong to the one model",
            "Call `.sdquant.offload.remove()` first, or load the model with offload='none'",
        )

    def report(self) -> dict[str, Any]:
        """The mode, the bytes of all weights, the counters, and how each component is kept."""
        return {
            "mode": self.mode,
            "device": self.device,
            "active": self.active,
            "bytes": self.total,
            **self.facts,
            **self.counters.to_dict(),
            "components": {name: dict(row) for name, row in self.components.items()},
        }
