"""Weights that another tool quantized as Qwix does: found by their keys, their rule inferred from dtypes and shapes.

Such a weight is a `QArray` taken apart, like a Qwix tree that is exported to torch: codes of the weight's shape in
`X.weight.qvalue`, `X.weight.scale`, and `X.weight.zero_point` if the range is asymmetric. The type is inferred from the
dtype of the codes, tiles from the shape of the scale, the calibration method from the zero point, and the float dtype
from that of the scale. Codes of fewer than 8 bits, one in a byte, count as int8 here, which gives the same products;
bytes (uint8) may be NF4, MXFP4, NVFP4 or anything packed, and are refused. Files do not say how activations were
quantized: they stay floats. No torch at import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..core import COMPUTE_DTYPES, Packed, PackedSpec, PrequantizedWeight, TensorInfo, dtype_name, registry
from ..errors import BadFileError, UnsupportedFileError
from .core.qtypes import qtype
from .qconfig import QtRule, QuantizationRule, to_dict

if TYPE_CHECKING:
    from torch import Tensor

RULE, BITS = "rule", "bits"  # in the details of a `PrequantizedWeight`
PARTS = ("qvalue", "scale", "zero_point")
# What stands between a weight's name and the name of a part: Qwix's tree has "array" there before it is unboxed.
SPELLINGS = (".array.", ".", "_")
CODES = ("int8", "int16", "float8_e4m3fn", "float8_e5m2")
# Qwix's static ranges of activations.
_RANGES = re.compile(r"(dot_general|einsum|conv_general_dilated)\d+_[lr]hs_(scale|zero_point)(\.array)?$")

_AGAIN = "Export the model again, or get the file from its source"


class TensorForm(Protocol):
    """Shape and dtype of a tensor: the tensor itself, or its entry in a header."""

    @property
    def shape(self) -> Any:
        """Return its sizes."""

    @property
    def dtype(self) -> Any:
        """Return its torch dtype, or the name of that."""


@dataclass(frozen=True, kw_only=True)
class Prequantized:
    """A weight that is already quantized.

    Attributes:
        name: of the weight. keys: of its tensors, by part.
        rule: by which it is quantized, for every module. dtype, shape: of the float weight.
    """

    name: str
    keys: Mapping[str, str]
    rule: QuantizationRule
    dtype: str
    shape: tuple[int, ...]


def prequantized(tensors: Mapping[str, TensorForm]) -> dict[str, Prequantized]:
    """Return the quantized weights among tensors, by name.

    Raises:
        UnsupportedFileError: a kind that cannot be inferred, or that rules cannot express. BadFileError: codes and
            scales that do not fit each other.
    """
    weights = {
        name: _inferred(name, {part: tensors[key] for part, key in keys.items()}, keys)
        for name, keys in keys_of(tensors).items()
    }
    ranges = next((key for key in tensors if weights and _RANGES.search(key)), None)
    if ranges is not None:
        raise UnsupportedFileError(
            f"Cannot read tensor {ranges!r}",
            "it is a static range of activations, and the file does not say which type the activations had",
            "Export the weights without it, then calibrate again with `sdquant calibrate`",
        )
    return weights


def keys_of(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the keys of quantized weights, by weight and part; there is always a qvalue.

    Raises:
        BadFileError: a weight that occurs twice.
    """
    weights: dict[str, dict[str, str]] = {}
    for key in names:
        join = next((join for join in SPELLINGS if key.endswith(f"{join}qvalue")), None)
        if join is None:
            continue
        name = key.removesuffix(f"{join}qvalue")
        if name in weights or name in names:
            other = repr(weights[name]["qvalue"] if name in weights else name)
            raise _bad(name, f"it occurs twice, as {key!r} and as {other}")
        weights[name] = {part: f"{name}{join}{part}" for part in PARTS if f"{name}{join}{part}" in names}
    return weights


def find_weights(tensors: Mapping[str, TensorInfo]) -> list[PrequantizedWeight]:
    """See `Backend.find`."""
    return [_found(row, tensors) for row in prequantized(tensors).values()]


def read(weight: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
    """See `Backend.read`."""
    import torch

    if RULE not in weight.details:
        raise NotImplementedError("parts of sdquant's own files are read as they are")
    parts = {part: get(key).contiguous() for part, key in weight.keys.items()}
    row = _inferred(weight.name, parts, weight.keys)
    if shape is not None and row.shape != shape:
        raise _bad(weight.name, f"its codes have shape {list(row.shape)}, but the model expects {list(shape)}")
    if row.dtype == "float16":  # as `rules.core.qarray` has it: the same numbers
        parts["scale"] = parts["scale"].to(torch.float32)
    spec = PackedSpec(scheme=registry.scheme("rules"), shape=row.shape, dtype=row.dtype, details=to_dict(row.rule))
    return Packed(spec=spec, parts=parts)


def _found(row: Prequantized, tensors: Mapping[str, TensorInfo]) -> PrequantizedWeight:
    codes, scale = (f"*{row.keys[part].removeprefix(row.name)}" for part in ("qvalue", "scale"))
    size = sum(tensors[key].nbytes for key in row.keys.values())
    assert row.rule.weight_qtype is not None
    return PrequantizedWeight(
        name=row.name,
        scheme="rules",
        keys=row.keys,
        evidence=f"codes in {codes} and their scales in {scale}, as in Qwix",
        details={RULE: to_dict(row.rule), BITS: qtype(row.rule.weight_qtype).bits},
        nbytes=size + tensors[row.keys["scale"]].nbytes if row.dtype == "float16" else None,
    )


def _inferred(name: str, parts: Mapping[str, TensorForm], keys: Mapping[str, str]) -> Prequantized:
    """Infer the rule of one weight from dtypes and shapes."""
    codes, shape = parts["qvalue"], tuple(parts["qvalue"].shape)
    kind = _dtype(codes)
    _refuse_codes(name, kind, shape)
    if "scale" not in parts:
        raise _bad(name, f"it has codes in {keys['qvalue']!r}, but no scale for them")
    dtype, sizes = _dtype(parts["scale"]), tuple(parts["scale"].shape)
    if dtype not in COMPUTE_DTYPES:
        known = ", ".join(COMPUTE_DTYPES)
        why = f"the dtype of its scale must be that of the original weight ({known}), and it is {dtype}"
        raise UnsupportedFileError(f"Cannot read weight {name!r}", why, "Export the scales as float32 or bfloat16")
    _refuse_scale(name, shape, sizes)
    fields: dict[str, Any] = {"weight_qtype": kind}
    if sizes[1] > 1:
        fields["tile_size"] = shape[1] // sizes[1]
    if "zero_point" in parts:
        _refuse_zero_point(name, kind, sizes, parts["zero_point"])
        fields["weight_calibration_method"] = "minmax"
    if sizes[0] < shape[0]:
        return Prequantized(
            name=name, keys=keys, rule=QtRule(**fields, disable_channelwise_axes=True), dtype=dtype, shape=shape
        )
    return Prequantized(name=name, keys=keys, rule=QuantizationRule(**fields), dtype=dtype, shape=shape)


def _refuse_codes(name: str, kind: str, shape: tuple[int, ...]) -> None:
    what = f"Cannot read weight {name!r}"
    if name.rpartition(".")[2] == "kernel":
        why = "it is named kernel, as in Flax, where axes are in another order and modules have other names"
        raise UnsupportedFileError(
            what, why, "Export it under the names of the torch model, as <module>.weight, with axes [out, in, ...]"
        )
    if kind == "uint8":
        why = "its codes are uint8, and the file does not say whether they are nf4, mxfp4, nvfp4 or packed integers"
        raise UnsupportedFileError(what, why, "Export the float weights, and quantize them with rules")
    if kind not in CODES:
        raise UnsupportedFileError(
            what, f"its codes are {kind}, not one of {', '.join(CODES)}", "Export it as one of these"
        )
    if len(shape) < 2:
        why = f"its shape is {list(shape)}, and rules apply only to weights with outputs and inputs"
        raise UnsupportedFileError(what, why, "Export it as floats")
    if 0 in shape:
        raise _bad(name, f"its shape is {list(shape)}")


def _refuse_scale(name: str, shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    if len(sizes) != len(shape) or 0 in sizes or any(n % m for n, m in zip(shape, sizes, strict=True)):
        raise _bad(name, f"its scale has shape {list(sizes)}, which does not fit codes of shape {list(shape)}")
    if sizes[0] not in (1, shape[0]) or any(n != 1 for n in sizes[2:]):
        raise UnsupportedFileError(
            f"Cannot read weight {name!r}",
            f"its scale has shape {list(sizes)} for codes of shape {list(shape)}, but rules need one scale for each "
            "output or for all of them, and one for each tile of inputs",
            "Export the scales as [out or 1, tiles, 1, ...], repeating those that several outputs share",
        )


def _refuse_zero_point(name: str, kind: str, sizes: tuple[int, ...], zero_point: TensorForm) -> None:
    if not qtype(kind).asymmetric:
        raise _bad(name, f"it has a zero point, but {kind} has none")
    if _dtype(zero_point) != kind or tuple(zero_point.shape) != sizes:
        actual = f"{_dtype(zero_point)} {list(zero_point.shape)}"
        raise _bad(name, f"its zero point is {actual}, but its codes and scale require {kind} {list(sizes)}")


def _dtype(form: TensorForm) -> str:
    return dtype_name(form.dtype)


def _bad(name: str, why: str) -> BadFileError:
    return BadFileError(f"Cannot read weight {name!r}", why, _AGAIN)
