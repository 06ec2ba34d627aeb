"""The base class of the bitsandbytes codecs, and checks on tensors read from files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from ..core import torch_dtypes
from ..errors import BadFileError
from ._bnb_find import key

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ..core import Expansion, LowRank, Packed, PackedLayout, PrequantizedWeight, QuantSpec, TensorSpec


class Codec(ABC):
    """The codec of one packing. Methods as in `Backend`; `decode_into` gets a contiguous `out`."""

    @abstractmethod
    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]: ...

    @abstractmethod
    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed: ...

    @abstractmethod
    def decode_into(self, packed: Packed, out: Tensor) -> None: ...

    def form(self, packed: Packed) -> PackedLayout | None:
        return None

    def by_row(self, packed: Packed) -> bool:
        return False

    def cuttable(self, packed: Packed) -> Packed:
        return packed

    def low_rank(self, packed: Packed) -> LowRank | None:
        return None

    def integers(self, packed: Packed) -> Expansion[Packed] | None:
        return None

    def to_library(self, module: nn.Module, packed: Packed, spec: QuantSpec | None) -> nn.Module:
        raise NotImplementedError(f"bitsandbytes has no module for {packed.spec.scheme}")

    def from_library(self, module: nn.Module) -> Packed | None:
        return None

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        return {key(name, part, packed.spec): tensor.contiguous() for part, tensor in packed.parts.items()}

    def read(self, detected: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        raise NotImplementedError(f"{detected.scheme} has no file format of its own")

    def config(self, spec: QuantSpec, dtype: str) -> dict[str, Any] | None:
        return None


def bad(key: str, why: str) -> BadFileError:
    """Return the error for a file tensor `key` that contradicts the other tensors of its weight."""
    return BadFileError(f"Cannot read tensor {key!r}", why, "Download the file again, or quantize the model again")


def require(detected: PrequantizedWeight, part: str, get: Callable[[str], Tensor]) -> tuple[str, Tensor]:
    """Return the file key and the tensor of a required part, or raise BadFileError."""
    key = detected.keys.get(part)
    if key is None:
        raise bad(detected.name, f"the file has no {part} for it")
    return key, get(key)


def scales(key: str, tensor: Tensor) -> Tensor:
    """Check that `tensor` holds finite scales and return it as float32. Half precision widens without loss."""
    if tensor.dtype not in torch_dtypes.COMPUTE_DTYPES:
        raise bad(key, f"scales must be float32, float16 or bfloat16, but these are {tensor.dtype}")
    if not torch.isfinite(tensor).all():
        raise bad(key, "a scale is infinite or not a number")
    return tensor.float()
