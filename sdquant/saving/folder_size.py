"""Bytes of a model's folder beside its weights' own, at most, before a mix for it is chosen: `size=` is of the files.

Of a small model they are a percent or two: headers, which name each weight's scheme, configs, and tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .export_gguf import files_in
from .float_configs import is_of_weights

if TYPE_CHECKING:
    from ..formats import Checkpoint

_TENSOR = 110  # bytes of a tensor's entry in the header beside its name
_SCHEME = 420  # of a weight that may be quantized: its scheme, and more entries, of scales and zero points
_NAMES = 5  # times that its name is written, besides in its own entry
_COMPONENT = 2048  # of its config beside what the source's says, and of its header beside what it says of tensors
_FILE = 256  # what a config grows by when its library writes it again
_VOCABULARY = 4  # times the size of a tokenizer of other files is its tokenizer.json, which libraries write beside them
_WHOLE = "tokenizer.json"


def bytes_beside(sources: Mapping[str, Checkpoint], places: Sequence[str | None]) -> int:
    """Return the bytes, at most.

    Args:
        sources: the components. places: the model's folder or file, and the base's.
    """
    homes = {src.path for src in sources.values()}
    return sum(map(_of_component, sources.values())) + sum(
        _of_folder(Path(place), homes) for place in places if place is not None and Path(place).is_dir()
    )


def _of_component(src: Checkpoint) -> int:
    entries = sum(len(json.dumps(name)) + _TENSOR for name in src.tensors)
    schemes = sum(_NAMES * len(json.dumps(name)) + _SCHEME for name, info in src.tensors.items() if len(info.shape) > 1)
    return _COMPONENT + 3 * len(json.dumps(dict(src.config), default=str)) + entries + schemes


def _of_folder(place: Path, homes: set[Path]) -> int:
    """Return the bytes of its files that are no weights."""
    files = [place / path for path in files_in(place) if not is_of_weights(place / path, {place, *homes})]
    total = sum(path.stat().st_size + _FILE for path in files)
    for home in {path.parent for path in files if "tokenizer" in path.parent.name}:
        if not (home / _WHOLE).exists():
            total += _VOCABULARY * sum(path.stat().st_size for path in files if path.parent == home)
    return total
