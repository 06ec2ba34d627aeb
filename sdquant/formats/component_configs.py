"""A component's config.json and the JSON files beside it that say how its weights are quantized. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import BadFileError, ConflictError, SettingsError
from ..utils import strict_json
from ..utils.home_paths import with_home
from . import folders, quantization_methods
from .method_names import GIVEN

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
_TABLE = r"\{[^{}]*\}"
for _ in range(3):  # tables in tables, which Python's expressions do not follow to any depth
    _TABLE = rf"\{{(?:[^{{}}]|{_TABLE})*\}}"
NAMED = rf"\bconfig=({_TABLE})"  # in a sentence of an error
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
        given: a `quantization_config`, a model's config, with one in it or without, or JSON of one of these: a file, or
            text. What it says beside what the files say is added to that.

    Raises:
        ConflictError: the files say otherwise. SettingsError: `given` is no config.
    """
    config = config_of(given)
    table = dict(config.get("quantization_config") or {})
    files = own[1].get("files", {})
    beside = {"config.json": own[0].get("quantization_config")}
    beside |= {f"{name}.json": files.get(name) for name in ("quantization_config",)}
    for name, here in beside.items():
        if isinstance(here, Mapping) and any(here.get(key, value) != value for key, value in table.items()):
            raise ConflictError(
                f"Cannot use config={_shown(given)} for {path}",
                f"its own {name} has another quantization_config",
                f"Leave config out, or correct the {name}",
            )
    old = own[0].get("quantization_config")
    table = {**old, **table} if isinstance(old, Mapping) else table
    whole = {**own[0], **config, **({"quantization_config": table} if table else {})}
    others = {key: rows for key, rows in files.items() if key != "config"}
    settings = _settings(whole, others, path)
    return whole, {**settings, "files": {GIVEN: whole, **others}} if config.get("quantization_config") else settings


def in_words_of_files(text: str) -> str:
    """Return a sentence of an error with a file instead of the argument `config`, where nobody can pass one."""

    def beside(match: re.Match[str]) -> str:
        inner = match[1].replace(": True", ": true").replace(": False", ": false")
        return f'{{"quantization_config": {inner}}} in a config.json beside the file (alone in a folder)'

    return re.sub(NAMED, beside, text)


def refuse_for_pipeline(place: Path, given: Given | None) -> None:
    """Raise SettingsError if there is a config from the caller, for a pipeline folder."""
    if given is not None:
        raise SettingsError(
            f"Cannot use config={_shown(given)} for {place}",
            "it is a pipeline, each of whose components has a config of its own",
            "Pass the folder or file of one component (to load it, with the pipeline as base=)",
        )


def config_of(given: Given) -> dict[str, Any]:
    """Return a model's config, of which there may be nothing but a `quantization_config`.

    Raises:
        SettingsError: `given` is none. BadFileError: a file that cannot be read.
    """
    if not isinstance(given, (Mapping, str, Path)) or not given:
        raise _strange(given, "it is neither a mapping nor the path of a JSON file")
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            return config_of(strict_json.parse(given))
        except ValueError as error:
            raise _strange(given, f"it is not JSON: {error}") from error
    if not isinstance(given, Mapping) and (place := Path(with_home(given))).is_dir():
        raise SettingsError(
            f"Cannot use config={_shown(given)}", "it is a folder", f"Use base={place} if it is the pipeline, or "
            "the config.json in it"
        )  # fmt: skip
    config = dict(given) if isinstance(given, Mapping) else folders.read_json(Path(with_home(given)))
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
    return folders.read_json(folders.inside(path, folder)) if os.path.lexists(path) else None
