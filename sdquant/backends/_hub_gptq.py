"""GPTQ's, AWQ's and AutoRound's weights in a header. Imports no torch.

A weight X [out, in] of b bits has, next to each other:

* GPTQ: X.qweight, int32 [in * b / 32, out], codes along the inputs; X.qzeros, int32 [groups, out * b / 32]; X.scales
  [groups, out]; perhaps X.g_idx, int32 [in], the group of each input.
* AWQ ("gemm"): X.qweight, int32 [in, out / 8], the columns of a word in an order of its own; X.qzeros alike; X.scales.

GPTQ's first version stores zero points less one, its second ("gptq_v2") and AutoRound's own format store them as they
are. No tensor tells which: the config does. Codes of 5, 6 and 7 bits are AutoRound's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import PrequantizedWeight, TensorInfo
from ._hub_find import (
    AWQ,
    BIT_STREAMS,
    DTYPE,
    GPTQ,
    OFFSET,
    PACKING,
    SYMMETRIC,
    float_dtype,
    lacking,
    require_readable,
    told,
    unread,
    untold,
)

METHODS = ("gptq", "auto-round", "intel/auto-round", "awq")
_OFFSETS: Mapping[str, int] = {"gptq": 1, "gptq_v2": 0}  # GPTQ's `checkpoint_format`: what is to be added to zeros
_AWQ = "gemm"  # AWQ's `version`
_PARTS = {"codes": "qweight", "zero": "qzeros", "scale": "scales", "order": "g_idx"}


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`.

    Raises:
        UnsupportedFileError: nothing tells what zero points mean, or it is another order. BadFileError: a part lacks.
    """
    stems = [key.removesuffix("qweight") for key, info in tensors.items() if _is_codes(key, info, tensors)]
    if not stems:
        return []
    settings = next(told(config, METHODS), None)
    used = {stem + part for stem in stems for part in _PARTS.values()}
    dtype = float_dtype(tensors, used)
    return [_weight(stem, tensors, settings, dtype) for stem in stems]


def _is_codes(key: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    stem, _, last = key.rpartition(".")
    return last == "qweight" and info.dtype == "int32" and len(info.shape) == 2 and f"{stem}.scales" in tensors


def _weight(
    stem: str, tensors: Mapping[str, TensorInfo], settings: tuple[str, str, Mapping[str, Any]] | None, dtype: str
) -> PrequantizedWeight:
    name = f"{stem}weight"
    keys = {part: stem + last for part, last in _PARTS.items() if stem + last in tensors}
    if "zero" not in keys:
        raise lacking(name, f"{stem}qzeros")
    codes, zero, scale = (tensors[keys[part]].shape for part in ("codes", "zero", "scale"))
    groups, out = scale if len(scale) == 2 else (0, 0)
    details: dict[str, Any] = {DTYPE: dtype}
    if groups * out and codes[1] * 8 == out and zero == (groups, codes[1]):
        bits, columns = 4, codes[0]
        words = _awq(name, settings)
        details |= {PACKING: AWQ}
    elif groups * out and codes[1] == out and len(zero) == 2 and zero[0] == groups and zero[1] * 32 % out == 0:
        bits = zero[1] * 32 // out
        columns = codes[0] * 32 // max(bits, 1)
        require_readable(name, "GPTQ", bits, BIT_STREAMS)
        words, offset, symmetric = _gptq(name, settings)
        details |= {PACKING: GPTQ, OFFSET: offset} | ({SYMMETRIC: True} if symmetric else {})
    else:
        shapes = ", ".join(f"{keys[part]} {list(tensors[keys[part]].shape)}" for part in ("codes", "zero", "scale"))
        raise unread(
            name, f"its tensors ({shapes}) are neither in GPTQ's order nor in AWQ's (gemm), but in one for a kernel"
        )
    _require_groups(name, settings, columns, groups)
    of = f"groups of {columns // groups}" if groups > 1 else "a scale for each row"
    return PrequantizedWeight(
        name=name,
        scheme=f"hub-int{bits}",
        keys=keys,
        evidence=f"{words}: {bits}-bit integers, {of}",
        details=details,
        nbytes=tensors[keys["codes"]].nbytes + tensors[keys["scale"]].nbytes + groups * out,
    )


def _require_groups(name: str, settings: tuple[str, str, Mapping[str, Any]] | None, columns: int, groups: int) -> None:
    """Raise UnsupportedFileError if groups are not of the size that the settings say, as where the last is shorter."""
    if settings is None or settings[2].get("dynamic") or settings[2].get("extra_config"):
        return
    size = settings[2].get("group_size")
    if type(size) is int and size > 0 and groups > 1 and groups * size != columns:
        raise unread(
            name,
            f"its {columns} columns have {groups} scales, but {settings[0]} says that it has groups of {size}",
        )


def _awq(name: str, settings: tuple[str, str, Mapping[str, Any]] | None) -> str:
    """Return what says that a weight is AWQ's, in words."""
    if settings is None:
        return "AWQ"
    place, word, table = settings
    version = table.get("version", _AWQ) if word == "awq" else _AWQ
    if str(version).lower() != _AWQ:
        raise unread(name, f"{place} says that it is in AWQ's order {version!r:.40}, and sdquant reads {_AWQ!r}")
    return "AWQ" if word == "awq" else f"AWQ's order, of {word}, as {place} says"


def _gptq(name: str, settings: tuple[str, str, Mapping[str, Any]] | None) -> tuple[str, int, bool]:
    """Return what says that a weight is in GPTQ's order, what its zero points lack, and whether it is symmetric."""
    if settings is None or settings[1] == "awq":
        raise untold(
            name,
            "it is in GPTQ's order, and nothing tells whether its zero points are less one, as GPTQ's first version "
            "stores them, or as they are (gptq_v2, AutoRound)",
            '{"quant_method": "gptq", "checkpoint_format": "gptq"}',
            '{"quant_method": "gptq", "checkpoint_format": "gptq_v2"}',
        )
    place, word, table = settings
    symmetric = table.get("sym") is True and not table.get("dynamic") and not table.get("extra_config")
    if word == "gptq":
        kind = table.get("checkpoint_format") or table.get("format") or "gptq"
        offset = _OFFSETS.get(kind) if isinstance(kind, str) and not table.get("is_marlin_format") else None
    else:
        kind = table.get("packing_format") or table.get("backend")
        if not isinstance(kind, str):
            raise untold(
                name,
                f"{place} does not say its packing_format",
                '{"quant_method": "auto-round", "packing_format": "auto_round"}',
                '{"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}',
            )
        own = kind.replace("-", "_").startswith(("auto_round", "autoround"))
        offset = 1 if "gptq" in kind else 0 if own and "awq" not in kind else None
    if offset is None:
        raise unread(name, f"{place} says that it is in the format {kind!r:.40} of {word}, which sdquant does not read")
    title = "GPTQ" if word == "gptq" else "AutoRound"
    return f"{title}, as {place} says, zero points {'less one' if offset else 'as they are'}", offset, symmetric
