"""A component's config.json and the JSON files beside it that say how its weights are quantized. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import BadFileError, ConflictError, SettingsError
from . import folders, quantization_methods

# JSON files that say how weights are quantized -> what they say. quanto's own classes write `quanto_qmap.json`.
_SIDE: Mapping[str, str] = {
    "quanto_qmap": "quantization_map",
    "quantization_map": "quantization_map",
    "quantization_config": "quantization_config",
}
# Names, without .json, of all files that are about the quantization of the weights beside them and nothing else.
SIDE_FILES = frozenset({*_SIDE, *quantization_methods.SIDE_FILES})

Given = Mapping[str, Any] | str | Path  # a config from the caller
Configs = tuple[dict[str, Any], dict[str, Any]]
_DEEPEST = 16


def configs_in(folder: Path) -> Configs:
    """Return a folder's config.json, and the quantization settings in its JSON files ("files": all these by name)."""
    config = _json_in(folder, "config") or {}
    beside = {name: _json_in(folder, name) for name in (*_SIDE, *quantization_methods.SIDE_FILES)}
    return config, _settings(config, {name: table for name, table in beside.items() if table is not None}, folder)


def without_quantization(config: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Return a config without its tables about quantization, those of the models in it included. depth: of the table in
    the whole; those deeper than any model's are returned as they are."""
    return {
        key: without_quantization(value, depth + 1) if isinstance(value, Mapping) and depth < _DEEPEST else value
        for key, value in config.items()
        if key not in quantization_methods.TABLES
    }


def with_given(own: Configs, given: Given, path: Path) -> Configs:
    """Return what `configs_in` returns, with a config from the caller for what the files do not say.

    Args:
        own: what is beside the weights. path: of the weights, for errors.
        given: a `quantization_config`, a model's config, with one in it or without, or a JSON file with one of these.

    Raises:
        ConflictError: the files have another quantization_config. SettingsError: `given` is no config.
    """
    config = _config_of(given)
    table = config.get("quantization_config")
    beside = {"config.json": own[0].get("quantization_config")}
    beside |= {f"{name}.json": own[1].get("files", {}).get(name) for name in ("quantization_config",)}
    for name, here in beside.items():
        if table and here and here != table:
            raise ConflictError(
                f"Cannot use config={_shown(given)} for {path}",
                f"its own {name} has another quantization_config",
                f"Leave config out, or correct the {name}",
            )
    whole = {**own[0], **config}
    return whole, _settings(
        whole, {key: rows for key, rows in own[1].get("files", {}).items() if key != "config"}, path
    )


def _config_of(given: Given) -> dict[str, Any]:
    """Return a model's config, of which there may be nothing but a `quantization_config`."""
    if not isinstance(given, (Mapping, str, Path)):
        raise _strange(given, "it is neither a mapping nor the path of a JSON file")
    config = dict(given) if isinstance(given, Mapping) else folders.read_json(Path(given).expanduser())
    if not config:
        raise _strange(given, "it is empty")
    if not config.keys() & {"quantization_config", "_class_name", "architectures"}:
        config = {"quantization_config": config}
    if not isinstance(config.get("quantization_config", {}), Mapping):
        raise _strange(given, "its quantization_config is not a table")
    return config


def _strange(given: object, why: str) -> SettingsError:
    return SettingsError(
        f"Cannot use config={_shown(given)}", why, "Pass a quantization_config, or the config.json of the model"
    )


def _shown(given: object) -> str:
    text = str(given) if isinstance(given, (str, Path)) else repr(given)
    return text if len(text) <= 80 else text[:77] + "..."


def _settings(config: Mapping[str, Any], beside: Mapping[str, Any], place: Path) -> dict[str, Any]:
    quantization = config.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        file = place / "config.json" if place.is_dir() else place
        raise BadFileError(f"Cannot read {file}", "its quantization_config is not a table", "Check the file")
    files = {"config": config, **beside}
    side: dict[str, Any] = {"quantization_config": quantization}
    side |= {_SIDE[name]: table for name, table in files.items() if name in _SIDE}
    return {**side, "files": files}


def _json_in(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    return folders.read_json(folders.inside(path, folder)) if path.exists() else None
