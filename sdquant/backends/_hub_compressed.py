"""compressed-tensors' integer and NVFP4 weights in a header. Imports no torch. Its float8 weights are `_float8_find`'s.

A weight X [out, in] has, next to each other:

* pack-quantized: X.weight_packed, int32 [out, in * b / 32], a row's codes from the low bits on, plus half of their
  range; X.weight_scale [out, groups]; X.weight_shape; perhaps X.weight_zero_point, int32 [out * b / 32, groups], and
  X.weight_g_idx, int32 [in], the group of each input.
* int-quantized: X.weight, int8 [out, in]; X.weight_scale [out, groups] or [1]; perhaps X.weight_zero_point.
* nvfp4-pack-quantized: X.weight_packed, uint8 [out, in / 2], the even column in the low half; X.weight_scale, E4M3
  [out, in / 16]; X.weight_global_scale, which divides.
* mxfp4-pack-quantized: X.weight_packed, uint8 [out, in / 2], alike; X.weight_scale, bytes of E8M0 [out, in / 32].
* mxfp6-pack-quantized: X.weight_packed, uint8 [out, in * 6 / 8], see `_hub_mxfp6`; X.weight_scale, alike.

The bits are those of the config group whose targets have the layer's name or class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..core import PrequantizedWeight, TensorInfo
from ..errors import BadFileError
from ..utils.quick_patterns import quick
from ._comfy_find import INVERSE
from ._hub_find import (
    BIT_STREAMS,
    BITS,
    BYTES,
    COMPRESSED,
    DTYPE,
    GROUP_SIZE,
    MXFP4,
    MXFP6,
    PACKING,
    float_dtype,
    lacking,
    require_readable,
    told,
    unread,
    untold,
)

METHODS = ("compressed-tensors",)
_NVFP4 = "comfy:nvfp4"
_HINTS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "weight_shape")
_MORE = {"zero": "weight_zero_point", "order": "weight_g_idx", "shape": "weight_shape"}


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`.

    Raises:
        UnsupportedFileError: nothing tells the bits, or these are not read. BadFileError: a part lacks, or the
            pattern of a target could take for ever to match.
    """
    settings = next(told(config, METHODS), None)
    kinds = {str(table.get("data_type", "")) for _, _, table in told(config, ("auto-round", "intel/auto-round"))}
    declared = config.get("comfy") or {}
    names = [key for key, info in tensors.items() if _is_codes(key, info, tensors, settings is not None)]
    stems = [key.rpartition(".")[0] for key in names if f"{key.rpartition('.')[0]}.weight" not in declared]
    used = {f"{stem}.{last}" for stem in stems for last in ("weight_scale", "weight_packed", *_MORE.values())}
    dtype = float_dtype(tensors, used) if stems else ""
    groups = list(_groups(settings[0], settings[2])) if settings is not None else []
    integers = next((kind for kind in kinds if kind.startswith("mx_int")), None)
    if stems and integers is not None:  # its tensors look as those of MXFP4
        raise unread(
            f"{stems[0]}.weight", f"it has AutoRound's 4-bit integers with powers of two as scales ({integers})"
        )
    return [_weight(stem, tensors, groups, dtype) for stem in stems]


def _is_codes(key: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], is_told: bool) -> bool:
    stem, _, last = key.rpartition(".")
    if last == "weight_packed" and len(info.shape) == 2:
        is_float = f"{stem}.weight_global_scale" in tensors or _bits_of_mx(f"{stem}.weight_scale", info, tensors)
        return info.dtype == "int32" or (info.dtype == "uint8" and bool(is_float))
    return (
        is_told
        and last == "weight"
        and info.dtype == "int8"
        and len(info.shape) == 2
        and f"{stem}.weight_scale" in tensors
    )


def _bits_of_mx(scale: str, codes: TensorInfo, tensors: Mapping[str, TensorInfo]) -> int | None:
    """Return the bits of MXFP4 or MXFP6, which has a byte as scale of 32 codes; None if it is neither."""
    (rows, columns), one = codes.shape, tensors.get(scale)
    if one is None or one.dtype not in ("uint8", "float8_e8m0fnu"):
        return None
    return next((bits for bits in (4, 6) if one.shape == (rows, columns // (32 * bits // 8))), None)


def _groups(place: str, table: Mapping[str, Any]) -> Iterator[tuple[list[str], Mapping[str, Any]]]:
    """Yield the targets of each config group, and what it says of weights. place: where the table stands."""
    for group in (table.get("config_groups") or {}).values():
        targets = [str(target) for target in group.get("targets") or ()]
        slow = next((one for one in targets if one.startswith("re:") and not quick(one.removeprefix("re:"))), None)
        if slow is not None:
            raise BadFileError(
                "Cannot read the weights of compressed-tensors",
                f"{place} has {slow!r:.80} among its targets, a pattern that could take for ever to match",
                "Get the config.json that belongs to the weights, or write the target there with simpler patterns: no "
                "repeated groups, and at most four repetitions",
            )
        yield targets, group.get("weights") or {}


def _settings_of(stem: str, groups: list[tuple[list[str], Mapping[str, Any]]]) -> Mapping[str, Any]:
    """Return what the config says of a layer's weight: its name counts before its class; {} if nothing."""
    for targets, weights in groups:
        for target in targets:
            if target == stem or (target.startswith("re:") and re.match(target.removeprefix("re:"), stem)):
                return weights
    classes = [weights for targets, weights in groups if any(_is_class(target) for target in targets)]
    return classes[0] if classes else {}


def _is_class(target: str) -> bool:
    return not target.startswith("re:") and "." not in target and target[:1].isupper()


def _weight(
    stem: str, tensors: Mapping[str, TensorInfo], groups: list[tuple[list[str], Mapping[str, Any]]], dtype: str
) -> PrequantizedWeight:
    name = f"{stem}.weight"
    codes = f"{stem}.weight_packed" if f"{stem}.weight_packed" in tensors else name
    scale = f"{stem}.weight_scale"
    if f"{stem}.scale_packed" in tensors:
        raise unread(name, "it is in compressed-tensors' marlin-24, sparse and in the order of a kernel")
    if scale not in tensors:
        raise lacking(name, scale)
    keys = {"codes": codes, "scale": scale}
    keys |= {part: f"{stem}.{last}" for part, last in _MORE.items() if f"{stem}.{last}" in tensors}
    hints = tuple(key for key in (f"{stem}.{hint}" for hint in _HINTS) if key in tensors and key not in keys.values())
    if tensors[codes].dtype == "uint8" and f"{stem}.weight_global_scale" not in tensors:
        if _bits_of_mx(scale, tensors[codes], tensors) == 6:
            nbytes = tensors[codes].nbytes // 6 * 7 + 2 * tensors[scale].nbytes
            words = "6-bit floats (MXFP6), powers of two as scales of 32"
            details = {DTYPE: dtype, PACKING: MXFP6, BITS: 6}
            return _found(name, "hub-int7", keys, hints, words, details, nbytes)
        keys, stored = {"blocks": codes, "scale": scale}, tensors[codes].shape
        words = "4-bit floats (MXFP4), powers of two as scales of 32"
        weight = _found(name, "mxfp4", keys, hints, words, {DTYPE: dtype, **MXFP4}, None)
        return replace(weight, shape=(stored[0], stored[1] * 2))
    if tensors[codes].dtype == "uint8":
        keys = {"codes": codes, "scale": scale, "factor": f"{stem}.weight_global_scale"}
        words = "4-bit floats (NVFP4), scales of 16 in the order of the weight"
        details = {DTYPE: dtype, INVERSE: True}
        return _found(name, _NVFP4, keys, hints, words, details, None)
    settings = _settings_of(stem, groups)
    if settings.get("symmetric") is False and "zero" not in keys:
        raise lacking(name, f"{stem}.{_MORE['zero']}")
    rows = tensors[codes].shape[0]
    several = tensors[scale].shape[-1] if len(tensors[scale].shape) == 2 else 1
    nbytes = tensors[codes].nbytes + tensors[scale].nbytes + (rows * several if "zero" in keys else 0)
    of = "scales of groups" if several > 1 else "a scale for each row"
    if tensors[codes].dtype == "int8":
        whole = tensors[scale].shape in ((), (1,), (1, 1)) and rows > 1
        if several == 1 and "zero" not in keys:
            scheme, of = ("int8_tensor", "one scale") if whole else ("int8_row", of)
            plain = {"codes": codes, "scale": scale}
            return _found(name, scheme, plain, hints, f"8-bit integers, {of}", {DTYPE: dtype}, None)
        details = {DTYPE: dtype, PACKING: BYTES, GROUP_SIZE: tensors[codes].shape[1] // max(several, 1)}
        return _found(name, "hub-int8", keys, hints, f"8-bit integers, {of}", details, nbytes)
    bits, size = settings.get("num_bits"), settings.get("group_size")
    if bits is None:
        raise untold(
            name,
            "it is in the pack-quantized format of compressed-tensors, and nothing tells the bits of its codes",
            '{"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": '
            '{"num_bits": 4}}}}',
        )
    require_readable(name, "compressed-tensors", bits, BIT_STREAMS)
    most = tensors[codes].shape[1] * 32 // bits  # columns; the last word may have room for more
    if type(size) is int and size > 0 and several > 1 and not most - 32 // bits < several * size <= most:
        raise unread(name, f"its {most} columns have {several} scales, but its config says groups of {size}")
    details = {DTYPE: dtype, PACKING: COMPRESSED, BITS: bits}
    return _found(name, f"hub-int{bits}", keys, hints, f"{bits}-bit integers, {of}", details, nbytes)


def _found(
    name: str,
    scheme: str,
    keys: Mapping[str, str],
    extra: tuple[str, ...],
    words: str,
    details: Mapping[str, Any],
    nbytes: int | None,
) -> PrequantizedWeight:
    return PrequantizedWeight(
        name=name,
        scheme=scheme,
        keys=keys,
        extra=extra,
        evidence=f"compressed-tensors: {words}",
        details=details,
        nbytes=nbytes,
    )
