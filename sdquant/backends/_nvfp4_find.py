"""NVFP4 in the order of ModelOpt and of Black Forest Labs, in a file's header. Imports no torch.

A weight X has X.weight, uint8 [out, in / 2], with the even column in the low half of a byte; X.weight_scale, E4M3
[out, in / 16]; X.weight_scale_2, one float32; perhaps X.input_scale, for activations, and X.pre_quant_scale; with
ModelOpt's SVDQuant X.svdquant_lora_a [rank, in] and X.svdquant_lora_b [out, rank].

ComfyUI's order has the same tensors, with the halves exchanged and scales in tiles of 128 x 4. Its files say so, and
are found by that (`_comfy_find`). ModelOpt's export for ComfyUI may leave the halves and order the scales in tiles.
Where nobody says anything, the shape of scales that are not whole tiles tells: read in the wrong order, a weight has
plausible values, and the images are white. A config can say it, {"quant_method": "modelopt"}, and where ModelOpt has
named itself in the file, {"quant_method": "modelopt", "enable_swizzle_layout": ...}, as its option is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import PrequantizedWeight, TensorInfo, leaf
from ..errors import BadFileError, UnsupportedFileError
from ._comfy_find import LOW_FIRST, TILED
from ._hub_find import unread
from ._nunchaku_find import NVFP4, ORDER

_METHODS = ("bfl", "modelopt")  # what configs call those who write this order
# Where ModelOpt names itself only in files that its export has changed for ComfyUI, perhaps to scales in tiles.
_CHANGED = ("its metadata", "modelopt")
_SCHEME = "comfy:nvfp4"
COMFYUI = "comfyui"  # the quant_method of a config that says that weights are in one of ComfyUI's formats
_SWIZZLE = "enable_swizzle_layout"
_BRANCH = {"down": "svdquant_lora_a", "up": "svdquant_lora_b"}
_PARTS = {"scale": "weight_scale", "factor": "weight_scale_2", "columns": "pre_quant_scale", **_BRANCH}


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
    tiled, reason = _order(config, names, tensors)
    order = "in tiles" if tiled else "in the order of the weight"
    evidence = f"NVFP4 of ModelOpt or Black Forest Labs, scales of 16 {order}, {reason}"
    details = {TILED: True, LOW_FIRST: True} if tiled else {}
    return [_weight(name, tensors, evidence, details) for name in names]


def has_branch(weight: PrequantizedWeight) -> bool:
    """Return whether a weight that was found in a header is NVFP4 with ModelOpt's low-rank branch."""
    return weight.scheme == NVFP4 and "factor" in weight.keys and ORDER not in weight.details


def missing(weight: PrequantizedWeight) -> str | None:
    """See `Backend.missing`, of those that `has_branch`."""
    if "scale" not in weight.keys:
        return leaf(weight.name, _PARTS["scale"])
    one, other = (weight.keys.get(part) for part in _BRANCH)
    return f"{one[:-1]}b" if one and not other else f"{other[:-1]}a" if other and not one else None


def swizzle_told(table: Mapping[str, Any]) -> bool | None:
    """Return whether ModelOpt's settings say that scales are in tiles; None if they do not say it.

    Raises:
        BadFileError: what they say is neither true nor false.
    """
    if str(table.get("quant_method", "")).lower() != "modelopt" or _SWIZZLE not in table:
        return None
    if type(table[_SWIZZLE]) is not bool:
        raise BadFileError(
            "Cannot tell the order of scales",
            f"{_SWIZZLE} is {table[_SWIZZLE]!r:.40} in a quantization_config, neither true nor false",
            "Write true for scales in tiles, false for scales in the order of the weight",
        )
    return table[_SWIZZLE]  # type: ignore[no-any-return]


def ways_to_say(form: str, *, swizzled: bool) -> str:
    """Return the configs by which a user can say the order of weights in `nvfp4` or `mxfp8`, in a sentence.

    Args:
        swizzled: ModelOpt's scales may be in tiles, too.
    """
    comfy = f'config={{"quant_method": "{COMFYUI}", "format": "{form}"}} if it is ComfyUI\'s'
    if not swizzled:
        return f'{comfy}, or config={{"quant_method": "modelopt"}} if it is ModelOpt\'s or Black Forest Labs\''
    theirs = (f'config={{"quant_method": "modelopt", "{_SWIZZLE}": {value}}}' for value in (True, False))
    return f"{comfy}, or, if it is ModelOpt's, {next(theirs)} for scales in tiles or {next(theirs)} for others"


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


def _order(config: Mapping[str, Any], names: list[str], tensors: Mapping[str, TensorInfo]) -> tuple[bool, str]:
    """Return whether scales are in tiles, and what tells it."""
    for place, table in config.get("tables", ()):
        if (tiled := swizzle_told(table)) is not None:
            return tiled, f"as {place} says (modelopt, {_SWIZZLE} {str(tiled).lower()})"
    methods = [(place, method.lower()) for place, method in config.get("methods", ())]
    for place, method in methods if _CHANGED not in methods else ():
        if method in _METHODS:
            return False, f"as {place} says ({method})"
    for name in names:
        scale = tensors.get(leaf(name, "weight_scale"))
        if scale is None:
            continue
        rows, blocks = tensors[name].shape[0], tensors[name].shape[1] // 8
        if scale.shape == (rows, blocks) and (rows % 128 or blocks % 4):
            return False, f"as {leaf(name, 'weight_scale')!r} shows, whose {rows} x {blocks} are no whole tiles"
    if _CHANGED in methods:
        raise UnsupportedFileError(
            f"Cannot tell the order of the scales of the NVFP4 weight {names[0]!r}",
            "the file's metadata names ModelOpt, which writes that into files that it changes for other programs: "
            "scales may be in tiles (enable_swizzle_layout) or in the order of the weight, and nothing tells which",
            f"Say which it is, with {ways_to_say('nvfp4', swizzled=True)}; one of them is right, and the others "
            "generate noise",
        )
    raise UnsupportedFileError(
        f"Cannot tell the order of the NVFP4 weight {names[0]!r}",
        "the file may be ComfyUI's (the even column in the high half of a byte, scales in tiles), without the marker "
        "comfy_quant that says so, or ModelOpt's or Black Forest Labs' (the other half, scales in the order of the "
        "weight), and nothing in it tells which",
        f"Say which it is, with {ways_to_say('nvfp4', swizzled=False)}; the other one generates noise",
    )


def _weight(
    name: str, tensors: Mapping[str, TensorInfo], evidence: str, details: Mapping[str, Any]
) -> PrequantizedWeight:
    keys = {"codes": name} | {part: leaf(name, word) for part, word in _PARTS.items() if leaf(name, word) in tensors}
    hint, has_branch = leaf(name, "input_scale"), bool(keys.keys() & _BRANCH)
    return PrequantizedWeight(
        name=name,
        scheme=NVFP4 if has_branch else _SCHEME,
        keys=keys,
        extra=(hint,) if hint in tensors else (),
        evidence=f"{evidence}, and a low-rank branch (SVDQuant)" if has_branch else evidence,
        details=details,
    )
