"""Quantization by rules, with Qwix's numerics: a type, tiles and a calibration method for each layer, and integer or
float8 products where activations have a type as well. See `sdquant.rules`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import (
    Activations,
    Backend,
    FloatGemm,
    FloatRounding,
    Geometry,
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
    dtype_name,
)
from ..errors import SettingsError
from ..utils.chunk_sizes import weights_at_once
from . import prequantized_files
from .core.how_to_quantize import tile_sizes
from .core.qtypes import QTYPES, qtype
from .packed_layout import ACT_SHAPE, act_how, act_method, layout, per_tensor
from .qconfig import QuantizationRule, rule_of
from .quant_spec import RuleSpec, operation_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TYPES = tuple(row.name for row in QTYPES)
# Packings of `core.packed_layout` by bits, as `core.bit_packing` makes them, in rows of whole units; and the tables of
# types whose codes are not numbers.
_PACKINGS = {8: "int8", 7: "sevens", 6: "sixes", 5: "fives", 4: "nibbles-low", 3: "threes", 2: "twos"}
_TABLES = {"nf4": "nf4", "e2m1": "e2m1"}
_UNIT = 8

_OPTIONS = {
    "weight_qtype": Option(default="int8", help="type of the weights", choices=TYPES),
    "act_qtype": Option(default=None, help="type of the activations", choices=(None, *TYPES)),
    "tile_size": Option(default=0, help="how many inputs share a scale; 0 for all of them"),
    "weight_calibration_method": Option(
        default="absmax", help="how the range of weights is found", choices=("absmax", "minmax")
    ),
}


class RulesBackend(Backend):
    """Weights quantized as a rule says.

    Parts, for a weight of [out, ...]:
        qvalue: int8, int16 and float8: codes of the weight's shape. Fewer bits: uint8 [out, bytes of a row], see
            `core.bit_packing`; integer codes have half their range added.
        scale: [out or 1, tiles or 1, 1...], in the weight's dtype (float32 for float16). Scales that a format keeps as
            powers of two are float8_e8m0fnu, those of nvfp4 float8_e4m3fn.
        zero_point: codes of the scale's shape, where the range is asymmetric.
        act_scale, act_zero_point: static ranges of activations, from calibration.

    For files of other tools see `prequantized_files`.
    """

    name: ClassVar[str] = "rules"
    title: ClassVar[str] = "Rules"
    requires: ClassVar[Requirement | None] = None
    magnitudes: ClassVar[frozenset[str]] = frozenset({"scale", "act_scale"})
    schemes: ClassVar[tuple[Scheme, ...]] = (
        Scheme(
            name="rules",
            backend="rules",
            bits=8,
            least_bits=2,
            summary="types by layer, as rules say; Qwix's numerics",
            options=_OPTIONS,
        ),
    )

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        one = _one(spec)
        return layout(one.rule, shape, dtype, one.act_shape)

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        from . import packed_qarray as packed
        from .core.static_range import static_range
        from .statistics_file import of_component, read_statistics

        shape, one = tuple(weight.shape), _one(spec)
        self.layout(one, shape, dtype_name(weight.dtype))  # raises Unfit
        static = None
        if one.rule.act_static_scale:
            known = {} if one.statistics is None else of_component(read_statistics(one.statistics), one.component)
            static = static_range(known, one.path, operation_of(shape), one.rule)
        return packed.encode(weight, one.rule, static)

    def spec_of(self, packed: PackedSpec) -> QuantSpec | None:
        details = dict(packed.details)
        act_shape = details.pop(ACT_SHAPE, None)
        return RuleSpec(
            self.schemes[0], rule=rule_of(details), act_shape=None if act_shape is None else tuple(act_shape)
        )

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        """Dequantize in the dtype of the scales, then cast; a few rows at a time, to bound memory."""
        from .core.qarray import values
        from .packed_qarray import weight_of

        shape, rule = packed.spec.shape, _rule_of(packed.spec)
        step = max(1, weights_at_once(out.device) // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], step):
            rows = slice(start, min(start + step, shape[0]))
            out[rows].copy_(values(weight_of(packed, rule, rows)))

    def form(self, packed: Packed) -> PackedLayout | None:

        spec, scale = packed.spec, packed.parts["scale"]
        row = qtype(_rule_of(spec).weight_qtype or "")
        rows, columns = spec.shape[0], math.prod(spec.shape[1:])
        packing = {"float": row.storage}.get(row.kind, _PACKINGS.get(row.bits))
        asymmetric = "zero_point" in packed.parts
        if packing is None or spec.dtype == "float64" or (scale.numel() > 1 and len(scale) != rows):
            return None
        if row.bits < 8 and (columns % _UNIT or asymmetric):  # rows are filled up; zero points are signed, codes not
            return None
        shifted = 2 ** (row.bits - 1) if row.kind == "int" and row.bits < 8 else 0
        return PackedLayout(
            rows=rows,
            columns=columns,
            codes="qvalue",
            packing=packing,
            group=rows * columns // scale.numel(),
            table=_TABLES.get(row.kind, ""),
            scale="scale",
            zero="zero_point" if asymmetric else shifted,
            zero_packing="int8",
            arithmetic="float32" if spec.dtype == "float16" else spec.dtype,
        )

    def encode_as(self, weight: Tensor, packed: PackedSpec) -> Packed:
        from .packed_qarray import encode

        return encode(weight, _rule_of(packed))

    def computes(self, packed: PackedSpec) -> bool:
        return "act_qtype" in packed.details

    def linear(self, packed: Packed, x: Tensor) -> Tensor:
        rule = _rule_of(packed.spec)
        from .core import dot_general
        from .packed_qarray import activations_of, weight_of

        return dot_general.linear(activations_of(packed, rule, x, conv=False), weight_of(packed, rule))

    def convolve(self, packed: Packed, x: Tensor, geometry: Geometry) -> Tensor:
        rule = _rule_of(packed.spec)
        from .core.conv_general import convolve
        from .packed_qarray import activations_of, weight_of

        return convolve(
            activations_of(packed, rule, x, conv=True),
            weight_of(packed, rule),
            stride=geometry.stride,
            padding=geometry.padding,
            dilation=geometry.dilation,
            groups=geometry.groups,
        )

    def activations(self, packed: Packed) -> Activations | None:
        """Return how activations are quantized, if both sides are integers of up to 8 bits without zero points."""
        from .core.dot_general import LEAST_TILE

        rule, (_, inputs, *space) = _rule_of(packed.spec), packed.spec.shape
        if rule.act_qtype is None or per_tensor(rule):
            return None
        row, tile = qtype(rule.act_qtype), 0
        if rule.tile_size is not None:
            tile = inputs // _tiles_of_x(rule, inputs)
        if row.kind != "int" or row.bits > 8 or (tile and (space or tile < min(LEAST_TILE, inputs))):
            return None
        static, method = packed.parts.get("act_scale"), act_method(rule)
        if static is None:
            known = method.name == "absmax" and not method.numbers
        else:
            known = static.numel() == 1 and not tile and "act_zero_point" not in packed.parts
        if not known:
            return None
        low, high = row.limits
        scale_part = "" if static is None else "act_scale"
        return Activations(bound=row.bound, low=int(low), high=int(high), scale=scale_part, tile=tile)

    def as_floats(self, packed: Packed, x: Tensor) -> FloatGemm | None:
        """Return the activations for a float GEMM: dequantized if the codes cannot be multiplied, else (a float type on
        either side) as codes with scales. None for integers on both sides, which are multiplied as integers."""
        from .core import fast_activations
        from .core.numerics import from_codes
        from .core.qarray import dequantize
        from .packed_qarray import activations_of

        rule, scale, space = _rule_of(packed.spec), packed.parts["scale"], packed.spec.shape[2:]
        by_codes = _multiplies_codes(packed)
        if by_codes is None:
            return None
        of_x = qtype(rule.act_qtype or "")
        fast = None if space else fast_activations.numbers(x, rule, decoded=not by_codes)
        if fast is not None and not by_codes:
            return FloatGemm(x=fast[0].to(x.dtype))
        if by_codes and "zero_point" in packed.parts:
            return None
        of_outputs = scale.reshape(-1, *[1] * len(space))
        if fast is not None:
            return FloatGemm(x=fast[0], scales=(fast[1], of_outputs))
        array = activations_of(packed, rule, x, conv=bool(space))
        if not by_codes:
            return FloatGemm(x=dequantize(array))
        if array.zero_point is not None:
            return None
        return FloatGemm(x=from_codes(array.qvalue, of_x, array.scale.dtype), scales=(array.scale, of_outputs))

    def float_rounding(self, packed: Packed, dtype: torch.dtype) -> FloatRounding | None:
        from .core import fast_activations

        if not self.computes(packed.spec) or len(packed.spec.shape) != 2:
            return None
        by_codes = _multiplies_codes(packed)
        if by_codes is None or (by_codes and "zero_point" in packed.parts):
            return None
        return fast_activations.rounding_of(
            _rule_of(packed.spec), (1, packed.spec.shape[1]), dtype, packed.device, decoded=not by_codes
        )

    def by_row(self, packed: Packed) -> bool:
        count = packed.spec.shape[0]
        return all(part.numel() == 1 or len(part) == count for part in packed.parts.values())

    def key(self, name: str, part: str, spec: PackedSpec) -> str:
        try:
            self.spec_of(spec)
        except SettingsError as error:
            raise ValueError(str(error)) from error
        return f"{name}.{part}"

    def find(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
        return prequantized_files.find_weights(tensors)

    def read(self, found: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        return prequantized_files.read(found, shape, get)


def _multiplies_codes(packed: Packed) -> bool | None:
    """Return whether codes of both sides are multiplied, as floats, or dequantized numbers; None for integers."""
    from .core.dot_general import LEAST_TILE

    rule, scale, (_, inputs, *space) = _rule_of(packed.spec), packed.parts["scale"], packed.spec.shape
    of_weight, of_x = qtype(rule.weight_qtype or ""), qtype(rule.act_qtype or "")
    tiles = scale.shape[1] if space else max(scale.shape[1], _tiles_of_x(rule, inputs))
    whole = tiles == 1 or (not space and inputs // tiles >= LEAST_TILE)  # a convolution's sums are of all inputs
    by_codes = whole and {of_weight.kind, of_x.kind} <= {"int", "float"}
    is_integer = of_weight.kind == of_x.kind == "int"
    return None if by_codes and (is_integer or tiles > 1 or 16 in (of_weight.bits, of_x.bits)) else by_codes


def _tiles_of_x(rule: QuantizationRule, inputs: int) -> int:
    """Return the number of tiles that a linear layer's input is quantized in."""
    return 1 if rule.tile_size is None else inputs // tile_sizes((inputs,), act_how(rule, 1, conv=False))[0]


def _one(spec: QuantSpec) -> RuleSpec:
    """Return a spec as one rule: that of a weight, or one made from the scheme's options."""
    if isinstance(spec, RuleSpec):
        return spec
    rule = QuantizationRule(
        weight_qtype=spec["weight_qtype"],
        act_qtype=spec["act_qtype"],
        tile_size=spec["tile_size"] or None,
        weight_calibration_method=spec["weight_calibration_method"],
    )
    return RuleSpec(spec.scheme, spec.options, spec.embeddings, rule)


def _rule_of(packed: PackedSpec) -> QuantizationRule:
    return _parsed(json.dumps(packed.details, sort_keys=True))


@lru_cache(maxsize=1024)
def _parsed(details: str) -> QuantizationRule:
    """Parse a rule; cached, since every layer needs its own at every step."""
    return rule_of({name: value for name, value in json.loads(details).items() if name != ACT_SHAPE})


BACKEND = RulesBackend()
