"""Integer weights of files that other tools quantized: torchao, ModelOpt, GPTQ, AWQ, AutoRound, HQQ and others.

All of them have small integer codes, with a scale and a zero point for a group of a row's weights. They differ in how
files pack that: each has a module that recognizes it in a header (`_hub_gptq`, `_hub_compressed`, `_hub_hqq`,
`_hub_torchao`, `_hub_modelopt`, `_hub_mxfp8`), and `_hub_read` unpacks it. In memory they are the same. Their libraries
are not needed. What other backends have (a scale for each row, float8, MXFP8, NVFP4) is found here and read there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..core import Backend, Packed, PackedLayout, PrequantizedWeight, QuantSpec, Requirement, Scheme, TensorSpec, Unfit
from . import _hub_compressed, _hub_gptq, _hub_hqq, _hub_modelopt, _hub_mxfp8, _hub_torchao

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from ..core import TensorInfo


def _scheme(bits: int) -> Scheme:
    return Scheme(
        name=f"hub-int{bits}",
        backend="hub",
        bits=bits,
        summary=f"{bits}-bit integers of other tools, a scale and perhaps a zero point for each group",
        group=128,
        on_the_fly=False,
    )


class Hub(Backend):
    """See the module. A weight is ((code - zero) * scale - shift) * column, [out, in] in `groups` groups of a row:

    codes: uint8 [out, in * bits / 8], a row's codes one after another from the low bits on.
    scale: float [out, groups].
    zero: uint8 [out, groups]. None if all are half of the range (8 for 4 bits), or 0 with "zero": 0 in the details.
        Or float32, where they are no integers of the range, which count from there.
    shift: float32 [out, groups], of HQQ, whose zero points are no integers, and of torchao's Int4Tensor.
    columns, order: see `core.input_columns`: of weights whose columns were smoothed, or have groups not of neighbours.

    HQQ's axis 0, which the details name, has [1, columns] in place of [out, groups]: of the weight as a matrix of so
    many columns, which need not be its own.
    """

    name: ClassVar[str] = "hub"
    title: ClassVar[str] = "torchao, GPTQ, AWQ and others"
    requires: ClassVar[Requirement | None] = None
    schemes: ClassVar[tuple[Scheme, ...]] = tuple(_scheme(bits) for bits in range(2, 9))

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        raise Unfit("sdquant reads it from files, and does not make it")

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        raise Unfit("sdquant reads it from files, and does not make it")

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        import torch

        out = torch.empty(packed.spec.shape, dtype=dtype, device=packed.device)
        self.decode_into(packed, out)
        return out

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        from ._hub_codes import decode_into

        decode_into(packed, out)

    def form(self, packed: Packed) -> PackedLayout | None:
        from ._hub_codes import form

        return form(packed)

    def by_row(self, packed: Packed) -> bool:
        return "axis" not in packed.spec.details  # `_hub_codes.AXIS`

    def rows_by(self, packed: Packed, chosen: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {name: part if name in ("order", "columns") else chosen(part) for name, part in packed.parts.items()}

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
        formats = (_hub_gptq, _hub_compressed, _hub_hqq, _hub_torchao, _hub_modelopt, _hub_mxfp8)
        return [weight for one in formats for weight in one.find(tensors, config)]

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        from ._hub_read import read

        return read(found, shape, get)


BACKEND = Hub()
