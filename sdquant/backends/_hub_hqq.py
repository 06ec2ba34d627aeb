"""HQQ's weights in a header. Imports no torch.

A weight X [out, in] of b bits is a matrix of groups, [groups, size] (axis 1) or [size, groups] (axis 0), flat the same.
X.W_q has its codes, several rows of the matrix in one: uint8, or int32 for 3 bits, ten in a number. X.scale and X.zero
are floats [groups, 1] or [1, groups]. X.nbits, X.shape and others describe it. Codes of 5 and 6 bits have a byte each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import PrequantizedWeight, TensorInfo
from ._hub_find import BITS, DTYPE, HQQ, PACKING, float_dtype, lacking, require_readable, told, untold

METHODS = ("hqq",)
IN_BYTES = (5, 6)  # bits of codes that files have in bytes
# The tensors that describe a weight: those that are read, by the part that they are here; and the others.
CHECKED = {
    "nbits": "nbits", "axis": "axis", "shape": "shape", "floats": "view_as_float", "scales": "quant_scale",
    "zeros": "quant_zero",
}  # fmt: skip
_HINTS = (
    "group_size", "channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "packing",
    "round_zero", "stores_quant_config", "unpack_view_dtype",
)  # fmt: skip


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`.

    Raises:
        UnsupportedFileError: nothing tells the bits, or these are not read. BadFileError: a part lacks.
    """
    settings = next(told(config, METHODS), None)
    stems = [
        key.removesuffix("W_q")
        for key, info in tensors.items()
        if key.rpartition(".")[2] == "W_q" and info.shape and (settings is not None or _is_hqqs(key, info, tensors))
    ]
    used = {stem + last for stem in stems for last in ("W_q", "scale", "zero")}
    dtype = float_dtype(tensors, used) if stems else ""
    return [_weight(stem, tensors, settings[2] if settings is not None else {}, dtype) for stem in stems]


def _is_hqqs(key: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether a tensor is HQQ's codes, where no config says so: there are other weights of this name."""
    stem = key.removesuffix("W_q")
    if f"{stem}nbits" in tensors:
        return True
    return info.dtype in ("uint8", "int32") and any(stem + last in tensors for last in ("scale", "zero"))


def _weight(stem: str, tensors: Mapping[str, TensorInfo], table: Mapping[str, Any], dtype: str) -> PrequantizedWeight:
    name = f"{stem}weight"
    gone = next((stem + last for last in ("scale", "zero") if stem + last not in tensors), None)
    if gone is not None:
        raise lacking(name, gone)
    keys = {"codes": f"{stem}W_q", "scale": f"{stem}scale", "shift": f"{stem}zero"}
    keys |= {part: stem + last for part, last in CHECKED.items() if stem + last in tensors}
    codes, scale = tensors[keys["codes"]], tensors[keys["scale"]]
    axis = 0 if scale.shape[:1] == (1,) and scale.shape[-1] > 1 else 1
    bits = _bits(codes, scale.shape[0]) if axis else _said(stem, table)
    if bits == 8 and (declared := _said(stem, table)) in IN_BYTES:
        bits = declared
    if bits is None:
        raise untold(
            name,
            "it is HQQ's, and nothing tells the bits of its codes",
            '{"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}',
        )
    require_readable(name, "HQQ", bits, (2, 3, 4, *IN_BYTES, 8))
    count = codes.shape[0] * (10 if codes.dtype == "int32" else 8 // bits) * codes.shape[-1]
    groups = f"groups of {count // max(1, *scale.shape)} along axis {axis}"
    return PrequantizedWeight(
        name=name,
        scheme=f"hub-int{bits}",
        keys=keys,
        extra=tuple(key for key in (stem + hint for hint in _HINTS) if key in tensors),
        evidence=f"HQQ: {bits}-bit integers, {groups}",
        details={PACKING: HQQ, DTYPE: dtype, BITS: bits},
        nbytes=count * bits // 8 + scale.nbytes + scale.nbytes * 4 // 2,
    )


def _bits(codes: TensorInfo, groups: int) -> int | None:
    """Return the bits of codes with a row of the matrix for each group; None for no known number."""
    if codes.dtype == "int32":
        return 3 if codes.shape[0] == -(-groups // 10) else None
    if codes.dtype != "uint8":
        return None
    return next((bits for bits in (1, 2, 4, 8) if codes.shape[0] * 8 == groups * bits), None)


def _said(stem: str, table: Mapping[str, Any]) -> int | None:
    """Return the bits that a config has for a layer, of its own or for all."""
    settings = table.get("quant_config") or {}
    rows = [row for part, row in settings.items() if stem.rstrip(".").endswith(part) and isinstance(row, Mapping)]
    row = rows[0] if rows else settings
    params = row.get("weight_quant_params") or row
    bits = params.get("nbits")
    return bits if type(bits) is int else None
