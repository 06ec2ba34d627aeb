"""Text encoders in files that hold less than the pipeline's model, such as a language model without its vision.

ComfyUI's file of Mistral Small for FLUX.2 has the 30 layers of 40 that FLUX.2 reads, and neither the norm after them,
nor the head, nor the vision; others lack the head, which only writes words. A class of transformers that has no more
than the file takes the place of the pipeline's: it encodes text alike, and has no `generate` that could be called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core import FLOATS, TensorInfo, dtype_name, dtype_named
from ..errors import UnsupportedFileError
from ..formats import main_dtype, model_families, text_encoders

if TYPE_CHECKING:
    from ..formats import Checkpoint

# Models that see, whose pipelines ask them for text alone unless a prompt is to be written anew -> the type of the
# language model in them if its config does not say so.
_TEXT_SUFFICES: Mapping[str, str] = {
    "Mistral3ForConditionalGeneration": "mistral",
    "Gemma3ForConditionalGeneration": "gemma3_text",
}
# Language models by the type that their configs say: the class, and whether a file may lack the last layers. That is
# for pipelines that read layers by their numbers: FLUX.2 reads 10, 20 and 30 of Mistral's.
_CLASSES: Mapping[str, tuple[str, bool]] = {
    "mistral": ("MistralModel", True),
    "ministral3": ("Ministral3Model", False),
    "gemma3_text": ("Gemma3TextModel", False),
}
# Models that pipelines show pictures to, and whose vision llama.cpp's files have in another file.
_SEEING = re.compile(r"(Qwen(2VL|2_5_VL|3VL)|Llava)(Model|ForConditionalGeneration)")
_VISUAL = re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
_EYE = re.compile(r"vision_tower\.vision_model\.encoder\.layers\.\d+\.layer_norm1\.weight")
_BLIND = "without_vision"  # see the module of that name, which imports torch
_VISION = ("vision_model.", "vision_tower.", "model.vision_tower.")
_NORM = "norm.weight"
# Without which transformers puts the output after the norm in the place of the last layer's.
_RAW = "tie_last_hidden_states"
_HEEDS_RAW = "5.20"  # from which on transformers reads it; 5.16 does not


def owner_for(lone: Checkpoint, owner: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return the component of a pipeline with the class and config that a file has weights for, and what it lacks.

    Args:
        lone: the file. owner: the component that it replaces; returned as it is if the file has all of it, or has a
            config of its own, or lacks what there is no smaller class for.
    """
    if lone.config or not owner.config:
        return owner, ()
    if _BLIND in owner.config:  # what was saved so may be given its vision again
        owner = replace(owner, config={key: value for key, value in owner.config.items() if key != _BLIND})
    smaller, remarks = _smaller(lone, owner)
    return _with_rows(lone, _with_eyes(lone, smaller)), remarks


def reduced(src: Checkpoint) -> Checkpoint:
    """Return a folder's text encoder with the class and config that its file has weights for; see `owner_for`. Other
    components, and weights in several files, of which one may be missing, are returned as they are."""
    one_file = len(src.files) == 1 or src.container == "gguf"
    if src.library != "transformers" or not one_file or text_encoders.sizes(src.tensors)[1] is None:
        return src
    owner, remarks = owner_for(replace(src, config={}), src)
    if owner is src:
        return src
    smaller = replace(src, config=owner.config, class_name=owner.class_name, warnings=(*src.warnings, *remarks))
    return with_norm(smaller)


def _smaller(lone: Checkpoint, owner: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    kind = str(owner.class_name)
    if _SEEING.fullmatch(kind) and not _vision_in(lone):
        return _blind(lone, owner)
    if kind in _TEXT_SUFFICES and not any(name.startswith(_VISION) for name in lone.names):
        return _text_only(lone, owner, _TEXT_SUFFICES[kind])
    layers = text_encoders.sizes(lone.tensors)[1]
    headless = not any(name.endswith("lm_head.weight") for name in lone.names)
    if kind.endswith("ForCausalLM") and layers and headless and not owner.config.get("tie_word_embeddings", False):
        smaller = replace(owner, class_name=kind.removesuffix("ForCausalLM") + "Model")
        return smaller, (f"{lone.path} has no lm_head: it encodes text, and writes none",)
    return owner, ()


def with_vision_of(lone: Checkpoint, owner: Checkpoint) -> Checkpoint:
    """Return a file of a language model with the vision of the component that it replaces, if that sees and the file
    does not, and if the component has its weights."""
    if lone.config or not _SEEING.fullmatch(str(owner.class_name)) or _vision_in(lone):
        return lone
    names = _vision_in(owner)
    if not names:
        return lone
    packs = {name: owner.prequantized[name] for name in names if name in owner.prequantized}
    keys = {key for pack in packs.values() for key in (*pack.keys.values(), *pack.extra)} | (names - packs.keys())
    files = tuple(dict.fromkeys(owner.home[key] for key in sorted(keys)))
    return replace(
        lone,
        files=(*lone.files, *files),
        tensors={**lone.tensors, **{key: info for key, info in owner.tensors.items() if key in keys}},
        home={**lone.home, **{key: owner.home[key] for key in keys}},
        prequantized={**lone.prequantized, **packs},
        specs={**lone.specs, **{name: owner.specs[name] for name in packs if name in owner.specs}},
        keys={**lone.keys, **{key: own for key, own in owner.keys.items() if key in keys}},
        recipes={**lone.recipes, **{key: recipe for key, recipe in owner.recipes.items() if key in keys}},
        headers={**lone.headers, **{file: owner.headers[file] for file in files if file in owner.headers}},
    )


def _vision_in(src: Checkpoint) -> frozenset[str]:
    return frozenset(name for name in src.names if _VISUAL.match(name))


def _blind(lone: Checkpoint, owner: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    fix = "use a base or a file of the whole model"
    if lone.container == "gguf" and str(owner.class_name).startswith("Qwen"):
        fix = "put the file with mmproj in its name beside it, or pass it as a further part"
    remark = f"{lone.path} is a {owner.class_name} without its vision: it encodes text. To show it pictures, {fix}"
    return replace(owner, config={**owner.config, _BLIND: True}), (remark,)


def _text_only(lone: Checkpoint, owner: Checkpoint, default: str) -> tuple[Checkpoint, tuple[str, ...]]:
    table = owner.config.get("text_config") or {}
    if not isinstance(table, dict):
        return owner, ()
    config = dict(table)
    name, prunable = _CLASSES.get(str(config.get("model_type", default)), (None, False))
    if name is None:
        return owner, ()
    lacks = "its vision"
    layers, whole = text_encoders.sizes(lone.tensors)[1], text_encoders.sizes_of(config)[1]
    if prunable and layers and whole and layers < whole and not _has_norm(lone):
        _refuse_old_transformers(lone)
        lacks += f" and its last {whole - layers} layers" if whole - layers > 1 else " and its last layer"
        config |= {"num_hidden_layers": layers, _RAW: False}
        if isinstance(config.get("layer_types"), list):
            config["layer_types"] = config["layer_types"][:layers]
    smaller = replace(owner, class_name=name, config=config)
    return smaller, (f"{lone.path} is a {owner.class_name} without {lacks}: it encodes text, and writes none",)


def _with_rows(lone: Checkpoint, owner: Checkpoint) -> Checkpoint:
    """Return the owner with as many tokens as a GGUF file of Gemma 3 has: llama.cpp leaves those out that its tokenizer
    has not, 64 of 262208."""
    name = next((name for name in lone.names if name.endswith("embed_tokens.weight")), None)
    if name is None or lone.container != "gguf" or not str(owner.class_name).startswith("Gemma3"):
        return owner
    packed = lone.prequantized.get(name)
    rows = (lone.tensors[name].shape if packed is None else packed.details["shape"])[0]
    inner = owner.config.get("text_config")
    table = inner if isinstance(inner, dict) else owner.config
    if not isinstance(table.get("vocab_size"), int) or rows >= table["vocab_size"]:
        return owner
    smaller = {**table, "vocab_size": rows}
    return replace(owner, config={**owner.config, "text_config": smaller} if table is inner else smaller)


def _with_eyes(lone: Checkpoint, owner: Checkpoint) -> Checkpoint:
    """Return the owner with as much of a vision as a GGUF file has: llama.cpp's leave out what is not read, the last
    layer of LLaVA's and the head of Gemma 3's."""
    config, eyes = dict(owner.config), owner.config.get("vision_config")
    layers = sum(bool(_EYE.fullmatch(name)) for name in lone.names)
    if lone.container != "gguf" or not layers or not isinstance(eyes, dict):
        return owner
    if "Gemma3" in str(owner.class_name):
        config["vision_config"] = {**eyes, "vision_use_head": False}
    elif eyes.get("num_hidden_layers") == layers + 1 and config.get("vision_feature_layer", -2) == -2:
        config |= {"vision_config": {**eyes, "num_hidden_layers": layers}, "vision_feature_layer": -1}
    return replace(owner, config=config)


def _has_norm(src: Checkpoint) -> bool:
    return any(prefix + _NORM in src.names for prefix in model_families.LANGUAGE_PREFIXES)


def _refuse_old_transformers(lone: Checkpoint) -> None:
    from packaging.version import Version

    from .libraries import module

    if Version(module("transformers").__version__) < Version(_HEEDS_RAW):
        raise UnsupportedFileError(
            f"Cannot load {lone.path}",
            "it has no norm after its last layer, and this version of transformers returns no layer without it",
            "Update transformers, or use the whole model",
        )


def with_norm(src: Checkpoint) -> Checkpoint:
    """Add the norm after the last layer, whose output nobody reads, to a language model without its last layers."""
    if src.config.get(_RAW) is not False or _has_norm(src):
        return src
    width, _ = text_encoders.sizes(src.tensors)
    if width is None:
        return src
    import torch

    from ..formats import Recipe

    dtype = dtype_named(main_dtype(src, dtypes=FLOATS) or "bfloat16")
    info = TensorInfo(dtype=dtype_name(dtype), shape=(width,), nbytes=width * dtype.itemsize)
    return replace(
        src,
        tensors={**src.tensors, _NORM: info},
        home={**src.home, _NORM: src.files[0]},
        recipes={
            **src.recipes,
            _NORM: Recipe((), None, (width,), dtype, lambda get: torch.ones(width, dtype=dtype, device="cpu")),
        },
    )
