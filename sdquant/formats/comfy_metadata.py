"""What ComfyUI's files say of their quantized layers, read before any weight. No torch.

A quantized layer X has a tensor `X.comfy_quant` (a line of JSON, in bytes), or is listed in the metadata, which ComfyUI
turns into such tensors: `_quantization_metadata` is {"layers": {X: {"format": ...}}}, with or without the prefix of a
diffusion model, whether its tensors have one or not. Formats and names: `QUANT_ALGOS` and `_load_quantized_module` of
ComfyUI, and the layouts of comfy-kitchen, its library of kernels.

Where both are there, the tensor counts: convert_to_quant writes a metadata without the rotation when it edits a file.
Where neither is, a config may say it, {"quant_method": "comfyui", "format": ...}, of all weights that look like it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import (
    COMFY_EXACT,
    COMFY_FORMATS,
    COMFY_ORIGINAL_SHAPE,
    COMFY_REFUSED,
    COMFYUI,
    FLOAT8_FORMATS,
    FLOAT8_MARKER,
    swizzle_told,
    ways_to_say,
)
from ..backends import COMFY_METADATA as METADATA
from ..core import ROTATION, leaf
from ..errors import BadFileError, UnsupportedFileError
from ..utils import strict_json
from . import method_names, safetensors

if TYPE_CHECKING:
    from ..core import TensorInfo
    from .tensor_file import Header

READ: Mapping[str, str] = {**FLOAT8_FORMATS, **COMFY_FORMATS}  # the formats that are read, and the dtype of their codes
_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")
_MOST = 4096  # bytes of a line; ComfyUI writes some tens
_INT8 = "int8_tensorwise"
_ROTATED = ("convrot_w4a4", "asym_w4a8_int8")  # the formats whose weights always are
_SCALES = ("weight_scale", "weight_s_rel")  # one of which weights of all formats have
_GROUP = 256  # of a rotation whose size is not said
# Other options that change what a weight means, or its product.
_OPTIONS = ("group_size", "layout", "act_unsigned", "lowrank_branch_input_basis", "linear_dtype")
# What ModelOpt's export calls by the same names and writes otherwise: with `enable_layerwise_quant_metadata` it lists
# layers as ComfyUI does, the even column in the low half of a byte, and scales in tiles only where it was told to.
_ALSO_MODELOPT = ("nvfp4", "mxfp8")
_OTHER_ORDER = ("modelopt", "bfl")  # what configs call methods whose files have it


@dataclass(frozen=True, kw_only=True)
class Declarations:
    """What a file says of its weights.

    Attributes:
        weights: by name, "format" and the options that change its meaning, such as "rotation".
        warnings: sentences about contradictions that have an answer.
    """

    weights: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def declarations(
    tensors: Mapping[str, TensorInfo],
    home: Mapping[str, Path],
    headers: Mapping[Path, Header],
    metadata: Mapping[str, Any],
    tables: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> Declarations:
    """Return what the file, or a config, says of each weight of a layer that is quantized in one of ComfyUI's formats.

    Args:
        home: the file of each tensor. headers: of the files. metadata: of the first file.
        tables: the places of settings about quantization, and these; see `method_names.tables`.

    Raises:
        BadFileError: the declarations are malformed, or contradict the tensors.
        UnsupportedFileError: layers are in a format that is not read here.
    """
    stated = _stated(home, tables)
    if not tensors or (stated is None and metadata.get(METADATA) is None and not any(map(_is_marker, tensors))):
        return Declarations()
    path = next(iter(home.values()))
    in_metadata: dict[str, dict[str, Any]] = {}
    for layer, row in _listed(path, metadata).items():
        if in_metadata.setdefault(_weight(path, layer, tensors), row) != row:
            raise _bad(path, METADATA, f"it says two different things of layer {layer!r}")
    in_tensors = dict(_by_weight(tensors, home, headers))
    listed = {name: row for name, row in in_metadata.items() if name not in in_tensors}
    if any(swizzle_told(table) is not None for _, table in tables):  # then they are found as ModelOpt's
        in_metadata = {
            k: row for k, row in in_metadata.items() if k in in_tensors or row["format"] not in _ALSO_MODELOPT
        }
    elif stated is None:
        _refuse_modelopt(path, listed, metadata)
    for name, row in in_tensors.items():
        if name in in_metadata and in_metadata[name]["format"] != row["format"]:
            key = f"{name.removesuffix('weight')}{FLOAT8_MARKER}"
            words = f"it says {row['format']!r}, but the file's metadata says {in_metadata[name]['format']!r}"
            raise _bad(home[key], key, words)
    rows = in_metadata | in_tensors
    told = {
        name: stated for name in tensors if stated is not None and name not in rows and _suits(name, tensors, stated)
    }
    against = [name for name, row in rows.items() if _is_unlike(name, row, tensors, stated, every=not told)]
    remarks = [*_outvoted(path, against, rows, stated), *_not_modelopts(path, in_tensors, tables)]
    rows |= told
    _require_read(path, rows)
    for name, row in rows.items():
        want = READ[row["format"]]
        if tensors[name].dtype != want:
            why = f"its format is declared as {row['format']}, but its dtype is {tensors[name].dtype}"
            raise _bad(home[name], name, why)
    differ = [name for name, row in in_tensors.items() if _meaning(in_metadata.get(name, row)) != _meaning(row)]
    remarks = [*_different(path, differ, in_tensors, in_metadata), *remarks]
    return Declarations(weights=rows, warnings=tuple(remarks))


def _refuse_modelopt(path: Path, rows: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, Any]) -> None:
    """Raise UnsupportedFileError if ModelOpt has listed layers whose order then is ComfyUI's or its own."""
    first = next((name for name, row in rows.items() if row["format"] in _ALSO_MODELOPT), None)
    if first is not None and any(word.lower() == "modelopt" for _, word in method_names.named(path, {}, metadata)):
        raise UnsupportedFileError(
            f"Cannot tell the order of the {rows[first]['format']} weight {first!r} of {path.name}",
            f"{METADATA} lists it as ComfyUI does, whose files have scales in tiles, and 4-bit floats with the even "
            "column in the high half of a byte; but quantization_config, beside it, names ModelOpt, which writes the "
            "even column in the low half (0.47), and scales in tiles or in the order of the weight",
            f"Say which it is, with {ways_to_say(rows[first]['format'], swizzled=True)}; one of them is right, and the "
            "others generate noise",
        )


def _stated(home: Mapping[str, Path], tables: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Return what a config says of all weights that nothing else is said of; None if it says nothing."""
    for place, table in tables:
        if str(table.get("quant_method", "")).lower() == COMFYUI:
            try:
                row = _read({key: value for key, value in table.items() if key != "quant_method"})
            except (KeyError, TypeError) as error:
                raise BadFileError(
                    f"Cannot read {next(iter(home.values()))}",
                    f"{place} says that it is ComfyUI's, and not in which of its formats",
                    f'Add "format" to it: one of {", ".join(READ)}',
                ) from error
            if row["format"] in READ:
                return row
            raise UnsupportedFileError(
                f"Cannot read {next(iter(home.values()))}",
                f"{place} names ComfyUI's format {row['format']!r:.60}, which this version does not read",
                f"Name the format that the file is in: one of {', '.join(READ)}",
            )
    return None


def _suits(name: str, tensors: Mapping[str, TensorInfo], row: Mapping[str, Any]) -> bool:
    """Return whether a tensor may be a weight in a format."""
    return (
        name.rpartition(".")[2] == "weight"
        and tensors[name].dtype == READ[row["format"]]
        and any(leaf(name, scale) in tensors for scale in _SCALES)
    )


def _require_read(path: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    strange = {name: row["format"] for name, row in rows.items() if row["format"] not in READ}
    if strange:
        kinds = ", ".join(f"{kind} ({count} layers)" for kind, count in Counter(strange.values()).items())
        raise UnsupportedFileError(
            f"Cannot load {path}",
            f"it has layers in ComfyUI formats that this version cannot read: {kinds}, first at "
            f"{next(iter(strange))!r}",
            f"Use a file of the same model in {', '.join(READ)}, nf4 or GGUF, or quantize the unquantized model",
        )
    turned = next((n for n, row in rows.items() if ROTATION in row and row["format"] not in (_INT8, *_ROTATED)), None)
    if turned is not None:
        raise UnsupportedFileError(
            f"Cannot load {path}",
            f"it says that {turned!r} is {rows[turned]['format']} and rotated, which that format is not",
            "Download the file again, or use one in another format",
        )


def _different(
    path: Path,
    names: list[str],
    in_tensors: Mapping[str, Mapping[str, Any]],
    in_metadata: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """Yield the warning about weights of which the tensors and the metadata say different things."""
    if names:
        first = names[0]
        one, other = (_in_words(rows[first]) for rows in (in_tensors, in_metadata))
        yield (
            f"{path.name}: of {len(names)} weights ({first!r} first) the *.{FLOAT8_MARKER} tensors say {one}, and the "
            f"metadata says {other}. The tensors are right in the files that are known for it, and were followed; "
            "ComfyUI follows the metadata, and generates noise from this file"
        )


def _is_unlike(
    name: str,
    row: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    stated: Mapping[str, Any] | None,
    *,
    every: bool,
) -> bool:
    """Return whether a config says another thing of a weight than the file, and may be meant for it.

    Args:
        every: also of weights that do not look like what it says, as there are no others that it could be meant for.
    """
    if stated is None or _meaning(row) == _meaning(stated):
        return False
    return every or _suits(name, tensors, stated)


def _outvoted(
    path: Path, names: Sequence[str], rows: Mapping[str, Mapping[str, Any]], stated: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield the warning about weights of which the file says another thing than a config that names ComfyUI."""
    if names and stated is not None:
        yield (
            f"{path.name}: its quantization_config says {stated['format']}, {_in_words(stated)}, but the file says "
            f"{rows[names[0]]['format']}, {_in_words(rows[names[0]])} of {len(names)} weights ({names[0]!r} first), "
            "and was followed"
        )


def _not_modelopts(
    path: Path, in_tensors: Mapping[str, Mapping[str, Any]], tables: Iterable[tuple[str, Mapping[str, Any]]]
) -> Iterator[str]:
    """Yield the warning about weights that a config says are in ModelOpt's order, and the file that in ComfyUI's."""
    names = [name for name, row in in_tensors.items() if row["format"] in _ALSO_MODELOPT]
    place = next((where for where, table in tables if str(table.get("quant_method", "")).lower() in _OTHER_ORDER), None)
    if names and place is not None:
        yield (
            f"{path.name}: {place} names ModelOpt or Black Forest Labs, whose {in_tensors[names[0]]['format']} is in "
            f"another order, but the *.{FLOAT8_MARKER} tensors of {len(names)} weights ({names[0]!r} first) say "
            "ComfyUI's, and were followed"
        )


def _in_words(row: Mapping[str, Any]) -> str:
    turned = f"rotated in groups of {row[ROTATION]}" if ROTATION in row else "not rotated"
    return ", ".join([turned, *(f"{option} {row[option]!r:.40}" for option in _OPTIONS if option in row)])


def _meaning(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without what only helps to read it, and what says of products alone."""
    return {option: value for option, value in row.items() if option not in (COMFY_ORIGINAL_SHAPE, COMFY_EXACT)}


def _is_marker(key: str) -> bool:
    return key.rpartition(".")[2] == FLOAT8_MARKER


def _listed(path: Path, metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    text = metadata.get(METADATA)
    if text is None:
        return {}
    try:
        layers = strict_json.parse(text)["layers"]
        listed = {layer: _read(row) for layer, row in layers.items()} if layers != COMFY_REFUSED else {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(path, METADATA, f"it is not a table of layers: {error!r}") from error
    return {layer: row for layer, row in listed.items() if row["format"] != COMFY_REFUSED}


def _by_weight(
    tensors: Mapping[str, TensorInfo], home: Mapping[str, Path], headers: Mapping[Path, Header]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each weight with a marker tensor, and what that says."""
    for key, row in _marked(tensors, home, headers).items():
        name = key.removesuffix(FLOAT8_MARKER) + "weight"
        if name not in tensors:
            raise _bad(home[key], key, f"it describes {name!r}, which is not in the file")
        yield name, row


def _marked(
    tensors: Mapping[str, TensorInfo], home: Mapping[str, Path], headers: Mapping[Path, Header]
) -> dict[str, dict[str, Any]]:
    """Return what each marker tensor says, by its key; of a truncated file, those that are there."""
    keys = [key for key in tensors if _is_marker(key)]
    lines = {}
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
                lines[key] = _read(strict_json.parse(strict_json.text(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise _bad(path, key, f"its JSON names no format: {error!r}") from error
    return lines


def _read(row: Any) -> dict[str, Any]:
    """Return what a row says of a layer. Some tools write only the name of the format, not a table; INT8-Fast and
    comfy-quants write a table without it, which is about 8-bit integers."""
    if isinstance(row, str):
        return {"format": row}
    if not isinstance(row, dict):
        raise TypeError(f"{row!r:.80} is neither a table nor a name")
    tables = [table for table in (row, row.get("params")) if isinstance(table, dict)]
    options = {key: value for table in reversed(tables) for key, value in table.items()}
    kind = options.get("format", _INT8 if {"convrot", "per_row"} & options.keys() else None)
    if kind is None:
        raise KeyError("format")
    if not isinstance(kind, str):
        raise TypeError(f"format {kind!r} is not a text")
    is_rotated = options.get("convrot", False)
    if type(is_rotated) is not bool:
        raise TypeError(f"convrot {is_rotated!r} is neither true nor false")
    turned = {ROTATION: options.get("convrot_groupsize", _GROUP)} if is_rotated or kind in _ROTATED else {}
    names, exact = (*_OPTIONS, COMFY_ORIGINAL_SHAPE), {COMFY_EXACT: True} if options.get(COMFY_EXACT) is True else {}
    return {"format": kind, **turned, **exact, **{option: options[option] for option in names if option in options}}


def _weight(path: Path, layer: str, tensors: Mapping[str, TensorInfo]) -> str:
    bare = next(layer.removeprefix(prefix) for prefix in reversed(_PREFIXES) if layer.startswith(prefix))
    for name in (f"{layer}.weight", *(f"{prefix}{bare}.weight" for prefix in _PREFIXES)):
        if name in tensors:
            return name
    raise _bad(path, METADATA, f"it names a format for layer {layer!r}, which has no weight in the file")


def _bad(path: Path, key: str, why: str) -> BadFileError:
    return BadFileError(f"Cannot read {key!r} of {path}", why, "Download the file again from its source")
