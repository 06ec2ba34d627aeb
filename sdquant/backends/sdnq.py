"""SDNQ, the quantization that SD.Next uses today: the example of a whole backend.

SDNQ quantizes a layer (its public `sdnq_quantize_layer`); the tensors it makes are the parts here, with SDNQ's own
shapes and file keys, so that a folder written here loads with `sdnq.load_sdnq_model` or diffusers, and the other way
round. Decoding is written out in plain torch, bit-equal to SDNQ's own, a few rows at a time; it needs no sdnq. How
codes are stored is in `_sdnq_codes`, what SDNQ's files say in `_sdnq_files`.
SDNQ's extras at encoding (SVD, Hadamard rotation, codebooks, dynamic selection, quantized matmul) stay off, and there
is no "library" runtime: SDNQ's layers would add its matmul kernels, which are another subject.

Differences from SDNQ's defaults, both for size:

* Scales take the dtype of the weight, not float32 (`fp32_scales` for those). The codes are computed against the rounded
  scale, so that little is lost, and a convolution of 32 channels keeps 8-bit weights at 0.53 of bf16 instead of 0.56.
* Groups are 64 weights at 4 bits and below (SDNQ: 16 to 64), 128 at 6 and 256 at 8. With SDNQ's own, uint4 takes 0.312.

SDNQ groups a convolution's weight along its input channels, with a scale for each kernel position. Where there are few
channels the scales outweigh the codes; like SDNQ itself this backend leaves layers of fewer than 32 channels alone, and
the unsigned schemes, which carry a zero point beside each scale, want 64.
"""

from __future__ import annotations

import functools
import math
import os
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import (
    Backend,
    Option,
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
    registry,
)
from ..errors import BadFileError
from ..utils.process_state import errors_only
from ..utils.tensors import put_parameter
from ._sdnq_codes import CODES, numbers
from ._sdnq_files import belong_together, float_dtype, scheme_of, shape_of, turned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor, nn

CHUNK = 1 << 18  # weights decoded at a time
# SDNQ's names of codes, as `core.packed_layout` names their packing.
_PACKINGS = {
    "int8": "int8",
    "float8_e4m3fn": "float8_e4m3fn",
    "int6": "sdnq6",
    "int4": "nibbles-low",
    "uint4": "nibbles-low",
    "uint3": "sdnq3",
}


def _scheme(name: str, bits: int, group: int, summary: str) -> Scheme:
    options = {
        "group_size": Option(
            default=group,
            help="how many input channels share a scale; -1 for all of them",
            choices=(-1, 32, 64, 128, 256, 512, 1024),
        ),
        "fp32_scales": Option(default=False, help="keep scales in float32, as SDNQ does by default"),
        "wo": Option(
            default=False,
            help="quantize what transformers and diffusers keep in floats too: T5's wo, 1.5 GB of T5-XXL; SDNQ cannot "
            "run it then",
        ),
    }
    return Scheme(name=name, backend="sdnq", bits=bits, group=group, summary=summary, options=options)


class SDNQ(Backend):
    """SDNQ's weight quantization, in sdquant's plain layers.

    Parts, for a weight of [out, in, ...] whose channels fall into `groups` groups, in SDNQ's own shapes:
        weight: int8 and fp8: [out, in, ...], or [out, groups, in / groups, ...] where there are several groups.
            4 bits: uint8 [n / 2]. 6 bits: uint8 [n / 4, 3]. 3 bits: uint8 [n / 8, 3].
        scale: [out, 1, ...] or [out, groups, 1, ...], in the weight's dtype or float32.
        zero_point: as `scale`, for the unsigned schemes.
        svd_up, svd_down: [out, rank] and [rank, in * ...], only in files that SDNQ wrote with SVD.
    """

    name: ClassVar[str] = "sdnq"
    title: ClassVar[str] = "SDNQ"
    requires: ClassVar[Requirement | None] = Requirement(package="sdnq", minimum="0.2.5", extra="sdnq")
    schemes: ClassVar[tuple[Scheme, ...]] = (
        _scheme("sdnq-int8", 8, 256, "SDNQ int8, in groups of 256 channels"),
        _scheme("sdnq-fp8", 8, 256, "SDNQ float8 (E4M3), in groups of 256 channels"),
        _scheme("sdnq-int6", 6, 128, "SDNQ int6, in groups of 128 channels"),
        _scheme("sdnq-int4", 4, 64, "SDNQ int4, symmetric, in groups of 64 channels"),
        _scheme("sdnq-uint4", 4, 64, "SDNQ uint4, asymmetric, in groups of 64 channels"),
        _scheme("sdnq-uint3", 3, 64, "SDNQ uint3, asymmetric, in groups of 64 channels"),
    )

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        code = CODES[spec.scheme.name]
        if len(shape) < 2:
            raise Unfit(f"a {len(shape)}-dimensional weight has no input channels")
        least = 64 if code.zero_point else 32
        if shape[1] < least:
            raise Unfit(f"it has {shape[1]} input channels, but {spec.scheme.name} needs at least {least} per scale")
        numel, per_unit = math.prod(shape), len(code.fields)
        if per_unit and numel % per_unit:
            raise Unfit(f"its {numel} weights do not fill whole units of {per_unit} codes")
        groups = _groups(shape[1], spec["group_size"])
        split: tuple[int, ...] = shape
        if groups > 1:
            split = (shape[0], groups, shape[1] // groups, *shape[2:])
        stored = split
        if code.fields:
            stored = (numel // per_unit, code.unit) if code.unit > 1 else (numel // per_unit,)
        axis = 2 if groups > 1 else 1
        scale = TensorSpec(
            dtype="float32" if spec["fp32_scales"] else dtype,
            shape=(*split[:axis], 1, *split[axis + 1 :]),
        )
        parts = {"weight": TensorSpec(dtype=code.dtype, shape=stored), "scale": scale}
        return parts | {"zero_point": scale} if code.zero_point else parts

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        dtype = dtype_name(weight.dtype)
        layout = self.layout(spec, tuple(weight.shape), dtype)  # raises Unfit
        from ._chunks import by_rows

        sdnq = _sdnq()
        config = sdnq.SDNQConfig(**_settings(spec))

        def encode(rows: Tensor) -> dict[str, Tensor]:
            layer, _ = sdnq.sdnq_quantize_layer(_layer(rows), config, torch_dtype=rows.dtype, param_name="weight")
            return {name: getattr(layer, name).data.contiguous() for name in layout}

        return Packed(
            spec=PackedSpec(scheme=spec.scheme, shape=tuple(weight.shape), dtype=dtype),
            parts=by_rows(weight.detach(), layout, encode),
        )

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        import torch

        out = torch.empty(packed.spec.shape, dtype=dtype, device=packed.parts["weight"].device)
        self.decode_into(packed, out)
        return out

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        """Dequantize in the order and dtype of SDNQ's dequantizer: in the scale's dtype, then SVD, then the cast."""
        import torch

        code, shape, parts = CODES[packed.spec.scheme.name], packed.spec.shape, packed.parts
        scale, zero_point, up = parts["scale"], parts.get("zero_point"), parts.get("svd_up")
        row = math.prod(shape[1:])
        grouped = scale.ndim == len(shape) + 1
        split = (scale.shape[1], shape[1] // scale.shape[1], *shape[2:]) if grouped else shape[1:]
        # Chunks of 8 rows, so that they begin at whole units. With SVD one chunk: a product of slices may round apart.
        step = shape[0] if up is not None else max(8, CHUNK // max(1, row) // 8 * 8)
        for start in range(0, shape[0], step):
            rows = slice(start, min(start + step, shape[0]))
            values = numbers(parts["weight"], code, rows, row, scale.dtype).view(-1, *split)
            if zero_point is None:
                values.mul_(scale[rows])
            else:
                values = torch.addcmul(zero_point[rows], values, scale[rows])
            values = values.view(-1, *shape[1:])
            if up is not None:
                down = parts["svd_down"]
                if len(shape) == 2:
                    values = values.to(up.dtype).addmm_(up, down)
                else:
                    values.add_(torch.mm(up, down).view(shape))
            out[rows].copy_(values)

    def form(self, packed: Packed) -> PackedLayout | None:
        code, parts, shape = CODES[packed.spec.scheme.name], packed.parts, packed.spec.shape
        packing = _PACKINGS.get(code.sdnq)
        if packing is None or "svd_up" in parts:
            return None
        rows, columns, scale = shape[0], math.prod(shape[1:]), parts["scale"]
        taps = math.prod(shape[2:]) if scale.numel() > rows else 1  # each position of a kernel has a scale of its own
        if rows * columns * taps % scale.numel():
            return None
        return PackedLayout(
            rows=rows,
            columns=columns,
            codes="weight",
            packing=packing,
            group=rows * columns * taps // scale.numel(),
            taps=taps,
            scale="scale",
            zero=-code.low,
            shift="zero_point" if code.zero_point else "",
            added=True,
            arithmetic=dtype_name(scale.dtype),
            fused=code.zero_point,
        )

    def by_row(self, packed: Packed) -> bool:
        per_unit = len(CODES[packed.spec.scheme.name].fields) or 1
        return math.prod(packed.spec.shape[1:]) % per_unit == 0 and "svd_up" not in packed.parts

    def key(self, name: str, part: str, spec: PackedSpec) -> str:
        return name.removesuffix("weight") + part

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
        settings = config.get("quantization_config") or {}
        if settings.get("quant_method") != "sdnq":
            return []
        weights = []
        for weight in tensors:
            stem = weight.removesuffix("weight")
            if stem == weight or stem + "scale" not in tensors:
                continue
            names = ("weight", "scale", "zero_point", "svd_up", "svd_down")
            weights.append(
                PrequantizedWeight(
                    name=weight,
                    scheme=scheme_of(weight, settings),
                    keys={part: stem + part for part in names if stem + part in tensors},
                    evidence="quantization_config says sdnq, and the weights have scales beside them",
                )
            )
        known = {key for row in weights for key in row.keys.values()}
        dtype = float_dtype(info.dtype for key, info in tensors.items() if key not in known)
        return [PrequantizedWeight(**{**vars(row), "details": {"dtype": dtype}}) for row in weights]

    def missing(self, found: PrequantizedWeight) -> str | None:
        needed: tuple[str, ...] = ("zero_point",) if CODES[found.scheme].zero_point else ()
        needed += ("svd_up", "svd_down") if {"svd_up", "svd_down"} & found.keys.keys() else ()
        return next((found.name.removesuffix("weight") + part for part in needed if part not in found.keys), None)

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        parts = {part: get(key) for part, key in found.keys.items()}
        shape = shape_of(parts, CODES[found.scheme]) if shape is None else shape
        if len(shape) > 1 and parts["scale"].shape == (1, shape[0]) and parts["weight"].shape == turned(shape):
            # Written for SDNQ's quantized matmul: the weight as [in, out].
            from ..utils.buffers import dense

            parts |= {part: dense(tensor.t()) for part, tensor in parts.items()}
            parts["weight"] = parts["weight"].view(shape)
            for part in {"scale", "zero_point"} & parts.keys():
                parts[part] = parts[part].view(shape[0], *(1,) * (len(shape) - 1))
        if not belong_together(CODES[found.scheme], shape, parts):
            shapes = ", ".join(
                f"{part} {dtype_name(tensor.dtype)} {list(tensor.shape)}" for part, tensor in parts.items()
            )
            raise BadFileError(
                f"Cannot read {found.name} as {found.scheme}",
                f"its tensors ({shapes}) do not make a weight of {list(shape)}",
                "Download the file again, or check that config.json belongs to it",
            )
        return Packed(
            spec=PackedSpec(scheme=registry.scheme(found.scheme), shape=tuple(shape), dtype=found.details["dtype"]),
            parts=parts,
        )

    def config(self, spec: QuantSpec, dtype: str) -> dict[str, Any] | None:
        """Return the quantization_config that SDNQ needs to build its layers.

        It assumes that every Linear and Conv of the model is quantized, except those in `modules_to_not_convert`
        ("block.proj.weight"): whoever writes the file adds the unquantized ones.
        """
        return {"quant_method": "sdnq", **_settings(spec), "modules_to_not_convert": []}


def _settings(spec: QuantSpec) -> dict[str, Any]:
    """Return the arguments of `SDNQConfig` for a scheme."""
    return {
        "weights_dtype": CODES[spec.scheme.name].sdnq,
        "group_size": spec["group_size"],
        "dequantize_fp32": spec["fp32_scales"],
        "quant_conv": True,
        "add_skip_keys": False,
        "use_svd": False,
        "use_hadamard": False,
        "use_codebook": False,
        "use_quantized_matmul": False,
        "use_quantized_matmul_conv": False,
        "use_dynamic_quantization": False,
    }


def _groups(channels: int, group_size: int) -> int:
    """Return the number of groups by SDNQ's rule: channels / group_size, or the next smaller number that divides."""
    groups = channels // group_size if 0 < group_size < channels else 1
    if groups > 1 and groups * group_size != channels:
        groups -= 1  # one group less, even where as many larger ones would divide them: 640 channels by 256 are 1 group
        while groups > 1 and channels % groups:
            groups -= 1
    return max(1, groups)


def _layer(weight: Tensor) -> nn.Module:
    """Return a layer with this weight, not copied, for SDNQ to quantize."""
    from torch import nn

    out, channels, *kernel = weight.shape
    if kernel:
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(kernel) - 1]
        layer: Any = conv(channels, out, tuple(kernel), bias=False, device="meta")  # type: ignore[arg-type]
    else:
        layer = nn.Linear(channels, out, bias=False, device="meta")
    # SDNQ assigns what it makes to the layer, and reads it from there.
    layer.__dict__["register_parameter"] = functools.partial(put_parameter, layer)
    put_parameter(layer, "weight", nn.Parameter(weight.detach(), requires_grad=False))
    module: nn.Module = layer
    return module


def _sdnq() -> Any:
    """Import sdnq and return the module. Its test compilation and messages at import are suppressed.

    To use SDNQ's compiled kernels in the same process, import sdnq first or set SDNQ_USE_TORCH_COMPILE.
    """
    import sys

    if "sdnq" in sys.modules:
        return sys.modules["sdnq"]
    switch = "SDNQ_USE_TORCH_COMPILE"
    unset = switch not in os.environ
    with errors_only(os.environ.get("SDNQ_LOGGER_NAME", "sdnq"), "bitsandbytes"):
        os.environ.setdefault(switch, "0")
        try:
            import sdnq
        finally:
            if unset:
                del os.environ[switch]
    return sdnq


BACKEND = SDNQ()
