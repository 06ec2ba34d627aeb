"""Text encoders in GGUF files, and the vision of language models beside them, as transformers has them. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..formats import METADATA_KEY, checkpoint, gguf_file, gguf_text_names, gguf_vision_names
from .refused_gguf import refuse_undecodable

if TYPE_CHECKING:
    from ..formats import Checkpoint

VISION = "vision"  # the component that is part of a language model, in a file of its own


def text_encoder_in(src: Checkpoint, *, complete: bool) -> Checkpoint | None:
    """Return a GGUF file of a text encoder as transformers has it, with its vision if that is in a file beside it; None
    for all other files."""
    if src.container != "gguf" or METADATA_KEY in src.metadata or len(src.files) != 1:
        return None
    header = src.headers.get(src.files[0])
    if not isinstance(header, gguf_file.GGUFHeader):
        return None
    kind = gguf_file.classify(header)
    if kind == "text-encoder" and (text := gguf_text_names.renamed(src, header.metadata)):
        return _with_vision(text, str(header.metadata["general.architecture"]), complete=complete)
    if kind in ("adapter", "split", "projector"):
        return None
    return gguf_text_names.under_own_names(src, prefixed=kind == "all-in-one")


def vision_in(src: Checkpoint) -> Checkpoint | None:
    """Return a GGUF file of the vision of a language model as transformers has it; None for all other files."""
    if src.container != "gguf" or len(src.files) != 1:
        return None
    header = src.headers.get(src.files[0])
    if not isinstance(header, gguf_file.GGUFHeader) or gguf_file.classify(header) != "projector":
        return None
    return gguf_vision_names.vision_of(src, header.metadata)


def _with_vision(text: Checkpoint, architecture: str, *, complete: bool) -> Checkpoint:
    beside = gguf_vision_names.beside(text, architecture)
    if len(beside) > 1:
        names = " and ".join(one.name for one in beside)
        several = f"any of {names} may be the vision of {text.files[0].name}: pass the one as a part, too"
        return replace(text, warnings=(*text.warnings, several))
    if not beside:
        return text
    file = checkpoint.single_file(beside[0], complete=complete)
    refuse_undecodable(file)
    vision = vision_in(file)
    return text if vision is None else gguf_vision_names.with_vision(text, vision)
