"""Names of the visions that llama.cpp keeps in files of their own, and transformers' for them, as rows. No torch.

The names are those of the package gguf, and of the converter that LLaVA's and the first Gemma 3's files were written
by, convert_image_encoder_to_gguf.py; the tests compare them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

QWEN = "model.visual."
PATCH, FRAMES = "patch_embed.proj.weight", ("v.patch_embd.weight", "v.patch_embd.weight.1")


@dataclass(frozen=True)
class VisionRow:
    """A kind of vision.

    Attributes:
        of: `general.architecture` of the language models that it is for.
        block, ends: names in a block and outside of blocks, without "weight" and "bias".
        whole: whole names outside of blocks. spare: names of what transformers has elsewhere.
        prefix, blocks: what stands before all names in the model, and before the blocks' numbers.
        in_pairs: whether the rows of q and k are in another order; see `text_values.in_halves`.
        plus_one: the norms that 1 was added to.
        unread: norms after what is read, which files leave out.
    """

    of: tuple[str, ...]
    block: Mapping[str, str]
    ends: Mapping[str, str]
    whole: Mapping[str, str] = field(default_factory=dict)
    spare: tuple[str, ...] = ()
    prefix: str = QWEN
    blocks: str = "blocks"
    in_pairs: bool = False
    plus_one: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def in_frames(self) -> bool:
        """Return whether the kernel of patches is in two tensors."""
        return self.prefix == QWEN

    def name(self, key: str, deep: list[int]) -> str | None:
        """Return the name of a tensor, of the parts of one tensor a name that no model has; None if it is unknown.

        Args:
            deep: the blocks that more than the last one's output is read from.
        """
        if self.in_frames and key in FRAMES:
            return self.prefix + key
        if key in self.whole:
            return self.prefix + self.whole[key]
        base, _, leaf = key.rpartition(".")
        if leaf not in ("weight", "bias"):
            return None
        if base in self.ends:
            return f"{self.prefix}{self.ends[base]}.{leaf}"
        block = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", base)
        if block is not None and block[2] in self.block:
            return f"{self.prefix}{self.blocks}.{block[1]}.{self.block[block[2]]}.{leaf}"
        more = re.fullmatch(r"v\.deepstack\.(\d{1,9})\.(\w+)", base)
        if more is not None and more[2] in _DEEP:
            return f"{self.prefix}deepstack_merger_list.{deep.index(int(more[1]))}.{_DEEP[more[2]]}.{leaf}"
        return None


_DEEP = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}  # after v.deepstack.<number of a block>
_BLOCK: Mapping[str, str] = {
    "ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_q": "attn.q", "attn_k": "attn.k", "attn_v": "attn.v",
    "attn_out": "attn.proj",
}  # fmt: skip
_QWEN2_ENDS = {"v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}
_CLIP_BLOCK: Mapping[str, str] = {
    "ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
_TOWER, _MIXER = "vision_tower.vision_model.", "multi_modal_projector."
_CLIP_LAYERS = f"{_TOWER}encoder.layers"
_CLIP_ENDS = {
    "v.patch_embd": f"{_TOWER}embeddings.patch_embedding", "v.position_embd": f"{_TOWER}embeddings.position_embedding",
    "v.post_ln": f"{_TOWER}post_layernorm",
}  # fmt: skip
_SOFT_NORM = f"{_MIXER}mm_soft_emb_norm.weight"

ROWS: Mapping[str, VisionRow] = {  # by `clip.projector_type`
    "qwen2vl_merger": VisionRow(("qwen2vl",), {**_BLOCK, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}, _QWEN2_ENDS),
    "qwen2.5vl_merger": VisionRow(
        ("qwen2vl",),
        {**_BLOCK, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        _QWEN2_ENDS,
    ),
    "qwen3vl_merger": VisionRow(
        ("qwen3vl",),
        {**_BLOCK, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        {
            "v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed", "v.post_ln": "merger.norm",
            "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2",
        },
    ),
    "gemma3": VisionRow(
        ("gemma3",),
        _CLIP_BLOCK,
        {**_CLIP_ENDS, "mm.soft_emb_norm": f"{_MIXER}mm_soft_emb_norm"},
        whole={"mm.input_projection.weight": f"{_MIXER}mm_input_projection_weight"},
        prefix="", blocks=_CLIP_LAYERS, plus_one=(_SOFT_NORM,),
    ),
    "pixtral": VisionRow(
        ("mistral3", "llama"),
        {
            "ln1": "attention_norm", "ln2": "ffn_norm", "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj", "attn_out": "attention.o_proj", "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
        },
        {
            "v.patch_embd": "vision_tower.patch_conv", "v.pre_ln": "vision_tower.ln_pre",
            "mm.input_norm": f"{_MIXER}norm", "mm.patch_merger": f"{_MIXER}patch_merger.merging_layer",
            "mm.1": f"{_MIXER}linear_1", "mm.2": f"{_MIXER}linear_2",
        },
        spare=("v.token_embd.img_break",),  # a row of the language model's table
        prefix="", blocks="vision_tower.transformer.layers", in_pairs=True,
    ),
    "mlp": VisionRow(  # LLaVA's, which reads the last layer but one
        ("llama",),
        _CLIP_BLOCK,
        {
            **_CLIP_ENDS, "v.pre_ln": f"{_TOWER}pre_layrnorm", "mm.0": f"{_MIXER}linear_1", "mm.2": f"{_MIXER}linear_2",
        },
        whole={"v.class_embd": f"{_TOWER}embeddings.class_embedding"},
        prefix="", blocks=_CLIP_LAYERS, unread=(f"{_TOWER}post_layernorm",),
    ),
}  # fmt: skip


def row_of(metadata: Mapping[str, Any]) -> VisionRow | None:
    """Return the row of a file's vision; None if its kind is unknown."""
    kind = metadata.get("clip.projector_type", metadata.get("clip.vision.projector_type"))
    if kind is None and metadata.get("clip.has_llava_projector") is True:
        kind = "mlp"  # before that key
    return ROWS.get(kind) if isinstance(kind, str) else None
