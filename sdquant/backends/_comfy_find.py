"""ComfyUI's quantized weights in a file, by what it says of their layers. Imports no torch.

`formats.comfy_metadata` reads what a file says: for each weight a mapping of "format", and of options that change its
meaning. Here are the formats, and the tensors that each consists of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core import ROTATION, PackedSpec, PrequantizedWeight, TensorInfo, leaf

METADATA = "_quantization_metadata"  # the entry of a file's metadata that says of all layers what their tensors say
INT8 = "int8_tensorwise"
# The formats of this backend, and the dtype of their codes.
FORMATS: Mapping[str, str] = {INT8: "int8"}
_GROUPS = (256, 64, 16)  # of rotations that are made, the first that divides the inputs
_HINTS = ("comfy_quant", "input_scale")


def details_of(scheme: str, columns: int) -> dict[str, Any]:
    """Return the details of a weight with so many inputs that is quantized to a scheme."""
    rotation = next((group for group in _GROUPS if columns % group == 0), 0) if scheme == "int8_convrot" else 0
    return {ROTATION: rotation} if rotation else {}


def entry(spec: PackedSpec) -> dict[str, Any]:
    """Return what ComfyUI's files say of the layer of a weight, as JSON values in comfy-kitchen's order."""
    turned = {"convrot": True, "convrot_groupsize": spec.rotation} if spec.rotation else {}
    return {"format": INT8, **turned}


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`. `config` may contain "comfy", what the file says of each of its weights."""
    rows = config.get("comfy") or {}
    return [_int8(name, tensors, row) for name, row in rows.items() if row["format"] == INT8]


def _int8(name: str, tensors: Mapping[str, TensorInfo], row: Mapping[str, Any]) -> PrequantizedWeight:
    keys = {"codes": name, "scale": leaf(name, "weight_scale")}
    scale, is_rotated = tensors.get(keys["scale"]), ROTATION in row
    whole = scale is not None and (not scale.shape or (math.prod(scale.shape) == 1 < tensors[name].shape[0]))
    scheme = "int8_convrot" if is_rotated else "int8_tensor" if whole else "int8_row"
    scales = "one scale" if whole else "a scale for each row"
    turned = f", rotated in groups of {row[ROTATION]}" if is_rotated else ""
    return PrequantizedWeight(
        name=name,
        scheme=scheme,
        keys={part: key for part, key in keys.items() if key in tensors},
        extra=tuple(key for key in (leaf(name, hint) for hint in _HINTS) if key in tensors),
        evidence=f"ComfyUI's {INT8}: int8 codes, {scales} in *.weight_scale{turned}",
        details={ROTATION: row[ROTATION]} if is_rotated else {},
    )


def missing(found: PrequantizedWeight) -> str | None:
    """See `Backend.missing`."""
    return None if "scale" in found.keys else leaf(found.name, "weight_scale")
