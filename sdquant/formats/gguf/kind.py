"""Classification of GGUF files: a diffusion model, or one of the other kinds of file with the same suffix.

`general.architecture` is a hint and not an identity (Z-Image files say "lumina2", patched converters say "pig"), so
names of tensors decide first. The rows come from files in the wild: those of city96's and llama.cpp's converters and of
stable-diffusion.cpp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import refused_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from .header import GGUFHeader


class FileKind(str):
    """ "diffusion", "all-in-one", "text-encoder", "projector", "adapter" or "split", and the evidence for it."""

    __slots__ = ("evidence",)
    evidence: str

    def __new__(cls, name: str, evidence: str = "") -> FileKind:
        kind = super().__new__(cls, name)
        kind.evidence = evidence
        return kind


@dataclass(frozen=True)
class _Row:
    kind: str
    test: Callable[[GGUFHeader], str | None]  # the evidence, or None


def _key(name: str, value: str) -> Callable[[GGUFHeader], str | None]:
    return lambda header: f"{name} = {value}" if header.metadata.get(name) == value else None


def _any_name(pattern: str) -> Callable[[GGUFHeader], str | None]:
    search = re.compile(pattern).search
    return lambda header: next((f"tensor {name}" for name in header.tensors if search(name)), None)


def _all_names(pattern: str) -> Callable[[GGUFHeader], str | None]:
    match = re.compile(pattern).match

    def test(header: GGUFHeader) -> str | None:
        first = next(iter(header.tensors), None)
        return f"all tensors are like {first}" if first and all(match(name) for name in header.tensors) else None

    return test


def _split(header: GGUFHeader) -> str | None:
    count = header.metadata.get("split.count", 0)
    return f"split.count = {count}" if count > 1 else None


def _language_model(header: GGUFHeader) -> str | None:
    architecture = str(header.metadata.get("general.architecture", ""))
    known = re.fullmatch(r"(llama|mistral|t5|t5encoder|qwen(?!_image)\w*|gemma\w*|phi\w*|bert)", architecture)
    return f"general.architecture = {architecture}" if known else None


def _both_ends(header: GGUFHeader) -> str | None:
    """Return the evidence for an autoencoder beside other parts: encoder, decoder and quant_conv at the top level."""
    tops = {name.split(".", 1)[0] for name in header.tensors}
    return "tensors encoder.*, decoder.*, quant_conv.*" if {"encoder", "decoder", "quant_conv"} <= tops else None


_LLAMA_CPP = r"(blk\.\d|token_embd|token_types|enc\.|dec\.blk|output\.|output_norm\.|position_embd|rope_freqs)"
# The first row that has evidence wins.
_ROWS = (
    _Row("split", _split),
    _Row("adapter", _key("general.type", "adapter")),
    _Row("adapter", _any_name(rf"\.lora_[ab]$|{refused_files.LORA_NAMES}")),  # llama.cpp's, and others'
    _Row("projector", _key("general.type", "mmproj")),
    _Row("projector", _key("general.type", "clip-vision")),
    _Row("projector", _all_names(r"(v|mm|a)\.")),
    _Row("text-encoder", _all_names(r"(text_model|text_projection|logit_scale)\b")),  # CLIP, transformers' names
    _Row(
        "text-encoder",  # CLIP, OpenCLIP's names
        _all_names(
            r"(transformer\.resblocks|token_embedding|positional_embedding|ln_final|text_projection|logit_scale)\b"
        ),
    ),
    _Row("text-encoder", _all_names(r"(encoder\.block|encoder\.final_layer_norm|shared)\.")),  # T5, the same
    _Row(
        "all-in-one",
        _any_name(
            r"^(first_stage_model|cond_stage_model|conditioner|text_encoders|text_model|vae|te[123]?|clip_[lg])\."
        ),
    ),
    _Row("all-in-one", _both_ends),
    _Row("projector", _key("general.architecture", "clip")),
    _Row("text-encoder", _all_names(_LLAMA_CPP)),
    _Row("text-encoder", _language_model),
)


def classify(header: GGUFHeader) -> FileKind:
    """Return the kind of file; its `.evidence` names the key or tensor that shows it."""
    for row in _ROWS:
        evidence = row.test(header)
        if evidence:
            return FileKind(row.kind, evidence)
    return FileKind("diffusion", "no tensor or key of another kind of file")
