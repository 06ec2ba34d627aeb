"""Qwen-Image 2.1, as ComfyUI names it: its authors' names, with the two halves of the gated layer in one."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Shapes

_GATE, _UP = ".img_mlp.gate_layer.", ".img_mlp.proj."


def qwen_image21(shapes: Shapes) -> Iterator[OutputTensor]:
    for name in shapes:
        if _GATE in name:
            yield OutputTensor(name.replace(_GATE, ".img_mlp.gate_up."), (name, name.replace(_GATE, _UP)))
        elif _UP not in name:
            yield OutputTensor(name, (name,))
