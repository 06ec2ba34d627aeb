"""Text encoders in files of their own: their type, and which of a pipeline's text encoders they replace. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core import TensorInfo
    from .checkpoint import Checkpoint

# The families of text encoders (`families`), and the word that the names of their classes have in common.
KINDS: Mapping[str, str] = {"clip": "CLIP", "t5": "T5"}

Sizes = tuple[int | None, int | None]  # width, layers; None where nothing tells

# Tensors that files have and a text encoder has no place for, by a word of its class: constants that transformers
# computes, the other half of the model that the encoder was taken from, and a tokenizer.
_SPARE: Mapping[str, re.Pattern[str]] = {
    "CLIPTextModel": re.compile(r"(^|\.)position_ids$|^logit_scale$|^vision_model\.|^visual_projection\."),
    "T5EncoderModel": re.compile(r"^decoder\.|^lm_head\.|^spiece_model$"),
}
_PROJECTION = "text_projection.weight"
_TABLE, _ALIAS = "shared.weight", "encoder.embed_tokens.weight"  # one and the same

_LAYER = re.compile(r"encoder\.(?:layers|block)\.(\d+)\.")
_NORM = re.compile(r"(?:^|\.)final_layer_norm\.weight$")  # as wide as the model, and in no format more than a vector
_WIDTH, _DEPTH = ("hidden_size", "d_model"), ("num_hidden_layers", "num_layers")


def sizes(tensors: Mapping[str, TensorInfo]) -> Sizes:
    """Return the width and number of layers by a file's tensors."""
    width = next((info.shape[0] for name, info in tensors.items() if _NORM.search(name) and info.shape), None)
    layers = {match[1] for name in tensors if (match := _LAYER.search(name))}
    return width, len(layers) or None


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Return the width and number of layers by a config."""
    return _first(config, _WIDTH), _first(config, _DEPTH)


def describe_encoder(sizes: Sizes) -> str:
    """Return the sizes in words."""
    width, layers = sizes
    return f"width {width or 'unknown'} and {layers or 'an unknown number of'} layers"


def tidied(src: Checkpoint) -> Checkpoint:
    """Return the source without tensors that a text encoder does not use, or has twice; other models unchanged."""
    kind = str(src.class_name)
    pattern = next((pattern for word, pattern in _SPARE.items() if word in kind), None)
    if pattern is None:
        return src
    spare = {name for name in src.names if pattern.search(name)}
    spare |= {_PROJECTION} & src.names if kind == "CLIPTextModel" else set()
    spare |= {_ALIAS} if {_TABLE, _ALIAS} <= src.names else set()
    if not spare:
        return src
    gone = {
        key
        for name in spare & set(src.prequantized)
        for key in (*src.prequantized[name].keys.values(), *src.prequantized[name].extra)
    }
    gone |= spare - set(src.prequantized)
    return dataclasses.replace(
        src,
        tensors={key: info for key, info in src.tensors.items() if key not in gone},
        prequantized={name: weight for name, weight in src.prequantized.items() if name not in spare},
    )


def _first(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    return next((value for name in names if isinstance(value := config.get(name), int)), None)
