"""Hook a component with diffusers' group offloading, and take the hooks off again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ..compat import hardware
from ..errors import IncompatibleError, SettingsError
from ..models import call_hooks
from ..utils.malloc_trim import trim
from .backward import refusing
from .host_store import ANOTHER_FOLDER, pinned_limit
from .pinned_memory import ByTorch
from .tensor_refs import bytes_of_weights, slots, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from .handle import Counters, OffloadHandle

# diffusers' names of the hooks that group offloading registers.
HOOKS = ("lazy_prefetch_group_offloading", "layer_execution_tracker", "group_offloading")
OUTERMOST = "sdquant_outermost"


def offload_groups(
    name: str, part: nn.Module, handle: OffloadHandle, device: torch.device, folder: Path | None
) -> None:
    """Hook a component. Its weights are in RAM, or in `folder` if it is not None and diffusers' files can hold them.

    Raises:
        IncompatibleError: a library hides tensors of a component that is to move to a GPU.
        SettingsError: the folder cannot be written.
    """
    reason = why_not_disk(part) if folder is not None else None
    path = folder if reason is None else None
    by = level(part)
    handle.components[name] = {
        "bytes": bytes_of_weights(part),
        "kept": "on disk" if path else "in RAM",
        "by": by,
        **({"why not on disk": reason} if reason else {}),
    }
    if reason:
        # Nothing of it moves. diffusers would still call `to("cpu")` around each group, which raises in a compiled
        # model: torch cannot swap a library's tensors while dynamo's guards refer to them.
        handle.undo.callback(call_hooks.serialize(part, handle.lock, refusing(handle, name)))
        handle.counters.hold(bytes_of_weights(part))
        return
    handle.undo.callback(_remove, part)
    if folder is None:
        _refuse_hidden(name, part)
    _hook(part, by, device, path)
    _register_outermost(part)
    handle.undo.callback(call_hooks.serialize(part, handle.lock, refusing(handle, name)))
    for group in _groups(part):
        if path is not None:
            _own_after_onload(group)
        _count(group, handle.counters)
    trim()


def _refuse_hidden(name: str, part: nn.Module) -> None:
    """Raise IncompatibleError for weights of which a library hides tensors from diffusers: GPU kernels would read CPU
    memory, which ends in "an illegal memory access" and makes the process unusable."""
    for slot in slots(part):
        if "." in slot.places[0].name or slot.opaque:
            raise IncompatibleError(
                f"Cannot use offload='group' for the {name}",
                f"{slot.name} belongs to a library's own layer, which diffusers' group offload moves only in part",
                "Use offload='balanced' or 'model', or load the pipeline with runtime='plain'",
            )


def _hook(part: nn.Module, level: str, device: torch.device, path: Path | None) -> None:
    from diffusers.hooks import apply_group_offloading
    from safetensors import SafetensorError

    streams = device.type == "cuda"
    try:
        apply_group_offloading(
            part,
            onload_device=device,
            offload_device="cpu",
            offload_type=level,
            num_blocks_per_group=1 if level == "block_level" else None,
            use_stream=streams,
            low_cpu_mem_usage=streams and not can_pin(part),
            offload_to_disk_path=None if path is None else str(path),
        )
    except (OSError, SafetensorError) as error:
        raise SettingsError(
            f"Cannot store offloaded weights in {path}",
            f"they cannot be written: {error}",
            f"Free space there, or choose a folder on another disk: {ANOTHER_FOLDER}",
        ) from error


def _register_outermost(part: nn.Module) -> None:
    """Register an empty diffusers hook as the component's last one. diffusers removes its prefetching hook after the
    first call, and removing the last hook would restore the component's earlier `forward`."""
    from diffusers.hooks import ModelHook

    registry = part.__dict__.get("_diffusers_hook")
    if registry is not None:
        registry.register_hook(ModelHook(), OUTERMOST)


def level(part: nn.Module) -> str:
    """Return "block_level" if the component's children include lists of blocks. A VAE's blocks are nested deeper."""
    return "block_level" if any(isinstance(child, nn.ModuleList) for child in part.children()) else "leaf_level"


def block_names(part: nn.Module) -> Iterator[str]:
    """Yield the dotted names of the blocks that are groups: members of the component's own lists."""
    for name, child in part.named_children():
        if isinstance(child, nn.ModuleList):
            yield from (f"{name}.{index}" for index in range(len(child)))


def can_pin(part: nn.Module) -> bool:
    """Return whether diffusers may pin the whole component at once, each tensor by torch's allocator, which takes up to
    twice their bytes. If not, it pins the tensors of a group when they are fetched, which is slower."""
    taken = sum(ByTorch(rounds=True).takes(tensor_bytes(t)) for slot in slots(part) if (t := slot.get()) is not None)
    return taken <= pinned_limit(*hardware.ram())


def why_not_disk(part: nn.Module) -> str | None:
    """Return why diffusers' files cannot hold the component's weights, or None if they can."""
    for slot in slots(part):
        if slot.opaque or "." in slot.places[0].name:
            return f"{slot.name} belongs to a library's tensor, which diffusers writes to a file only in part"
        if len(slot.places) > 1:
            return f"{slot.name} is tied to another tensor: the second of two groups would be written empty"
        tensor = slot.get()
        if tensor is not None and not tensor.is_contiguous():
            return f"{slot.name} is not contiguous, and safetensors cannot write such tensors"
    return None


def _groups(part: nn.Module) -> Iterator[Any]:
    """Yield diffusers' groups of the component, each once."""
    for module in part.modules():
        registry = module.__dict__.get("_diffusers_hook")
        hook = registry.get_hook("group_offloading") if registry is not None else None
        if hook is not None and hook.group.offload_leader is module:
            yield hook.group


def _own(group: Any) -> None:
    """Copy the tensors that the group has just read to memory of their own.

    safetensors maps the file, and its tensors start at any multiple of 8 bytes; matrix products of the same numbers
    round differently from there than from torch's own memory, which would change images.
    """
    for tensor in group.tensor_to_key:
        tensor.data = tensor.data.clone()


def _own_after_onload(group: Any) -> None:
    onload = group.onload_

    def onload_() -> None:
        onload()
        _own(group)

    group.onload_ = onload_


def _count(group: Any, counters: Counters) -> None:
    """Count a group's transfers, since diffusers does not."""
    tensors = [*group.parameters, *group.buffers]
    for module in group.modules:
        tensors += [*module.parameters(), *module.buffers()]
    nbytes = sum(tensor_bytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())
    onload, offload, there = group.onload_, group.offload_, [False]

    def onload_() -> None:
        onload()
        if not there[0]:
            there[0] = True
            counters.hold(nbytes)
            counters.fetched += nbytes
            counters.fetches += 1

    def offload_() -> None:
        offload()
        if there[0]:
            there[0] = False
            counters.hold(-nbytes)
            counters.evicted += nbytes
            counters.evictions += 1

    group.onload_, group.offload_ = onload_, offload_


def _remove(part: nn.Module) -> None:
    """Bring all weights to ordinary memory and remove the hooks, with what diffusers leaves behind.

    Groups in RAM are offloaded, not fetched: all together need not fit on the device, and the last would still be in
    transfer on diffusers' stream when it is read. Pinned tensors are copied, since pinned memory is not available to
    other programs.
    """
    for group in _groups(part):
        if group.offload_to_disk_path is None:
            group.offload_()
        else:
            group.onload_()
    for module in part.modules():
        registry = module.__dict__.get("_diffusers_hook")
        if registry is None:
            continue
        for name in (OUTERMOST, *HOOKS):
            registry.remove_hook(name, recurse=False)
        if not registry.hooks:
            del module.__dict__["_diffusers_hook"]
            call_hooks.tidy(module)
    for slot in slots(part):
        tensor = slot.get()
        if tensor is not None and tensor.device.type != "cpu":
            slot.put(tensor.to("cpu"))
        elif tensor is not None and tensor.is_pinned():
            slot.put(tensor.clone())
