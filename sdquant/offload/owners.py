"""The owners of an offload mode's components: the offloaded pipeline, and those that share components with it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from ..models import components_of
from . import pipelines, state_guards
from .actions import used_by
from .handle import HANDLE

if TYPE_CHECKING:
    from .handle import OffloadHandle


class Owners:
    """Weak references to the pipelines of a mode, or to its single component."""

    def __init__(self, model: Any, handle: OffloadHandle) -> None:
        self._handle = handle
        self._models = [weakref.ref(model)]
        # The mode of a lone component does not extend to what else is in a pipeline that it is put into.
        self._alone = components_of(model) if isinstance(model, nn.Module) else None
        self._known: dict[str, nn.Module] = {}

    def parts(self) -> dict[str, nn.Module]:
        """Return all components by name, except those with a mode of their own."""
        if self._alone is not None:
            return self._alone
        pipes = self._pipes()
        if not pipes:  # a component outlives its pipeline
            return self._known
        parts: dict[str, nn.Module] = {}
        for pipe in pipes:
            for name, part in _networks(pipe).items():
                if any(part is one for one in parts.values()):
                    continue
                if part.__dict__.get(HANDLE, self._handle) is self._handle:
                    parts[_free(name, parts)] = part
        return parts

    def follow(self, parts: dict[str, nn.Module]) -> None:
        """Guard the components to which the mode was just applied."""
        self._known = parts
        state_guards.follow(parts, self._handle, self._used())

    def watch(self) -> None:
        """Have the resting mode applied when a component is used."""
        self._known = self.parts()
        state_guards.watch(self._known, self._handle, self._used())

    def have_grown(self) -> bool:
        """Return whether the components differ from those to which the mode was applied."""
        return {id(part) for part in self.parts().values()} != {id(part) for part in self._known.values()}

    def take(self) -> None:
        """Guard the pipelines."""
        for pipe in self._pipes():
            pipelines.take(pipe, self._handle)

    def adopt(self, pipe: Any) -> None:
        """Add and guard a pipeline that shares components."""
        if all(one() is not pipe for one in self._models):
            self._models = [one for one in self._models if one() is not None] + [weakref.ref(pipe)]
            self._handle.grown = True
            pipelines.take(pipe, self._handle)

    def release(self) -> None:
        """Remove the guards of the pipelines."""
        for pipe in self._pipes():
            pipelines.release(pipe, self._handle)

    def _pipes(self) -> list[Any]:
        models = (one() for one in self._models)
        return [model for model in models if model is not None and not isinstance(model, nn.Module)]

    def _used(self) -> frozenset[str]:
        return frozenset().union(*(used_by(type(pipe), ("__call__",)) for pipe in self._pipes()))


def _networks(pipe: Any) -> dict[str, nn.Module]:
    """Return a pipeline's components, or those set so far while it is being constructed."""
    try:
        return components_of(pipe)
    except ValueError:  # diffusers': not all that the class has are set
        return {name: value for name, value in vars(pipe).items() if isinstance(value, nn.Module)}


def _free(name: str, taken: dict[str, nn.Module]) -> str:
    """Return the name, numbered if another pipeline has another component of that name."""
    count = 1
    while name in taken:
        count += 1
        name = f"{name.rpartition('_')[0] if count > 2 else name}_{count}"
    return name
