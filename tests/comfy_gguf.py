"""A strict reader of GGUF files by ComfyUI-GGUF's rules, on gguf-py alone: what it says no to would fail there, or
come out wrong without a word. Written from what its loader, its layers and its converter do (version of 2025-12)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

PREFIX = "model.diffusion_model."  # the only one that is taken away; what is not behind it is left out then
IMAGE_MODELS = {
    "flux", "sd1", "sdxl", "sd3", "aura", "hidream", "cosmos", "ltxv", "hyvid", "wan", "lumina2", "qwen_image",
}  # fmt: skip
GUESSED = {None, "pig", "cow"}  # tags whose files are told by their tensors
MAX_NAME = 127
FLOATS = {"F32", "F16"}
# Decoded by the layers themselves. gguf-py does the others, and their result keeps the shape as stored.
OWN_TYPES = {"BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS"}

# By architecture, in this order: groups of names of which one has to be there whole, and names that must not be there.
_SD_1 = (
    "input_blocks.3.0.op input_blocks.6.0.op input_blocks.9.0.op "
    "output_blocks.2.1.conv output_blocks.5.2.conv output_blocks.8.2.conv"
)
_SD_XL = "input_blocks.3.0.op input_blocks.6.0.op output_blocks.2.2.conv output_blocks.5.2.conv"
MODELS: dict[str, tuple[tuple[str, ...], str]] = {
    "flux": (("double_blocks.0.img_attn.proj",), "transformer_blocks.0.attn.norm_added_k"),
    "sd3": (("joint_blocks.0.x_block.attn.qkv",), "transformer_blocks.0.attn.add_q_proj"),
    "aura": (("double_layers.3.modX.1",), "joint_transformer_blocks.3.ff_context.out_projection"),
    "sdxl": ((_SD_XL, "label_emb.0.0"), "down_blocks.0.downsamplers.0.conv"),
    "sd1": ((_SD_1,), "down_blocks.0.downsamplers.0.conv"),
}
# Layers that take a quantized weight, by the end of its name: everything else must be F32 or F16.
LAYERS = (".weight", ".bias")


class Refused(Exception):
    """ComfyUI-GGUF would not load the file, or would load it wrongly."""


def read(path: Path) -> tuple[str, dict[str, Tensor], dict[str, str]]:
    """The architecture, the decoded tensors in float32 and their types, by name without the prefix.

    Raises:
        Refused: with the rule that is broken.
    """
    reader = gguf.GGUFReader(path)
    named = {tensor.name: tensor for tensor in reader.tensors}
    if any(name.startswith(PREFIX) for name in named):
        named = {name: tensor for name, tensor in named.items() if name.startswith(PREFIX)}
    tensors = {name.removeprefix(PREFIX): _decoded(reader, tensor) for name, tensor in named.items()}
    types = {name.removeprefix(PREFIX): tensor.tensor_type.name for name, tensor in named.items()}
    return _architecture(reader, set(tensors)), tensors, types


def told(names: set[str]) -> str:
    """The architecture by the names of the tensors."""
    for model, (groups, banned) in MODELS.items():
        if any(all(f"{name}.weight" in names for name in group.split()) for group in groups):
            if f"{banned}.weight" in names:
                raise Refused(f"{banned} is a name of diffusers")
            return model
    raise Refused("Unknown model architecture!")


def _architecture(reader: gguf.GGUFReader, names: set[str]) -> str:
    field = reader.get_field("general.architecture")
    if field is not None and field.types != [gguf.GGUFValueType.STRING]:
        raise Refused(f"general.architecture is {field.types}")
    name = None if field is None else str(field.contents())
    if name in GUESSED:
        return told(names)
    if name not in IMAGE_MODELS:
        raise Refused(f"Unexpected architecture type in GGUF file: {name!r}")
    return str(name)


def _decoded(reader: gguf.GGUFReader, tensor: gguf.ReaderTensor) -> Tensor:
    kind = tensor.tensor_type.name
    stored = tuple(int(n) for n in reversed(tensor.shape))
    shape = _orig_shape(reader, tensor.name) or stored
    if len(tensor.name) > MAX_NAME:
        raise Refused(f"the name {tensor.name} is too long")
    if kind in FLOATS:
        return torch.from_numpy(np.array(tensor.data)).view(shape).float()
    if len(shape) > 4 or not tensor.name.endswith(LAYERS):
        raise Refused(f"{tensor.name} {shape} is {kind}, and no layer there decodes it")
    if kind != "BF16" and len([n for n in shape if n > 1]) < 2:
        raise Refused(f"{tensor.name} {shape} is {kind}, and norms and biases are not quantized")
    if kind not in OWN_TYPES and shape != stored:
        raise Refused(f"{tensor.name} is {kind}, which keeps its stored shape {stored} instead of {shape}")
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).reshape(shape)


def _orig_shape(reader: gguf.GGUFReader, name: str) -> tuple[int, ...] | None:
    field = reader.get_field(f"comfy.gguf.orig_shape.{name}")
    if field is None:
        return None
    if field.types != [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]:
        raise Refused(f"orig_shape of {name} is {field.types}")
    return tuple(field.contents())
