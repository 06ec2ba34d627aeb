"""Configs of components whose weights are dequantized, and the files that belong to the old weights."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

from ..formats import SIDE_FILES, folders, without_quantization

if TYPE_CHECKING:
    from ..formats import Checkpoint

_DTYPES = ("dtype", "torch_dtype")  # of transformers' configs


def is_of_weights(path: Path, homes: Container[Path]) -> bool:
    """Return whether a file is weights, their index, or about their quantization.

    Args:
        homes: the folders of components; files elsewhere are none of these.
    """
    if path.parent not in homes:
        return False
    is_index = path.name.endswith(".json") and ".index" in path.name
    is_beside = path.suffix == ".json" and path.stem in SIDE_FILES
    return is_index or is_beside or path.suffix.lower() in (*folders.WEIGHTS, *folders.PICKLES)


def write_config(home: Path, src: Checkpoint, dtype: str | None = None) -> None:
    """Write a component's config.json without what it says of quantization, if it has a config.

    Args:
        home: the component's new folder, into which its config.json may have been copied. dtype: that it names.
    """
    path = home / "config.json"
    config = without_quantization(folders.read_json(path) if path.exists() else src.config)
    if not config:
        return
    if dtype is not None:
        config |= {key: dtype for key in _DTYPES if key in config}
    path.unlink(missing_ok=True)  # it has the permissions of the file that it is a copy of
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
