"""Language models that see, without their vision: for files of text alone, whose pipelines show them no picture.

llama.cpp writes the vision of a Qwen2.5-VL to a file of its own, and people have the other one. The class stays the
pipeline's, which may ask it to write a prompt anew; in the place of the vision stands a module that says so if it is
called. Which model is meant is in its config (`KEY`), so that what is saved without a vision is loaded without one.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from ..errors import MissingComponentError

KEY = "without_vision"
_PATHS = ("visual", "vision_tower", "multi_modal_projector")  # in the model, or in its `model`


class NoVision(nn.Module):
    """Stands in the place of a vision; raises MissingComponentError when pictures are shown to it."""

    @property
    def dtype(self) -> NoReturn:
        """Raise as `forward` does: transformers casts pixels to it first."""
        raise _blind()

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise MissingComponentError."""
        raise _blind()


def take_out(model: nn.Module) -> None:
    """Replace the vision of a model."""
    for owner in (model, getattr(model, "model", None)):
        for leaf in _PATHS:
            if owner is not None and leaf in owner._modules:
                setattr(owner, leaf, NoVision())


def _blind() -> MissingComponentError:
    return MissingComponentError(
        "Cannot show a picture to the text encoder",
        "it was loaded from a file of the language model alone, without its vision",
        "Load it with the file that has mmproj in its name beside it or as a further part, or from a base that has the "
        "whole text encoder",
    )
