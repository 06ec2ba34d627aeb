"""What `apply` gives back: the way to undo an offload mode, and to see what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import SettingsError
from ..utils.inference_mode import ordinary
from .locking import ComputingLock

HANDLE = "_sdquant_offload"  # on each component: the handle that is active


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

    The mode is at work, or it rests: after something that nobody announced was set on the model, all weights are in
    ordinary memory until the model is used again. `suspended` is the way to read and write weights.

    Attributes:
        mode: its name.
        device: the compute device, as text.
        undo: what `remove` calls, the last first. A mode pushes here whatever takes back what it did.
        lock: re-entrant. Whoever moves weights, or computes with them, holds it: a method of a component from the time
            that its weights are fetched, a mode while it is put on, suspended or taken off. Other threads wait.
        computing: how many methods of components are being called, one inside the other; under the lock.
        calls: how many calls of pipelines there are; under the lock.
        grown: whether a pipeline may have components that the mode does not know.
    """

    def __init__(self, mode: str, device: str, total: int) -> None:
        self.mode, self.device = mode, device
        self.total = total
        self.counters = Counters()
        self.lock = ComputingLock()
        self.undo = ExitStack()
        self.components: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}
        self.active = True
        self.computing = self.calls = 0
        self.grown = False
        self._suspended = False
        self._rests = False
        # What `apply` sets where there is a mode: does what it does, on the components of the owners.
        self.engage: Callable[[], None] = lambda: None
        self.owners: Any = None

    @property
    def works(self) -> bool:
        """Whether the model has a mode that moves its weights, at work or resting."""
        return self.active and self.mode != "none"

    @contextmanager
    def suspended(self, what: str = "suspend the offload mode") -> Iterator[None]:
        """The weights in ordinary memory and no hooks; afterwards the mode is at work again, on what is there then.

        Args:
            what: for the error, what was to be done meanwhile: an imperative.

        Raises:
            SettingsError: the model is computing in this thread. BudgetError: what it is now does not fit the budget
                any more; the mode rests then, and is put on when the model is used after it has been made smaller.
        """
        with self.lock:
            if not self.works or self._suspended:
                yield
                return
            if self.computing:
                raise SettingsError(
                    f"Cannot {what} with offload={self.mode!r} while the model is running",
                    "the weights that it is using would be taken away",
                    "Do it before or after the call, or between the steps of a pipeline",
                )
            self._undo()
            self._suspended, self._rests = True, False
            try:
                yield
            finally:
                self._suspended = False
                self.put_on()

    def put_on(self) -> None:
        """Have the mode at work on what the model is now. Where that fails it rests."""
        if not self.works:
            return
        self._rests = self.grown = False
        try:
            self.engage()
        except BaseException:
            self._rest()  # which takes off what came to be on
            raise

    def rest(self) -> None:
        """Bring all weights into ordinary memory until the model is used next, since it is about to be changed."""
        with self.lock:
            if self.works and not (self._suspended or self._rests or self.computing):
                self._rest()

    def look_again(self) -> None:
        """Take note of the components that there are now, if the mode rests: one that has gone is let go."""
        with self.lock:
            self.grown = True
            if self.works and self._rests:
                self._rest()

    def _rest(self) -> None:
        self._undo()
        self._rests = True
        self.owners.watch()

    def ready(self) -> None:
        """Put the mode on if it rests, or does not know all components; the model is about to be used."""
        with self.lock:
            if not self.works or self._suspended or self.computing:
                return
            if self._rests or (self.grown and self.owners.have_grown()):
                self._undo()
                self.put_on()
            self.grown = False

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A pipeline is being called."""
        with self.lock:
            self.ready()
            self.calls += 1
            try:
                yield
            finally:
                self.calls -= 1

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
            if self.owners is not None:
                self.owners.release()
        if self.mode != "none":
            from ..utils.buffers import give_back

            give_back()

    def __deepcopy__(self, memo: object) -> OffloadHandle:
        """Copies of a model that is not offloaded share the handle: it has nothing to undo."""
        self.refuse("copy")
        return self

    def __reduce__(self) -> Any:
        """Pickled with a model that is not offloaded, it is the handle of a mode with nothing to undo."""
        self.refuse("pickle")
        return OffloadHandle, ("none", self.device, self.total)

    def refuse(self, what: str, why: str = "its weights are managed by hooks that belong to this one model") -> None:
        """Raise SettingsError if the model's weights are held by hooks.

        Args:
            what: an imperative: "copy".
        """
        if not self.works:
            return
        raise SettingsError(
            f"Cannot {what} a model with offload={self.mode!r}",
            why,
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
