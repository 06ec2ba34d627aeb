"""Where a component's configs and metadata name the method that it was quantized with. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadFileError
from ..utils import strict_json

# JSON files beside the weights by which tools say their method, and it.
SIDE_FILES: Mapping[str, str] = {"quantize_config": "gptq", "quant_config": "awq", "hf_quant_config": "modelopt"}
# Lists of a table with what is not quantized, which alone are no quantization.
_SKIPS = frozenset({
    "modules_to_not_convert", "llm_int8_skip_modules", "modules_not_to_quantize", "exclude_modules", "ignored_layers",
    "ignore",
})  # fmt: skip
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
TABLES = ("quantization_config", "compression_config")  # in a config.json; the second is compressed-tensors' old one
_MLX = "quantization"  # MLX's table in a config.json, {"bits": 4, "group_size": 64}
_METHOD_KEYS = ("method", "mode", "algorithm", "scheme")  # what others may call a method in a table of that name
# JSON files that list the weights that optimum-quanto has quantized.
MAPS = ("quantization_map", "quanto_qmap")
# Keys of a file's metadata that are the name of a method, which tools write as they like ("fp8_scaled", "convrot").
_IN_METADATA = ("quant_method", "quantization_method")
# What they write for none.
_FLOATS = frozenset({"none", "unknown", "fp16", "bf16", "fp32", "float16", "bfloat16", "float32"})
# How ModelOpt's names of algorithms begin, which its hf_quant_config.json gives without a method. Which are read, the
# weights show.
_ALGORITHMS = ("FP8", "NVFP4", "MXFP", "INT8", "W4A16", "W4A8", "W8A8_SQ", "W8A16", "MIXED_PRECISION")
_DEEPEST = 8  # tables in tables of a config.json
GIVEN = "config="  # among the names of JSON files: what the caller says


def named(
    path: Path, configs: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield each place that names a method ("its config.json"), and the name.

    Raises:
        BadFileError: the name is not a string.
    """
    for name, values in configs.items():
        place = _file(name)
        if name in SIDE_FILES:
            yield place, SIDE_FILES[name]
        if name in MAPS and values:
            yield place, "quanto"
        for table in (values,) if name in TABLES else tables_of(values):
            word = _word(path, place, table)
            if word is not None:
                yield place, word
    if "tensor_names" in metadata and any('"_tensor_data_names"' in str(text) for text in metadata.values()):
        yield "its metadata", "torchao"
    for settings in _of_metadata(metadata):
        word = settings.get("quant_method", settings.get("method"))
        if isinstance(word, str) and word:
            yield "its metadata", word
    for key in _IN_METADATA:
        word = metadata.get(key)
        if isinstance(word, str) and word.strip() and word.strip().lower() not in _FLOATS:
            yield _place(key), word.strip()


def is_free(place: str) -> bool:
    """Return whether a place that `named` yields has text that tools write as they like."""
    return place in map(_place, _IN_METADATA)


def _file(name: str) -> str:
    return name if name == GIVEN else f"its {name}.json"


def _place(key: str) -> str:
    return f"{key} in its metadata"


def nameless(configs: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield each place with settings of a quantization that do not say by which method."""
    for where, table in tables(configs, metadata):
        names = {"quant_method", "method", "quant_algo", "quant_library", "rules"}
        keys = {key for key, value in table.items() if value not in _EMPTY} - _SKIPS
        if keys and not keys & names and not table.keys() & {"load_in_4bit", "load_in_8bit"}:
            yield where


def tables(
    configs: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each table about quantization stands ("its config.json"), and the table."""
    for name, values in configs.items():
        own = name in TABLES or name in SIDE_FILES
        yield from ((_file(name), table) for table in ((values,) if own else tables_of(values)))
    yield from (("its metadata", table) for table in _of_metadata(metadata))


def with_stated(side: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return quantization settings with the `quantization_config` of the file's "metadata" where no config has one."""
    metadata = side.get("metadata", {})
    table, config = (_parsed(metadata.get(key)) for key in ("quantization_config", "config"))
    if table is None and isinstance(config, dict):
        table = config.get("quantization_config")
    return (
        side
        if side.get("quantization_config") or not isinstance(table, dict)
        else {**side, "quantization_config": table}
    )


def _of_metadata(metadata: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the tables about quantization in a file's metadata, and in the model's config there."""
    table = _parsed(metadata.get("quantization_config"))
    if table:
        yield table if isinstance(table, dict) else {"quant_method": str(table)}
    yield from tables_of({_MLX: _parsed(metadata.get(_MLX))})
    config = _parsed(metadata.get("config"))
    yield from tables_of(config) if isinstance(config, dict) else ()


def _parsed(text: object) -> Any:
    """Return a metadata entry parsed as JSON; as it is where it is none, since some tools write a name instead."""
    if not isinstance(text, str) or not text.strip():
        return None
    try:
        return strict_json.parse(text)
    except ValueError:
        return text


def tables_of(config: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the tables that say how a model, or the model of a part of it (`text_config`), is quantized."""
    word = config.get("quant_method")
    if isinstance(word, str) and word:  # in no table of its own
        yield {"quant_method": word}
    for key, value in config.items():
        if key in TABLES and value:
            table = value if isinstance(value, Mapping) else {"quant_method": value}
            yield {"quant_method": "compressed-tensors", **table} if key == "compression_config" else table
        elif key == _MLX and isinstance(value, Mapping) and value.keys() >= {"bits", "group_size"}:
            yield {"quant_method": "mlx", **value}
        elif key == _MLX and isinstance(value, Mapping) and value.keys() & {"quant_method", "quant_algo"}:
            yield value
        elif key == _MLX and isinstance(value, Mapping) and (words := _words_of(value)):
            yield {**value, "quant_method": words[0]}
        elif isinstance(value, Mapping) and depth < _DEEPEST:
            yield from tables_of(value, depth + 1)


def _words_of(table: Mapping[str, Any]) -> list[str]:
    return [word for key in _METHOD_KEYS if isinstance(word := table.get(key), str) and word]


def _word(path: Path, place: str, table: Mapping[str, Any]) -> str | None:
    """Return the method that a table names; None if it names none.

    Raises:
        BadFileError: the name is not a string.
    """
    word = table.get("quant_method")
    if word in (None, ""):
        if table.get("load_in_4bit") or table.get("load_in_8bit"):  # bitsandbytes', before methods had names
            return "bitsandbytes"
        algorithm = table.get("quant_algo")
        if isinstance(algorithm, str) and algorithm.upper().startswith(_ALGORITHMS):
            return "modelopt"
        algorithm = algorithm or table.get("quant_library")
        return algorithm if isinstance(algorithm, str) and algorithm else None
    if not isinstance(word, str):
        raise BadFileError(
            f"Cannot load {path}",
            f"{place} has {word!r:.80} as its quant_method, which is not a name",
            f"Get the {place.removeprefix('its ')} that belongs to the weights",
        )
    return word
