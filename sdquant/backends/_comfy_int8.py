"""ComfyUI's 8-bit integers (`int8_tensorwise`), plain or rotated (ConvRot).

A weight is codes * scale. With ConvRot it was rotated along its inputs before it was quantized (`core.hadamard`), so
that no column is much larger than the others, and is rotated back when it is dequantized; the activations are rotated
instead where a layer computes with the codes.

Format: `TensorWiseINT8Layout` of comfy-kitchen.
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
    dtype_name,
    hadamard,
    leaf,
    registry,
)
from ..errors import UnsupportedFileError
from ..kernels import hadamard as fast_hadamard
from ..kernels import rotated_codes
from ..utils.tensors import divided
from ._bnb_codec import bad, require, scales
from ._chunks import by_rows, row_chunks
from ._comfy_codec import RotatedCodec, dtype_of, marker, require_matrix
from ._comfy_rotation import rotation_in

if TYPE_CHECKING:
    from ..core import PrequantizedWeight

_LARGEST = 127
_LEAST = 1e-30  # the smallest scale, of rows of zeros


class Int8(RotatedCodec):
    """Parts: codes, int8 [out, in]; scale, float32 [out, 1], or [] for int8_tensor."""

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        require_matrix(shape, dtype)
        scale = () if spec.scheme.name == "int8_tensor" else (shape[0], 1)
        return {"codes": TensorSpec(dtype="int8", shape=shape), "scale": TensorSpec(dtype="float32", shape=scale)}

    def parts_of(self, weight: Tensor, rotation: int, layout: Mapping[str, TensorSpec]) -> Mapping[str, Tensor]:
        whole = None
        if not layout["scale"].shape:
            whole = _scale(_largest(weight, rotation))

        def encode(rows: Tensor) -> dict[str, Tensor]:
            if rotation and whole is None:
                codes, scale = rotated_codes.quantize(rows, rotation, _scale, -_LARGEST - 1, _LARGEST)
                return {"codes": codes, "scale": scale}
            values = rows.float()
            if rotation:
                values = hadamard.rotate_by_matrix(values, rotation)
            scale = _scale(values.abs().amax(dim=1, keepdim=True)) if whole is None else whole
            codes = (values / scale).round_().clamp_(-_LARGEST - 1, _LARGEST).to(torch.int8)
            return {"codes": codes} if whole is not None else {"codes": codes, "scale": scale}

        parts = by_rows(weight, layout, encode, rotated_codes.chunks(weight) if rotation and whole is None else 1)
        return parts if whole is None else {**parts, "scale": whole}

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        codes, scale, rotation = packed.parts["codes"], packed.parts["scale"], packed.spec.rotation
        for rows in row_chunks(codes, codes.shape[1]):
            values = codes[rows] * (scale[rows] if scale.ndim else scale)
            out[rows].copy_(fast_hadamard.rotate(values, rotation) if rotation else values)

    def form(self, packed: Packed) -> PackedLayout | None:
        if packed.spec.rotation:
            return None
        rows, columns = packed.spec.shape
        group = columns if packed.parts["scale"].ndim else rows * columns
        return PackedLayout(rows=rows, columns=columns, codes="codes", packing="int8", group=group, scale="scale")

    def key(self, name: str, part: str) -> str:
        return {"codes": name, "scale": leaf(name, "weight_scale")}[part]

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        return {**super().write(name, packed), **marker(name, packed.spec)}

    def export(self, name: str, packed: Packed) -> dict[str, Tensor]:
        return self.write(name, packed)

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        key, codes = require(found, "codes", get)
        shape = tuple(codes.shape) if shape is None else tuple(shape)
        if codes.dtype != torch.int8 or codes.ndim != 2 or tuple(codes.shape) != shape or not codes.numel():
            raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, but {list(shape)} in int8 is needed")
        details = {ROTATION: rotation_in(found, shape[1])} if ROTATION in found.details else {}
        key, scale = require(found, "scale", get)
        scale = scales(key, scale)
        if scale.numel() == 1 and (found.scheme == "int8_tensor" or shape[0] > 1):
            scale = scale.reshape(())
        elif found.scheme != "int8_tensor" and tuple(scale.shape) in ((), shape[:1], (shape[0], 1)):
            scale = scale.reshape(shape[0], 1)
        else:
            raise bad(
                key, f"its shape is {list(scale.shape)}, but it must be one scale or one for each of {shape[0]} rows"
            )
        _refuse_zero_points(found, get)
        spec = PackedSpec(scheme=registry.scheme(found.scheme), shape=shape, dtype=dtype_of(found), details=details)
        return Packed(spec=spec, parts={"codes": codes, "scale": scale})


def _refuse_zero_points(found: PrequantizedWeight, get: Callable[[str], Tensor]) -> None:
    """Raise UnsupportedFileError for zero points beside the scales, as torchao has them, unless all are zero."""
    key = next((key for key in found.extra if key.endswith("_zero_point") and "_act_" not in key), None)
    if key is not None and bool((get(key) != 0).any()):
        raise UnsupportedFileError(
            f"Cannot read weight {found.name!r}",
            f"{key!r} has zero points, which {found.scheme} does not",
            "Quantize the model again with symmetric weights, which are torchao's default",
        )


def _largest(weight: Tensor, rotation: int) -> Tensor:
    """Return the largest size in a weight as it is quantized: float32 []."""
    if rotation:
        sizes = [
            hadamard.rotate_by_matrix(weight[rows].float(), rotation).abs().amax()
            for rows in row_chunks(weight, weight.shape[1])
        ]
        return torch.stack(sizes).amax()
    low, high = torch.aminmax(weight)
    return torch.maximum(-low, high).float()


def _scale(largest: Tensor) -> Tensor:
    return divided(largest, _LARGEST).clamp_(min=_LEAST)
