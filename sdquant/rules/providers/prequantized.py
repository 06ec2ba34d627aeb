"""Checkpoints quantized by another tool: their rules, and their tensors in a template (Qwix's checkpoint_util.py).

A quantized weight `X.weight` is stored as `X.weight.qvalue`, `X.weight.scale` and, where its range is not symmetric,
`X.weight.zero_point`; or as a mapping {"qvalue", "scale", "zero_point"} under its name, as in a tree of Qwix. See
`rules.prequantized_files` for what can be inferred from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core import dtype_name, dtype_named, torch_dtypes
from ...errors import SettingsError
from ...nn import LIKE_KEY, PACKED_PREFIX
from ..core.numerics import storage
from ..core.qarray import QArray, dequantize
from ..core.qtypes import QType, qtype
from ..infer_rules import Layer, by_path, does
from ..packed_layout import SCALES, layout
from ..packed_qarray import pack_array
from ..params import ParamTypeError, UnknownParamError, layer_of
from ..prequantized_files import CODES, Prequantized, keys_of, prequantized
from ..qconfig import QtRule, QuantizationRule
from ..quant_spec import operation_of
from .ptq import rule_of_layer

if TYPE_CHECKING:
    from ...core import TensorSpec
    from ...nn import QuantizedLayer

_TOGETHER = "Check that the weights and the template belong to the same model"


class PrequantizedError(SettingsError, ValueError):
    """A parameter that is not quantized as the template expects."""


def restore_quantization_rules(
    tensors: Mapping[str, Any],
    rule_type: type[QuantizationRule] = QuantizationRule,
    *,
    act_qtype: str | None = None,
    **values: Any,
) -> list[QuantizationRule]:
    """Return rules that quantize what is quantized in a checkpoint, and leave its float weights alone.

    Numbers in paths become `[^.]+`, and equal rules are merged. Layers for which such a rule would be wrong get rules
    of their own before it.

    Args:
        tensors: of a torch model's checkpoint, or what a header says of them (a dtype and a shape each).
        rule_type: QuantizationRule or QtRule. Weights with one scale for all outputs need a QtRule, and get one.
        act_qtype: type of the activations, of which a checkpoint says nothing; None leaves them as floats. (Qwix takes
            the type of the weights.)
        values: more fields of the rules.

    Raises:
        UnsupportedFileError, BadFileError: weights that rules cannot say, or whose parts do not fit each other.
        SettingsError: a field that rules do not have.
    """
    flat = _flat(tensors)
    weights = prequantized(flat)
    tiles = {(does(replace(row.rule, tile_size=None)), row.rule.tile_size) for row in weights.values()}
    layers: dict[str, Layer] = {}
    for name, form in flat.items():
        shape = tuple(form.shape)
        if name.endswith(".weight") and len(shape) > 1:
            layers[name.removesuffix(".weight")] = Layer(operation_of(shape), None)
    for name, row in weights.items():
        rule = _typed(_tiled(row, tiles), rule_type, {"act_qtype": act_qtype, **values})
        layers[name.removesuffix(".weight")] = Layer(operation_of(row.shape), rule)
    return list(by_path(layers))


def process_prequantized_params(
    tensors: Mapping[str, Any], template: nn.Module, allow_extra_params: bool = False
) -> dict[str, Tensor]:
    """Convert the tensors of a quantized checkpoint to those that a template expects.

    Quantized weights become the tensors of the template's quantized layers: codes in the template's type, if they fit,
    and scales in its dtype, repeated where the template has more of them. Where the template is float they are
    dequantized. Other tensors are cast to the template's dtype.

    Args:
        template: of `quantize_model(model, PtqProvider(rules))`, on the meta device or not. It is not changed.
        allow_extra_params: leave out what the template has no place for, instead of raising.

    Returns:
        As `quantize_params`: tensors by the names of the template's state dict.

    Raises:
        ParamTypeError (a TypeError): a value is no tensor.
        UnknownParamError (a ValueError): the template has no such parameter.
        PrequantizedError (a ValueError): floats for a quantized layer, or codes, scales or sizes that it cannot have.
    """
    flat = _flat(tensors)
    known = template.state_dict(keep_vars=True)
    converted: dict[str, Tensor] = {}
    weights = keys_of(flat)
    used = {key for keys in weights.values() for key in keys.values()}
    for name, keys in weights.items():
        parts = {part: flat[key] for part, key in keys.items()}
        if "scale" not in parts:
            raise _misfit(name, f"it has codes in {keys['qvalue']!r}, but no scale for them")
        layer = layer_of(template, name)
        if layer is not None:
            converted |= _into(name, parts, layer)
        elif name in known:
            converted[name] = _fitted(name, _floats(name, parts), known[name])
        elif not allow_extra_params:
            raise _unknown(name)
    for name, value in flat.items():
        if name in used:
            continue
        if layer_of(template, name) is not None:
            raise PrequantizedError(
                f"Cannot put parameter {name!r} into the template",
                f"it is {dtype_name(value.dtype)}, but it is quantized in the template",
                "Use quantize_params for float parameters",
            )
        if name in known:
            converted[name] = _fitted(name, value, known[name])
        elif not allow_extra_params:
            raise _unknown(name)
    return converted


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a tree of mappings to names with dots."""
    flat: dict[str, Any] = {}
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            flat[f"{prefix}{name}"] = value
        else:
            raise ParamTypeError(
                f"Cannot read parameter {prefix + str(name)!r}", f"it is not a tensor but {type(value)}",
                "Pass a state dict",
            )  # fmt: skip
    return flat


def _tiled(row: Prequantized, tiles: Collection[tuple[str | None, int | float | None]]) -> QuantizationRule:
    """Return a weight's rule. Its scale does not tell one tile of all inputs from no tiles: assume the tile size of
    weights that have several tiles of that size, if there are any."""
    inputs = row.shape[1]
    if row.rule.tile_size is None and (does(row.rule), inputs) in tiles:
        return replace(row.rule, tile_size=inputs)
    return row.rule


def _typed(rule: QuantizationRule, kind: type[QuantizationRule], values: Mapping[str, Any]) -> QuantizationRule:
    """Return a rule with more fields, of a class that has all of them."""
    known = {row.name for row in fields(kind)}
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        raise SettingsError(
            f"Cannot restore rules with {unknown}=", f"a {kind.__name__} has no such field", "Remove it"
        )
    if isinstance(rule, QtRule) or kind is QuantizationRule:
        return replace(rule, **values)
    return kind(**vars(rule) | dict(values))


def _into(name: str, parts: Mapping[str, Tensor], layer: QuantizedLayer) -> dict[str, Tensor]:
    """Return the tensors of a layer's packed weight."""
    rule, spec = rule_of_layer(layer), layer.spec
    assert rule.weight_qtype is not None
    row, expected = qtype(rule.weight_qtype), layout(rule, spec.shape, spec.dtype)
    if ("zero_point" in parts) != ("zero_point" in expected):
        has, wants = ("a", "none") if "zero_point" in parts else ("no", "one")
        raise _misfit(name, f"it has {has} zero point, but the template expects {wants}")
    codes = parts["qvalue"]
    if tuple(codes.shape) != spec.shape:
        raise _misfit(name, f"its codes have shape {list(codes.shape)}, but the template expects {list(spec.shape)}")
    zero_point = parts.get("zero_point")
    array = QArray(
        qvalue=_codes(name, codes, row),
        scale=_scale(name, parts["scale"], expected["scale"], row),
        zero_point=None if zero_point is None else _spread(name, _codes(name, zero_point, row), expected["zero_point"]),
        qtype=row.name,
        dtype=getattr(torch, spec.dtype),
    )
    path = name.removesuffix("weight")
    tensors = {f"{path}{PACKED_PREFIX}{part}": tensor for part, tensor in pack_array(array, rule).parts.items()}
    if LIKE_KEY in layer._parameters:
        tensors[path + LIKE_KEY] = torch.empty(0, dtype=array.dtype, device=codes.device)
    return tensors


def _codes(name: str, codes: Tensor, row: QType) -> Tensor:
    """Return codes in the dtype of a type, which must be theirs or hold their integers."""
    kind = dtype_name(codes.dtype)
    if row.kind == "e2m1":
        raise _misfit(
            name, f"the template expects {row.name}, whose codes Qwix stores in a dtype that torch does not have"
        )
    low, high = (0.0, 15.0) if row.kind == "nf4" else row.limits
    if row.kind == "float" and codes.dtype != storage(row):
        raise _misfit(name, f"its codes are {kind}, but the template expects {row.name}")
    if row.kind != "float":
        if codes.is_floating_point() or codes.dtype == torch.bool:
            raise _misfit(name, f"its codes are {kind}, but the template expects {row.name}")
        if codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
            raise _misfit(name, f"it has codes outside of {int(low)} to {int(high)}, the range of {row.name}")
    return codes.to(storage(row))


def _scale(name: str, scale: Tensor, expected: TensorSpec, row: QType) -> Tensor:
    """Return a scale in the template's shape and dtype."""
    if scale.dtype not in (*torch_dtypes.FLOATS, dtype_named(expected.dtype)):
        raise _misfit(name, f"its scale is {dtype_name(scale.dtype)}, which is not a float dtype")
    cast = scale.to(dtype_named(expected.dtype))
    if row.scale_type in SCALES and not torch.equal(cast.to(torch.float32), scale.to(torch.float32)):
        raise _misfit(name, f"its scales cannot be stored as those of {row.name} ({row.scale_type}) without rounding")
    return _spread(name, cast if row.scale_type == "" else cast.to(torch.float32), expected)


def _spread(name: str, small: Tensor, expected: TensorSpec) -> Tensor:
    """Repeat scales or zero points to the template's shape."""
    sizes = (1,) * (len(expected.shape) - small.ndim) + tuple(small.shape)
    if len(sizes) != len(expected.shape) or any(n == 0 or m % n for n, m in zip(sizes, expected.shape, strict=True)):
        raise _misfit(
            name, f"its scales have shape {list(small.shape)}, but the template expects {list(expected.shape)}"
        )
    small = small.reshape(sizes)
    for axis, (have, want) in enumerate(zip(sizes, expected.shape, strict=True)):
        if have != want:
            small = small.repeat_interleave(want // have, axis)
    return small


def _floats(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Dequantize a weight to the dtype of its scale."""
    codes, scale, zero_point = parts["qvalue"], parts["scale"], parts.get("zero_point")
    kind = dtype_name(codes.dtype)
    row = next((row for row in (qtype(one) for one in CODES) if row.storage == kind), None)
    if row is None or scale.dtype not in torch_dtypes.FLOATS:
        scale_dtype = dtype_name(scale.dtype)
        raise _misfit(name, f"it has {kind} codes with {scale_dtype} scales, which do not say how to dequantize it")
    for small in (scale, *(() if zero_point is None else (zero_point,))):
        if small.ndim != codes.ndim or any(m == 0 or n % m for n, m in zip(codes.shape, small.shape, strict=True)):
            raise _misfit(
                name,
                f"its scales have shape {list(small.shape)}, which does not fit codes of shape {list(codes.shape)}",
            )
    working = scale.float() if scale.dtype == torch.float16 else scale
    return dequantize(
        QArray(qvalue=codes, scale=working, zero_point=zero_point, qtype=row.name, dtype=scale.dtype)
    )  # fmt: skip


def _fitted(name: str, value: Tensor, expected: Tensor) -> Tensor:
    if value.shape != expected.shape:
        raise _misfit(name, f"its shape is {list(value.shape)}, but the template expects {list(expected.shape)}")
    return value.to(expected.dtype)


def _unknown(name: str) -> UnknownParamError:
    return UnknownParamError(
        f"Cannot put parameter {name!r} into the template", "it was not found in the template", _TOGETHER
    )


def _misfit(name: str, why: str) -> PrequantizedError:
    return PrequantizedError(f"Cannot put parameter {name!r} into the template", why, _TOGETHER)
