"""A packed weight seen as a tensor: the float weight's shape, dtype and device, and its values to whoever reads them.

Code outside looks at `layer.weight`: T5 for the dtype to compute in, PEFT for the device to put a LoRA on, DoRA for the
values, ComfyUI for the shapes by which it tells models. Such a tensor costs nothing until an operation needs values;
then the weight is decoded for that operation. What would write into it is refused: it would write into a copy.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..core import registry
from ..errors import IncompatibleError
from ..kernels import dispatch
from .read_only import AsTensor, ReadOnly

if TYPE_CHECKING:
    from ..core.backend import Packed

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
    """The float weight, for whoever asks for its shape; see the module.

    Attributes:
        packed: the weight. Its parts are those of the layer, not copies.
        path: of the layer that it is the weight of; "" where nobody has said it.
        way_out: the last sentence of the error for who would write other values; see `_TO_FUSE`, too.
        way_out_of_fusing: that for who would add to them.
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
        made: PackedTensor = Tensor._make_wrapper_subclass(
            cls,
            packed.spec.shape,
            dtype=dtype or getattr(torch, packed.spec.dtype),
            device=packed.device,
            requires_grad=False,
        )
        return made

    def __init__(self, packed: Packed, dtype: torch.dtype | None = None, path: str = "") -> None:
        """`dtype`: that it shows; None is that of the weight that was encoded."""
        self.packed, self.path = packed, path

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.packed.spec.scheme}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on the decoded weight."""
        if func in _KEPT and isinstance(args[0], PackedTensor):
            return type(args[0])(args[0].packed, args[0].dtype, args[0].path)
        if func in _JOINING:
            _say_floats(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def read(self) -> Tensor:
        """Return the decoded weight."""
        return decoded(self)

    def refusal(self, how: str) -> IncompatibleError:
        """The error for who would write into it."""
        which = f"the weight of {self.path!r}," if self.path else "a weight"
        return IncompatibleError(
            f"Cannot write to {which} {list(self.packed.spec.shape)} in {self.packed.spec.scheme} ({how})",
            "it stays packed, and anything written to it would be lost",
            self.way_out_of_fusing if how.split("_.")[0] in _TO_FUSE else self.way_out,
        )


class LayerWeight(AsTensor, PackedTensor):
    """What a quantized layer answers for its `weight`: as above, also for uses of a tensor that are no operations."""

    # transformers draws values for the weights of the layers that a module owns, but for those that say this.
    _is_hf_initialized: ClassVar[bool] = True


def decoded(weight: PackedTensor) -> Tensor:
    """The float weight in the dtype that the tensor shows, in memory of its own."""
    packed = weight.packed
    backend = registry.of_scheme(packed.spec.scheme)
    out = torch.empty(packed.spec.shape, dtype=weight.dtype, device=packed.device)
    dispatch.decode_into(backend, packed, backend.form(packed), out)
    return out
