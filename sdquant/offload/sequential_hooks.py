"""Hook the leaves of a component with accelerate's `cpu_offload`, which fetches each while it runs.

accelerate moves every parameter and persistent buffer of a module to the meta device and creates a new one for each
call. It does not see tensors that libraries hide, so their layers break here; sdquant's own layers hide none.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ..models import call_hooks
from ..utils.malloc_trim import trim
from .tensor_refs import is_opaque, slots, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch
    from torch import Tensor, nn

    from .handle import OffloadHandle
    from .host_store import Store

PIECE = 1 << 26  # bytes


def offload_leaves(part: nn.Module, store: Store, handle: OffloadHandle, device: torch.device) -> None:
    """Store the weights of a component, and have each leaf fetch its own when it is called."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    before = _Registered(part)
    weights: dict[str, Tensor] = dict(part.state_dict())
    # Tied weights are stored once. Tensors that cannot be stored are passed to accelerate directly.
    memory = {key: _memory(t) for key, t in weights.items() if not is_opaque(t) and t.numel()}
    owner = {where: key for key, where in reversed(memory.items())}

    def undo() -> None:
        _disarm(part)
        remove_hook_from_submodules(part)
        before.restore(weights)
        for module in part.modules():
            call_hooks.tidy(module)
        trim()

    handle.undo.callback(undo)
    for keys in _pieces(weights, owner.values(), device):
        region = store.add([weights[key] for key in keys])
        handle.counters.stored += region.nbytes
        stored = {memory[key]: tensor for key, tensor in zip(keys, region.waiting, strict=True)}
        now = {key: stored[where] for key, where in memory.items() if where in stored}
        weights |= now
        before.point(now)
        trim()
    cpu_offload(part, execution_device=device, offload_buffers=True, state_dict=weights)
    before.let_go(weights)


def _pieces(weights: Mapping[str, Tensor], keys: Iterable[str], device: torch.device) -> Iterator[list[str]]:
    """Yield the keys to store at a time: few bytes in RAM, since these are there twice meanwhile; all for a file."""
    piece: list[str] = []
    size = 0
    for key in keys:
        piece.append(key)
        size += tensor_bytes(weights[key])
        if size >= PIECE and device.type != "cpu":
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _disarm(part: nn.Module) -> None:
    """Stop hooks from bringing weights back when they are removed: `restore` does that, also where they cannot."""
    for module in part.modules():
        hook: Any = module.__dict__.get("_hf_hook")
        for one in getattr(hook, "hooks", (hook,)):
            if hasattr(one, "offload"):
                one.offload = False


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class _Registered:
    """The registered parameters and buffers of a module, to be restored as the same objects.

    Hidden tensors as well: accelerate does not see them, but accidentally moves some to the meta device.
    """

    def __init__(self, part: nn.Module) -> None:
        owners = list(part.named_modules(remove_duplicate=False))
        self._parameters = [(f"{n}.{k}".lstrip("."), m, k, p) for n, m in owners for k, p in m._parameters.items()]
        self._buffers = [(f"{n}.{k}".lstrip("."), m, k, b) for n, m in owners for k, b in m._buffers.items()]
        self._hidden = [(slot, slot.get()) for slot in slots(part) if "." in slot.places[0].name]

    def point(self, weights: Mapping[str, Tensor]) -> None:
        """Point the parameters at these tensors."""
        for key, _, _, parameter in self._parameters:
            if parameter is not None and key in weights and not is_opaque(parameter):
                parameter.data = weights[key]

    def let_go(self, weights: Mapping[str, Tensor]) -> None:
        """Keep the objects, but release memory that is stored elsewhere now."""
        self.point(weights)
        self._buffers = [(key, m, k, None if key in weights else b) for key, m, k, b in self._buffers]

    def restore(self, weights: dict[str, Tensor]) -> None:
        """Restore everything with memory of its own; entries of `weights` are released on the way."""
        tied = {number for number, count in Counter(map(id, weights.values())).items() if count > 1}
        fresh: dict[int, tuple[Tensor, Tensor]] = {}  # of tied ones, with the stored tensor, to keep its id in use
        for key, module, name, parameter in self._parameters:
            if parameter is not None and key in weights and not is_opaque(parameter):
                stored = weights[key]
                if id(stored) in fresh:
                    parameter.data = fresh[id(stored)][0]
                else:
                    parameter.data = stored.to("cpu", copy=True)
                    if id(stored) in tied:
                        fresh[id(stored)] = parameter.data, stored
                weights[key] = parameter.data
            shown = module._parameters.get(name)
            if parameter is not None and shown is not None and shown.is_floating_point():
                parameter.requires_grad_(shown.requires_grad)  # may have been changed meanwhile
            module._parameters[name] = parameter
        for key, module, name, buffer in self._buffers:
            module._buffers[name] = weights[key].to("cpu", copy=True) if key in weights else buffer
        for slot, hidden in self._hidden:
            if hidden is not None:
                slot.put(hidden)
