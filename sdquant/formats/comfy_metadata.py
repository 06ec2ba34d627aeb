"""Per-layer quantization formats declared in ComfyUI's files, read before any weight. No torch.

A quantized layer X has a tensor `X.comfy_quant` (a line of JSON, in bytes), or is listed in the metadata, which ComfyUI
turns into such tensors: `_quantization_metadata` is {"layers": {X: {"format": ...}}}, with or without the prefix that
its tensors have. Formats and names: `QUANT_ALGOS` and `_load_quantized_module` of ComfyUI, and the layouts of
comfy-kitchen, its library of kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import FLOAT8_FORMATS as FLOAT8
from ..backends import FLOAT8_MARKER
from ..errors import BadFileError, UnsupportedFileError
from ..utils import strict_json
from . import safetensors

if TYPE_CHECKING:
    from ..core import TensorInfo
    from .tensor_file import Header

METADATA = "_quantization_metadata"
# The formats that are read here, and the dtype of their codes. int8_tensorwise is qint8: a scale for all or for a row.
READ: Mapping[str, str] = {**FLOAT8, "int8_tensorwise": "int8"}
_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")
_MOST = 4096  # bytes of a line; ComfyUI writes some tens


def formats(
    tensors: Mapping[str, TensorInfo],
    home: Mapping[str, Path],
    headers: Mapping[Path, Header],
    metadata: Mapping[str, Any],
) -> dict[str, str]:
    """Return the format of each layer that is quantized in one of ComfyUI's, by the name of its weight.

    Args:
        home: the file of each tensor. headers: of the files. metadata: of the first file.

    Raises:
        BadFileError: the declarations are malformed, or contradict the tensors.
        UnsupportedFileError: layers are in a format that is not read here.
    """
    if not tensors or (metadata.get(METADATA) is None and not any(map(_is_marker, tensors))):
        return {}
    path = next(iter(home.values()))
    declared = {_weight(path, layer, tensors): kind for layer, kind in _listed(path, metadata).items()}
    for key, kind in _marked(tensors, home, headers).items():
        name = key.removesuffix(FLOAT8_MARKER) + "weight"
        if name not in tensors:
            raise _bad(home[key], key, f"it describes {name!r}, which is not in the file")
        if declared.setdefault(name, kind) != kind:
            raise _bad(home[key], key, f"it says {kind!r}, but the file's metadata says {declared[name]!r}")
    strange = {name: kind for name, kind in declared.items() if kind not in READ}
    if strange:
        kinds = ", ".join(f"{kind} ({count} layers)" for kind, count in Counter(strange.values()).items())
        raise UnsupportedFileError(
            f"Cannot load {path}",
            f"it has layers in ComfyUI formats that this version cannot read: {kinds}, first at "
            f"{next(iter(strange))!r}",
            f"Use a file of the same model in {', '.join(READ)}, nf4 or GGUF, or quantize the unquantized model",
        )
    for name, kind in declared.items():
        if tensors[name].dtype != READ[kind]:
            raise _bad(home[name], name, f"its format is declared as {kind}, but its dtype is {tensors[name].dtype}")
    return declared


def _is_marker(key: str) -> bool:
    return key.rpartition(".")[2] == FLOAT8_MARKER


def _listed(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    text = metadata.get(METADATA)
    if text is None:
        return {}
    try:
        rows = strict_json.parse(text)["layers"].items()
        return {layer: _kind(row) for layer, row in rows}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(path, METADATA, f"it is not a table of layers: {error!r}") from error


def _marked(
    tensors: Mapping[str, TensorInfo], home: Mapping[str, Path], headers: Mapping[Path, Header]
) -> dict[str, str]:
    """Return the format in each marker tensor, by its key; of a truncated file, those that are there."""
    keys = [key for key in tensors if _is_marker(key)]
    declared = {}
    for path in dict.fromkeys(home[key] for key in keys):
        here = [key for key in keys if home[key] == path]
        long = next((key for key in here if tensors[key].nbytes > _MOST), None)
        if long is not None:
            raise _bad(path, long, f"it has {tensors[long].nbytes} bytes, too many for one line of JSON")
        header = headers[path]
        if not isinstance(header, safetensors.SafetensorsHeader):
            raise _bad(path, here[0], "only safetensors files have such tensors")
        for key, line in safetensors.peek(header, here).items():
            try:
                declared[key] = _kind(strict_json.parse(strict_json.text(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise _bad(path, key, f"its JSON names no format: {error!r}") from error
    return declared


def _kind(row: Any) -> str:
    """Return a layer's format, with options that change its meaning. Some tools write only the name, not a table."""
    kind = row if isinstance(row, str) else row["format"]
    if not isinstance(kind, str):
        raise TypeError(f"format {kind!r} is not a text")
    params = row.get("params") if isinstance(row, dict) else None
    tables = [table for table in (row, params) if isinstance(table, dict)]
    return f"{kind} with convrot" if any(table.get("convrot") for table in tables) else kind


def _weight(path: Path, layer: str, tensors: Mapping[str, TensorInfo]) -> str:
    for prefix in _PREFIXES:
        if f"{prefix}{layer}.weight" in tensors:
            return f"{prefix}{layer}.weight"
    raise _bad(path, METADATA, f"it names a format for layer {layer!r}, which has no weight in the file")


def _bad(path: Path, key: str, why: str) -> BadFileError:
    return BadFileError(f"Cannot read {key!r} of {path}", why, "Download the file again from its source")
