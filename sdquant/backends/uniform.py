"""Integers with scales and zero points of groups, from files of torchao and NVIDIA ModelOpt, which are not needed here.

What other backends have (a scale for each row, float8, MXFP8, NVFP4) is found here and read there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import (
    Backend,
    Packed,
    PackedLayout,
    PackedSpec,
    PrequantizedWeight,
    QuantSpec,
    Requirement,
    Scheme,
    TensorInfo,
    TensorSpec,
    Unfit,
)
from . import _modelopt_find, _torchao_find

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from ._uniform_codec import UniformCodec


def _read_only(name: str, bits: float, summary: str) -> Scheme:
    return Scheme(name=name, backend="uniform", bits=bits, summary=summary, on_the_fly=False)


class Uniform(Backend):
    """See the module. Parts are those of the codec."""

    name: ClassVar[str] = "uniform"
    title: ClassVar[str] = "torchao, ModelOpt"
    requires: ClassVar[Requirement | None] = None
    magnitudes: ClassVar[frozenset[str]] = frozenset({"scale"})
    schemes: ClassVar[tuple[Scheme, ...]] = (
        _read_only("uniform-int8", 8, "8-bit integers, a scale and perhaps a zero point per group of weights"),
        _read_only("uniform-int4", 4, "4-bit integers, a scale and perhaps a zero point per group of weights"),
    )

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
        _codec().decode_into(packed, out)

    def form(self, packed: Packed) -> PackedLayout | None:
        return _codec().form(packed)

    def by_row(self, packed: Packed) -> bool:
        return "columns" not in packed.parts

    def spec_of(self, packed: PackedSpec) -> QuantSpec | None:
        return QuantSpec(packed.scheme)

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
        return [*_torchao_find.find(tensors, config), *_modelopt_find.find(tensors, config)]

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        return _codec().read(found, shape, get)


@lru_cache(maxsize=1)
def _codec() -> UniformCodec:
    from ._uniform_codec import UniformCodec  # which imports torch, and listing schemes must not

    return UniformCodec()


BACKEND = Uniform()
