"""A packed weight as a tensor subclass: the float weight's shape, dtype and device, and its values when they are read.

Other code reads `layer.weight`: T5 for the dtype to compute in, PEFT for the device of a LoRA, DoRA for the values,
ComfyUI for the shapes by which it detects models. Such a tensor costs nothing until an operation needs values; then the
weight is dequantized for that operation. Writes into it are refused: they would change a copy.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..errors import IncompatibleError
from ..kernels import dispatch
from .read_only import AsTensor, ReadOnly

if TYPE_CHECKING:
    from ..core import Packed

# What LoRAs are fused by, and taken out again; other writes set new values: a new token's, those of an initialization.
_TO_FUSE = ("aten.add", "aten.sub", "aten.addmm", "aten.baddbmm", "aten.addcmul")
log = logging.getLogger(__name__)

_KEPT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


_JOINING = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)  # of which models are made a new weight


@cache
def _say_floats(func: Any) -> None:
    log.warning(
        "Quantized weights were joined (%s, as fuse_qkv_projections does): the result is a float weight and takes as "
        "much memory as one. Do not join them to keep them quantized.",
        func,
    )


class PackedTensor(ReadOnly):
    """The float weight, dequantized on demand; see the module.

    Attributes:
        packed: the weight. Its parts are those of the layer, not copies.
        path: of its layer; "" if unknown.
        way_out: the fix in the error for writing other values; see `_TO_FUSE`, too.
        way_out_of_fusing: the fix in the error for adding to them.
    """

    packed: Packed
    path: str
    way_out: ClassVar[str] = (
        "Load the model without quantizing this layer (components=, skip=), change it, and call sdquant.quantize"
    )
    way_out_of_fusing: ClassVar[str] = (
        "Keep the LoRA separate (do not fuse or merge it), or load the model without quantization"
    )

    @staticmethod
    def __new__(cls, packed: Packed, dtype: torch.dtype | None = None, path: str = "") -> PackedTensor:
        tensor: PackedTensor = Tensor._make_wrapper_subclass(
            cls,
            packed.spec.shape,
            dtype=dtype or getattr(torch, packed.spec.dtype),
            device=packed.device,
            requires_grad=False,
        )
        return tensor

    def __init__(self, packed: Packed, dtype: torch.dtype | None = None, path: str = "") -> None:
        """`dtype`: the dtype it has as a tensor; None for that of the weight before quantization."""
        self.packed, self.path = packed, path

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.packed.spec.scheme}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on the dequantized weight."""
        if func in _KEPT and isinstance(args[0], PackedTensor):
            return type(args[0])(args[0].packed, args[0].dtype, args[0].path)
        if func in _JOINING:
            _say_floats(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def read(self) -> Tensor:
        """Return the dequantized weight."""
        return decoded(self)

    def refusal(self, how: str) -> IncompatibleError:
        """Return the error for writing into it; `how` is the operation."""
        which = f"the weight of {self.path!r}," if self.path else "a weight"
        return IncompatibleError(
            f"Cannot write to {which} {list(self.packed.spec.shape)} in {self.packed.spec.scheme} ({how})",
            "it stays packed, and anything written to it would be lost",
            self.way_out_of_fusing if how.split("_.")[0] in _TO_FUSE else self.way_out,
        )


class LayerWeight(AsTensor, PackedTensor):
    """The `weight` of a quantized layer: a `PackedTensor` that also supports uses that are not operations."""

    # transformers draws values for the weights of the layers that a module owns, but for those that say this.
    _is_hf_initialized: ClassVar[bool] = True


def decoded(weight: PackedTensor) -> Tensor:
    """Dequantize the weight to the tensor's dtype, in new memory."""
    packed = weight.packed
    backend = packed.spec.scheme.codec
    out = torch.empty(packed.spec.shape, dtype=weight.dtype, device=packed.device)
    dispatch.decode_into(backend, packed, backend.form(packed), out)
    return out
