"""The base class of the codecs of ComfyUI's formats."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from ..core import COMPUTE_DTYPES, Packed, PackedSpec, PrequantizedWeight, QuantSpec, Unfit, dtype_name, leaf
from . import _comfy_find
from ._bnb_codec import Codec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from ..core import TensorSpec


class ComfyCodec(Codec):
    """The codec of some schemes of the backend; methods as in `Backend`, and `export`."""

    def by_row(self, packed: Packed) -> bool:
        return True

    def rows_by(self, packed: Packed, chosen: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {name: chosen(part) for name, part in packed.parts.items()}

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        return self.encode(weight, QuantSpec(packed.scheme))

    def key(self, name: str, part: str) -> str:
        """Return the key of a part in sdquant's own files. No other program has such keys, so none reads them wrong."""
        return f"{name}.{part}"

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        return {self.key(name, part): tensor.contiguous() for part, tensor in packed.parts.items()}

    def export(self, name: str, packed: Packed) -> dict[str, Tensor]:
        """Return the tensors of ComfyUI's own files for weight `name`; `packed` may be on the meta device."""
        raise NotImplementedError(f"{packed.spec.scheme} is not written for ComfyUI")


class RotatedCodec(ComfyCodec):
    """A codec of weights that may be rotated, whose details are all that encoding another weight alike takes."""

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        return self._encode(weight, spec, _comfy_find.details_of(spec.scheme.name, weight.shape[-1]))

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        return self._encode(weight, QuantSpec(packed.scheme), packed.details)

    def _encode(self, weight: Tensor, spec: QuantSpec, details: Mapping[str, Any]) -> Packed:
        shape, dtype = tuple(weight.shape), dtype_name(weight.dtype)
        layout = self.layout(spec, shape, dtype)  # raises Unfit
        described = PackedSpec(scheme=spec.scheme, shape=shape, dtype=dtype, details=details)
        return Packed(spec=described, parts=self.parts_of(weight.detach(), described.rotation, layout))

    def parts_of(self, weight: Tensor, rotation: int, layout: Mapping[str, TensorSpec]) -> Mapping[str, Tensor]:
        """Return the parts of a weight that is rotated in such groups; 0: that is not."""
        raise NotImplementedError


def require_matrix(shape: tuple[int, ...], dtype: str) -> None:
    """Raise Unfit unless the float weight is one of a linear layer or an embedding, in a dtype that models have."""
    if dtype not in COMPUTE_DTYPES:
        raise Unfit(f"ComfyUI's formats can only quantize {', '.join(COMPUTE_DTYPES)}, not {dtype}")
    if len(shape) != 2 or not math.prod(shape):
        raise Unfit(f"ComfyUI's formats are for linear layers and embeddings, not for weights of {list(shape)}")


def marker(name: str, spec: PackedSpec) -> dict[str, Tensor]:
    """Return the tensor that says the format of a layer: a line of JSON, as bytes."""
    import torch

    line = json.dumps(_comfy_find.entry(spec)).encode()
    return {leaf(name, "comfy_quant"): torch.tensor(list(line), dtype=torch.uint8, device="cpu")}


def dtype_of(found: PrequantizedWeight) -> str:
    """Return the dtype of the float weight. Only sdquant's metadata says it: else bfloat16."""
    dtype: str = found.details.get("dtype", "bfloat16")
    return dtype
