"""NVIDIA ModelOpt's weights in a file's header. Imports no torch.

ModelOpt writes weights in two ways:

* `compress`, which diffusers' `modelopt` folders have: X.weight in codes, X.weight_quantizer._scale, for NVFP4 also
  _double_scale, and X.input_quantizer._pre_quant_scale where the columns of the weight were smoothed. A value is
  code * scale, of 4-bit integers code / scale. The graph in `modelopt_state.pth`, a pickle, is not needed.
* the unified export: X.weight, X.weight_scale and perhaps X.pre_quant_scale; 4-bit integers have two rows in a byte.
  Nothing in the tensors names ModelOpt, so a config or the metadata has to.

Both write MXFP4 and MXFP8 with a byte of E8M0 for 32 weights. NVFP4 may have a low-rank branch beside it (SVDQuant):
A [rank, in] and B [out, rank], of a weight (value + B A) * pre_quant_scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..core import COMPUTE_DTYPES, PrequantizedWeight, TensorInfo, leaf
from ..errors import BadFileError, UnsupportedFileError
from ._hub_find import BYTES, DTYPE, GROUP_SIZE, HIGH_FIRST, MXFP4, PACKING, PAIRS, float_dtype, told, unread
from ._nunchaku_find import NVFP4

SCALE = "weight_quantizer._scale"
_DOUBLE, _COLUMNS = "weight_quantizer._double_scale", "input_quantizer._pre_quant_scale"
OF_QUANTIZER = re.compile(r"(.*\.)?\w*quantizer\._\w+")
_BRANCH = {"down": "weight_quantizer._svdquant_lora_a", "up": "weight_quantizer._svdquant_lora_b"}
_OF_BRANCH = (*_BRANCH.values(), "svdquant_lora_a", "svdquant_lora_b")
_BLOCK = 32  # weights of a scale of MXFP4 and MXFP8


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`. `config` may contain "methods", the places that name a method, and the methods.

    Raises:
        UnsupportedFileError: codes or scales that ModelOpt is not known to write, a low-rank branch beside others than
            NVFP4, or a float weight that was smoothed.
    """
    declared = config.get("comfy") or {}
    names = [name for name in tensors if name.rpartition(".")[2] == "weight" and name not in declared]
    _refuse_smoothed_floats(names, tensors)
    weights = [_compressed(name, tensors) for name in names if leaf(name, SCALE) in tensors]
    if any(method.lower() == "modelopt" for _, method in config.get("methods", ())):
        weights += [one for one in (_exported(name, tensors) for name in names) if one is not None]
    others = {one.name for one in weights if one.scheme != NVFP4}
    for name in names:
        branch = next((leaf(name, word) for word in _OF_BRANCH if leaf(name, word) in tensors), None)
        if branch is not None and (name in others or tensors[name].dtype != "uint8"):
            raise unread(branch, "it is of a low-rank branch beside codes that are not NVFP4 (SVDQuant by ModelOpt)")
    _check_groups(weights, config)
    return _with_ranges(weights, tensors)


def _refuse_smoothed_floats(names: list[str], tensors: Mapping[str, TensorInfo]) -> None:
    """Raise UnsupportedFileError for a layer that was taken out of the quantization after its calibration: its inputs
    are multiplied all the same, and its branch belongs to it, so that its weight alone is another one."""
    for name in names:
        beside = (leaf(name, word) for word in ("pre_quant_scale", _COLUMNS, *_OF_BRANCH))
        key = next((key for key in beside if key in tensors), None)
        if key is not None and tensors[name].dtype in COMPUTE_DTYPES:
            raise unread(
                name,
                f"it is a float weight, but {key!r} beside it shows that NVIDIA ModelOpt changed it before its layer "
                "was left unquantized",
            )


def _check_groups(weights: list[PrequantizedWeight], config: Mapping[str, Any]) -> None:
    """Raise BadFileError for 4-bit weights whose scales are of other groups than the one size that the configs say."""
    tables = [table for _, _, table in told(config, ("modelopt",))]
    sizes = {size for table in tables for size in _sizes(table) if type(size) is int and size > 0}
    wrong = next((one for one in weights if one.details.get(GROUP_SIZE) not in (None, *sizes)), None)
    if wrong is not None and wrong.scheme == "hub-int4" and len(sizes) == 1:
        raise BadFileError(
            f"Cannot read weight {wrong.name!r}",
            f"its config says groups of {sizes.pop()} weights, but each scale is of {wrong.details[GROUP_SIZE]}",
            "Put the config.json that belongs to the weights beside them, or download both again",
        )


def _sizes(table: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what the tables of ModelOpt, of diffusers and of converted configs say of the size of groups."""
    yield from (table.get("group_size"), table.get("block_quantize"))
    inner = table.get("quantization")
    yield inner.get("group_size") if isinstance(inner, Mapping) else None
    groups = table.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        yield weights.get("group_size") if isinstance(weights, Mapping) else None


def _with_ranges(weights: list[PrequantizedWeight], tensors: Mapping[str, TensorInfo]) -> list[PrequantizedWeight]:
    """Return the weights, the first one with the ranges of activations in the whole model."""
    if not any(one.keys.get("scale", "").endswith(SCALE) for one in weights):
        return weights
    used = {key for one in weights for key in one.keys.values()}
    ranges = tuple(key for key in tensors if OF_QUANTIZER.fullmatch(key) and key not in used)
    return [replace(weights[0], extra=(*weights[0].extra, *ranges)), *weights[1:]]


def _compressed(name: str, tensors: Mapping[str, TensorInfo]) -> PrequantizedWeight:
    info, columns = tensors[name], leaf(name, _COLUMNS)
    keys = {"codes": name, "scale": leaf(name, SCALE)}
    keys |= {"columns": columns} if columns in tensors else {}
    scale = tensors[keys["scale"]]
    if scale.dtype == "uint8" and "columns" not in keys and info.dtype in ("uint8", "float8_e4m3fn"):
        return _by_exponents(name, keys, tensors, "compressed")
    if info.dtype == "uint8" and leaf(name, _DOUBLE) in tensors:
        if math.prod(scale.shape) * _BLOCK == math.prod(info.shape) * 2:
            raise _strange(name, f"4-bit floats with scales of {_BLOCK}")
        keys["factor"] = leaf(name, _DOUBLE)
        keys |= {part: leaf(name, word) for part, word in _BRANCH.items() if leaf(name, word) in tensors}
        if keys.keys() & _BRANCH:
            return _row(name, NVFP4, keys, "NVFP4 and a low-rank branch (SVDQuant), compressed")
        return _row(name, "comfy:nvfp4", keys, "NVFP4, compressed")
    if info.dtype == "uint8":
        groups, columns_of = math.prod(tensors[keys["scale"]].shape), 2 * (info.shape or (0,))[-1]
        each = math.prod(info.shape) * 2 // groups if groups else 0
        if not each or math.prod(info.shape) * 2 % groups or columns_of % each:
            raise _strange(name, f"{list(info.shape)} bytes with {groups} scales")
        return _row(name, "hub-int4", keys, "4-bit integers, compressed", {PACKING: HIGH_FIRST, GROUP_SIZE: each})
    if info.dtype == "int8":
        return _int8(name, keys, tensors, "compressed")
    if info.dtype.startswith("float8") and "columns" not in keys:
        return _row(name, "fp8", keys, "8-bit floats, compressed", {PACKING: "float8"})
    raise _strange(name, f"{info.dtype} {list(info.shape)}" + (" with smoothed columns" if "columns" in keys else ""))


def _exported(name: str, tensors: Mapping[str, TensorInfo]) -> PrequantizedWeight | None:
    info, scale = tensors[name], tensors.get(leaf(name, "weight_scale"))
    if scale is None or scale.dtype.startswith("float8") or leaf(name, "weight_scale_2") in tensors:
        return None
    columns = leaf(name, "pre_quant_scale")
    keys = {"codes": name, "scale": leaf(name, "weight_scale")}
    keys |= {"columns": columns} if columns in tensors else {}
    extra = tuple(key for key in (leaf(name, "input_scale"),) if key in tensors)
    if info.dtype == "int8":
        return replace(_int8(name, keys, tensors, "exported"), extra=extra)
    if info.dtype != "uint8" or len(info.shape) != 2 or len(scale.shape) != 2:
        return None
    if scale.dtype == "uint8" and "columns" not in keys:
        return replace(_by_exponents(name, keys, tensors, "exported"), extra=extra)
    if not scale.shape[1] or info.shape[1] % scale.shape[1]:
        raise _strange(name, f"{list(info.shape)} bytes with {list(scale.shape)} scales")
    details = {PACKING: PAIRS, GROUP_SIZE: info.shape[1] // scale.shape[1]}
    return replace(_row(name, "hub-int4", keys, "4-bit integers, exported", details), extra=extra)


def _by_exponents(
    name: str, keys: Mapping[str, str], tensors: Mapping[str, TensorInfo], how: str
) -> PrequantizedWeight:  # fmt: skip
    """MXFP8, or MXFP4, where two columns are in a byte."""
    info, scale = tensors[name], tensors[keys["scale"]]
    each = 2 if info.dtype == "uint8" else 1
    if len(info.shape) != 2 or math.prod(scale.shape) * _BLOCK != math.prod(info.shape) * each:
        raise _strange(name, f"{info.dtype} {list(info.shape)} with {list(scale.shape)} exponents")
    details = {DTYPE: float_dtype(tensors, {keys["scale"]})}
    if each == 1:
        return _row(name, "mxfp8", keys, f"8-bit floats (MXFP8), {how}", details)
    parts = {"blocks": name, "scale": keys["scale"]}
    weight = _row(name, "mxfp4", parts, f"4-bit floats (MXFP4), {how}", {**details, **MXFP4})
    return replace(weight, shape=(info.shape[0], info.shape[1] * 2))


def _int8(
    name: str, keys: Mapping[str, str], tensors: Mapping[str, TensorInfo], how: str
) -> PrequantizedWeight:  # fmt: skip
    words, shape = f"8-bit integers, {how}", tensors[name].shape
    if "columns" in keys:
        return _row(name, "hub-int8", keys, words, {PACKING: BYTES, GROUP_SIZE: (shape or (0,))[-1]})
    single = math.prod(tensors[keys["scale"]].shape) == 1
    return _row(name, "int8_tensor" if single and (shape or (1,))[0] > 1 else "int8_row", keys, words)


def _row(
    name: str, scheme: str, keys: Mapping[str, str], words: str, details: Mapping[str, Any] | None = None
) -> PrequantizedWeight:
    return PrequantizedWeight(
        name=name, scheme=scheme, keys=keys, evidence=f"NVIDIA ModelOpt's {words}", details=details or {}
    )


def _strange(name: str, what: str) -> UnsupportedFileError:
    return UnsupportedFileError(
        f"Cannot read weight {name!r}",
        f"NVIDIA ModelOpt's quantizer of it has codes that sdquant does not know: {what}",
        "Export the model with another config of ModelOpt (FP8, INT8, INT4 AWQ or NVFP4), or load the unquantized one",
    )
