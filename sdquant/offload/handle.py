"""`OffloadHandle`, the result of `apply`: undo or suspend an offload mode, and report on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from ..core import NO_OFFLOAD
from ..errors import SettingsError
from ..utils.inference_mode import ordinary
from .locking import ComputingLock

HANDLE = "_sdquant_offload"  # on each component: the handle that is active
# The beginning of a fix, for models of load_model and others.
REMOVE_FIRST = "Call `pipe.sdquant.offload.remove()` first (or `remove()` of what `sdquant.offload.apply` returned)"


@dataclass
class Counters:
    """Transfer statistics, in bytes and counts.

    Attributes:
        fetched, fetches: bytes and number of copies to the compute device.
        evicted, evictions: bytes and number of evictions there; nothing is copied back.
        prefetched: number of fetches of a block that were started before the block was called.
        waited: number of those that were not complete when the block was called.
        mispredicted: number of prefetched blocks that were not the next one called.
        stored: bytes written to the store.
        resident, peak: bytes of weights on the compute device, now and at most, buffers included.
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
        """Count `nbytes` more on the device (fewer, if negative)."""
        with self._lock:
            self.resident += nbytes
            self.peak = max(self.peak, self.resident)

    def to_dict(self) -> dict[str, int]:
        """Return all counters by name."""
        return {row.name: getattr(self, row.name) for row in fields(self) if row.repr}


class OffloadHandle:
    """An offload mode of a model.

    The mode is either active or resting: after something was set on the model directly, all weights are in ordinary
    memory until the model is used again. Use `suspended` to read and write weights.

    Attributes:
        mode: its name.
        device: the compute device, as text.
        undo: callbacks of `remove`, the last first. A mode pushes a callback here for everything that it changes.
        lock: re-entrant. Held while weights are moved or used: by a method of a component from the time that its
            weights are fetched, and while a mode is applied, suspended or removed. Other threads wait.
        computing: number of nested calls of components' methods; guarded by the lock.
        calls: number of running calls of pipelines; guarded by the lock.
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
        # Set by `apply` unless the mode is "none": applies the mode to the components of the owners.
        self.engage: Callable[[], None] = lambda: None
        self.owners: Any = None

    @property
    def works(self) -> bool:
        """Return whether the model has a mode that moves its weights, active or resting."""
        return self.active and self.mode != NO_OFFLOAD

    @contextmanager
    def suspended(self, what: str = "suspend the offload mode") -> Iterator[None]:
        """Suspend the mode: weights in ordinary memory, no hooks. Afterwards it is applied to the model as it is then.

        Args:
            what: an imperative for the error: the action that needs the suspension.

        Raises:
            SettingsError: the model is running in this thread. BudgetError: the changed model does not fit the budget;
                the mode then rests, and is applied when the model is used after it has been made smaller.
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
        """Apply the mode to the model as it is now. If that fails, it rests."""
        if not self.works:
            return
        self._rests = self.grown = False
        try:
            self.engage()
        except BaseException:
            self._rest()  # undoes what was applied so far
            raise

    def rest(self) -> None:
        """Bring all weights to ordinary memory until the model is used next, since it is about to be changed."""
        with self.lock:
            if self.works and not (self._suspended or self._rests or self.computing):
                self._rest()

    def look_again(self) -> None:
        """Look up the present components, if the mode rests, so that removed ones are released."""
        with self.lock:
            self.grown = True
            if self.works and self._rests:
                self._rest()

    def _rest(self) -> None:
        self._undo()
        self._rests = True
        self.owners.watch()

    def ready(self) -> None:
        """Apply the mode if it rests or does not know all components; called before the model is used."""
        with self.lock:
            if not self.works or self._suspended or self.computing:
                return
            if self._rests or (self.grown and self.owners.have_grown()):
                self._undo()
                self.put_on()
            self.grown = False

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Have the mode applied during a call of a pipeline, and count the call."""
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
        """Remove all hooks, bring the weights back to ordinary memory, and delete files. May be called again.

        Offloaded weights are in CPU memory afterwards; those that never moved stay where they are.
        """
        with self.lock:
            if not self.active:
                return
            self.active = False
            self._undo()
            if self.owners is not None:
                self.owners.release()
        if self.mode != NO_OFFLOAD:
            from ..utils.buffers import give_back

            give_back()

    def __deepcopy__(self, memo: object) -> OffloadHandle:
        """Return itself: copies of a model that is not offloaded share the handle, which has nothing to undo."""
        self.refuse("copy")
        return self

    def __reduce__(self) -> Any:
        """Pickle the handle of a model that is not offloaded as one of mode "none", with nothing to undo."""
        self.refuse("pickle")
        return OffloadHandle, (NO_OFFLOAD, self.device, self.total)

    def refuse(self, what: str, why: str = "its weights are managed by hooks that belong to this one model") -> None:
        """Raise SettingsError if hooks of a mode manage the model's weights.

        Args:
            what: an imperative: "copy".
        """
        if not self.works:
            return
        raise SettingsError(
            f"Cannot {what} a model with offload={self.mode!r}",
            why,
            f"{REMOVE_FIRST}, or load the model with offload='none'",
        )

    def report(self) -> dict[str, Any]:
        """Return the mode, the bytes of all weights, the counters, and how each component is kept."""
        return {
            "mode": self.mode,
            "device": self.device,
            "active": self.active,
            "bytes": self.total,
            **self.facts,
            **self.counters.to_dict(),
            "components": {name: dict(row) for name, row in self.components.items()},
        }
