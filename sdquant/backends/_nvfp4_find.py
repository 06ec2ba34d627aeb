"""NVFP4 in the order of ModelOpt and of Black Forest Labs, in a file's header. Imports no torch.

A weight X has X.weight, uint8 [out, in / 2], with the even column in the low half of a byte; X.weight_scale, E4M3
[out, in / 16]; X.weight_scale_2, one float32; perhaps X.input_scale, for activations, and X.pre_quant_scale.

ComfyUI's order has the same tensors, with the halves exchanged and scales in tiles of 128 x 4. Its files say so, and
are found by that (`_comfy_find`). Where nobody says anything, the shape of scales that are not whole tiles tells: read
in the wrong order, a weight has plausible values, and the images are white.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import PrequantizedWeight, TensorInfo, leaf
from ..errors import UnsupportedFileError
from ._hub_find import unread

_METHODS = ("bfl", "modelopt")  # what configs call those who write this order
# Where ModelOpt names itself only in files that its export has changed for ComfyUI, perhaps to scales in tiles.
_CHANGED = ("its metadata", "modelopt")
_SCHEME = "comfy:nvfp4"
_PARTS = {"scale": "weight_scale", "factor": "weight_scale_2", "columns": "pre_quant_scale"}


def find(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[PrequantizedWeight]:
    """See `Backend.find`. `config` may contain "methods", the places that name a method, and the methods.

    Raises:
        UnsupportedFileError: nothing tells the order, or scales are of 32 weights.
    """
    declared = config.get("comfy") or {}
    names = [name for name, info in tensors.items() if name not in declared and _is_weight(name, info, tensors)]
    if not any(tensors.get(leaf(name, "weight_scale_2")) and leaf(name, "weight_scale") in tensors for name in names):
        return []
    wide = next((name for name in names if _scale_of_32(name, tensors)), None)
    if wide is not None:
        raise unread(wide, "it is in 4-bit floats with a scale for 32 of them (W4A8_NVFP4_FP8), and NVFP4 has 16")
    told = _told(config, names, tensors)
    evidence = f"NVFP4 of ModelOpt or Black Forest Labs, scales of 16 in the order of the weight, {told}"
    return [_weight(name, tensors, evidence) for name in names]


def _is_weight(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    if name.rpartition(".")[2] != "weight" or info.dtype != "uint8" or len(info.shape) != 2:
        return False
    scale = tensors.get(leaf(name, "weight_scale"))
    has_factor = leaf(name, "weight_scale_2") in tensors
    return scale.dtype == "float8_e4m3fn" if scale is not None else has_factor


def _scale_of_32(name: str, tensors: Mapping[str, TensorInfo]) -> bool:
    scale = tensors.get(leaf(name, "weight_scale"))
    rows, halves = tensors[name].shape
    return scale is not None and halves > 0 and scale.shape == (rows, halves // 16) and halves % 16 == 0


def _told(config: Mapping[str, Any], names: list[str], tensors: Mapping[str, TensorInfo]) -> str:
    """Return what tells that weights are in this order."""
    methods = [(place, method.lower()) for place, method in config.get("methods", ())]
    for place, method in methods if _CHANGED not in methods else ():
        if method in _METHODS:
            return f"as {place} says ({method})"
    for name in names:
        scale = tensors.get(leaf(name, "weight_scale"))
        if scale is None:
            continue
        rows, blocks = tensors[name].shape[0], tensors[name].shape[1] // 8
        if scale.shape == (rows, blocks) and (rows % 128 or blocks % 4):
            return f"as {leaf(name, 'weight_scale')!r} shows, whose {rows} x {blocks} are no whole tiles"
    if _CHANGED in methods:
        raise UnsupportedFileError(
            f"Cannot tell the order of the scales of the NVFP4 weight {names[0]!r}",
            "the file's metadata names ModelOpt, which writes that into files that it changes for other programs: "
            "scales may be in tiles (enable_swizzle_layout) or in the order of the weight, and nothing tells which",
            "Export the model again without enable_swizzle_layout, merged_base_safetensor_path and padding_strategy, "
            "or use a file in a format that `sdquant matrix` lists",
        )
    raise UnsupportedFileError(
        f"Cannot tell the order of the NVFP4 weight {names[0]!r}",
        "the file may be ComfyUI's (the even column in the high half of a byte, scales in tiles), without the marker "
        "comfy_quant that says so, or ModelOpt's or Black Forest Labs' (the other half, scales in the order of the "
        "weight), and nothing in it tells which",
        'Put a config.json with "quantization_config": {"quant_method": "modelopt"} beside it (`dequantize` takes '
        'config={"quant_method": "modelopt"}, too, and the command --config FILE) if it is '
        "ModelOpt's or Black Forest Labs', use a file with markers if it is ComfyUI's, or one that `sdquant matrix` "
        "lists",
    )


def _weight(name: str, tensors: Mapping[str, TensorInfo], evidence: str) -> PrequantizedWeight:
    keys = {"codes": name} | {part: leaf(name, word) for part, word in _PARTS.items() if leaf(name, word) in tensors}
    hint = leaf(name, "input_scale")
    return PrequantizedWeight(
        name=name,
        scheme=_SCHEME,
        keys=keys,
        extra=(hint,) if hint in tensors else (),
        evidence=evidence,
    )
