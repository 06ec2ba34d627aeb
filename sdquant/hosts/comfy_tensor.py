"""A packed weight as ComfyUI sees it: a tensor of the float weight's shape and dtype.

ComfyUI finds out which model a state dict is of by the shapes in it, counts its numbers, renames it, and for some
models rewrites weights. So a packed weight travels as a tensor. The layers of `comfy_ops` take the packed parts out of
it; any other use of its values decodes it first, and so is right, if not small. What would write into it is refused: it
would write into a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import backends
from ..errors import IncompatibleError

if TYPE_CHECKING:
    from ..backends.base import Packed

_KEPT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class PackedTensor(Tensor):
    """The float weight, for whoever asks for its shape; see the module."""

    packed: Packed

    @staticmethod
    def __new__(cls, packed: Packed, dtype: torch.dtype | None = None) -> PackedTensor:
        made: PackedTensor = Tensor._make_wrapper_subclass(
            cls,
            packed.spec.shape,
            dtype=dtype or getattr(torch, packed.spec.dtype),
            device=packed.device,
            requires_grad=False,
        )
        return made

    def __init__(self, packed: Packed, dtype: torch.dtype | None = None) -> None:
        """`dtype`: that it shows; None is that of the weight that was encoded."""
        self.packed = packed

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.packed.spec.scheme}, {self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on the decoded weight."""
        if func in _KEPT:
            return type(args[0])(args[0].packed, args[0].dtype)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, PackedTensor):
                raise IncompatibleError(
                    f"A weight in {value.packed.spec.scheme} was to be written to ({func})",
                    "it stays packed, and what is written would be lost",
                    "Leave out the node that changes weights (a LoRA by hooks, say), or load the model without sdquant",
                )
        args, kwargs = tree_map_only(PackedTensor, _decoded, (args, kwargs or {}))
        return func(*args, **kwargs)


class Counted(PackedTensor):
    """What a layer's state dict shows of its packed weight: the same, with the bytes that it takes in memory, which
    ComfyUI plans its offload by. (It reads `nbytes`; before 2026, `nelement() * element_size()`.)"""

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Of the packed parts."""
        return self.packed.nbytes

    def nelement(self) -> int:
        """So many that they take the bytes of the packed parts."""
        return -(-self.packed.nbytes // self.element_size())


def _decoded(weight: PackedTensor) -> Tensor:
    packed = weight.packed
    return backends.of_scheme(packed.spec.scheme).decode(packed, weight.dtype)
