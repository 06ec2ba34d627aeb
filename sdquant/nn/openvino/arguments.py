"""Split the arguments of a call of a diffusers model into tensors and everything else."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

# What is compared by value where it is an argument; everything else by being the same object.
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Arguments:
    """A call's arguments, bound to the names of the model's forward.

    Attributes:
        tensors: those among them, in order; floats in float32, numbers for time steps as tensors.
        rest: everything else, with None in the places of tensors; `structure` says how all of it belongs together.
    """

    tensors: tuple[Tensor, ...]
    rest: tuple[Fixed | None, ...]
    structure: Any

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments of `model(*args, **kwargs)`.

        Raises:
            TypeError: they do not match the signature of its forward.
        """
        bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
        bound.apply_defaults()
        values = dict(list(bound.arguments.items())[1:])
        for name, value in values.items():
            if "timestep" in name and isinstance(value, int | float) and not isinstance(value, bool):
                # Else each step would be another graph.
                dtype = torch.float32 if isinstance(value, float) else torch.int64
                values[name] = torch.tensor(value, dtype=dtype, device="cpu")
        leaves, structure = tree_flatten(values)
        tensors = tuple(one.float() if one.is_floating_point() else one for one in leaves if isinstance(one, Tensor))
        return cls(tensors, tuple(None if isinstance(one, Tensor) else Fixed(one) for one in leaves), structure)

    @property
    def form(self) -> Any:
        """Return the key that calls with the same graph share: everything but the sizes of the tensors."""
        kinds = tuple((one.dtype, one.ndim) for one in self.tensors)
        return kinds, self.rest, str(self.structure)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Return the shapes of the tensors."""
        return tuple(one.shape for one in self.tensors)

    def call(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Call the model with these tensors in place of its own."""
        remaining = iter(tensors)
        leaves = [next(remaining) if one is None else one.value for one in self.rest]
        values: dict[str, Any] = tree_unflatten(leaves, self.structure)
        parameters = inspect.signature(type(model).forward).parameters
        named: dict[str, Any] = {}
        for name, value in values.items():
            named |= value if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return model(**named)


@dataclass(frozen=True, eq=False)
class Fixed:
    """An argument that is not a tensor, comparable; see `_VALUES`."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fixed) or type(self.value) is not type(other.value):
            return False
        return bool(self.value == other.value) if isinstance(self.value, _VALUES) else self.value is other.value

    def __hash__(self) -> int:
        return hash(self.value) if isinstance(self.value, _VALUES) else id(self.value)


class OutputStructure:
    """The structure of a model's output without its tensors, into which others can be inserted."""

    def __init__(self) -> None:
        self._rest: tuple[Any, ...] = ()
        self._structure: Any = None

    def take(self, value: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a model's output; keep the rest here."""
        leaves, self._structure = tree_flatten(value)
        self._rest = tuple(None if isinstance(one, Tensor) else Fixed(one) for one in leaves)
        return tuple(one for one in leaves if isinstance(one, Tensor))

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """Return the output with these tensors."""
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if one is None else one.value for one in self._rest], self._structure)
