"""ComfyUI's `convrot_w4a4`: 4-bit integers of the rotated weight (ConvRot), a scale for each row.

Format: `TensorCoreConvRotW4A4Layout` of comfy-kitchen, whose nibbles are in two's complement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import (
    ROTATION,
    Packed,
    PackedLayout,
    PackedSpec,
    QuantSpec,
    TensorSpec,
    Unfit,
    dtype_name,
    leaf,
    registry,
)
from ..kernels import hadamard as fast_hadamard
from ..kernels import rotated_codes
from ..utils.tensors import divided
from ._bnb_codec import bad, require, scales
from ._chunks import by_rows, row_chunks
from ._comfy_codec import RotatedCodec, dtype_of, marker, require_matrix
from ._comfy_find import LINEAR_DTYPE
from ._comfy_rotation import rotation_in

if TYPE_CHECKING:
    from ..core import PrequantizedWeight

_LARGEST, ZERO = 7, 8
_FOUR, _EIGHT = "int4", "int8"
_LEAST = 1e-10  # the least magnitude of a row that its scale is made of
_INPUTS = 64  # of which comfy-kitchen's kernels want a multiple
SIGNS = 0x88  # exchanges nibbles in two's complement and codes with 8 added


class Int4(RotatedCodec):
    """Parts: codes, uint8 [out, in / 2], with 8 added, the even column in the low half; scale, float32 [out, 1].

    Details have a linear_dtype if a file says "int8": then comfy-kitchen's product (`runtime="library"`) has
    activations of 8 bits.
    """

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        require_matrix(shape, dtype)
        if shape[1] % _INPUTS:
            raise Unfit(f"it has {shape[1]} inputs, and {spec.scheme} needs a multiple of {_INPUTS}")
        return {
            "codes": TensorSpec(dtype="uint8", shape=(shape[0], shape[1] // 2)),
            "scale": TensorSpec(dtype="float32", shape=(shape[0], 1)),
        }

    def parts_of(self, weight: Tensor, rotation: int, layout: Mapping[str, TensorSpec]) -> Mapping[str, Tensor]:
        def encode(rows: Tensor) -> dict[str, Tensor]:
            integers, scale = rotated_codes.quantize(rows, rotation, _scale, -_LARGEST, _LARGEST)
            codes = integers.add_(ZERO).view(torch.uint8)
            return {"codes": codes[:, ::2] | codes[:, 1::2] << 4, "scale": scale}

        return by_rows(weight, layout, encode, rotated_codes.chunks(weight))

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        codes, scale, rotation = packed.parts["codes"], packed.parts["scale"], packed.spec.rotation
        for rows in row_chunks(codes, packed.spec.shape[1]):
            values = nibbles(codes[rows]).float().sub_(ZERO).mul_(scale[rows])
            out[rows].copy_(fast_hadamard.rotate(values, rotation) if rotation else values)

    def form(self, packed: Packed) -> PackedLayout | None:
        if packed.spec.rotation:
            return None
        rows, columns = packed.spec.shape
        return PackedLayout(
            rows=rows, columns=columns, codes="codes", packing="nibbles-low", group=columns, scale="scale", zero=ZERO
        )

    def export(self, name: str, packed: Packed) -> dict[str, Tensor]:
        return {
            name: (packed.parts["codes"] ^ SIGNS).view(torch.int8),
            leaf(name, "weight_scale"): packed.parts["scale"].reshape(-1),
            **marker(name, packed.spec),
        }

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        key, codes = require(found, "codes", get)
        if codes.dtype not in (torch.int8, torch.uint8) or codes.ndim != 2 or not codes.numel():
            raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, not a matrix of bytes")
        stored = (len(codes), codes.shape[1] * 2)
        shape = stored if shape is None else tuple(shape)
        if shape != stored:
            raise bad(key, f"it has 4-bit codes of {list(stored)}, but the model needs {list(shape)}")
        rotation = rotation_in(found, shape[1])
        key, scale = require(found, "scale", get)
        if scale.numel() != shape[0]:
            raise bad(key, f"it has {scale.numel()} scales, but the weight has {shape[0]} rows")
        parts = {
            "codes": codes.view(torch.uint8) ^ SIGNS if codes.dtype == torch.int8 else codes,
            "scale": scales(key, scale).reshape(-1, 1),
        }
        product = found.details.get(LINEAR_DTYPE, _FOUR)
        if product not in (_FOUR, _EIGHT):
            raise bad(found.name, f"its {LINEAR_DTYPE} is {product!r:.40}, neither {_FOUR!r} nor {_EIGHT!r}")
        details = {ROTATION: rotation} | ({LINEAR_DTYPE: product} if product == _EIGHT else {})
        spec = PackedSpec(scheme=registry.scheme(found.scheme), shape=shape, dtype=dtype_of(found), details=details)
        return Packed(spec=spec, parts=parts)


def _scale(largest: Tensor) -> Tensor:
    return divided(largest.clamp(min=_LEAST), _LARGEST)


def nibbles(codes: Tensor) -> Tensor:
    """Return the halves of bytes [rows, columns] one by one, the low half first: uint8 [rows, 2 * columns]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
