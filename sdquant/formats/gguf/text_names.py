"""Text encoders in llama.cpp's GGUF files under transformers' names, as rows: those whose values are as they were.

Not here, because their values are changed too: Llama and Mistral (rows of q and k in another order), Gemma (1 added to
the norms), and the vision of Qwen2.5-VL, which is a file of its own. The names are those of the package gguf. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_T5_BLOCK: Mapping[str, str] = {
    "attn_q": "layer.0.SelfAttention.q", "attn_k": "layer.0.SelfAttention.k", "attn_v": "layer.0.SelfAttention.v",
    "attn_o": "layer.0.SelfAttention.o", "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "attn_norm": "layer.0.layer_norm", "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1", "ffn_down": "layer.1.DenseReluDense.wo", "ffn_norm": "layer.1.layer_norm",
}  # fmt: skip
_QWEN3_BLOCK: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_T5_ENDS = {"token_embd.weight": "shared.weight", "enc.output_norm.weight": "encoder.final_layer_norm.weight"}
_QWEN3_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
# `general.architecture` -> names at both ends, what stands before the blocks in the file and in the model, their names.
_ROWS: Mapping[str, tuple[Mapping[str, str], str, str, Mapping[str, str]]] = {
    "t5encoder": (_T5_ENDS, "enc.blk", "encoder.block", _T5_BLOCK),
    "t5": (_T5_ENDS, "enc.blk", "encoder.block", _T5_BLOCK),
    "qwen3": (_QWEN3_ENDS, "blk", "model.layers", _QWEN3_BLOCK),
}
# The half of T5 that writes; frequencies that the model computes.
_UNUSED = re.compile(r"dec\..*|rope_freqs\.weight")


def renamed(src: Checkpoint, architecture: object) -> Checkpoint | None:
    """Return a GGUF file's tensors under transformers' names; None if it is no such text encoder.

    Args:
        architecture: the file's `general.architecture`.
    """
    row = _ROWS.get(str(architecture))
    if row is None:
        return None
    writes = row[0] is _T5_ENDS  # whose head belongs to the half that writes
    left_out = {key for key in src.names if _UNUSED.fullmatch(key) or (writes and key == "output.weight")}
    names = {key: _name(key, *row) for key in src.names if key not in left_out}
    known = {key: name for key, name in names.items() if name is not None}
    if len(known) < len(names) or "token_embd.weight" not in known or len(known) < 3:
        return None  # of another make, under its own names
    plain = {key: name for key, name in known.items() if key not in src.prequantized}
    parts = {part for key in known if key in src.prequantized for part in src.prequantized[key].keys.values()}
    parts |= {part for key in known if key in src.prequantized for part in src.prequantized[key].extra}
    return replace(
        src,
        tensors={
            **{part: src.tensors[part] for part in src.tensors if part in parts},
            **{name: src.tensors[key] for key, name in plain.items()},
        },
        home={
            **{part: src.home[part] for part in src.home if part in parts},
            **{name: src.home[key] for key, name in plain.items()},
        },
        prequantized={known[key]: match for key, match in src.prequantized.items() if key in known},
        specs={known[key]: spec for key, spec in src.specs.items() if key in known},
        keys={name: key for key, name in plain.items()},
    )


def _name(key: str, ends: Mapping[str, str], before: str, after: str, block: Mapping[str, str]) -> str | None:
    if key in ends:
        return ends[key]
    match = re.fullmatch(rf"{re.escape(before)}\.(\d+)\.(\w+)\.(weight|bias)", key)
    if match is None or match[2] not in block:
        return None
    return f"{after}.{match[1]}.{block[match[2]]}.{match[3]}"
