"""Gradients through weights that a mode moves.

Autograd keeps the weights that backward will read, as the tensors that they were during the forward: in memory which
the next block has taken by then. So what it keeps of a component's weights is where they wait (`keeping`), and backward
reads them there; what it runs once more has its weights brought (`recompute`). Where a mode has no such place, or a
library keeps its weights where autograd does not look, backward is refused before it starts (`refuse_backward`), and so
is training weights that are read from a store, into which no optimizer writes (`refuse_training`). A LoRA that is
trained belongs to no mode: see `units.cut`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import IncompatibleError
from .recompute import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from ..errors import SdquantError
    from .blocks import Component, Unit
    from .handle import OffloadHandle
    from .recompute import Recompute

TRAINS = ("none", "model", "balanced")  # modes in which a LoRA can be trained


@dataclass(frozen=True)
class _Weight:
    """A weight, or a view of one: the tensor that waits in the store, and how to see it."""

    waiting: Tensor
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements, from the beginning of the weight

    def read(self) -> Tensor:
        there = self.waiting.to(self.device)
        return there.as_strided(self.size, self.stride, there.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Kept:
    """What other hooks around the call made of a tensor that is no weight, and how they undo it."""

    value: Any
    unpack: Callable[[Any], Tensor]


def keeping(units: Sequence[Unit]) -> AbstractContextManager[object]:
    """While this is entered autograd keeps of these units' weights where they wait; of all else, what it would have."""
    if not torch.is_grad_enabled():
        return nullcontext()
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    below = top(True) if top is not None else None

    def pack(tensor: Tensor) -> Any:
        weight = _found(tensor, units)
        if weight is not None:
            return weight
        if below is not None:  # of torch.utils.checkpoint, which counts what is kept, or of save_on_cpu
            return _Kept(below[0](tensor), below[1])
        return tensor.detach()  # an operation's own result would hold the graph that holds it

    return saved_tensors_hooks(pack, _unpack)


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, _Weight):
        return kept.read()
    if isinstance(kept, _Kept):
        return kept.unpack(kept.value)
    tensor: Tensor = kept
    return tensor


def _found(tensor: Tensor, units: Sequence[Unit]) -> _Weight | None:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.numel():
        return None
    storage = tensor.untyped_storage().data_ptr()
    for unit in units:
        if storage in unit.storages and (pair := unit.stored(tensor)) is not None:
            placed, waiting = pair
            offset = int(tensor.storage_offset()) - int(placed.storage_offset())
            return _Weight(waiting, tensor.device, tensor.size(), tensor.stride(), offset)
    return None


def gradient_hooks(component: Component, handle: OffloadHandle, recompute: Recompute) -> dict[str, Any]:
    """Arguments of `wrap` for a component's methods."""
    units = component.units
    hiding = [unit for unit in units if unit.hides]
    drops = [0]

    def around() -> AbstractContextManager[object]:
        if component.depth == 1:
            drops[0] = sum(unit.drops for unit in hiding)
        return keeping(units)

    def outcome(result: Any) -> None:
        before = drops[0]
        refuse_training(component.name, (row for unit in units for row in unit.owners), handle)
        if hiding:
            gone = moved(handle, component.name)
            refuse_backward(result, lambda: None if before == sum(unit.drops for unit in hiding) else gone)
        recompute.watch(result)

    return {"lock": handle.lock, "around": around, "outcome": outcome}


def refuse_backward(output: Any, reason: Callable[[], SdquantError | None]) -> None:
    """Have backward through these outputs (tensors in any containers) raise what `reason` gives then, if anything."""
    if not torch.is_grad_enabled():
        return

    def check(grad: Tensor) -> None:
        error = reason()
        if error is not None:
            raise error

    for tensor in tensors_of(output):
        if tensor.requires_grad:
            tensor.register_hook(check)  # type: ignore[no-untyped-call]


def refusing(handle: OffloadHandle, name: str) -> Callable[[Any], None]:
    """For `wrap`: what is to be done with a result in a mode that cannot give gradients."""
    return lambda result: refuse_backward(result, lambda: unable(handle, name) if handle.active else None)


def unable(handle: OffloadHandle, name: str) -> SdquantError:
    """The error for gradients in a mode that cannot give them."""
    return IncompatibleError(
        f"Cannot compute gradients through the {name} with offload={handle.mode!r}",
        "backward reads the weights after the mode has offloaded them",
        "Load the pipeline with offload='model' or 'balanced' (and runtime='plain'), or with offload='none'",
    )


def refuse_derivatives(handle: OffloadHandle, part: nn.Module) -> None:
    """Raise IncompatibleError within torch.func's transforms that take derivatives: they wrap the weights, which a mode
    would no longer know when it puts them away."""
    functorch: Any = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return
    kinds = {level.key() for level in functorch.get_interpreter_stack()}
    if kinds & {functorch.TransformType.Grad, functorch.TransformType.Jvp}:
        raise IncompatibleError(
            f"Cannot take derivatives of the {type(part).__name__} with torch.func and offload={handle.mode!r}",
            "torch.func keeps references to the weights, which the mode offloads",
            "Use torch.autograd.grad with offload='model' or 'balanced', or load the pipeline with offload='none'",
        )


def moved(handle: OffloadHandle, name: str) -> SdquantError:
    """The error for gradients of a library's layers, whose weights were put away since they ran."""
    return IncompatibleError(
        f"Cannot compute gradients through the {name} with offload={handle.mode!r}",
        "its layers are a library's own and keep their weights for backward, which have been offloaded since they ran",
        "Load the pipeline with runtime='plain', give a larger budget, or use offload='none'",
    )


def refuse_training(name: str, owners: Iterable[tuple[str, nn.Module]], handle: OffloadHandle) -> None:
    """Have backward refuse to give gradients to weights that the mode moves."""
    if not torch.is_grad_enabled():
        return
    for path, owner in owners:
        for key, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad and not hasattr(parameter, _REFUSED):
                _refuse(f"{path}.{key}".lstrip("."), parameter, name, handle)


_REFUSED = "_sdquant_refuses_gradients"


def _refuse(path: str, parameter: Any, name: str, handle: OffloadHandle) -> None:
    def check(grad: Tensor) -> None:
        raise IncompatibleError(
            f"Cannot train {path} of the {name} with offload={handle.mode!r}",
            "its values are read back from where they are stored, and what an optimizer writes would be lost",
            "Freeze it (requires_grad_(False)), or load the pipeline with offload='none'; a LoRA can be trained after "
            "sdquant.lora.add_lora, or after sdquant.lora.trainable(model, name) where it is on the model already",
        )

    hook = parameter.register_hook(check)
    setattr(parameter, _REFUSED, True)

    def undo() -> None:
        hook.remove()
        delattr(parameter, _REFUSED)

    handle.undo.callback(undo)
