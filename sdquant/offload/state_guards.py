"""Intercept every change of an offloaded component: its methods, casts of its modules, and attributes set on them.

`actions` defines how each call is treated. There are three layers of guards:
* all public methods of a component, as attributes of the instance;
* the methods behind casts, moves, state dicts, copies and pickles of every module inside, in the same way;
* torch's hooks for new modules, parameters and buffers, whoever sets them (PEFT, attention processors, a user).
"""

from __future__ import annotations

import functools
import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import SettingsError
from ..models import call_hooks
from ..utils.inference_mode import ordinary
from .actions import INSIDE, REFUSED, CallTreatment, destination, kind, methods, used_by
from .backward import refuse_derivatives
from .foreign_hooks import hook_of, refuse_taken
from .handle import HANDLE, REMOVE_FIRST

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from .handle import OffloadHandle

log = logging.getLogger(__name__)

PART_OF = "_sdquant_part_of"  # on each module inside: the handle


def follow(parts: Mapping[str, nn.Module], handle: OffloadHandle, used: frozenset[str]) -> None:
    """Guard components until the mode is removed.

    Args:
        used: the names that calls of their pipelines use.
    """
    _hook_registrations()
    for part in parts.values():
        begin = partial(_begin, handle, part, hook_of(part))
        handle.undo.callback(call_hooks.wrap(part, begin, partial(_end, handle), lock=handle.lock))
    _guard(parts.values(), handle, used)


def watch(parts: Mapping[str, nn.Module], handle: OffloadHandle, used: frozenset[str]) -> None:
    """Have a resting mode applied when one of the components is used."""
    for part in parts.values():
        _set(part, HANDLE, handle, handle)
        for name in call_hooks.ENTRIES:
            if hasattr(part, name):
                _set(part, name, _waking(part, name, handle), handle)
    _guard(parts.values(), handle, used)


def _begin(handle: OffloadHandle, part: nn.Module, hook: Any, name: str) -> None:
    refuse_taken(handle.mode, part, hook)
    refuse_derivatives(handle, part)
    handle.computing += 1


def _end(handle: OffloadHandle, name: str) -> None:
    handle.computing -= 1


def _waking(part: nn.Module, name: str, handle: OffloadHandle) -> Callable[..., Any]:
    @functools.wraps(getattr(part, name))
    def call(*args: Any, **kwargs: Any) -> Any:
        handle.ready()
        return getattr(part, name)(*args, **kwargs)

    return call


def _guard(parts: Collection[nn.Module], handle: OffloadHandle, used: frozenset[str]) -> None:
    modules: dict[int, nn.Module] = {}
    compiled = (part._modules.get("_orig_mod") for part in parts)  # what torch.compile has wrapped
    for part in (*parts, *(inner for inner in compiled if inner is not None)):
        modules |= {id(module): module for module in part.modules()}
        names = used | used_by(type(part))
        for name in methods(type(part)):
            what = kind(name, names)
            if name not in INSIDE and what is not CallTreatment.SAFE:
                _set(part, name, _guarded(part, name, what, handle), handle)
    for module in modules.values():
        _set(module, PART_OF, handle, handle)
        _set(module, "__deepcopy__", _Refusal(handle, "copy"), handle)
        _set(module, "__reduce_ex__", _Reduce(module, handle), handle)
        for name in INSIDE:
            what = kind(name, used)
            _set(module, name, _guarded(module, name, what, handle), handle)
        _set(module, "_apply", _cast(module, handle), handle)


def _guarded(owner: Any, name: str, what: CallTreatment, handle: OffloadHandle) -> Callable[..., Any]:
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("keep_vars"):  # of `state_dict`: the parameters themselves, wherever they are
            return method(*args, **kwargs)
        return guarded([handle], owner, name, what, lambda *a, **k: getattr(owner, name)(*a, **k), args, kwargs)

    return call


def guarded(
    handles: list[OffloadHandle],
    owner: Any,
    name: str,
    what: CallTreatment,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a method of a pipeline or module as its kind demands.

    Args:
        handles: of the modes of the pipeline's components.
        call: the method, looked up when the modes are suspended.
    """
    if not handles:
        return call(*args, **kwargs)
    handle, *others = handles
    if what is CallTreatment.REFUSED:
        handle.refuse("share the memory of" if name == "share_memory" else f"call {name} on", REFUSED[name])
    with handle.lock:
        if what is CallTreatment.UNKNOWN and (handle.calls or handle.computing):
            return call(*args, **kwargs)
        if what is CallTreatment.MOVES and handle.works:
            device, left, named = destination(name, args, kwargs)
            if device is not None and not is_move(handle, device):
                log.info("%s.%s: the move to %s is left to offload=%r", type(owner).__name__, name, device, handle.mode)
                if not left and not named.get("dtype"):
                    return owner
                args, kwargs = left, named
        with handle.suspended(f"call {name}"):
            return guarded(others, owner, name, what, call, args, kwargs) if others else lasting(call)(*args, **kwargs)


def lasting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call outside inference mode: tensors that it sets on the model outlive an inference mode."""
    return ordinary(call) if torch.is_inference_mode_enabled() else call


def is_move(handle: OffloadHandle, device: torch.device) -> bool:
    """Return whether a move to `device` takes weights off the mode's compute device, as one to the CPU does.

    Raises:
        SettingsError: `device` is another one.
    """
    own = torch.device(handle.device)
    if device.type == own.type and (device.index is None or own.index is None or device.index == own.index):
        return False
    if device.type == "cpu":
        return True
    raise SettingsError(
        f"Cannot move a model with offload={handle.mode!r} to {device}",
        f"the mode computes on {own}, and fetches the weights when they are needed",
        f"{REMOVE_FIRST}, or load the model for that device (device=)",
    )


def _cast(module: nn.Module, handle: OffloadHandle) -> Callable[..., Any]:
    """Return a guarded `nn.Module._apply`, which all casts and moves go through."""
    method = module._apply

    def call(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        with handle.lock:
            if handle.computing:  # a layer that is cast while it computes
                return method(function, recurse)  # type: ignore[no-untyped-call]
            device = function(torch.empty(0, dtype=torch.float32, device="cpu")).device
            cast = function if device.type == "cpu" or is_move(handle, device) else _staying(function)
            with handle.suspended("cast or move weights"):
                return lasting(module._apply)(cast, recurse)

    return call


def _staying(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: function(tensor).to(tensor.device)


class _Refusal:
    """Callable for copying and pickling that refuses both."""

    def __init__(self, handle: OffloadHandle, what: str) -> None:
        self._handle, self._what = handle, what

    def __call__(self, *args: Any) -> Any:
        self._handle.refuse(self._what)
        raise AssertionError("the mode is at work wherever this is set")


class _Reduce:
    """`__reduce_ex__` of a module, which refuses pickling before the contents of hooks are pickled. It allows
    `copy.copy`: a shallow copy shares weights and hooks, and a deep one is refused earlier."""

    def __init__(self, module: nn.Module, handle: OffloadHandle) -> None:
        self._module, self._handle = module, handle

    def __call__(self, protocol: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != "copy":
            self._handle.refuse("pickle")
        return type(self._module).__reduce_ex__(self._module, protocol)


def _set(owner: Any, name: str, value: Any, handle: OffloadHandle) -> None:
    """Set an attribute of the instance until the mode is removed."""
    earlier = owner.__dict__.get(name)

    def undo() -> None:
        if earlier is None:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = earlier

    owner.__dict__[name] = value
    handle.undo.callback(undo)


@functools.cache
def _hook_registrations() -> None:
    """Register torch's global hooks for anything set on a module. They stay: each costs one dictionary lookup."""
    from torch.nn.modules import module as torch_module

    torch_module.register_module_module_registration_hook(_registers)
    torch_module.register_module_parameter_registration_hook(_registers)
    torch_module.register_module_buffer_registration_hook(_registers)


def _registers(module: nn.Module, name: str, value: Any) -> None:
    handle = module.__dict__.get(PART_OF)
    if handle is not None:
        handle.rest()
