"""Offloading: keep weights elsewhere while they are not needed. One file per mode.

    handle = offload.apply(pipeline, "balanced", device="cpu", budget="2GB")
    pipeline("a handwritten seven")
    handle.remove()

In: pipelines and components, a mode, a budget. Out: an `OffloadHandle`, which reports and can undo it.
Offloaded weights are in pinned RAM if the compute device is a GPU, and in a file on disk if it is the CPU.
May import `compat` and what is below. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core import NO_OFFLOAD, OFFLOAD_MODES
from ..errors import IncompatibleError, SettingsError
from ..models import components_of
from ..nn import openvino
from ..utils.byte_sizes import parse_budget
from ..utils.inference_mode import make_ordinary, ordinary
from ..utils.lazy_exports import lazy_exports
from .handle import HANDLE, OffloadHandle
from .mode import ComponentSizes, OffloadMode, OffloadOptions, mode_named

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn

    from .budget import budget_on
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "MODES", "ComponentSizes", "OffloadHandle", "OffloadMode", "apply", "blocks", "budget",
    "budget_on", "components_of", "host_store", "mode_named", "parse_budget", "suspended", "weight_bytes",
]  # fmt: skip

MODES: tuple[OffloadMode, ...] = tuple(mode_named(name) for name in OFFLOAD_MODES)


@ordinary
def apply(
    model: Any,
    mode: str | OffloadMode,
    *,
    device: str | torch.device,
    budget: str | int | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> OffloadHandle:
    """Offload a diffusers pipeline, or one component of it, and return a handle that can undo it.

    Calls that change the model, or read or write all its weights, suspend the mode for their duration, or are refused
    by name (see `actions`). Pipelines made of the model's components (`from_pipe`) are offloaded with it, and so is a
    component that is set on one of them. To read or write weights yourself, use `with handle.suspended():`.

    Args:
        model: a pipeline or an `nn.Module`, its weights in ordinary memory.
        mode: one of `MODES`, or its name.
        device: the compute device.
        budget: for "balanced": bytes (or "6GB") that weights may take on the device. None: the free memory less the
            activations, estimated by a trace of the model's shapes, and a margin.
        folder: folder for offloaded weights if the device is the CPU; default: the system's temporary folder.

    Raises:
        UnknownOffloadError: no such mode.
        SettingsError: a budget or folder that cannot be used, or a model that is already offloaded.
        IncompatibleError: OpenVINO runs a component of the model, or another tool casts or moves its weights.
        BudgetError: the model cannot run within the budget.
    """
    offload_mode = mode if isinstance(mode, OffloadMode) else mode_named(mode)
    name, size = offload_mode.name, offload_mode.budget_bytes(budget)
    parts = components_of(model)
    if name != NO_OFFLOAD:
        _refuse_openvino(name, parts)
    if any(HANDLE in part.__dict__ for part in parts.values()):
        raise SettingsError(
            f"Cannot apply offload mode {name!r}",
            "the model is already offloaded",
            "Call `remove()` of the handle that the first `apply` returned, then apply the new mode",
        )
    import torch

    target = torch.device(device)
    handle = OffloadHandle(name, str(target), weight_bytes(*parts.values()))
    options = OffloadOptions(budget=size, folder=folder)
    if offload_mode.takes_budget and size is None:
        from .budget import activations_of

        handle.facts["activations"] = activations_of(model)
        options = replace(options, activations=handle.facts["activations"])
    if name == NO_OFFLOAD:  # nothing to suspend, and the model has to be freed with its last reference
        try:
            _engage(handle, parts, target, options)
        except BaseException:
            handle.remove()
            raise
        return handle
    from .owners import Owners

    owners = Owners(model, handle)

    @ordinary
    def engage() -> None:
        components = owners.parts()
        _refuse_openvino(name, components)
        _engage(handle, components, target, options)
        owners.follow(components)

    handle.owners, handle.engage = owners, engage
    try:
        with handle.lock:
            engage()
        owners.take()
    except BaseException:
        handle.remove()
        raise
    return handle


@ordinary
def _engage(handle: OffloadHandle, parts: dict[str, nn.Module], target: torch.device, options: OffloadOptions) -> None:
    """Apply the handle's mode to these components."""
    handle.total = weight_bytes(*parts.values())
    handle.counters.resident = 0
    handle.components.clear()
    offloaded = handle.mode != NO_OFFLOAD
    if offloaded:
        from .foreign_hooks import refuse_hooked

        refuse_hooked(handle.mode, parts)
        _refuse_without_values(handle.mode, parts)
        make_ordinary(*parts.values())
    mode_named(handle.mode).apply(parts, handle, target, options)
    for part in parts.values():
        part.__dict__[HANDLE] = handle
        handle.undo.callback(part.__dict__.pop, HANDLE, None)
    if target.type == "cpu":
        from ..utils.malloc_trim import trim_after

        handle.undo.callback(trim_after(*parts.values()))
    if offloaded:
        from ..utils.buffers import give_back

        give_back()


@contextmanager
def suspended(*parts: nn.Module) -> Iterator[None]:
    """Suspend the offload modes of these components, if any; see `OffloadHandle.suspended`."""
    with ExitStack() as stack:
        handles = {id(one): one for part in parts if (one := part.__dict__.get(HANDLE)) is not None}
        for _, handle in sorted(handles.items()):  # in one order, so that no two threads wait for each other
            stack.enter_context(handle.suspended())
        yield


def refuse_training(*parts: nn.Module) -> None:
    """Raise IncompatibleError if one of these components is offloaded in a mode that cannot compute gradients."""
    for part in parts:
        handle: OffloadHandle | None = part.__dict__.get(HANDLE)
        if handle is not None and not mode_named(handle.mode).trains:
            from .backward import unable

            raise unable(handle, type(part).__name__)


def _refuse_without_values(mode: str, parts: Mapping[str, nn.Module]) -> None:
    """Raise IncompatibleError if a parameter is on the meta device and has no values to offload."""
    for name, part in parts.items():
        lost = next((key for key, parameter in part.named_parameters() if parameter.is_meta), None)
        if lost is not None:
            raise IncompatibleError(
                f"Cannot run the {name} with offload={mode!r}",
                f"its {lost!r} is on the meta device and has no values: a tool moved it to the device of its layer "
                "while that layer's weights were offloaded",
                "Load the model again and make the change within `with model.sdquant.offload.suspended():`, or use the "
                "model's own methods (load_lora_weights, add_adapter), which suspend the mode themselves",
            )


def _refuse_openvino(mode: str, parts: Mapping[str, nn.Module]) -> None:
    """Raise IncompatibleError if OpenVINO runs one of these: no offload mode can move its copy of the weights."""
    for name, part in parts.items():
        if openvino.is_served(part):
            raise IncompatibleError(
                f"Cannot apply offload mode {mode!r}",
                f"OpenVINO runs the {name} with its own copy of the weights, which cannot be moved",
                'Load the model with runtime="plain", or leave the offload mode at "none"',
            )


def weight_bytes(*modules: nn.Module) -> int:
    """Return the bytes of all weights of the modules: every parameter and buffer (persistent or not) and tensors that
    libraries hide in attributes, such as bitsandbytes' scales. Tied ones count once. See `tensor_refs.slots`.
    """
    from . import tensor_refs

    return tensor_refs.bytes_of_weights(*modules)
