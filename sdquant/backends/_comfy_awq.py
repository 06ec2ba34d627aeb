"""comfy-kitchen's `awq_w4a16`: 4-bit codes, a scale and a zero point for each group of columns.

A weight is (code - 8) * scale + zero. Format: `TensorCoreAWQW4A16Layout` of comfy-kitchen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import Packed, PackedLayout, PackedSpec, TensorSpec, Unfit, dtype_name, registry
from ._bnb_codec import bad, require, scales
from ._chunks import row_chunks
from ._comfy_codec import ComfyCodec, dtype_of
from ._comfy_int4 import ZERO, nibbles
from ._hub_find import GROUP_SIZE

if TYPE_CHECKING:
    from ..core import PrequantizedWeight, QuantSpec

_GROUP = 64  # unless a file says another number


class Awq(ComfyCodec):
    """Parts: codes, uint8 [out, in / 2], the even column in the low half; scale and zero, floats [out, groups]."""

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        raise Unfit("sdquant reads it from files, and does not make it")

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        raise Unfit("sdquant reads it from files, and does not make it")

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        return None

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        codes, scale, zero = (packed.parts[name] for name in ("codes", "scale", "zero"))
        for rows in row_chunks(codes, packed.spec.shape[1]):
            values = nibbles(codes[rows]).float().sub_(ZERO).view(-1, scale.shape[1], packed.spec.details["group_size"])
            values = values.mul_(scale[rows].float().unsqueeze(-1)).add_(zero[rows].float().unsqueeze(-1))
            out[rows].copy_(values.flatten(1))

    def form(self, packed: Packed) -> PackedLayout | None:
        rows, columns = packed.spec.shape
        return PackedLayout(
            rows=rows,
            columns=columns,
            codes="codes",
            packing="nibbles-low",
            group=packed.spec.details["group_size"],
            scale="scale",
            zero=ZERO,
            shift="zero",
            added=True,
        )

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        key, codes = require(found, "codes", get)
        is_own = codes.dtype == torch.uint8
        if codes.dtype not in (torch.int8, torch.uint8) or codes.ndim != 2 or not codes.numel():
            raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, not a matrix of bytes")
        stored = (len(codes), codes.shape[1] * 2)
        shape = stored if shape is None else tuple(shape)
        if shape != stored:
            raise bad(key, f"it has 4-bit codes of {list(stored)}, but the model needs {list(shape)}")
        group: Any = found.details.get(GROUP_SIZE, _GROUP)
        if type(group) is not int or group < 2 or group % 2 or shape[1] % group:
            raise bad(found.name, f"its group size is {group!r}, which does not divide its {shape[1]} columns")
        parts = {"codes": codes.view(torch.uint8)}
        for part in ("scale", "zero"):
            key, tensor = require(found, part, get)
            scales(key, tensor)  # float, and finite
            size = (shape[0], shape[1] // group) if is_own else (shape[1] // group, shape[0])
            if tuple(tensor.shape) != size:
                raise bad(key, f"its shape is {list(tensor.shape)}, but {list(size)} belongs to the weight")
            parts[part] = tensor if is_own else tensor.T.contiguous()
        spec = PackedSpec(
            scheme=registry.scheme(found.scheme),
            shape=shape,
            dtype=dtype_of(found),
            details={GROUP_SIZE: group},
        )
        return Packed(spec=spec, parts=parts)
