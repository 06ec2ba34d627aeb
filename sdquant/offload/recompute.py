"""Fetch weights of modules that backward runs again: the blocks of a model with gradient checkpointing.

Backward calls such a block by itself, long after the call of its component has ended and its weights were evicted. From
the moment that backward reaches a component's outputs until it ends, calling a module of the component fetches the
module's unit to the device.

A unit fetched this way has memory of its own: autograd saves the weights for the block's gradients, and may need them
after the next block has been fetched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from .blocks import Component, Unit
    from .handle import OffloadHandle


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a component returns: in containers and in diffusers' and transformers' outputs."""
    values = [vars(output)] if hasattr(output, "__dataclass_fields__") and not isinstance(output, dict) else output
    yield from (value for value in tree_leaves(values) if isinstance(value, Tensor))


class Recompute:
    """Hooks of one component that fetch its units during backward.

    Args:
        bring: fetches a unit that is not on the device; called under the handle's lock.
        end: called when backward is over, under the handle's lock.
    """

    def __init__(
        self, component: Component, handle: OffloadHandle, bring: Callable[[Unit], None], end: Callable[[], None]
    ) -> None:
        self._component, self._handle, self._bring, self._end = component, handle, bring, end
        self._units: dict[int, Unit] = {}
        self._hooks: list[Any] = []  # while backward runs, on every module of the component
        self._running = 0
        handle.undo.callback(self._stop)

    def watch(self, output: Any) -> None:
        """Register hooks that start when backward reaches these outputs."""
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._start)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Reset after a backward that ended with an error, which is not reported; called before each call."""
        if self._hooks and torch._C._current_graph_task_id() == -1:
            self._stop()
            self._end()

    def _start(self, grad: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        with self._handle.lock:
            if not self._handle.active:
                return
            self._running += 1
            if not self._hooks:
                modules = list(_modules(self._component))
                self._units = {id(module): unit for unit, module in modules}
                self._hooks = [module.register_forward_pre_hook(self._called) for _, module in modules]
        engine.queue_callback(self._over)

    def _called(self, module: nn.Module, args: Any) -> None:
        """Fetch the unit of a module before its forward, in any thread, while backward runs."""
        unit = self._units.get(id(module))
        if unit is None or unit.resident:
            return
        with self._handle.lock:
            # Within a call of the component the mode itself fetches its weights.
            if self._hooks and not unit.resident and not self._component.depth:
                self._bring(unit)

    def _over(self) -> None:
        with self._handle.lock:
            self._running = max(0, self._running - 1)
            if not self._running and self._hooks:
                self._stop()
                self._end()

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._units, self._running = [], {}, 0


def _modules(component: Component) -> Iterator[tuple[Unit, nn.Module]]:
    """Yield the modules whose calls need a unit: all of a block's, and outside blocks those that own weights."""
    yield from ((component.rest, module) for _, module in component.rest.owners)
    for unit in component.blocks:
        assert unit.module is not None
        yield from ((unit, module) for module in unit.module.modules())
