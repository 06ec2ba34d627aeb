"""Text encoders in files of their own: their type, and which of a pipeline's text encoders they replace. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .model_families import LANGUAGE_PREFIXES

if TYPE_CHECKING:
    from ..core import TensorInfo
    from .checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family of text encoders (`model_families`).

    Attributes:
        title: what it is called. classes: what the names of its classes in transformers contain, and no others'.
    """

    title: str
    classes: re.Pattern[str]


def _kind(title: str, classes: str) -> Kind:
    return Kind(title, re.compile(classes))


KINDS: Mapping[str, Kind] = {
    "clip": _kind("CLIP", r"CLIP(?!Vision)"),
    "t5": _kind("T5", r"T5(?!Gemma)"),  # UMT5 too, of which one block looks like T5's
    "umt5": _kind("UMT5", r"UMT5"),
    "qwen2.5-vl": _kind("Qwen2.5-VL", r"^Qwen2_5_VL"),
    "qwen2-vl": _kind("Qwen2-VL", r"^Qwen2VL"),
    "qwen2": _kind("Qwen2", r"^Qwen2"),  # those that see too, for a file without their vision, which the load refuses
    "qwen3-vl": _kind("Qwen3-VL", r"^Qwen3VL"),
    "qwen3": _kind("Qwen3", r"^Qwen3(VL|[A-Z])"),
    "gemma2": _kind("Gemma 2", r"^Gemma2"),
    "gemma3": _kind("Gemma 3", r"^Gemma3"),
    "gemma4": _kind("Gemma 4", r"^Gemma4"),
    "llama": _kind("Llama or Mistral", r"^(Llama|Llava|Mistral|Ministral|SmolLM3|Gemma[A-Z])"),
}

Sizes = tuple[int | None, int | None]  # width, layers; None where nothing tells

# Tensors that files have and a text encoder has no place for, by its class: constants that transformers computes, the
# other half of the model that the encoder was taken from, the head of a language model that is asked for no words.
_SPARE: Mapping[re.Pattern[str], re.Pattern[str]] = {
    re.compile(of): re.compile(names)
    for of, names in (
        ("CLIPTextModel", r"(^|\.)position_ids$|^logit_scale$|^vision_model\.|^visual_projection\."),
        ("T5EncoderModel", r"^decoder\.|^lm_head\."),
        (r"^(Qwen|Gemma|Llama|Mistral|Ministral)\w*Model$", r"^(language_model\.)?lm_head\."),
    )
}
# A tokenizer's own file as bytes, by which ComfyUI makes one; pipelines have theirs in a folder.
_TOKENIZER = re.compile(r"^(\w+\.)?(\w+_)?(spiece_model|tekken_model|tokenizer_json)$")
_PROJECTION = "text_projection.weight"
_TABLE, _ALIAS = "shared.weight", "encoder.embed_tokens.weight"  # one and the same

_LAYER = re.compile(r"encoder\.(?:layers|block)\.(\d+)\.|^(?:model\.)?transformer\.resblocks\.(\d+)\.")
_LANGUAGE_LAYER = re.compile(
    rf"(?:{'|'.join(map(re.escape, LANGUAGE_PREFIXES))})layers\.(\d+)\.input_layernorm\.weight"
)
# As wide as the model, and in no format more than a vector.
_NORM = re.compile(r"(?:^|\.)final_layer_norm\.weight$|^(?:model\.)?ln_final\.weight$")
_WIDTH, _DEPTH = ("hidden_size", "d_model"), ("num_hidden_layers", "num_layers")


def sizes(tensors: Mapping[str, TensorInfo]) -> Sizes:
    """Return the width and number of layers by a file's tensors."""
    norms = {match[1]: info for name, info in tensors.items() if (match := _LANGUAGE_LAYER.fullmatch(name))}
    if norms:
        return next((info.shape[0] for info in norms.values() if info.shape), None), len(norms)
    width = next((info.shape[0] for name, info in tensors.items() if _NORM.search(name) and info.shape), None)
    layers = {match[1] or match[2] for name in tensors if (match := _LAYER.search(name))}
    return width, len(layers) or None


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Return the width and number of layers by a config; of the language model in one that sees as well."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else {}
    width, layers = _first(config, _WIDTH), _first(config, _DEPTH)
    return _first(inner, _WIDTH) if width is None else width, _first(inner, _DEPTH) if layers is None else layers


def describe_encoder(sizes: Sizes) -> str:
    """Return the sizes in words."""
    width, layers = sizes
    return f"width {width or 'unknown'} and {layers or 'an unknown number of'} layers"


def tokenizers(names: Iterable[str]) -> list[str]:
    """Return the tensors of a file that are a tokenizer and no weights."""
    return sorted(name for name in names if _TOKENIZER.fullmatch(name))


def tidied(src: Checkpoint) -> Checkpoint:
    """Return the source without tensors that a text encoder does not use, or has twice; other models unchanged."""
    kind = str(src.class_name)
    if src.library != "transformers":
        return src
    spare = set(tokenizers(src.names))
    for of, pattern in _SPARE.items():
        if of.search(kind):
            spare |= {name for name in src.names if pattern.search(name)}
    spare |= {_PROJECTION} & src.names if kind == "CLIPTextModel" else set()
    spare |= {_ALIAS} if "T5EncoderModel" in kind and {_TABLE, _ALIAS} <= src.names else set()
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
