"""Files of a LoRA or its kin: changes to a model, not a model. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import UnsupportedFileError

# As peft, diffusers, kohya's scripts and LyCORIS (LoHa, LoKr) name the two sides of a change.
NAMES = r"\.(lora_(A|B|up|down|mid)|lora\.(up|down))\.|\.(hada_w[12]_[ab]|lokr_w[12](_[ab])?)$"


def sign(names: Iterable[str]) -> str | None:
    """Return the first tensor name that only LoRA files have; None if there is none."""
    return min((name for name in names if re.search(NAMES, name)), default=None)


def refuse_lora(path: object, names: Iterable[str]) -> None:
    """Raise UnsupportedFileError for a LoRA's file, by its tensor names."""
    name = sign(names)
    if name is not None:
        raise UnsupportedFileError(
            f"Cannot load {path}",
            f"it contains LoRA weights ({name!r}), not a model",
            "Load the base model, then call pipe.load_lora_weights on this file",
        )
