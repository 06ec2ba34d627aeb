"""What ComfyUI's files say about the format of each layer. Headers only, no torch.

A quantized layer X has a tensor `X.comfy_quant` (a line of JSON, in bytes), or is listed in the metadata, which ComfyUI
turns into such tensors: `_quantization_metadata` is {"layers": {X: {"format": ...}}}, with or without the prefix that
its tensors have. Formats and names: `QUANT_ALGOS` and `_load_quantized_module` of ComfyUI, and the layouts of
comfy-kitchen, its library of kernels.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends._float8_find import FORMATS, MARKER
from ..errors import BadFileError, UnsupportedFileError

if TYPE_CHECKING:
    from ..backends.base import TensorInfo

METADATA = "_quantization_metadata"
_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")

# How formats that are not read show themselves where only the tensors tell: the dtype of the codes, a neighbour.
_SHAPES: tuple[tuple[str, str, str], ...] = (
    ("uint8", "weight_scale_2", "nvfp4"),
    ("int8", "weight_s_rel", "asym_w4a8_int8"),
    ("int8", "weight_proj_down", "svdquant_w4a4"),
    ("int8", "weight_zeros", "awq_w4a16"),
    ("int8", "weight_scale", "an int8 or int4 one"),
)


def formats(path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any]) -> dict[str, str]:
    """The format that the metadata gives a layer, by the name of its weight.

    Raises:
        BadFileError: the metadata makes no sense, or not with these tensors.
        UnsupportedFileError: layers are in a format that is not read here.
    """
    said = {_weight(path, layer, tensors): row for layer, row in _layers(path, metadata).items()}
    shown = [key.removesuffix(MARKER) + "weight" for key in tensors if key.rpartition(".")[2] == MARKER]
    strange = {name: said[name] for name in said if said[name] not in FORMATS}
    strange |= {name: _guess(name, tensors) for name in shown if name not in said and not _is_float8(tensors.get(name))}
    if strange:
        kinds = ", ".join(f"{kind} ({count} layers)" for kind, count in Counter(strange.values()).items())
        raise UnsupportedFileError(
            f"{path} was to be loaded",
            f"it has layers in formats of ComfyUI's that this version does not read: {kinds}, the first of them "
            f"{next(iter(strange))!r}",
            f"Use a file of the same model in {', '.join(FORMATS)}, nf4 or GGUF, or quantize the unquantized one",
        )
    for name, kind in said.items():
        if tensors[name].dtype != FORMATS[kind]:
            raise _bad(path, f"it says that {name!r} is in {kind}, and that tensor is {tensors[name].dtype}")
    return said


def _layers(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    text = metadata.get(METADATA)
    if text is None:
        return {}
    try:
        rows = json.loads(text)["layers"].items()
        # Some tools write the format alone instead of a table.
        layers = {str(layer): row if isinstance(row, str) else row["format"] for layer, row in rows}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _bad(path, f"it is no table of layers: {error!r}") from error
    if not all(isinstance(kind, str) for kind in layers.values()):
        raise _bad(path, "a format in it is not a text")
    return layers


def _weight(path: Path, layer: str, tensors: Mapping[str, TensorInfo]) -> str:
    for prefix in _PREFIXES:
        if f"{prefix}{layer}.weight" in tensors:
            return f"{prefix}{layer}.weight"
    raise _bad(path, f"it has a format for layer {layer!r}, which has no weight in the file")


def _guess(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    info, stem = tensors.get(name), name.removesuffix("weight")
    for dtype, neighbour, kind in _SHAPES:
        if info is not None and info.dtype == dtype and stem + neighbour in tensors:
            return kind
    return "an unknown one" if info is None else f"one with {info.dtype} codes"


def _is_float8(info: TensorInfo | None) -> bool:
    return info is not None and info.dtype in FORMATS.values()


def _bad(path: Path, why: str) -> BadFileError:
    return BadFileError(f"The {METADATA} of {path} was read", why, "Get the file from its source again")
