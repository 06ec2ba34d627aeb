"""Units: weights that are fetched and evicted together, and how a component is cut into them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..utils.buffers import flat_buffer
from ..utils.inference_mode import ordinary
from .host_store import aligned
from .tensor_refs import Slot, is_opaque, own_slots, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .handle import Counters
    from .host_store import Region, Store


TRAINED = "_sdquant_trained"  # attribute of parameters that an optimizer updates: no mode moves them


class Unit:
    """Modules whose own tensors move together.

    Attributes:
        name: dotted, within the component.
        module: the block; None for the unit of all layers outside blocks.
        resident: whether the weights are on the compute device.
        storages: start addresses of the weights' memory on the compute device; empty while they are offloaded.
        drops: how often they were evicted.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module | None,
        owners: list[tuple[str, nn.Module]],
        *,
        skip: Callable[[Slot], bool],
        counters: Counters,
    ) -> None:
        self.name, self.module = name, module
        self.resident = False
        self._owners, self._skip, self._counters = owners, skip, counters
        self._slots = self._collect()
        self._region: Region | None = None
        self._placed: list[Tensor] = []
        self._held = 0
        self.storages: frozenset[int] = frozenset()
        self.drops = 0

    def _collect(self) -> list[Slot]:
        return [slot for slot in own_slots(self._owners) if not self._skip(slot)]

    @property
    def nbytes(self) -> int:
        """Return the bytes that the unit takes on the device when it is fetched."""
        return sum(aligned(tensor_bytes(tensor)) for slot in self._slots if (tensor := slot.get()) is not None)

    @ordinary
    def stow(self, store: Store) -> None:
        """Put the weights into the store, and point the module at the stored tensors."""
        self._slots = self._collect()
        tensors = [tensor for slot in self._slots if (tensor := slot.get()) is not None]
        self._region = store.add(tensors)
        self._counters.stored += self.nbytes
        self._place(self._region.waiting)

    @property
    def waits(self) -> bool:
        """Return whether `read` blocks until the copy is done; see `Region`."""
        return self._region is not None and self._region.waits

    @ordinary
    def read(self, buffer: Tensor | None, device: torch.device) -> Tensor:
        """Start copying the bytes to the device, into `buffer` or new memory; does not touch the module."""
        assert self._region is not None
        if buffer is None or buffer.numel() < self._region.nbytes:
            buffer = flat_buffer(self._region.nbytes, device)
        self._region.read(buffer)
        return buffer

    @ordinary
    def place(self, flat: Tensor, *, held: bool) -> None:
        """Point the module at the bytes from `read`. `held`: count them as resident (not for shared buffers)."""
        assert self._region is not None
        self._place(self._region.views(flat))
        self.storages = frozenset(t.untyped_storage().data_ptr() for t in self._placed if not is_opaque(t))
        self.resident = True
        self._held = self.nbytes if held else 0
        self._counters.hold(self._held)
        self._counters.fetched += self.nbytes
        self._counters.fetches += 1

    @ordinary
    def drop(self, store: Store) -> None:
        """Evict the weights from the device: point the module at the stored ones again.

        A library may have changed its weights meanwhile (bitsandbytes repacks 4-bit weights at their first forward on
        some CPUs): then the stored ones are outdated, and the new ones are stored.
        """
        assert self._region is not None
        self._counters.evicted += self.nbytes
        self._counters.evictions += 1
        self.storages = frozenset()
        self.drops += 1
        if self.changed():
            self.stow(store)
        else:
            self._place(self._region.waiting)
        self.resident = False
        self._counters.hold(-self._held)
        self._held = 0

    @ordinary
    def free(self) -> None:
        """Copy stored weights to ordinary CPU memory, each tensor in its own, and drop the store's region."""
        if self._region is None:
            return
        if self.changed():
            self._slots = self._collect()
        for slot in self._slots:
            tensor = slot.get()
            if tensor is not None:
                slot.put(tensor.to("cpu") if slot.opaque else _copy(tensor))
        self._region, self._placed = None, []
        self.storages = frozenset()
        self.drops += 1
        self.resident = False
        self._counters.hold(-self._held)
        self._held = 0

    @property
    def owners(self) -> list[tuple[str, nn.Module]]:
        """Return the modules with weights of their own that move with the unit, by name."""
        owning = {id(place.owner): place.owner for slot in self._slots for place in slot.places}
        return [(name, module) for name, module in self._owners if id(module) in owning]

    @property
    def hides(self) -> bool:
        """Return whether some of the weights are in attributes that only their library knows."""
        return any("." in slot.places[0].name for slot in self._slots)

    def stored(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the weight on the device that `tensor` is a view of, and its stored copy; None if there is none."""
        assert self._region is not None
        where = tensor.data_ptr()
        for placed, waiting in zip(self._placed, self._region.waiting, strict=True):
            if placed.dtype == tensor.dtype and not is_opaque(placed):
                start = placed.data_ptr()
                if start <= where < start + tensor_bytes(placed):
                    return placed, waiting
        return None

    def _place(self, tensors: list[Tensor]) -> None:
        for slot, tensor in zip(self._slots, tensors, strict=True):
            slot.put(tensor)
        self._placed = tensors

    def changed(self) -> bool:
        """Return whether a slot no longer holds the tensor that was last put into it."""
        for slot, placed in zip(self._slots, self._placed, strict=True):
            tensor = slot.get()
            if tensor is None:
                return True
            if not slot.opaque and (tensor.data_ptr() != placed.data_ptr() or tensor.dtype != placed.dtype):
                return True
        return False


def _copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu")
    return copy.copy_(tensor)


@dataclass
class Component:
    """A component of a pipeline, cut into units.

    Attributes:
        rest: the layers outside blocks.
        blocks: in order of registration, the first guess at the order in which they run.
        depth: how many of the component's methods are running.
        used: when it was last called, counted in calls.
        release: frees memory that the component holds besides its units (buffers for streaming); None if nothing.
    """

    name: str
    module: nn.Module
    rest: Unit
    blocks: list[Unit] = field(default_factory=list)
    depth: int = 0
    used: int = 0
    release: Callable[[], None] | None = None

    @property
    def units(self) -> list[Unit]:
        """Return all units, the rest first."""
        return [self.rest, *self.blocks]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all units."""
        return sum(unit.nbytes for unit in self.units)


def cut(
    parts: dict[str, nn.Module],
    counters: Counters,
    *,
    blocks: bool,
    leave: Callable[[Slot], bool] = lambda slot: False,
) -> tuple[list[Component], list[Slot]]:
    """Return the components cut into units, and the slots that belong to no unit: those that several components share,
    and the trained parameters of a LoRA, which an optimizer updates.

    Args:
        parts: components by name.
        blocks: whether to cut out blocks; otherwise a component is one unit.
        leave: selects slots that no unit moves.
    """
    shared = _shared({name: list(module.named_modules()) for name, module in parts.items()})
    shared |= {key for module in parts.values() for key in _trained(module)}
    components = []
    for name, module in parts.items():
        block_modules = dict(find_blocks(module)) if blocks else {}
        owners = {
            block: [(f"{block}.{n}" if n else block, m) for n, m in child.named_modules()]
            for block, child in block_modules.items()
        }
        inside = {id(m) for rows in owners.values() for _, m in rows}
        outside = [(n, m) for n, m in module.named_modules() if id(m) not in inside]
        # A weight that two blocks share, or a block and the rest, stays with the rest.
        tied = _shared({**owners, "": outside})
        extra = [(n, m) for rows in owners.values() for n, m in rows if any(key[0] == id(m) for key in tied)]

        def not_rest(slot: Slot, inside: set[int] = inside, tied: set[tuple[int, str]] = tied) -> bool:
            return id(slot.places[0].owner) in inside and slot.places[0].key not in tied

        def skip_block(slot: Slot, tied: set[tuple[int, str]] = tied) -> bool:
            return _touches(slot, shared) or _touches(slot, tied) or leave(slot)

        def skip_rest(slot: Slot, not_rest: Callable[[Slot], bool] = not_rest) -> bool:
            return _touches(slot, shared) or not_rest(slot) or leave(slot)

        rest = Unit("", None, outside + extra, skip=skip_rest, counters=counters)
        cuts = [Unit(b, block_modules[b], owners[b], skip=skip_block, counters=counters) for b in block_modules]
        components.append(Component(name, module, rest, [unit for unit in cuts if unit.nbytes]))
    everyone = [(f"{name}.{n}" if n else name, m) for name, module in parts.items() for n, m in module.named_modules()]
    return components, [slot for slot in own_slots(everyone) if _touches(slot, shared)]


def find_blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a network by dotted name: members of the outermost module lists, and a `mid_block`."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{prefix}{name}.{i}", block) for i, block in child._modules.items() if block is not None)
        elif name == "mid_block":
            yield f"{prefix}{name}", child
        else:
            yield from find_blocks(child, f"{prefix}{name}.")


def _trained(module: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the places of parameters that are marked as trained."""
    for owner in module.modules():
        yield from ((id(owner), name) for name, p in owner._parameters.items() if hasattr(p, TRAINED))


def _shared(groups: dict[str, list[tuple[str, nn.Module]]]) -> set[tuple[int, str]]:
    """Return the places of slots that more than one group refers to."""
    group_of: dict[int, str] = {}
    modules_in_two: set[int] = set()
    for group, rows in groups.items():
        for _, module in rows:
            if group_of.setdefault(id(module), group) != group:
                modules_in_two.add(id(module))
    keys: set[tuple[int, str]] = set()
    for slot in own_slots(row for rows in groups.values() for row in rows):
        homes = {group_of[id(place.owner)] for place in slot.places}
        if len(homes) > 1 or any(id(place.owner) in modules_in_two for place in slot.places):
            keys.update(place.key for place in slot.places)
    return keys


def _touches(slot: Slot, keys: set[tuple[int, str]]) -> bool:
    return any(place.key in keys for place in slot.places)
