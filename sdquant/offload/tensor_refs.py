"""Enumerate every tensor of a module, with the means to replace it.

`nn.Module` knows its parameters and buffers. bitsandbytes has more tensors, in attributes: the `quant_state` of a
`Params4bit`, the `CB` and `SCB` of an `Int8Params` (which move to the module's `state` at the first forward). Weights
of optimum-quanto are wrapper tensors, which can only be moved whole: opaque slots. Nothing here imports those
libraries; their objects are recognised by their attributes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_ORDINARY = (Tensor, nn.Parameter)
# Of a bitsandbytes QuantState, outer and nested.
_STATE_PARTS = ("absmax", "code", "offset", "state2.absmax", "state2.code")


@dataclass(frozen=True)
class TensorReference:
    """One reference to a tensor: `get` returns it (None if it no longer exists), `put` replaces it."""

    owner: nn.Module
    name: str
    get: Callable[[], Tensor | None]
    put: Callable[[Tensor], None]

    @property
    def key(self) -> tuple[int, str]:
        """Return a key that identifies the place."""
        return id(self.owner), self.name


@dataclass(frozen=True)
class Slot:
    """A tensor of a module with all the places that refer to it.

    Attributes:
        name: dotted, of the first place: "blocks.0.proj.weight", "proj.weight.quant_state.absmax".
        places: the references to the tensor; several for tied weights.
        opaque: whether it is a wrapper tensor without memory of its own, which only `.to(device)` can move.
    """

    name: str
    places: list[TensorReference] = field(repr=False)
    opaque: bool = False

    def get(self) -> Tensor | None:
        """Return the present tensor; None if the module no longer has it."""
        return self.places[0].get()

    def put(self, tensor: Tensor) -> None:
        """Point all places at `tensor` (same shape and dtype, any device)."""
        for place in self.places:
            place.put(tensor)


def slots(*modules: nn.Module) -> Iterator[Slot]:
    """Yield the slots of the modules and all their children: parameters, buffers (persistent or not), hidden tensors.

    A tensor in several places is one slot. Tensors that merely overlap are separate slots.
    """
    named = ((prefix, owner) for module in modules for prefix, owner in module.named_modules())
    yield from _merge(named)


def own_slots(owners: Iterable[tuple[str, nn.Module]]) -> list[Slot]:
    """Return the slots of exactly these modules, without their children. `owners`: (dotted name, module) pairs."""
    return list(_merge(owners))


def is_opaque(tensor: Tensor) -> bool:
    """Return whether a tensor wraps others instead of having memory of its own."""
    # Most tensors are of these two types, and torch looks for methods of wrappers in each parameter.
    return type(tensor) not in _ORDINARY and bool(is_traceable_wrapper_subclass(tensor))


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's values; for a wrapper tensor, those of the wrapped ones."""
    if not is_opaque(tensor):
        return tensor.numel() * tensor.element_size()
    wrapper: Any = tensor
    inner, _ = wrapper.__tensor_flatten__()
    return sum(tensor_bytes(getattr(wrapper, name)) for name in inner)


def bytes_of_weights(*modules: nn.Module) -> int:
    """Return the bytes of all slots of the modules: parameters, buffers and hidden tensors; tied ones count once."""
    return sum(tensor_bytes(tensor) for slot in slots(*modules) if (tensor := slot.get()) is not None)


def bring(these: Iterable[Slot], device: torch.device) -> int:
    """Move tensors that are elsewhere, including on another GPU, to the device. Return their number."""
    there, count = with_number(device), 0
    for slot in these:
        tensor = slot.get()
        if tensor is not None and tensor.device != there:
            slot.put(tensor.to(there))
            count += 1
    return count


def with_number(device: torch.device) -> torch.device:
    """Return a device with its index, as tensors have it: "cuda" is the current GPU."""
    return torch.empty(0, device=device, dtype=torch.float32).device


def _merge(owners: Iterable[tuple[str, nn.Module]]) -> Iterator[Slot]:
    by_identity: dict[object, Slot] = {}
    visited: set[int] = set()
    for prefix, owner in owners:
        if id(owner) in visited:
            continue
        visited.add(id(owner))
        for place in _places(owner):
            tensor = place.get()
            if tensor is None:
                continue
            key = _identity(owner, place, tensor)
            if key in by_identity:
                by_identity[key].places.append(place)
            else:
                name = f"{prefix}.{place.name}" if prefix else place.name
                by_identity[key] = Slot(name, [place], is_opaque(tensor))
    yield from by_identity.values()


def _identity(owner: nn.Module, place: TensorReference, tensor: Tensor) -> object:
    """Return a key that is equal for places with the same values in the same memory."""
    if is_opaque(tensor) or tensor.device.type == "meta" or tensor.numel() == 0:
        parameter = owner._parameters.get(place.name)
        return id(parameter) if parameter is not None else place.key
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _places(owner: nn.Module) -> Iterator[TensorReference]:
    for name, parameter in owner._parameters.items():
        if parameter is None:
            continue
        if is_opaque(parameter):
            yield _opaque(owner, name)
        elif hasattr(parameter, "SCB"):
            yield from _int8(owner, name)
        else:
            yield _parameter(owner, name)
            if hasattr(parameter, "quant_state"):
                yield from _quant_state(owner, name)
    for name, buffer in owner._buffers.items():
        if buffer is not None:
            yield _buffer(owner, name)


def _parameter(owner: nn.Module, name: str) -> TensorReference:
    def get() -> Tensor | None:
        parameter = owner._parameters.get(name)
        return None if parameter is None else parameter.data

    def put(tensor: Tensor) -> None:
        parameter = _held(owner, name)
        if torch._has_compatible_shallow_copy_type(parameter, tensor):
            parameter.data = tensor
        else:  # as nn.Module does: parameters of the CPU cannot be given memory of devices that torch has no name for
            owner._parameters[name] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)

    return TensorReference(owner, name, get, put)


def _opaque(owner: nn.Module, name: str) -> TensorReference:
    def get() -> Tensor | None:
        return owner._parameters.get(name)

    def put(tensor: Tensor) -> None:
        # Assigning `.data` would change the wrapper and leave the wrapped tensors where they were.
        owner._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    return TensorReference(owner, name, get, put)


def _buffer(owner: nn.Module, name: str) -> TensorReference:
    def put(tensor: Tensor) -> None:
        owner._buffers[name] = tensor

    return TensorReference(owner, name, lambda: owner._buffers.get(name), put)


def _quant_state(owner: nn.Module, name: str) -> Iterator[TensorReference]:
    """Yield the hidden tensors of a `Params4bit`. On some CPUs its first forward repacks it and drops `state2`."""
    for path in _STATE_PARTS:

        def holder(path: str = path) -> Any:
            state: Any = getattr(owner._parameters.get(name), "quant_state", None)
            return getattr(state, "state2", None) if path.startswith("state2.") else state

        attribute = path.rpartition(".")[2]

        def get(holder: Callable[[], Any] = holder, attribute: str = attribute) -> Tensor | None:
            value = getattr(holder(), attribute, None)
            return value if isinstance(value, Tensor) else None

        def put(tensor: Tensor, holder: Callable[[], Any] = holder, attribute: str = attribute) -> None:
            setattr(holder(), attribute, tensor)

        yield TensorReference(owner, f"{name}.quant_state.{path}", get, put)


def _int8(owner: nn.Module, name: str) -> Iterator[TensorReference]:
    """Yield the codes of an `Int8Params`, which `CB` aliases, and the scales, each on the weight or on the state."""

    def holders() -> list[Any]:
        return [owner._parameters.get(name), getattr(owner, "state", None)]

    def put_codes(tensor: Tensor) -> None:
        weight = _held(owner, name)
        weight.data = tensor
        for holder in holders():
            if getattr(holder, "CB", None) is not None:
                holder.CB = weight.data

    def get_scales() -> Tensor | None:
        scales = (getattr(holder, "SCB", None) for holder in holders())
        return next((value for value in scales if value is not None), None)

    def put_scales(tensor: Tensor) -> None:
        having = [holder for holder in holders() if getattr(holder, "SCB", None) is not None]
        for holder in having:
            holder.SCB = tensor
        if not having:  # accelerate's hooks throw them away; as for a fresh weight, the next forward distributes them
            weight: Any = _held(owner, name)
            weight.CB, weight.SCB = weight.data, tensor

    yield TensorReference(owner, name, _parameter(owner, name).get, put_codes)
    yield TensorReference(owner, f"{name}.SCB", get_scales, put_scales)


def _held(owner: nn.Module, name: str) -> Tensor:
    parameter = owner._parameters[name]
    if parameter is None:
        raise RuntimeError(f"{type(owner).__name__}.{name} was removed while its weights were offloaded")
    return parameter
