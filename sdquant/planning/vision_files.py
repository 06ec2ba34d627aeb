"""Put the vision of a language model, given as a GGUF file of its own, into that model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core import LONE
from ..errors import MissingComponentError
from ..formats import gguf_vision_names, model_families

if TYPE_CHECKING:
    from ..models import Detected


def with_visions(contents: list[Detected], visions: list[Detected]) -> list[Detected]:
    """Return the contents with visions in the language models that they are for.

    Raises:
        MissingComponentError: there is none for a vision, or several are for the same.
    """
    whole = list(contents)
    for vision in visions:
        seen = vision.sources[LONE]
        kinds = gguf_vision_names.language_models_of(seen.metadata)
        at = [
            place
            for place, one in enumerate(contents)
            if _architecture_of(one) in kinds and gguf_vision_names.fits(seen, one.sources[LONE])
        ]
        if len(at) != 1 or whole[at[0]] is not contents[at[0]]:
            raise MissingComponentError(
                f"Cannot use {vision.path}",
                f"it is the vision of a language model ({' or '.join(kinds)} in llama.cpp's terms), and "
                + ("no such GGUF file, of its width, is given with it" if not at else "it is not clear of which one"),
                "Pass it together with the GGUF file of that one language model, as parts=[model, vision]",
            )
        whole[at[0]] = _seeing(whole[at[0]], vision)
    return whole


def _architecture_of(detected: Detected) -> str | None:
    """Return what a lone file of llama.cpp's says of its architecture; None for all other models."""
    src = detected.sources.get(LONE)
    if src is None or src.container != "gguf" or detected.component != "text_encoder":
        return None
    return str(src.metadata.get("general.architecture"))


def _seeing(text: Detected, vision: Detected) -> Detected:
    """Return a language model with the vision of another GGUF file, instead of what was found beside it."""
    src = gguf_vision_names.with_vision(text.sources[LONE], vision.sources[LONE])
    row = model_families.recognise(src.names)
    return replace(
        text,
        family=row.family if row is not None else text.family,
        evidence=[*text.evidence, f"its vision is in {vision.path}"],
        tensors=len(src.tensors),
        bytes=src.weight_bytes,
        types=dict(Counter(info.dtype for info in src.tensors.values())),
        warnings=[line for line in text.warnings if line not in text.sources[LONE].warnings],
        sources={LONE: replace(src, warnings=())},
    )
