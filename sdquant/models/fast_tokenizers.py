"""Tokenizers whose only file, tokenizer.json, the class that their pipeline names does not read.

transformers 5 saves no other file. In transformers 4 each tokenizer has two classes: CLIPTokenizer reads vocab.json and
merges.txt, and CLIPTokenizerFast tokenizer.json, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import libraries

_FILE = "tokenizer.json"


def reader(cls: Any, folder: Path, index: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """Return the pipeline class, or an heir of it that reads other classes of tokenizers out of model_index.json.

    Set `__class__` of what its `from_pretrained` returns back to `cls`.

    Args:
        index: what the folder's model_index.json says. others: tokenizers that are not read from the folder.
    """
    rows = {
        name: [row[0], f"{row[1]}Fast"]
        for name, row in index.items()
        if isinstance(row, list) and len(row) == 2 and _needs_other(row[1], folder / name, others.get(name))
    }
    if not rows:
        return cls

    def load_config(kind: Any, *args: Any, **kwargs: Any) -> Any:
        config = super(heir, kind).load_config(*args, **kwargs)
        return {**config, **rows} if isinstance(config, dict) else config

    heir: Any = type(cls.__name__, (cls,), {"load_config": classmethod(load_config)})
    return heir


def _needs_other(class_name: Any, folder: Path, other: Any) -> bool:
    """Return whether a tokenizer has to be of the second class."""
    transformers = libraries.transformers()
    kind = getattr(transformers, str(class_name), None)
    if not isinstance(kind, type) or not hasattr(transformers, f"{class_name}Fast"):
        return False
    is_empty = "_backends" in vars(kind)  # it stands for a class whose library, sentencepiece, is not installed
    files = {} if is_empty else getattr(kind, "vocab_files_names", {"any": _FILE})
    if _FILE in files.values():
        return False
    if other is not None:
        return is_empty or not isinstance(other, kind)
    return (folder / _FILE).is_file() and not any((folder / file).is_file() for file in files.values())
