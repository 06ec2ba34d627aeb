"""Gradients through weights that a mode moves.

Autograd saves the weights that backward reads as the tensors of the forward pass, in memory that the next block has
overwritten by then. So it saves references to the stored weights instead (`keeping`), from which backward reads them;
modules that backward runs again (gradient checkpointing) get their weights fetched (`recompute`). If a mode has no such
store, or a library keeps its weights where autograd does not see them, backward is refused before it starts
(`refuse_backward`). So is training weights that are read from a store, to which no optimizer writes
(`refuse_training`). A LoRA that is trained belongs to no mode: see `blocks.cut`.
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


@dataclass(frozen=True)
class _Weight:
    """A saved weight, or a view of one: the tensor in the store, and the view of it."""

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
    """A tensor that is no weight, as packed by outer saved-tensor hooks, with their unpack function."""

    value: Any
    unpack: Callable[[Any], Tensor]


def keeping(units: Sequence[Unit]) -> AbstractContextManager[object]:
    """Within this context autograd saves references to the stored weights of these units; other tensors as usual."""
    if not torch.is_grad_enabled():
        return nullcontext()
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    below = top(True) if top is not None else None

    def pack(tensor: Tensor) -> Any:
        weight = _found(tensor, units)
        if weight is not None:
            return weight
        if below is not None:  # of torch.utils.checkpoint, which counts saved tensors, or of save_on_cpu
            return _Kept(below[0](tensor), below[1])
        return tensor.detach()  # saving an operation's own result would create a reference cycle with its graph

    return saved_tensors_hooks(pack, _unpack)


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, _Weight):
        return saved.read()
    if isinstance(saved, _Kept):
        return saved.unpack(saved.value)
    tensor: Tensor = saved
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
    """Return the arguments of `wrap` for a component's methods."""
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
    """Make backward through these outputs (tensors in any containers) raise the error of `reason()`, if not None."""
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
    """Return a result hook for `wrap` that refuses backward in a mode without gradients."""
    return lambda result: refuse_backward(result, lambda: unable(handle, name) if handle.active else None)


def unable(handle: OffloadHandle, name: str) -> SdquantError:
    """Return the error for gradients in a mode that cannot compute them."""
    return IncompatibleError(
        f"Cannot compute gradients through the {name} with offload={handle.mode!r}",
        "backward reads the weights after the mode has offloaded them",
        "Load the pipeline with offload='model' or 'balanced' (and runtime='plain'), or with offload='none'",
    )


def refuse_derivatives(handle: OffloadHandle, part: nn.Module) -> None:
    """Raise IncompatibleError within torch.func's transforms that take derivatives: they wrap the weights, and a mode
    does not recognise the wrapped ones when it evicts them."""
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
    """Return the error for gradients of a library's layers whose weights have been evicted since they ran."""
    return IncompatibleError(
        f"Cannot compute gradients through the {name} with offload={handle.mode!r}",
        "its layers belong to a library and save their weights for backward, but these have been offloaded since",
        "Load the pipeline with runtime='plain', give a larger budget, or use offload='none'",
    )


def refuse_training(name: str, owners: Iterable[tuple[str, nn.Module]], handle: OffloadHandle) -> None:
    """Make backward refuse gradients of weights that the mode moves."""
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
