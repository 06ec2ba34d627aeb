"""Gemma's tables of embeddings, which multiply what they look up by a number that they keep beside the weight."""

from __future__ import annotations

import re

from torch import Tensor, nn

SCALE = "embed_scale"
# The classes of transformers whose forward is that of `nn.Embedding` times `embed_scale`, a buffer without dimensions,
# in the dtype of the weight. Others of such names keep a number of Python (BART's) or more weights (T5Gemma 2's).
_CLASSES = re.compile(r"(Vault|Embedding|Diffusion)?Gemma\w*ScaledWordEmbedding")


def is_scaled(module: nn.Module) -> bool:
    """Return whether a module is such a table."""
    known = _CLASSES.fullmatch(type(module).__name__) is not None and set(module._parameters) == {"weight"}
    return known and isinstance(module._buffers.get(SCALE), Tensor)


def scaled(values: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply what was looked up by the table's scale, in its dtype; as it is without a scale."""
    return values if scale is None else values * scale.to(values.dtype)
