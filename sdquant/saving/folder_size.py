"""Bytes of a model's folder beside its weights' own, at most, before a mix for it is chosen: `size=` is of the files.

Of a small model they are a percent or two: headers, which name each weight's scheme, configs, and tokenizers. Files of
the source that `save` does not write (pictures, weights in formats of others) are none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import PackedSpec, registry
from ..formats import folders
from ..models import file_tokenizers, fitting
from . import comfyui_refusal
from .model_files import config_of

if TYPE_CHECKING:
    from ..formats import Checkpoint

_TENSOR = 52  # bytes of a tensor's entry in the header beside its name, shape and two offsets
_SCHEME = 420  # of a weight that may be quantized: its scheme, and more entries, of scales and zero points
_NAMES = 5  # times that its name is written, besides in its own entry
_COMPONENT = 512  # of what its config and its header say beside its own values and tensors
_FILE = 1024  # what a config grows by when its library writes it again: values that were left out as usual ones
_VOCABULARY = 4  # times the size of a tokenizer of other files is its tokenizer.json, which libraries write beside them
_WHOLE = "tokenizer.json"
_JOINED = re.compile(rb'"merges"\s*:\s*\[\s*"')  # of a tokenizer.json of before tokenizers 0.20


def bytes_beside(sources: Mapping[str, Checkpoint], quantized: Container[str], folder: str | Path) -> int:
    """Return the bytes, at most.

    Args:
        sources: the components. quantized: the names of those that get schemes.
        folder: the pipeline's, which has the tokenizers; anything else for a component by itself.
    """
    parts = sum(_of_component(src, name in quantized) for name, src in sources.items())
    is_pipeline = (Path(folder) / "model_index.json").is_file()
    return parts + (_of_pipeline(Path(folder), sources) if is_pipeline else 0)


def _of_component(src: Checkpoint, is_quantized: bool) -> int:
    """Return the bytes of its config, of which there are two, and of its header."""
    digits = 2 * len(str(src.weight_bytes))
    entries = sum(len(json.dumps(name)) + len(str(info.shape)) + digits + _TENSOR for name, info in src.tensors.items())
    model = fitting.shell(src)
    config = json.dumps(dict(src.config) if model is None else config_of(model.model), indent=2, default=str)
    matrices = [name for name, info in src.tensors.items() if is_quantized and len(info.shape) > 1]
    return (
        _COMPONENT + len(config) + len(json.dumps(config)) + entries + _of_schemes(src, {*src.prequantized, *matrices})
    )


def _of_schemes(src: Checkpoint, names: Collection[str]) -> int:
    """Return the bytes of what is said of weights that have schemes."""
    some = PackedSpec(scheme=registry.scheme("q8_0"), shape=(1,), dtype="bfloat16", details={})
    rows = dict.fromkeys(names, some)
    refusal = comfyui_refusal.refusal(rows, src.names, (), is_text_encoder=src.library == "transformers")
    return sum(_NAMES * len(json.dumps(name)) + _SCHEME for name in names) + len(json.dumps(refusal))


def _of_pipeline(place: Path, sources: Mapping[str, Checkpoint]) -> int:
    """Return the bytes of what a pipeline has beside the components: its index, the scheduler, and tokenizers."""
    index = place / "model_index.json"
    total = index.stat().st_size + _FILE
    for name in folders.named_parts(folders.read_json(index)):
        home = place / name
        if name not in sources and home.is_dir():
            total += _of_part(home)
    return total + _VOCABULARY * file_tokenizers.bytes_of(place, sources)


def _of_part(home: Path) -> int:
    weights = (*folders.WEIGHTS, *folders.PICKLES)
    files = [path for path in home.iterdir() if path.is_file() and path.suffix not in weights]
    total = sum(path.stat().st_size + _FILE for path in files)
    whole = home / _WHOLE
    if whole.exists():
        return total + (_growth(whole) - 1) * whole.stat().st_size
    return total + (_VOCABULARY * total if "tokenizer" in home.name else 0)


def _growth(whole: Path) -> int:
    """Return how many times as large a tokenizer.json is, at most, that its library writes again: with a line for each
    value, and for each half of a merge, of which earlier versions made one text."""
    text = whole.read_bytes()
    if text.count(b"\n") < len(text) // 1000:
        return _VOCABULARY
    return 2 if _JOINED.search(text) else 1
