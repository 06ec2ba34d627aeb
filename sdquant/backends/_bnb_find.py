"""Detection of bitsandbytes' weights in a file's header, and the file keys of its packings. Imports no torch.

The codecs, which do, read the weights detected here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import PackedSpec, PrequantizedWeight, TensorInfo, leaf
from ._float8_find import find_float8

STATE = ".quant_state.bitsandbytes__"  # the key suffix by which a file shows nf4 and fp4

_PACKINGS: Mapping[str, tuple[str, ...]] = {
    "nf4": ("four-bit",), "fp4": ("four-bit",), "bnb-int8": ("bnb-int8",), "fp8": ("blockwise", "float8"),
}  # fmt: skip
# The file key of a part, by packing; {name} is the weight's, {stem} the same without its last word.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "four-bit": {"codes": "{name}", "absmax": "{name}.absmax", "nested_absmax": "{name}.nested_absmax"},
    "bnb-int8": {"codes": "{name}", "scb": "{stem}SCB"},
    "blockwise": {"codes": "{name}.codes", "absmax": "{name}.absmax"},
    "float8": {"codes": "{name}", "scale": "{stem}scale_weight"},
    "float8 in blocks": {"codes": "{name}", "scale": "{stem}weight_scale_inv"},
}


def packing_of(scheme: str, packing: str | None) -> str:
    """Return the packing of a scheme: the one in its description, else the only one it has.

    Raises:
        KeyError: the scheme has no such packing.
    """
    known = _PACKINGS[scheme]
    if packing is None and len(known) == 1:
        return known[0]
    if packing not in known:
        raise KeyError(packing)
    return str(packing)


def key(name: str, part: str, spec: PackedSpec) -> str:
    """See `Backend.key`."""
    packing = packing_of(spec.scheme.name, spec.details.get("packing"))
    if "block" in spec.details:
        packing += " in blocks"
    return _KEYS[packing][part].format(name=name, stem=leaf(name, ""))


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`."""
    return [*_four_bit(tensors), *_int8(tensors), *find_float8(tensors, config)]


def missing(detected: PrequantizedWeight) -> str | None:
    """See `Backend.missing`."""
    if detected.scheme not in ("nf4", "fp4"):
        comfy_format = detected.details.get("format")  # ComfyUI's, all of which have scales
        return (
            leaf(detected.name, "weight_scale") if comfy_format is not None and "scale" not in detected.keys else None
        )
    parts: tuple[str, ...] = ("absmax", "quant_map")
    if {"nested_absmax", "nested_quant_map"} & {
        key.rpartition(".")[2] for key in (*detected.keys.values(), *detected.extra)
    }:
        parts += ("nested_absmax", "nested_quant_map")
    there = {*detected.keys.values(), *detected.extra}
    keys = (detected.name, *(f"{detected.name}.{part}" for part in parts))
    return next((key for key in keys if key not in there), None)


def _four_bit(tensors: Mapping[str, TensorInfo]) -> list[PrequantizedWeight]:
    weights = []
    for key in tensors:
        name, mark, scheme = key.rpartition(STATE)
        if not mark or scheme not in ("nf4", "fp4"):
            continue
        keys = {"codes": name, "absmax": f"{name}.absmax", "nested_absmax": f"{name}.nested_absmax"}
        extra = (f"{name}.quant_map", f"{name}.nested_quant_map", key)
        weights.append(
            PrequantizedWeight(
                name=name,
                scheme=scheme,
                keys={part: file_key for part, file_key in keys.items() if file_key in tensors},
                extra=tuple(file_key for file_key in extra if file_key in tensors),
                evidence=f"bitsandbytes' quant_state tensors (*{STATE}{scheme})",
            )
        )
    return weights


def _int8(tensors: Mapping[str, TensorInfo]) -> list[PrequantizedWeight]:
    weights = []
    for key in tensors:
        head, mark, last = key.rpartition("SCB")
        name = f"{head}weight"
        if not mark or last or head[-1:] not in ("", ".") or name not in tensors or tensors[name].dtype != "int8":
            continue
        extra = (f"{name}_format",) if f"{name}_format" in tensors else ()
        weights.append(
            PrequantizedWeight(
                name=name,
                scheme="bnb-int8",
                keys={"codes": name, "scb": key},
                extra=extra,
                evidence="int8 weights with bitsandbytes' row scales (*.SCB)",
            )
        )
    return weights
