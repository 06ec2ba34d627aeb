"""bnb-int8: the weights of LLM.int8(), one scale for each output row.

bitsandbytes rounds the weight to float16 first; `SCB` is the largest magnitude of a row, and a code c stands for
c * SCB / 127. Convolutions are quantized as the matrix [out, in * k * ...]: bitsandbytes has no module for them.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import (
    COMPUTE_DTYPES,
    Packed,
    PackedLayout,
    PackedSpec,
    PrequantizedWeight,
    TensorSpec,
    Unfit,
    dtype_name,
    registry,
)
from ..utils.tensors import put_parameter
from ._bnb_codec import Codec, bad, require, scales
from ._bnb_library import apply_to_layer, library, tile
from ._chunks import by_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core import QuantSpec

_ROW_MAJOR = 0  # the only `weight_format` that bitsandbytes still writes or reads
_INVERSE_127 = 7.874015718698502e-3  # as bitsandbytes' int8_vectorwise_dequant has it; dividing rounds differently
_OUTLIERS = 6.0  # the threshold of the LLM.int8() paper and of diffusers: larger activations are multiplied in half


class Int8(Codec):
    """The codec of bnb-int8. Parts: codes int8 [out, in * k...]; scb float32 [out]."""

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        if dtype not in COMPUTE_DTYPES:
            raise Unfit(f"bitsandbytes can only quantize {', '.join(COMPUTE_DTYPES)}, but the weight is {dtype}")
        rows, columns = shape[0], math.prod(shape[1:])
        return {
            "codes": TensorSpec(dtype="int8", shape=(rows, columns)),
            "scb": TensorSpec(dtype="float32", shape=(rows,)),
        }

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        dtype = dtype_name(weight.dtype)
        layout = self.layout(spec, tuple(weight.shape), dtype)
        return Packed(
            spec=PackedSpec(scheme=spec.scheme, shape=tuple(weight.shape), dtype=dtype),
            parts=by_rows(weight.detach(), layout, _encode),
        )

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        codes, scb = packed.parts["codes"], packed.parts["scb"][:, None]
        flat = out.view(codes.shape)
        step = max(1, tile(out.device, codes.numel()) // codes.shape[1])
        for row in range(0, codes.shape[0], step):
            rows = slice(row, row + step)
            flat[rows].copy_(codes[rows].float().mul_(scb[rows]).mul_(_INVERSE_127))

    def form(self, packed: Packed) -> PackedLayout:
        rows, columns = packed.parts["codes"].shape
        return PackedLayout(
            rows=rows,
            columns=columns,
            codes="codes",
            packing="int8",
            group=columns,
            scale="scb",
            factor=_INVERSE_127,
        )

    def by_row(self, packed: Packed) -> bool:
        return True

    def to_library(self, module: nn.Module, packed: Packed, spec: QuantSpec | None) -> nn.Module:
        from ..kernels import flop_counts

        flop_counts.declare_of_library(library().__name__)
        rows, columns = packed.spec.shape
        codes = packed.parts["codes"]
        layer: Any = _linear8bit()(
            columns, rows, bias=False, has_fp16_weights=False, threshold=_OUTLIERS, device="meta"
        )
        weight = library().nn.Int8Params(
            codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=packed.parts["scb"]
        )
        put_parameter(layer, "weight", weight)
        put_parameter(layer, "bias", module._parameters.get("bias"))
        layer.encoded_dtype = packed.spec.dtype
        assert isinstance(layer, nn.Module)
        return layer.train(module.training)

    def from_library(self, module: nn.Module) -> Packed | None:
        if "bitsandbytes" not in sys.modules or not isinstance(module, library().nn.Linear8bitLt):
            return None
        layer: Any = module
        # The first forward moves both from the weight into the module's state.
        scb = layer.state.SCB if getattr(layer.weight, "SCB", None) is None else layer.weight.SCB
        codes = layer.weight.data
        if scb is None or codes.dtype != torch.int8:  # a float weight that waits for its first move
            return None
        dtype = getattr(layer, "encoded_dtype", None)
        if dtype is None:  # another tool's module: bitsandbytes does not keep it
            dtype = "float16" if layer.bias is None else dtype_name(layer.bias.dtype)
        return Packed(
            spec=PackedSpec(scheme=registry.scheme("bnb-int8"), shape=tuple(codes.shape), dtype=dtype),
            parts={"codes": codes, "scb": scb},
        )

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        return super().write(name, packed) | {
            f"{name}_format": torch.tensor(_ROW_MAJOR, dtype=torch.uint8, device="cpu")
        }

    def read(self, detected: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        for key in detected.extra:
            if get(key).tolist() not in (_ROW_MAJOR, [_ROW_MAJOR]):
                raise bad(key, "its weight has an old row order that bitsandbytes can no longer read")
        key, codes = require(detected, "codes", get)
        shape = tuple(codes.shape) if shape is None else shape
        if len(shape) < 2:
            raise bad(key, f"it has shape {list(shape)}, but 8-bit weights need at least two dimensions")
        matrix = (shape[0], math.prod(shape[1:]))
        if codes.dtype != torch.int8 or tuple(codes.shape) not in (matrix, shape):
            raise bad(key, f"it is {codes.dtype} {list(codes.shape)}, but the model needs int8 {list(matrix)}")
        key, scb = require(detected, "scb", get)
        if scb.shape != (shape[0],):
            raise bad(key, f"it has shape {list(scb.shape)}, but the weight has {shape[0]} rows")
        return Packed(
            # The file does not say what was encoded; float16 is what bitsandbytes rounds every weight to.
            spec=PackedSpec(scheme=registry.scheme(detected.scheme), shape=shape, dtype="float16"),
            parts={"codes": codes.reshape(matrix), "scb": scales(key, scb)},
        )

    def config(self, spec: QuantSpec, dtype: str) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": False,
            "load_in_8bit": True,
            "llm_int8_threshold": _OUTLIERS,
            "llm_int8_has_fp16_weight": False,
        }


@lru_cache(maxsize=1)
def _linear8bit() -> type[nn.Module]:
    """Return a `Linear8bitLt` whose input can also be passed by torch's name `input`, and whose codes and scales move
    with the model that contains it.

    bitsandbytes keeps them as attributes and moves those in `Linear8bitLt.to`, which is not called when a parent is
    moved. The class name is unchanged: other tools look for it.
    """
    base: Any = library().nn.Linear8bitLt

    class Linear8bitLt(base):  # type: ignore[misc]  # the base is only known at run time
        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            owner = self.weight if getattr(self.weight, "SCB", None) is not None else self.state
            scb, of_torch = owner.SCB, super()._apply
            apply_to_layer(self, fn, lambda: of_torch(fn, recurse))
            if scb is None or self.weight.device.type == "meta":
                return self
            owner = self.weight if owner is not self.state else self.state
            owner.CB = self.weight.data
            owner.SCB = scb.to(self.weight.device)
            return self

        def forward(self, input: Tensor) -> Tensor:
            out: Tensor = super().forward(input)
            return out

    Linear8bitLt.__qualname__ = _OURS
    return Linear8bitLt


_OURS = "Linear8bitLt"


def __getattr__(name: str) -> Any:
    """Return the class that is created once bitsandbytes is imported, so that pickle finds it by name."""
    if name == _OURS:
        return _linear8bit()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _encode(rows: Tensor) -> dict[str, Tensor]:
    half = rows.reshape(len(rows), -1).to(torch.float16).contiguous()
    codes, scb, _ = library().functional.int8_vectorwise_quant(half)
    return {"codes": codes, "scb": scb}
