"""How bitsandbytes' weights and other tools' float8 weights show themselves in a file's header. Imports no torch.

The codecs, which do, read what is found here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .base import Found, PackedSpec, TensorInfo

STATE = ".quant_state.bitsandbytes__"  # the key suffix by which a file shows nf4 and fp4

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# See `_float8` for whose they are and what they mean.
SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
HINTS = ("scale_input", "input_scale", "comfy_quant")
MARKER = "scaled_fp8"
# Other formats that use float8 tensors under the same names, with scales of their own.
_FOREIGN = ("sdnq", "quanto", "torchao", "bfl", "modelopt", "compressed-tensors", "fbgemm_fp8", "auto-round")


def leaf(name: str, part: str) -> str:
    """The key of a neighbour of a weight: leaf("proj.weight", "SCB") is "proj.SCB"."""
    head, dot, _ = name.rpartition(".")
    return f"{head}{dot}{part}"


_PACKINGS: Mapping[str, tuple[str, ...]] = {
    "nf4": ("four-bit",), "fp4": ("four-bit",), "bnb-int8": ("bnb-int8",), "fp8": ("blockwise", "float8"),
}  # fmt: skip
# The file key of a part, by packing; {name} is the weight's, {stem} the same without its last word.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "four-bit": {"codes": "{name}", "absmax": "{name}.absmax", "nested_absmax": "{name}.nested_absmax"},
    "bnb-int8": {"codes": "{name}", "scb": "{stem}SCB"},
    "blockwise": {"codes": "{name}.codes", "absmax": "{name}.absmax"},
    "float8": {"codes": "{name}", "scale": "{stem}" + SCALES[0]},
}


def packing_of(scheme: str, packing: str | None) -> str:
    """The packing of a scheme: what its description says, else the only one it has.

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
    return _KEYS[packing_of(spec.scheme, spec.details.get("packing"))][part].format(name=name, stem=leaf(name, ""))


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[Found]:
    """See `Backend.find`."""
    return [*_four_bit(tensors), *_int8(tensors), *_float8(tensors, config)]


def _four_bit(tensors: Mapping[str, TensorInfo]) -> list[Found]:
    found = []
    for key in tensors:
        name, mark, scheme = key.rpartition(STATE)
        if not mark or scheme not in ("nf4", "fp4"):
            continue
        keys = {"codes": name, "absmax": f"{name}.absmax", "nested_absmax": f"{name}.nested_absmax"}
        extra = (f"{name}.quant_map", f"{name}.nested_quant_map", key)
        found.append(
            Found(
                name=name,
                scheme=scheme,
                keys={part: file_key for part, file_key in keys.items() if file_key in tensors},
                extra=tuple(file_key for file_key in extra if file_key in tensors),
                evidence=f"bitsandbytes' quant_state tensors (*{STATE}{scheme})",
            )
        )
    return found


def _int8(tensors: Mapping[str, TensorInfo]) -> list[Found]:
    found = []
    for key in tensors:
        head, mark, last = key.rpartition("SCB")
        name = f"{head}weight"
        if not mark or last or head[-1:] not in ("", ".") or name not in tensors or tensors[name].dtype != "int8":
            continue
        extra = (f"{name}_format",) if f"{name}_format" in tensors else ()
        found.append(
            Found(
                name=name,
                scheme="bnb-int8",
                keys={"codes": name, "scb": key},
                extra=extra,
                evidence="int8 weights with bitsandbytes' row scales (*.SCB)",
            )
        )
    return found


def _float8(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[Found]:
    quantization = config.get("quantization_config") or {}
    if isinstance(quantization, dict) and quantization.get("quant_method") in _FOREIGN:
        return []
    names = [key for key, info in tensors.items() if info.dtype in FLOAT8 and key.rpartition(".")[2] == "weight"]
    neighbours = _neighbours(tensors, names)
    made = (_float8_weight(name, tensors[name], neighbours.get(leaf(name, ""), [])) for name in names)
    found = [one for one in made if one is not None]
    markers = tuple(key for key in tensors if key.rpartition(".")[2] == MARKER)
    if found and markers:  # it is about the whole file; the first weight carries it
        found[0] = replace(found[0], extra=(*found[0].extra, *markers))
    return found


def _neighbours(tensors: Mapping[str, TensorInfo], names: list[str]) -> dict[str, list[str]]:
    """For each prefix "X." of a weight, the keys X.<leaf> and X.weight.<leaf> that may describe it."""
    prefixes = {leaf(name, "") for name in names}
    found: dict[str, list[str]] = {}
    for key in tensors:
        prefix = leaf(key, "")
        for candidate in (prefix, leaf(prefix[:-1], "")) if prefix.endswith(".weight.") else (prefix,):
            if candidate in prefixes:
                found.setdefault(candidate, []).append(key)
    return found


def _float8_weight(name: str, info: TensorInfo, neighbours: list[str]) -> Found | None:
    scale_keys = [key for key in neighbours if key in {leaf(name, last) for last in SCALES}]
    hints = [key for key in neighbours if key in {leaf(name, last) for last in HINTS}]
    # Anything else that calls itself a scale is carried along as well, for `read` to refuse by name.
    strange = [key for key in neighbours if "scal" in key.rpartition(".")[2] and key not in scale_keys + hints]
    strange = [key for key in strange if not key.endswith(MARKER)]
    if len(info.shape) < 2 and not scale_keys and not strange:
        return None  # a norm in float8 is a plain tensor that is cast when it is loaded
    keys = {"codes": name} | ({"scale": scale_keys[0]} if scale_keys else {})
    scaled = f"scales in *.{scale_keys[0].rpartition('.')[2]}" if scale_keys else "no scales"
    return Found(
        name=name,
        scheme="fp8",
        keys=keys,
        extra=tuple(scale_keys[1:] + hints + strange),
        evidence=f"{info.dtype} weights, {scaled}",
        details={"packing": "float8"},
    )
