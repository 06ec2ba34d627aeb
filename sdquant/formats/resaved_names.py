"""Names that ComfyUI gives tensors when it loads a model, and leaves in what it saves of it: nobody else has them.

The norms of queries and keys of Flux and Chroma, published as `double_blocks.0.img_attn.norm.query_norm.scale`, are
`...query_norm.weight` in files of its node ModelSave (`process_unet_state_dict` of ComfyUI 0.33).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

_Value = TypeVar("_Value")
_RESAVED = re.compile(
    r"^((?:double|single)_blocks\..+\.(?:query|key)_norm|distilled_guidance_layer\.norms\.\d+)\.weight$"
)


def published(state: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return what is known of a model's tensors, by name without a prefix, under the names of its publisher."""
    return {_RESAVED.sub(r"\1.scale", name): value for name, value in state.items()}
