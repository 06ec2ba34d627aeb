"""Bytes of a model's folder beside its weights' own, at most, before a mix for it is chosen: `size=` is of the files.

Of a small model they are a few percent: headers, which name each weight's scheme, configs, and tokenizers. Files of
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
from ..planning import BytesBeside, folder_of, mix_pool
from ..rules import MixSpec
from . import comfyui_refusal, header_bytes
from .model_files import config_of, keys_of

if TYPE_CHECKING:
    from ..formats import Checkpoint
    from ..planning import Plan

_SCHEME = 420  # of a weight in any scheme: what is said of it, and the entries of its tensors, beside its names
_NAMES = 6  # times that its name is written
_COMPONENT = 512  # of what its config and its header say beside its own values and tensors
_FILE = 1024  # what a config grows by when its library writes it again: values that were left out as usual ones
_VOCABULARY = 4  # times the size of a tokenizer of other files is its tokenizer.json, which libraries write beside them
_WHOLE = "tokenizer.json"
_JOINED = re.compile(rb'"merges"\s*:\s*\[\s*"')  # of a tokenizer.json of before tokenizers 0.20


def bytes_beside(
    sources: Mapping[str, Checkpoint], schemes: Mapping[str, Mapping[str, Collection[str]]], folder: str | Path
) -> BytesBeside:
    """Return the bytes, at most: of the whole folder, and of each weight by its scheme.

    Args:
        sources: the components. schemes: of their weights that a scheme is chosen for, those there are to choose from.
        folder: the pipeline's, which has the tokenizers; anything else for a component by itself.
    """
    parts = {name: _of_component(name, src, schemes.get(name, {})) for name, src in sources.items()}
    is_pipeline = (Path(folder) / "model_index.json").is_file()
    rest = _of_pipeline(Path(folder), sources) if is_pipeline else 0
    return BytesBeside(
        fixed=rest + sum(part.fixed for part in parts.values()),
        by_scheme={name: part.by_scheme[name] for name, part in parts.items() if name in schemes},
    )


def foreseen_beside(plan: Plan) -> int:
    """Return the bytes of the folder of a plan, at most."""
    schemes = {
        part.name: {
            share.name: (mix_pool.FLOAT if share.spec is None else f"{share.spec}",) for share in part.spec.shares
        }
        for part in plan.components
        if isinstance(part.spec, MixSpec)
    }
    beside = bytes_beside(plan.detected.sources, schemes, folder_of(plan))
    of_weights = (nbytes for part in beside.by_scheme.values() for row in part.values() for nbytes in row.values())
    return beside.fixed + sum(of_weights)


def most_beside(sources: Mapping[str, Checkpoint], quantized: Container[str], folder: str | Path) -> int:
    """Return the bytes whatever schemes are chosen, of components with these names."""
    names = [
        key
        for name, src in sources.items()
        for key, info in src.tensors.items()
        if name in quantized and len(info.shape) > 1
    ]
    return bytes_beside(sources, {}, folder).fixed + sum(map(_of_any_scheme, names))


def _of_any_scheme(key: str) -> int:
    return _NAMES * len(json.dumps(key)) + _SCHEME


def _of_component(name: str, src: Checkpoint, schemes: Mapping[str, Collection[str]]) -> BytesBeside:
    """Return the bytes of its config, of which there are two, and of its header."""
    model, offset = fitting.shell(src), src.weight_bytes
    config = json.dumps(dict(src.config) if model is None else config_of(model.model), indent=2, default=str)
    keys = {} if model is None else keys_of(model.model)
    fixed = _COMPONENT + len(config) + len(json.dumps(config))
    by_scheme: dict[str, dict[str, int]] = {}
    for weight, info in src.tensors.items():
        key = max(weight, keys.get(weight, weight), key=len)
        if weight in schemes:
            by_scheme[weight] = {word: _of_weight(key, info.shape, word, offset) for word in schemes[weight]}
            continue
        fixed += header_bytes.of_float(key, info.shape, offset)
        if schemes and len(info.shape) > 1:
            fixed += header_bytes.in_config(key)
        if weight in src.prequantized:
            fixed += _of_any_scheme(key)
    return BytesBeside(fixed=fixed + _of_refusal(src, {*src.prequantized, *schemes}), by_scheme={name: by_scheme})


def _of_weight(key: str, shape: tuple[int, ...], scheme: str, offset: int) -> int:
    if scheme == mix_pool.FLOAT:
        return header_bytes.of_float(key, shape, offset) + header_bytes.in_config(key)
    return header_bytes.of_scheme(key, shape, scheme, offset)


def _of_refusal(src: Checkpoint, names: Collection[str]) -> int:
    """Return the bytes of what keeps ComfyUI from loading a file of these weights."""
    some = PackedSpec(scheme=registry.scheme("q8_0"), shape=(1,), dtype="bfloat16", details={})
    rows = dict.fromkeys(names, some)
    refusal = comfyui_refusal.refusal(rows, src.names, (), is_text_encoder=src.library == "transformers")
    return len(json.dumps(refusal))


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
