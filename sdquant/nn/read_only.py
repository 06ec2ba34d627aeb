"""Tensors with the values of a packed weight that refuse writes: a write into dequantized values would be lost. Views
of such a tensor refuse them, too.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import IncompatibleError, SdquantError

_alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]


class ReadOnly(Tensor):
    """A tensor whose values are dequantized from a packed weight when an operation needs them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @abstractmethod
    def read(self) -> Tensor:
        """Return the values, as an ordinary tensor."""

    @abstractmethod
    def refusal(self, how: str) -> SdquantError:
        """Return the error for writing into it; `how` is the operation."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on the values."""
        kwargs = kwargs or {}
        _refuse_writes(func, args, kwargs)
        read: list[tuple[ReadOnly, Tensor]] = []

        def values(shown: ReadOnly) -> Tensor:
            read.append((shown, shown.read()))
            return read[-1][1]

        args, kwargs = tree_map_only(ReadOnly, values, (args, kwargs))

        # By memory and not by the schema: an operation that may give a view (`to`, `reshape`) may as well give a copy.
        def shown(result: Tensor) -> Tensor:
            whose = next((one for one, its in read if _alias(its, result)), None)
            return result if whose is None else View(result, whose)

        return tree_map_only(Tensor, shown, func(*args, **kwargs))


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not func._schema.is_mutable:
        return
    bound = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for value in tree_leaves(bound.get(argument.name)):  # a list, in `torch._foreach_add_`
                if isinstance(value, ReadOnly):
                    raise value.refusal(str(func))


class AsTensor(ReadOnly):
    """A read-only tensor that also supports uses of a tensor that are not operations."""

    @property
    def data(self) -> Tensor:
        """Return the tensor itself; assigning another raises."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        raise self.refusal("weight.data = ...")

    @property
    def requires_grad(self) -> bool:
        """Return False: packed weights have no gradient."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Raise if a gradient is required."""
        if requires_grad:
            refused = self.refusal("requires_grad = True")
            raise IncompatibleError(
                refused.what.replace("Cannot write to", "Cannot train", 1),
                "it stays packed, and packed weights have no gradient",
                "Train a LoRA on it (sdquant.lora.add_lora), or the float model with "
                "sdquant.rules.quantize_model(model, QtProvider(rules))",
            )
        return self

    @property
    def grad(self) -> None:
        """Return None; assigning a gradient raises."""
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise self.refusal("weight.grad = ...")

    def __setitem__(self, index: Any, value: Any) -> None:
        """Raise: torch would write into a view of dequantized values."""
        raise self.refusal("weight[...] = ...")

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a read-only numpy array."""
        array = self.read().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: the receiver could write to the memory."""
        raise self.refusal("DLPack; use a copy, weight.clone()")

    def share_memory_(self) -> Tensor:
        """Raise: the tensor has no memory of its own, which torch does not check."""
        raise self.refusal("share_memory_; use the model's, model.share_memory()")

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.read().tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.read().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickled, it is the values
        return self.read().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class View(AsTensor):
    """A view of the values of a weight, such as `weight[0]` and `weight.T`."""

    def __new__(cls, values: Tensor, whose: ReadOnly) -> View:
        with torch.inference_mode(whose.is_inference()):  # which torch wants of a view, whatever the mode is now
            view: View = Tensor._make_wrapper_subclass(
                cls,
                values.shape,
                strides=values.stride(),
                storage_offset=values.storage_offset(),
                dtype=values.dtype,
                device=values.device,
                requires_grad=False,
            )
        return view

    def __init__(self, values: Tensor, whose: ReadOnly) -> None:
        self._shown, self._whose = values, whose

    def read(self) -> Tensor:
        """Return the values, as an ordinary tensor."""
        return self._shown

    def refusal(self, how: str) -> SdquantError:
        """Return the error of the weight that it is a view of."""
        return self._whose.refusal(how)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._shown)
