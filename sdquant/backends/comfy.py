"""ComfyUI's own formats, those of its library comfy-kitchen: 8-bit integers, plain or rotated (ConvRot).

A weight is codes * scale. With ConvRot it was rotated along its inputs before it was quantized (`core.hadamard`), so
that no column is much larger than the others, and is rotated back when it is dequantized; the activations are rotated
instead where a layer computes with the codes. Codes and scales are those that comfy-kitchen makes of a float32 weight.

Formats: `TensorWiseINT8Layout` of comfy-kitchen (Apache-2.0), which is not needed here.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import (
    COMPUTE_DTYPES,
    ROTATION,
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
    dtype_name,
    leaf,
    registry,
)
from ..errors import BadFileError
from . import _comfy_find

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

_LARGEST = 127
_LEAST = 1e-30  # the smallest scale, of rows of zeros


def _scheme(name: str, summary: str) -> Scheme:
    return Scheme(name=name, backend="comfy", bits=8, summary=summary)


class Comfy(Backend):
    """Parts: codes, int8 [out, in]; scale, float32 [out, 1], or [] for int8_tensor."""

    name: ClassVar[str] = "comfy"
    title: ClassVar[str] = "ComfyUI"
    requires: ClassVar[Requirement | None] = None
    magnitudes: ClassVar[frozenset[str]] = frozenset({"scale"})
    schemes: ClassVar[tuple[Scheme, ...]] = (
        _scheme("int8_convrot", "8-bit integers of the rotated weight (ConvRot), a scale per output row"),
        _scheme("int8_row", "8-bit integers, a scale per output row"),
        _scheme("int8_tensor", "8-bit integers, one scale for the weight"),
    )

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        if dtype not in COMPUTE_DTYPES:
            raise Unfit(f"ComfyUI's formats can only quantize {', '.join(COMPUTE_DTYPES)}, not {dtype}")
        if len(shape) != 2 or not math.prod(shape):
            raise Unfit(f"ComfyUI's formats are for linear layers and embeddings, not for weights of {list(shape)}")
        scale = () if spec.scheme.name == "int8_tensor" else (shape[0], 1)
        return {"codes": TensorSpec(dtype="int8", shape=shape), "scale": TensorSpec(dtype="float32", shape=scale)}

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        return self._encode(weight, spec, _comfy_find.details_of(spec.scheme.name, weight.shape[-1]))

    def _encode(self, weight: Tensor, spec: QuantSpec, details: Mapping[str, Any]) -> Packed:
        import torch

        from ..core import hadamard
        from ._chunks import by_rows

        shape, dtype = tuple(weight.shape), dtype_name(weight.dtype)
        layout = self.layout(spec, shape, dtype)
        described = PackedSpec(scheme=spec.scheme, shape=shape, dtype=dtype, details=details)
        whole = None
        if not layout["scale"].shape:
            low, high = torch.aminmax(weight.detach())
            whole = _scale(torch.maximum(-low, high).float())

        def encode(rows: Tensor) -> dict[str, Tensor]:
            values = rows.float()
            if described.rotation:
                values = hadamard.rotate_by_matrix(values, described.rotation)
            scale = _scale(values.abs().amax(dim=1, keepdim=True)) if whole is None else whole
            codes = (values / scale).round_().clamp_(-_LARGEST - 1, _LARGEST).to(torch.int8)
            return {"codes": codes} if whole is not None else {"codes": codes, "scale": scale}

        parts = by_rows(weight.detach(), layout, encode)
        return Packed(spec=described, parts=parts if whole is None else {**parts, "scale": whole})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        import torch

        out = torch.empty(packed.spec.shape, dtype=dtype, device=packed.device)
        self.decode_into(packed, out)
        return out

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        from ..kernels import hadamard
        from ._chunks import CHUNK, CHUNK_ELSEWHERE

        codes, scale, rotation = packed.parts["codes"], packed.parts["scale"], packed.spec.rotation
        step = max(1, CHUNK.get(codes.device.type, CHUNK_ELSEWHERE) // max(1, codes.shape[1]))
        for start in range(0, codes.shape[0], step):
            rows = slice(start, start + step)
            values = codes[rows] * (scale[rows] if scale.ndim else scale)
            out[rows].copy_(hadamard.rotate(values, rotation) if rotation else values)

    def form(self, packed: Packed) -> PackedLayout | None:
        if packed.spec.rotation:
            return None
        rows, columns = packed.spec.shape
        group = columns if packed.parts["scale"].ndim else rows * columns
        return PackedLayout(rows=rows, columns=columns, codes="codes", packing="int8", group=group, scale="scale")

    def by_row(self, packed: Packed) -> bool:
        return True

    def spec_of(self, packed: PackedSpec) -> QuantSpec | None:
        return QuantSpec(packed.scheme)

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed | None:
        return self._encode(weight, QuantSpec(packed.scheme), packed.details)

    def key(self, name: str, part: str, spec: PackedSpec) -> str:
        return {"codes": name, "scale": leaf(name, "weight_scale")}[part]

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        import torch

        line = json.dumps(_comfy_find.entry(packed.spec)).encode()
        return {**super().write(name, packed), leaf(name, "comfy_quant"): torch.tensor(list(line), dtype=torch.uint8)}

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
        return _comfy_find.find(tensors, config)

    def missing(self, found: PrequantizedWeight) -> str | None:
        return _comfy_find.missing(found)

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        import torch

        from ..core import hadamard
        from ._bnb_codec import bad, require, scales

        key, codes = require(found, "codes", get)
        shape = tuple(codes.shape) if shape is None else tuple(shape)
        if codes.dtype != torch.int8 or codes.ndim != 2 or tuple(codes.shape) != shape or not codes.numel():
            raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, but {list(shape)} in int8 is needed")
        details = {name: value for name, value in found.details.items() if name == ROTATION}
        for rotation in details.values():
            if not hadamard.is_regular(rotation) or shape[1] % rotation:
                raise _no_rotation(found.name, rotation, shape[1])
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
        # The file does not say what was encoded: bfloat16, unless sdquant's metadata says something else.
        dtype = found.details.get("dtype", "bfloat16")
        spec = PackedSpec(scheme=registry.scheme(found.scheme), shape=shape, dtype=dtype, details=details)
        return Packed(spec=spec, parts={"codes": codes, "scale": scale})


def _scale(largest: Tensor) -> Tensor:
    from ..utils.tensors import divided

    return divided(largest, _LARGEST).clamp_(min=_LEAST)


def _no_rotation(name: str, rotation: object, columns: int) -> BadFileError:
    return BadFileError(
        f"Cannot read weight {name!r}",
        f"it is rotated in groups of {rotation!r}, but groups are powers of 4 that divide its {columns} inputs",
        "Download the file again from its source",
    )


BACKEND = Comfy()
