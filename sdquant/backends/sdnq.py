"""SDNQ, the quantization that SD.Next uses today: the example of a whole backend.

SDNQ quantizes a layer (its public `sdnq_quantize_layer`); the tensors it makes are the parts here, with SDNQ's own
shapes and file keys, so that a folder written here loads with `sdnq.load_sdnq_model` or diffusers, and the other way
round. Decoding is written out in plain torch, bit-equal to SDNQ's own, a few rows at a time; it needs no sdnq. How
codes are stored is in `_sdnq_codes`, how a weight is in `_sdnq_storage`, what SDNQ's files say in `_sdnq_files`.
Of SDNQ's extras, Hadamard rotation, SVD and dynamic selection are options; codebooks, quantized scales and quantized
matmul are only read. A rotated weight is rotated back when it is dequantized. There is no "library" runtime: SDNQ's
layers would add its matmul kernels, which are another subject.

Differences from SDNQ's defaults, both for size:

* Scales take the dtype of the weight, not float32 (`fp32_scales` for those). The codes are computed against the rounded
  scale, so that little is lost, and a convolution of 32 channels keeps 8-bit weights at 0.53 of bf16 instead of 0.56.
* Groups are 64 weights at 4 bits and below (SDNQ: 16 to 64), 128 at 6 and 256 at 8. With SDNQ's own, uint4 takes 0.312.

SDNQ groups a convolution's weight along its input channels, with a scale for each kernel position. Where there are few
channels the scales outweigh the codes; like SDNQ itself this backend leaves layers of fewer than 32 channels alone, and
the unsigned schemes, which carry a zero point beside each scale, want 64.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import (
    BIAS,
    BIAS_OPTION,
    DTYPE_BITS,
    GPTQ,
    GPTQ_OPTION,
    INPUT_FIRST,
    RANGE,
    RANGE_OPTION,
    ROTATION,
    Backend,
    LowRank,
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
    dtype_named,
    registry,
)
from ..errors import BadFileError, UnsupportedFileError
from ..utils.chunk_sizes import weights_at_once
from . import _sdnq_encode, _sdnq_layout
from ._sdnq_codes import CODES
from ._sdnq_files import float_dtype, of_weight, products_of, shape_of, stored_as, upright, words
from ._sdnq_layout import Choice
from ._sdnq_storage import DETAILS, OTHER, PARTS, belong_together, is_input_first, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from ._sdnq_codes import Code

HADAMARD, RANK = 256, 32  # SDNQ's defaults: values rotated together at most; rank of the SVD
BITS, PRODUCTS = "bits", "products"  # in the details of what is found in a file; not in those of a packed weight
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
        "hadamard": Option(default=False, help="rotate inputs in groups of up to 256 first, which spreads outliers"),
        "svd": Option(default=False, help="keep the largest singular values apart, as two narrow float matrices"),
        "rank": Option(
            default=RANK, help="how many singular values svd keeps", choices=(8, 16, 32, 64, 128, 256), of="svd"
        ),
        "dynamic": Option(
            default=False, help="give a weight that loses too much the next dtype of more bits, which SDNQ looks for"
        ),
        "wo": Option(
            default=False,
            help="quantize what transformers and diffusers keep in floats too: T5's wo, 1.5 GB of T5-XXL; SDNQ cannot "
            "run it then",
        ),
    }
    if bits < 8:
        options |= {GPTQ: GPTQ_OPTION, RANGE: RANGE_OPTION, BIAS: BIAS_OPTION}
    return Scheme(name=name, backend="sdnq", bits=bits, group=group, summary=summary, options=options)


class SDNQ(Backend):
    """SDNQ's weight quantization, in sdquant's plain layers.

    Parts, for a weight of [out, in, ...] whose channels fall into `groups` groups, in SDNQ's own shapes:
        weight: int8 and fp8: [out, in, ...], or [out, groups, in / groups, ...] where there are several groups.
            4 bits: uint8 [n / 2]. 6 bits: uint8 [n / 4, 3]. 3 bits: uint8 [n / 8, 3].
        scale: [out, 1, ...] or [out, groups, 1, ...], in the weight's dtype or float32.
        zero_point: as `scale`, for the unsigned schemes.
    And in files that SDNQ wrote with its extras, which the details of the packed weight name (`_sdnq_storage`):
        weight: codes of another dtype, as the detail "code" says.
        scale: with a codebook, [out, levels, ...] or [out, groups, levels, ...], or [levels] for the whole weight. A
            single scale for the whole weight is [1, 1, ...]. Quantized scales, and zero_point alike, are codes again,
            flat if they are packed, with
        scale_2, scale_zero_point; zero_point_scale, zero_point_2: factor and offset of these, float32 [1], or a table
            of the values of their codes.
        svd_up, svd_down: [out, rank] and [rank, in * ...], in the rotated basis if the weight is rotated.
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
        Scheme(
            name=OTHER,
            backend="sdnq",
            bits=8,
            least_bits=1,
            summary="SDNQ's other integers and floats, of 1 to 32 bits",
            on_the_fly=False,
        ),
    )

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        if spec.scheme.name == OTHER:
            raise Unfit("sdquant reads it from files, and does not make it")
        code = CODES[spec.scheme.name]
        if len(shape) < 2:
            raise Unfit(f"a {len(shape)}-dimensional weight has no input channels")
        least = 64 if code.zero_point else 32
        if shape[1] < least:
            raise Unfit(f"it has {shape[1]} input channels, but {spec.scheme.name} needs at least {least} per scale")
        return _sdnq_layout.part_specs(code, _choice(spec), shape, dtype)

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        shape, dtype = tuple(weight.shape), dtype_name(weight.dtype)
        layout = self.layout(spec, shape, dtype)  # raises Unfit
        settings, rows = _settings(spec), weight.detach()
        if spec["dynamic"]:
            scheme, details, parts = _sdnq_encode.encode_dynamic(rows, settings)
        elif spec["hadamard"] or spec["svd"]:  # whose sums depend on how many rows there are
            scheme, details, parts = spec.scheme.name, {}, _sdnq_encode.encode(rows, settings)[0]
        else:
            from ._chunks import by_rows

            scheme, details, parts = (
                spec.scheme.name,
                {},
                by_rows(rows, layout, lambda some: _sdnq_encode.encode(some, settings)[0]),
            )
        rotation = _sdnq_layout.rotation_of(_choice(spec), shape)
        details = {**details, ROTATION: rotation} if rotation else details
        return Packed(
            spec=PackedSpec(scheme=registry.scheme(scheme), shape=shape, dtype=dtype, details=details), parts=parts
        )

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        from . import _sdnq_decode

        _sdnq_decode.decode_into(packed, out, weights_at_once(out.device))

    def form(self, packed: Packed) -> PackedLayout | None:
        way, parts, shape = storage_of(packed.spec.scheme.name, packed.spec.details), packed.parts, packed.spec.shape
        code, packing = way.code, _PACKINGS.get(way.code.sdnq)
        if packing is None or not way.plain or "svd_up" in parts:
            return None
        rows, columns, scale = shape[0], math.prod(shape[1:]), parts["scale"]
        if scale.shape[0] != rows:  # one for all rows
            return None
        kernel = tuple(scale.shape[scale.ndim - len(shape[2:]) :])
        if kernel not in (shape[2:], (1,) * len(kernel)) or (kernel != shape[2:] and scale.numel() > rows):
            return None  # scales of groups that all positions of a kernel share, or some of them
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
        way, parts, shape = storage_of(packed.spec.scheme.name, packed.spec.details), packed.parts, packed.spec.shape
        per_unit = len(way.code.fields) or 1
        of_rows = parts["scale"].shape[0] == shape[0]  # not one for all of them
        return way.plain and of_rows and math.prod(shape[1:]) % per_unit == 0 and "svd_up" not in parts

    def low_rank(self, packed: Packed) -> LowRank | None:
        parts = packed.parts
        if "svd_up" not in parts or len(packed.spec.shape) != 2:
            return None
        residual = tuple(name for name in parts if not name.startswith("svd_"))
        return LowRank(residual=residual, down="svd_down", up="svd_up", is_turned=True)

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
            own = of_weight(weight, settings)
            scheme, details = stored_as(weight, own)
            code = storage_of(scheme, details).code
            bits = DTYPE_BITS.get(tensors[weight].dtype, 8) * code.bits // DTYPE_BITS[code.dtype]
            keys = {part: stem + part for part in PARTS if stem + part in tensors}
            size = sum(tensors[key].nbytes for key in keys.values())
            weights.append(
                PrequantizedWeight(
                    name=weight,
                    scheme=scheme,
                    keys=keys,
                    evidence=f"quantization_config says sdnq, and the weights have scales beside them{words(details)}",
                    details={
                        **details,
                        **({BITS: bits} if bits != registry.scheme(scheme).bits else {}),
                        **({PRODUCTS: products} if (products := products_of(weight, own)) else {}),
                    },
                    nbytes=size - tensors[weight].nbytes * 7 // 8 if _in_words(code, tensors[weight].dtype) else None,
                )
            )
        known = {key for row in weights for key in row.keys.values()}
        dtype = float_dtype(info.dtype for key, info in tensors.items() if key not in known)
        return [replace(row, details={**row.details, "dtype": dtype}) for row in weights]

    def missing(self, found: PrequantizedWeight) -> str | None:
        needed = storage_of(found.scheme, found.details).parts
        needed += ("svd_up", "svd_down") if {"svd_up", "svd_down"} & found.keys.keys() else ()
        return next((found.name.removesuffix("weight") + part for part in needed if part not in found.keys), None)

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        way, parts = storage_of(found.scheme, found.details), {part: get(key) for part, key in found.keys.items()}
        if _in_words(way.code, dtype_name(parts["weight"].dtype)):
            parts["weight"] = parts["weight"].to(dtype_named("uint8"))
        products = found.details.get(PRODUCTS, "")
        size = shape_of(parts, way, products=bool(products)) if shape is None else shape
        if size is None:
            raise Unfit(f"the tensors of {found.name} alone do not tell its shape")
        laid = upright(parts, size, way, products=products)
        if laid is None:
            raise UnsupportedFileError(
                f"Cannot read {found.name}, stored by SDNQ for its quantized products",
                f"as a square of {size[0]} with a single scale it may lie as [out, in] or as [in, out]",
                "Quantize the model again with SDNQ without quantized_matmul_dtype, or with another group_size",
            )
        details = {name: value for name, value in found.details.items() if name in DETAILS and name != INPUT_FIRST}
        if len(size) > 2 and (found.details.get(INPUT_FIRST) or is_input_first(laid["scale"], size, way)):
            way, details = replace(way, input_first=True), {**details, INPUT_FIRST: True}
        if not belong_together(way, size, laid):
            shapes = ", ".join(
                f"{part} {dtype_name(tensor.dtype)} {list(tensor.shape)}" for part, tensor in laid.items()
            )
            raise BadFileError(
                f"Cannot read {found.name} as {found.scheme}",
                f"its tensors ({shapes}) do not make a weight of {list(size)}",
                "Download the file again, or check that config.json belongs to it",
            )
        if way.hadamard:
            from ..core import hadamard

            details[ROTATION] = hadamard.group_size(size[1], way.hadamard)
            details = {name: value for name, value in details.items() if value}
        return Packed(
            spec=PackedSpec(
                scheme=registry.scheme(found.scheme), shape=size, dtype=found.details["dtype"], details=details
            ),
            parts=laid,
        )

    def config(self, spec: QuantSpec, dtype: str) -> dict[str, Any] | None:
        """Return the quantization_config that SDNQ needs to build its layers.

        It assumes that every Linear and Conv of the model is quantized, except those in `modules_to_not_convert`
        ("block.proj.weight"): whoever writes the file adds the unquantized ones.
        """
        if spec.scheme.name == OTHER:
            return None
        return {"quant_method": "sdnq", **_settings(spec), "modules_to_not_convert": []}

    def config_of(self, weights: Mapping[str, Packed]) -> tuple[dict[str, Any], frozenset[str]] | None:
        choice, names = _sdnq_layout.choice_of(weights)
        dtypes: dict[str, list[str]] = {}
        for name in sorted(names):
            spec = weights[name].spec
            dtypes.setdefault(storage_of(spec.scheme.name, spec.details).code.sdnq, []).append(name)
        if not dtypes:
            return None
        most = max(dtypes, key=lambda dtype: len(dtypes[dtype]))
        config = {"quant_method": "sdnq", **_arguments(most, choice), "modules_to_not_convert": []}
        return {**config, "modules_dtype_dict": {d: names for d, names in dtypes.items() if d != most}}, names


def _in_words(code: Code, dtype: str) -> bool:
    """Return whether each byte of codes is a 64-bit integer: SDNQ stores its codes of 1 bit so."""
    return code.bits == 1 and dtype == "int64"


def _choice(spec: QuantSpec) -> Choice:
    return Choice(
        group_size=spec["group_size"],
        rank=spec["rank"] if spec["svd"] else 0,
        hadamard=HADAMARD if spec["hadamard"] else 0,
        fp32_scales=spec["fp32_scales"],
    )


def _settings(spec: QuantSpec) -> dict[str, Any]:
    """Return the arguments of `SDNQConfig` for a scheme."""
    return _arguments(CODES[spec.scheme.name].sdnq, _choice(spec))


def _arguments(dtype: str, choice: Choice) -> dict[str, Any]:
    """Return the arguments of `SDNQConfig` for weights of SDNQ's `dtype`."""
    return {
        "weights_dtype": dtype,
        "group_size": choice.group_size,
        "dequantize_fp32": choice.fp32_scales,
        "quant_conv": True,
        "add_skip_keys": False,
        "use_svd": choice.rank > 0,
        "svd_rank": choice.rank or RANK,
        "use_hadamard": choice.hadamard > 0,
        "hadamard_group_size": choice.hadamard or HADAMARD,
        "use_codebook": False,
        "use_quantized_matmul": False,
        "use_quantized_matmul_conv": False,
        "use_dynamic_quantization": False,
    }


BACKEND = SDNQ()
