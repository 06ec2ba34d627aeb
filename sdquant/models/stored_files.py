"""The components in a file or folder as they are stored: of any kind, whether sdquant could load it or not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends import gguf
from ..core import LONE, registry
from ..errors import BadFileError, MissingComponentError, UnsupportedFileError
from ..formats import checkpoint, component_configs, folders
from ..utils.home_paths import with_home

if TYPE_CHECKING:
    from ..formats import Checkpoint, Given

_INDEX = "model_index.json"


def stored_components(
    path: str | Path, *, config: Given | None = None, allow_pickle: bool = False, variant: str | None = None
) -> dict[str, Checkpoint]:
    """Return the components with weights in a pipeline folder, or the only one in a component's folder or a file.

    Unlike `detect` it asks neither for a known model nor for one that can be loaded: text encoders in GGUF, LoRAs and
    single shards are components, too.

    Args:
        config: the quantization_config of a component that has none; see `formats.component_configs`.
        allow_pickle, variant: see `detect`.

    Raises:
        MissingComponentError: there is nothing. BadFileError: a damaged file. UnsupportedFileError: it is quantized in
            a way that sdquant does not read. SettingsError: a config for a whole pipeline.
    """
    place = Path(with_home(path))
    try:
        sources = _components(place, config=config, allow_pickle=allow_pickle, variant=variant)
    except OSError as error:
        raise BadFileError(f"Cannot read {path}", str(error), "Check the path") from error
    there = {name for src in sources.values() for name in (src.variant, *src.variants)}
    if variant is not None and variant not in there:
        raise folders.no_variant(str(path), variant, there)
    for src in sources.values():
        _refuse_undecodable(src)
    return sources


def _components(place: Path, *, config: Given | None, allow_pickle: bool, variant: str | None) -> dict[str, Checkpoint]:
    if not (place.exists() or place.is_symlink()):
        raise MissingComponentError(f"Cannot read {place}", "there is no such file or folder", "Check the path")
    if not place.is_dir():
        return {LONE: checkpoint.single_file(place, allow_pickle=allow_pickle, given=config)}
    index = place / _INDEX
    if not os.path.lexists(index):
        src = checkpoint.component_folder(place, allow_pickle=allow_pickle, variant=variant, given=config)
        return {LONE: src}
    component_configs.refuse_for_pipeline(place, config)
    contents = folders.read_json(folders.inside(index, place))
    sources = {
        name: checkpoint.as_named(
            checkpoint.component_folder(folder, allow_pickle=allow_pickle, variant=variant), contents[name]
        )
        for name, folder in folders.pipeline_parts(place, contents).items()
    }
    if not sources:
        raise MissingComponentError(
            f"Cannot read {place}", f"its {_INDEX} names no component with weights", "Check that the folder is complete"
        )
    return sources


def _refuse_undecodable(src: Checkpoint) -> None:
    """Raise UnsupportedFileError for tensors in types of GGUF that are not decoded here."""
    unknown = gguf.undecodable(src.tensors) if src.container == "gguf" else {}
    if unknown:
        raise UnsupportedFileError(
            f"Cannot read {src.path}",
            "it has tensors in types that this version cannot dequantize: "
            + ", ".join(f"{kind} ({len(names)})" for kind, names in unknown.items()),
            "Use a file of the same model in one of these types: "
            + ", ".join(row.name for row in registry.get("gguf").schemes if row.group),
        )
