"""NNCF (Intel's Neural Network Compression Framework): int8 and int4, one layer at a time, in plain layers only.

NNCF compresses whole models and leaves hooks in them, which break saving, sequential and disk offload. So only its
arithmetic is used here: for 4 bits its `compress_weight`, the function that `nncf.compress_weights` itself calls for
each weight after it has traced the model; for 8 bits the same formulas in torch (`_nncf_eight`). The tests show that
all give the same bits as the public call. Codes, scales and zero points are plain tensors after that; decoding needs no
NNCF.

`runtime="openvino"` runs these codes in OpenVINO's compressed kernels, the only form of NNCF's that computes with them;
see `sdquant.nn.openvino`.

Four things to know:

* NNCF keeps its scales in float16 and decodes in float16. Rows whose weights are all below about 1e-3 lose precision.
* In its int4 modes NNCF leaves all convolutions at int8 and, unless it is told `all_layers=True`, the last layer of the
  model too. Here int4 means 4 bits for every layer that is asked for, as with `all_layers=True`; a convolution's weight
  is compressed as the matrix [out, in * k * k].
* Groups must divide the rows. Where `group_size` does not, the next smaller one does it: 128, 64, 32, then none.
* Below 3.3 the asymmetric modes clip every row or group that does not straddle zero (an error of 80 %; fixed there by
  widening the range to include zero), hence the least version.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import (
    BIAS,
    BIAS_OPTION,
    GPTQ,
    GPTQ_OPTION,
    RANGE,
    RANGE_OPTION,
    Backend,
    Option,
    Packed,
    PackedLayout,
    PackedSpec,
    QuantSpec,
    Requirement,
    Scheme,
    TensorSpec,
    Unfit,
    dtype_name,
)
from ..utils.no_telemetry import no_telemetry
from ..utils.process_state import errors_only

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

GROUPS = (128, 64, 32)

_GROUP_SIZE = Option(
    default=64,
    help="how many weights of a row share a scale; -1 for the whole row",
    choices=(*GROUPS, -1),
)

_BETTER = {GPTQ: GPTQ_OPTION, RANGE: RANGE_OPTION, BIAS: BIAS_OPTION}

# Scheme name -> the name of NNCF's mode.
MODES = {"int8": "INT8_ASYM", "int8_sym": "INT8_SYM", "int4": "INT4_ASYM", "int4_sym": "INT4_SYM"}


def _scheme(name: str, bits: int, what: str) -> Scheme:
    """Return a scheme of NNCF; the ones of 4 bits have their scales for groups of a row's weights."""
    grouped = bits == 4
    return Scheme(
        name=name, backend="nncf", bits=bits, summary=f"NNCF int{bits}, {what}", runtimes=("plain", "openvino"),
        group=64 if grouped else None,
        options={"group_size": _GROUP_SIZE, **_BETTER} if grouped else {},
    )  # fmt: skip


def _asymmetric(scheme: str) -> bool:
    return not scheme.endswith("_sym")


class NNCF(Backend):
    """NNCF's integer weight compression.

    Parts, for a weight of [out, ...] with `row` weights per output and `groups` groups in a row:
        codes: int8: uint8 or (symmetric) int8 [out, row]. int4: uint8 [out, row / 2], the first of two weights in the
            low bits; symmetric codes with 8 added, as NNCF packs them.
        scale: float16 [out, groups].
        zero_point: in the asymmetric schemes. int8: uint8 [out, groups]. int4: uint8 [ceil(out * groups / 2)], two in a
            byte.
    """

    name: ClassVar[str] = "nncf"
    title: ClassVar[str] = "NNCF"
    requires: ClassVar[Requirement | None] = Requirement(package="nncf", minimum="3.3", extra="nncf")
    runtime_requires: ClassVar[Mapping[str, Requirement]] = {
        "openvino": Requirement(package="openvino", minimum="2026.0", extra="openvino")
    }
    schemes: ClassVar[tuple[Scheme, ...]] = (
        _scheme("int8", 8, "asymmetric, a scale per row"),
        _scheme("int8_sym", 8, "symmetric, a scale per row"),
        _scheme("int4", 4, "asymmetric, in groups of 64"),
        _scheme("int4_sym", 4, "symmetric, in groups of 64"),
    )

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        if len(shape) < 2:
            raise Unfit(f"a {len(shape)}-dimensional weight has no rows")
        out, row = shape[0], math.prod(shape[1:])
        groups = row // _group(spec, row)
        asymmetric = _asymmetric(spec.scheme.name)
        scale = TensorSpec(dtype="float16", shape=(out, groups))
        if spec.scheme.bits == 8:
            parts = {"codes": TensorSpec(dtype="uint8" if asymmetric else "int8", shape=(out, row)), "scale": scale}
            zero_point = TensorSpec(dtype="uint8", shape=(out, groups))
        else:
            parts = {"codes": TensorSpec(dtype="uint8", shape=(out, row // 2)), "scale": scale}
            zero_point = TensorSpec(dtype="uint8", shape=((out * groups + 1) // 2,))
        return parts | {"zero_point": zero_point} if asymmetric else parts

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        from ._chunks import by_rows

        dtype = dtype_name(weight.dtype)
        layout = self.layout(spec, tuple(weight.shape), dtype)  # raises Unfit
        matrix = weight.detach().reshape(weight.shape[0], -1)
        group = _group(spec, matrix.shape[1])
        if spec.scheme.bits == 8:
            from ._nncf_eight import encode_eight

            parts = by_rows(matrix, layout, partial(encode_eight, asymmetric=_asymmetric(spec.scheme.name)))
        else:
            with no_telemetry():
                import nncf  # noqa: F401  # now, as it sets the level of its logger when it is imported

            with errors_only("nncf"):
                parts = by_rows(matrix, layout, partial(_encode_four, mode=MODES[spec.scheme.name], group=group))
        return Packed(spec=PackedSpec(scheme=spec.scheme, shape=tuple(weight.shape), dtype=dtype), parts=parts)

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        """Dequantize as NNCF's decompressors do: in float16, then cast. A few rows at a time, to save memory."""
        import torch

        from ._chunks import row_chunks

        shape, codes, scale = packed.spec.shape, packed.parts["codes"], packed.parts["scale"]
        row, groups = math.prod(shape[1:]), scale.shape[1]
        zeros: Tensor | int
        if "zero_point" not in packed.parts:
            zeros = 8 if packed.spec.scheme.name == "int4_sym" else 0
        elif packed.spec.scheme.name == "int4":
            zeros = _unpack(packed.parts["zero_point"], torch.float16)[: scale.numel()].view(scale.shape)
        else:
            zeros = packed.parts["zero_point"].to(torch.float16)
        for rows in row_chunks(codes, row):
            part = codes[rows]
            floats = part.to(torch.float16) if part.shape[1] == row else _unpack(part, torch.float16)
            grouped = floats.view(len(part), groups, row // groups)
            if isinstance(zeros, int):
                grouped.sub_(zeros)
            else:
                grouped.sub_(zeros[rows].unsqueeze(-1))
            grouped.mul_(scale[rows].unsqueeze(-1))
            out[rows].copy_(grouped.view(len(part), *shape[1:]))

    def form(self, packed: Packed) -> PackedLayout:
        scheme, scale = packed.spec.scheme.name, packed.parts["scale"]
        rows, columns = packed.spec.shape[0], math.prod(packed.spec.shape[1:])
        eight = scheme.startswith("int8")
        symmetric: int = 0 if eight else 8
        return PackedLayout(
            rows=rows,
            columns=columns,
            codes="codes",
            packing=("uint8" if _asymmetric(scheme) else "int8") if eight else "nibbles-low",
            group=rows * columns // scale.numel(),
            scale="scale",
            zero="zero_point" if _asymmetric(scheme) else symmetric,
            zero_packing="uint8" if eight else "nibbles-low",
            arithmetic="float16",
        )

    def by_row(self, packed: Packed) -> bool:
        return packed.spec.scheme.name != "int4" or packed.parts["scale"].shape[1] % 2 == 0  # two zero points in a byte


def _group(spec: QuantSpec, row: int) -> int:
    """Return the number of weights that share a scale in rows of `row` weights."""
    if spec.scheme.bits == 8 or spec["group_size"] == -1:
        if spec.scheme.bits == 4 and row % 2:
            raise Unfit(f"its rows have an odd number of weights ({row}), but two 4-bit codes share a byte")
        return row
    for group in GROUPS:
        if group <= spec["group_size"] and row % group == 0:
            return group
    raise Unfit(f"its rows have {row} weights, which no group size from 32 to {spec['group_size']} divides")


def _encode_four(matrix: Tensor, mode: str, group: int) -> dict[str, Tensor]:
    """Quantize some rows, [rows, row], to 4 bits. Return their parts."""
    import torch

    compressed = _compress(matrix, mode, group)
    codes, zero_point = compressed.tensor.data.reshape(matrix.shape), compressed.zero_point
    parts = {
        "codes": _pack(codes if zero_point is not None else codes + 8).reshape(len(matrix), -1),
        "scale": compressed.scale.data.to(torch.float16).reshape(len(matrix), -1),
    }
    if zero_point is not None:
        parts["zero_point"] = _pack(zero_point.data.to(torch.uint8))
    return {name: part.contiguous() for name, part in parts.items()}


def _compress(matrix: Tensor, mode: str, group: int) -> Any:
    """Return NNCF's `CompressedWeight` of an [out, row] matrix, each row (or group of it) with its own scale."""
    from nncf import CompressWeightsMode
    from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
    from nncf.quantization.algorithms.weight_compression.weight_lowering import compress_weight
    from nncf.tensor import Tensor as NncfTensor

    config = WeightCompressionConfig(mode=CompressWeightsMode[mode], group_size=group)
    return compress_weight(NncfTensor(matrix), (1,), config)


def _pack(codes: Tensor) -> Tensor:
    """Pack codes of 0 to 15, any shape and integer dtype, as uint8 [ceil(n / 2)], the first of two in the low bits."""
    import torch

    flat = codes.reshape(-1).to(torch.uint8)
    if len(flat) % 2:  # only zero points can be odd in number
        flat = torch.cat([flat, flat.new_zeros(1)])
    return flat[::2] | (flat[1::2] << 4)


def _unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack [..., n] bytes to [..., 2 * n] codes in `dtype`: the inverse of `_pack`."""
    import torch

    codes = torch.empty((*packed.shape, 2), dtype=dtype, device=packed.device)
    codes[..., 0] = packed & 15
    codes[..., 1] = packed >> 4
    return codes.flatten(-2)


BACKEND = NNCF()
