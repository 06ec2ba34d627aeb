"""Detection of other tools' float8 weights in a file's header. Imports no torch; see `_float8` for the codec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core import PrequantizedWeight, TensorInfo, leaf
from ..errors import BadFileError, UnsupportedFileError
from . import _hub_mxfp8
from ._hub_modelopt import SCALE as COMPRESSED

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# See `_float8` for whose they are and what they mean.
SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
MARKER = "comfy_quant"  # ComfyUI's line of JSON beside a weight
INPUT_SCALES = ("scale_input", "input_scale")  # of activations, for the whole layer
HINTS = (*INPUT_SCALES, "activation_scale", MARKER)
WHOLE = "scaled_fp8"  # about the whole file
# ComfyUI's names for the formats that are read here, and the dtype of their codes.
FORMATS: Mapping[str, str] = {
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fn_rowwise": "float8_e4m3fn",
    "float8_e4m3fn_blockwise": "float8_e4m3fn",
    "float8_e4m3fn_block3d": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
}
# Other formats that use float8 tensors under the same names, with scales of their own.
_FOREIGN = ("sdnq", "quanto", "torchao")


def find_float8(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """Return the float8 weights of a file.

    Args:
        config: quantization settings from outside the tensors: "quantization_config" of a config.json; "tables", all
            of them, those of the models in a model included; and "comfy", what the file says of each weight in one of
            ComfyUI's formats (see `formats.comfy_metadata`).
    """
    quantization = config.get("quantization_config") or {}
    if isinstance(quantization, dict) and quantization.get("quant_method") in _FOREIGN:
        return []
    details, formats = _said(quantization, config), config.get("comfy") or {}
    names = [
        key
        for key, info in tensors.items()
        if info.dtype in FLOAT8
        and key.rpartition(".")[2] == "weight"
        and leaf(key, COMPRESSED) not in tensors  # ModelOpt's
        and (key not in formats or formats[key]["format"] in FORMATS)
        and (key in formats or _hub_mxfp8.scale_of(key, tensors, config) is None)
    ]
    neighbours = _neighbours(tensors, names)
    candidates = (
        _weight(name, tensors, neighbours.get(leaf(name, ""), []), details | _format(formats.get(name)))
        for name in names
    )
    weights = [one for one in candidates if one is not None]
    _refuse_unscaled(weights, [name for name in tensors if _hub_mxfp8.scale_of(name, tensors, config) is not None])
    markers = [key for key in tensors if key.rpartition(".")[2] == WHOLE] if weights else []
    if markers and not any("scale" in one.keys for one in weights):
        raise BadFileError(
            f"Cannot read weight {weights[0].name!r}",
            f"it is float8 without a scale, but {markers[0]!r} says that the file's float8 weights have scales",
            "Download the file again, or quantize the model again",
        )
    for key in markers:
        # It is about the whole file, or about the model whose prefix it has: the first weight of that carries it.
        prefix = leaf(key, "")
        place = next((place for place, one in enumerate(weights) if one.name.startswith(prefix)), 0)
        weights[place] = replace(weights[place], extra=(*weights[place].extra, key))
    return weights


# What checkpoints of several models put before the names of each of them.
_MODELS = re.compile(
    r"(model\.diffusion_model|cond_stage_model|conditioner\.\w+\.\d+|text_encoders\.\w+|\w*vae|first_stage_model)\."
)


def _refuse_unscaled(weights: list[PrequantizedWeight], blocks: list[str]) -> None:
    """Raise BadFileError for a weight without a scale in a model whose others have one: its codes are not values.

    Args:
        blocks: names of float8 weights with scales of blocks, which are other backends'.
    """
    models: dict[str, list[PrequantizedWeight]] = {}
    for one in weights:
        models.setdefault(_model_of(one.name), []).append(one)
    for model, rows in models.items():
        scaled = [one.keys["scale"] for one in rows if "scale" in one.keys]
        scaled += [leaf(name, "weight_scale") for name in blocks if _model_of(name) == model]
        bare = next((one for one in rows if "scale" not in one.keys), None)
        if scaled and bare is not None:
            key = scaled[0].rpartition(".")[2]
            raise BadFileError(
                f"Cannot read weight {bare.name!r}",
                f"it is float8 without a scale ({leaf(bare.name, key)!r}), but {len(scaled)} other weights of the "
                "model have one",
                "Download the file again, or quantize the model again",
            )


def _model_of(name: str) -> str:
    match = _MODELS.match(name)
    return match[0] if match else ""


def _said(quantization: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block size of transformers' fine-grained fp8 in a config.json, as details of all weights."""
    tables = [quantization, *(table for _, table in config.get("tables", ()))]
    sizes = (table.get("weight_block_size") for table in tables if isinstance(table, Mapping))
    size = next((one for one in sizes if one is not None), None)
    return {} if size is None else {"block": size}


def _format(row: Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if row is None else {"format": row["format"]}


def _neighbours(tensors: Mapping[str, TensorInfo], names: list[str]) -> dict[str, list[str]]:
    """Return, for each prefix "X." of a weight, the keys X.<leaf> and X.weight.<leaf> that may describe it."""
    prefixes = {leaf(name, "") for name in names}
    matches: dict[str, list[str]] = {}
    for key in tensors:
        prefix = leaf(key, "")
        for candidate in (prefix, leaf(prefix[:-1], "")) if prefix.endswith(".weight.") else (prefix,):
            if candidate in prefixes:
                matches.setdefault(candidate, []).append(key)
    return matches


def _weight(
    name: str, tensors: Mapping[str, TensorInfo], neighbours: list[str], details: Mapping[str, Any]
) -> PrequantizedWeight | None:
    info = tensors[name]
    scale_keys = [key for key in neighbours if key in {leaf(name, last) for last in SCALES}]
    hints = [key for key in neighbours if key in {leaf(name, last) for last in HINTS}]
    # Anything else that calls itself a scale.
    strange = [key for key in neighbours if "scal" in key.rpartition(".")[2] and key not in scale_keys + hints]
    strange = [key for key in strange if not key.endswith(WHOLE)]
    if strange:
        known = ", ".join(f"X.{scale}" for scale in SCALES)
        raise UnsupportedFileError(
            f"Cannot read weight {name!r}",
            f"it is float8, and {strange[0]!r} beside it looks like a scale of another format: without a config, only "
            f"{known} are known",
            "If a config.json belongs to it, as with SDNQ's files, pass the folder that has both. Otherwise: Use a "
            "file of the same model in a format that `sdquant matrix` lists",
        )
    if len(info.shape) < 2 and not scale_keys:
        return None  # a norm in float8 is a plain tensor that is cast when it is loaded
    keys = {"codes": name} | ({"scale": scale_keys[0]} if scale_keys else {})
    scaled = f"scales in *.{scale_keys[0].rpartition('.')[2]}" if scale_keys else "no scales"
    if scale_keys and tensors[scale_keys[0]].dtype == "uint8" and scale_keys[0] == leaf(name, "weight_scale_inv"):
        details = {**details, "scale": "e8m0"}  # transformers' bytes of E8M0, scale_fmt "ue8m0"
    return PrequantizedWeight(
        name=name,
        scheme="fp8",
        keys=keys,
        extra=tuple(scale_keys[1:] + hints),
        evidence=f"{info.dtype} weights, {scaled}",
        details={"packing": "float8", **details},
        nbytes=_nbytes(info, tensors[scale_keys[0]], details.get("block")) if scale_keys else None,
    )


def _nbytes(codes: TensorInfo, scale: TensorInfo, block: Any) -> int | None:
    """Return the bytes in memory of a weight with scales of blocks, each of which is there once for each row of its
    block (see `models.weight_loader`); None if it is as large in the file.

    Args:
        block: what the config says, [rows, columns]; None if it says nothing, and the blocks divide the weight.
    """
    grid = scale.shape[::2] if len(scale.shape) == 4 else scale.shape  # [rows, 1, columns, 1]: ModelOpt's blocks
    if len(codes.shape) != 2 or len(grid) != 2 or grid[0] == codes.shape[0]:
        return None
    if block is None and grid[0] == 1:
        return None
    if block is not None and not _divides(block, codes.shape[1]):
        return None  # it stays in blocks, because kernels have no such rows
    return codes.nbytes + codes.shape[0] * grid[1] * 4


def _divides(block: Any, columns: int) -> bool:
    """Return whether blocks [rows, columns], as a config may say anything, divide so many columns."""
    return isinstance(block, list) and len(block) == 2 and type(block[1]) is int and block[1] > 0 == columns % block[1]
