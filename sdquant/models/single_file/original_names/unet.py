"""The UNet of Stable Diffusion 1, 2 and XL, as CompVis name it, and its ControlNets, as Lvmin Zhang names them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .rows import OutputTensor, Shapes

# Blocks of one list there, by kind and place here.
_UNET_ENDS = {
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "class_embedding.linear_1": "label_emb.0.0", "class_embedding.linear_2": "label_emb.0.2",
    "class_embedding": "label_emb",
}  # fmt: skip
_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)\.(\w+)")
_MIDDLE = re.compile(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)\.(\w+)")


def unet(shapes: Shapes) -> Iterator[OutputTensor]:
    resnets = {name.split(".")[3] for name in shapes if name.startswith("down_blocks.0.resnets.")}
    stride = len(resnets) + 1  # entries of the authors' list for each block: its layers, and one that changes the size
    attending = {name.split(".")[1] for name in shapes if re.match(r"up_blocks\.\d+\.attentions\.", name)}
    for name in shapes:
        target = _unet_name(name, stride, attending)
        if target is not None:
            yield OutputTensor(target, (name,))


_CONTROL_ENDS = {
    "controlnet_cond_embedding.conv_in": "input_hint_block.0",
    "controlnet_cond_embedding.conv_out": "input_hint_block.14",
    "controlnet_mid_block": "middle_block_out.0",
}
_CONTROL = re.compile(r"controlnet_(down|cond_embedding\.)_?blocks\.(\d+)\.(\w+)")


def controlnet(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from unet(shapes)
    for name in shapes:
        module, _, leaf = name.rpartition(".")
        if module in _CONTROL_ENDS:
            yield OutputTensor(f"{_CONTROL_ENDS[module]}.{leaf}", (name,))
        elif match := _CONTROL.fullmatch(name):
            kind, number, leaf = match.groups()
            # Between the layers of the hint are activations.
            theirs = f"zero_convs.{number}.0" if kind == "down" else f"input_hint_block.{2 * int(number) + 2}"
            yield OutputTensor(f"{theirs}.{leaf}", (name,))


def _unet_name(name: str, stride: int, attending: set[str]) -> str | None:
    module, _, leaf = name.rpartition(".")
    if module in _UNET_ENDS:
        return f"{_UNET_ENDS[module]}.{leaf}"
    if middle := _MIDDLE.fullmatch(name):
        kind, number, inner, leaf = middle.groups()
        if kind == "attentions":
            return f"middle_block.1.{inner}.{leaf}" if number == "0" else None
        return f"middle_block.{2 * int(number)}.{_RESNET[inner]}.{leaf}" if inner in _RESNET else None
    block = _BLOCK.fullmatch(name)
    if block is None:
        return None
    side, at, kind, number, inner, leaf = block.groups()
    begin = int(at) * stride + (side == "down")
    there = "input_blocks" if side == "down" else "output_blocks"
    if kind == "downsamplers":
        return f"{there}.{begin + stride - 1}.0.op.{leaf}" if inner == "conv" else None
    if kind == "upsamplers":
        return f"{there}.{begin + stride - 1}.{2 if at in attending else 1}.{inner}.{leaf}"
    if kind == "attentions":
        return f"{there}.{begin + int(number)}.1.{inner}.{leaf}"
    return f"{there}.{begin + int(number)}.0.{_RESNET[inner]}.{leaf}" if inner in _RESNET else None
