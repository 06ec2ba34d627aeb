"""The two UNets of Stable Cascade, as Stability AI name them: torch's own attention, and one name of stage B."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .rows import OutputTensor, Shapes

_ATTENTION = re.compile(r"(.+\.attention)\.to_(q|k|v|out\.0)\.(weight|bias)")
_POOLED = "clip_txt_pooled_mapper."


def stable_cascade(shapes: Shapes) -> Iterator[OutputTensor]:
    stage_c = "clip_txt_mapper.weight" in shapes
    for name in shapes:
        match = _ATTENTION.fullmatch(name)
        if match is None:
            theirs = name if stage_c else name.replace(_POOLED, "clip_mapper.")
            yield OutputTensor(theirs, (name,))
            continue
        module, part, leaf = match.groups()
        if part == "out.0":
            yield OutputTensor(f"{module}.attn.out_proj.{leaf}", (name,))
        elif part == "q":
            yield OutputTensor(f"{module}.attn.in_proj_{leaf}", tuple(f"{module}.to_{one}.{leaf}" for one in "qkv"))
