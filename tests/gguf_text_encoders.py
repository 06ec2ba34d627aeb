"""Text encoders written to GGUF as convert_hf_to_gguf.py of llama.cpp does: the package gguf has the names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch

ARCH = gguf.MODEL_ARCH
_OWN = re.compile(r"^(model\.)?(language_model\.)?(model\.)?")


def bare(name: str) -> str:
    """Return a name without what stands before those of the language model."""
    return _OWN.sub("", name)


class File:
    """A GGUF file in the making.

    Attributes:
        worth: what each tensor is worth, by `bare` names of transformers.
    """

    def __init__(self, path: Path, architecture: str) -> None:
        self.writer = gguf.GGUFWriter(path, architecture)
        self.worth: dict[str, np.ndarray] = {}

    def add(self, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType | None) -> np.ndarray:
        """Add a tensor, quantized if it is a matrix; return the values that a reader gets."""
        if kind is None or values.ndim != 2 or "rel_b" in name:
            self.writer.add_tensor(name, np.ascontiguousarray(values))
            return values
        data = gguf.quants.quantize(values, kind)
        self.writer.add_tensor(name, data, raw_dtype=kind)
        return np.asarray(gguf.quants.dequantize(data, kind))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_text(
    model: Any,
    path: Path,
    arch: gguf.MODEL_ARCH,
    kind: gguf.GGMLQuantizationType | None,
    *,
    blocks: int | None = None,
    heads: bool = True,
    fields: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> dict[str, np.ndarray]:
    """Write the language model of a text encoder; return what each tensor is worth.

    Args:
        blocks: only so many. heads: whether the header says how many heads there are. fields: adds others to it.
    """
    config = getattr(model.config, "text_config", model.config)
    name = gguf.MODEL_ARCH_NAMES[arch]
    file = File(path, name)
    fields(file.writer)
    count = config.num_hidden_layers
    table = gguf.get_tensor_name_map(arch, count)
    if heads:
        file.writer.add_head_count(config.num_attention_heads)
        file.writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    for key, tensor in model.state_dict().items():
        own = key if key.startswith(("shared", "encoder", "lm_head")) else f"model.{bare(key)}"
        there = table.get_name(own, try_suffixes=(".weight", ".bias"))
        block = re.match(r"(?:enc\.)?blk\.(\d+)\.", there or "")
        if there is None or "visual" in key or "vision" in key or key == "encoder.embed_tokens.weight":
            continue
        if block is not None and blocks is not None and int(block[1]) >= blocks:
            continue
        values, undone = _changed(there, tensor.float(), arch, config)
        file.worth[bare(key)] = undone(file.add(there, values.numpy(), kind))
    file.close()
    return file.worth


_PROJECTORS = {ARCH.QWEN2VL: gguf.VisionProjectorType.QWEN25VL, ARCH.QWEN3VL: gguf.VisionProjectorType.QWEN3VL}
_AT: dict[str, str] = {  # by code of that converter, not by the table of names
    "merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2", "norm": "norm",
    "linear_fc1": "fc1", "linear_fc2": "fc2",
}  # fmt: skip


def write_vision(
    model: Any,
    path: Path,
    arch: gguf.MODEL_ARCH,
    kind: gguf.GGMLQuantizationType | None,
    others: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Write the vision of a Qwen2.5-VL or Qwen3-VL; return what each tensor is worth.

    Args:
        others: types of tensors whose names contain a word.
    """
    file = File(path, "clip")
    file.writer.add_type("mmproj")
    file.writer.add_clip_projector_type(_PROJECTORS[arch])
    table = gguf.get_tensor_name_map(ARCH.MMPROJ, model.config.vision_config.depth + 1)  # mm.2 counts as a block
    deep = getattr(model.config.vision_config, "deepstack_visual_indexes", [])
    for key, tensor in model.state_dict().items():
        if ".visual." not in key:
            continue
        own, values = key.removeprefix("model."), tensor.float().numpy()
        wanted = {part: next((others[word] for word in others if word.endswith(f"_{part}")), kind) for part in "qkv"}
        inner = re.fullmatch(r"visual\.(merger\.\w+|deepstack_merger_list\.(\d+)\.(\w+))\.(weight|bias)", own)
        if own == "visual.patch_embed.proj.weight":
            for frame, name in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
                file.add(name, values[:, :, frame], None)
            file.worth[bare(key)] = values
        elif ".qkv." in own and arch == ARCH.QWEN2VL:
            thirds = np.split(values, 3)
            names = [table.get_name(own.replace("qkv", part), try_suffixes=(".weight", ".bias")) for part in "qkv"]
            rows = zip(names, thirds, wanted.values(), strict=True)
            file.worth[bare(key)] = np.concatenate([file.add(*one) for one in rows])
        else:
            there = table.get_name(own, try_suffixes=(".weight", ".bias"))
            if inner is not None and inner[2]:
                there = f"v.deepstack.{deep[int(inner[2])]}.{_AT[inner[3]]}.{inner[4]}"
            elif inner is not None and inner[1] in _AT:
                there = f"{_AT[inner[1]]}.{inner[4]}"
            file.worth[bare(key)] = file.add(there, values, kind if "pos_embed" not in own else None)
    file.close()
    return file.worth


def write_eyes(
    model: Any, path: Path, kind: gguf.GGMLQuantizationType | None, *, legacy: bool = False, heads: bool = True
) -> dict[str, np.ndarray]:
    """Write the vision of a Gemma 3, Mistral 3 (Pixtral) or LLaVA; return what each tensor is worth.

    Args:
        legacy: as convert_image_encoder_to_gguf.py does: the two matrices of an MLP under each other's names, and of
            LLaVA neither the last layer nor what comes after it.
        heads: whether the header says how many heads there are.
    """
    file, config = File(path, "clip"), model.config.vision_config
    of = {"Gemma3": "gemma3", "Mistral3": "pixtral", "Llava": "mlp"}[type(model).__name__.split("For")[0]]
    if of == "mlp":  # as files before there was a key for its kind
        file.writer.add_bool("clip.has_llava_projector", True)
    else:
        file.writer.add_type("mmproj")
        file.writer.add_clip_projector_type(of)
    if heads:
        file.writer.add_vision_head_count(config.num_attention_heads)
    table = gguf.get_tensor_name_map(ARCH.MMPROJ, config.num_hidden_layers + 1)
    for key, tensor in model.state_dict().items():
        last = f"layers.{config.num_hidden_layers - 1}." in key or "post_layernorm" in key
        if ("vision_tower" not in key and "projector" not in key) or ".head." in key or (of == "mlp" and last):
            continue
        own = re.sub(r"^(model\.)?vision_tower\.(?=embed|pre_|post_|encoder)", "vision_tower.vision_model.", key)
        there = table.get_name(re.sub("_weight$", ".weight", own.removeprefix("model.")), (".weight", ".bias"))
        values, undone = tensor.float(), lambda read: read
        if of == "pixtral" and re.search(r"attn_[qk]\.", there):
            index = _in_pairs(len(values), config.num_attention_heads)
            values, undone = values[torch.from_numpy(index)], lambda read, index=index: read[np.argsort(index)]
        if "soft_emb_norm" in there:
            values, undone = values + 1, lambda read: read - np.float32(1)
        if legacy:
            there = re.sub(r"ffn_(up|down)", lambda match: {"up": "ffn_down", "down": "ffn_up"}[match[1]], there)
        there = there.replace("mm.1.", "mm.0.") if of == "mlp" else there
        plain = "embd" in there or "input_projection" in there
        file.worth[bare(key)] = undone(file.add(there, values.numpy(), None if plain else kind))
    if of == "pixtral":
        file.add("v.token_embd.img_break", np.zeros(model.config.text_config.hidden_size, np.float32), None)
    file.close()
    return file.worth


def _in_pairs(rows: int, heads: int) -> np.ndarray:
    """Return which of transformers' rows llama.cpp has in the place of each."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)


def _changed(name: str, values: torch.Tensor, arch: gguf.MODEL_ARCH, config: Any) -> tuple[torch.Tensor, Any]:
    """Return the values as llama.cpp has them, and the way back."""
    if arch in (ARCH.LLAMA, ARCH.MISTRAL3) and re.search(r"attn_[qk]\.", name):
        heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
        index = _in_pairs(len(values), heads)
        return values[torch.from_numpy(index)], lambda read: read[np.argsort(index)]
    if arch in (ARCH.GEMMA, ARCH.GEMMA2, ARCH.GEMMA3) and name.endswith("norm.weight"):
        return values + 1, lambda read: read - np.float32(1)
    return values, lambda read: read
