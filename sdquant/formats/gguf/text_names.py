"""Text encoders in GGUF under transformers' names: those of llama.cpp as rows, others with their own names.

llama.cpp's names are those of the package gguf, which is not needed to read; the tests compare them. `text_values` has
what is to be undone in the values, `vision_names` the other file of a model that sees. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import BadFileError
from .. import model_families
from . import text_values

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_T5_BLOCK: Mapping[str, str] = {
    "attn_q": "layer.0.SelfAttention.q", "attn_k": "layer.0.SelfAttention.k", "attn_v": "layer.0.SelfAttention.v",
    "attn_o": "layer.0.SelfAttention.o", "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "attn_norm": "layer.0.layer_norm", "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1", "ffn_down": "layer.1.DenseReluDense.wo", "ffn_norm": "layer.1.layer_norm",
}  # fmt: skip
_BLOCK: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_T5_ENDS = {"token_embd.weight": "shared.weight", "enc.output_norm.weight": "encoder.final_layer_norm.weight"}
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
_SEEING_ENDS = {key: name.replace("model.", "model.language_model.") for key, name in _ENDS.items()}
# The half of T5 that writes; frequencies that the model computes.
_UNUSED = re.compile(r"dec\..*|rope_freqs\.weight")


@dataclass(frozen=True)
class _Row:
    """An architecture.

    Attributes:
        block: names in a block of the file, and of the model. ends: whole names outside of blocks.
        before, after: what stands before the blocks' numbers in the file, and in the model.
        in_pairs: whether the rows of q and k are in another order; see `text_values.in_halves`.
        norms_plus_one: whether 1 was added to the norms.
    """

    block: Mapping[str, str]
    ends: Mapping[str, str]
    before: str = "blk"
    after: str = "model.layers"
    in_pairs: bool = False
    norms_plus_one: bool = False


_T5 = _Row(_T5_BLOCK, _T5_ENDS, "enc.blk", "encoder.block")
_LLAMA = _Row(_BLOCK, _ENDS, in_pairs=True)
_SEEING_LAYERS = "model.language_model.layers"
_ROWS: Mapping[str, _Row] = {  # by `general.architecture`
    "t5": _T5,
    "t5encoder": _T5,
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "qwen2": _Row(_BLOCK, _ENDS),
    "qwen2vl": _Row(_BLOCK, _SEEING_ENDS, after=_SEEING_LAYERS),
    "qwen3": _Row({**_BLOCK, **_HEAD_NORMS}, _ENDS),
    "qwen3vl": _Row({**_BLOCK, **_HEAD_NORMS}, _SEEING_ENDS, after=_SEEING_LAYERS),
    "gemma": _Row(_BLOCK, _ENDS, norms_plus_one=True),
    "gemma2": _Row({**_BLOCK, **_FOUR_NORMS}, _ENDS, norms_plus_one=True),
    "gemma3": _Row({**_BLOCK, **_HEAD_NORMS, **_FOUR_NORMS}, _ENDS, norms_plus_one=True),
}
# What stable-diffusion.cpp and others put before all names of one text encoder.
_PREFIX = re.compile(
    r"(text_encoders\.\w+\.transformer|cond_stage_model\.transformer|conditioner\.embedders\.\d+\.transformer"
    r"|te[123]?|clip_[lg]|t5xxl)\."
)


def renamed(src: Checkpoint, metadata: Mapping[str, Any]) -> Checkpoint | None:
    """Return a file of llama.cpp's as transformers has it; None if it is no such text encoder.

    Args:
        metadata: the file's.

    Raises:
        BadFileError: its header lacks the number of heads, or contradicts the tensors.
        UnsupportedFileError: what has to be changed is quantized.
    """
    architecture = str(metadata.get("general.architecture"))
    row = _ROWS.get(architecture)
    if row is None:
        return None
    writes = row is _T5  # whose head belongs to the half that writes
    left_out = {key for key in src.names if _UNUSED.fullmatch(key) or (writes and key == "output.weight")}
    names = {key: _name(key, row) for key in src.names if key not in left_out}
    known = {key: name for key, name in names.items() if name is not None}
    if len(known) < len(names) or not _is_text_encoder(known.values()):
        return None  # of another make, under its own names
    text = with_names(src, known)
    if row.in_pairs:
        width = metadata.get(f"{architecture}.attention.key_length")
        text = text_values.in_halves(text, _heads(src, metadata, architecture, known), width)
    if row.norms_plus_one:
        text = text_values.less_one(text, [name for name in known.values() if name.endswith("norm.weight")])
    return text


def under_own_names(src: Checkpoint, *, prefixed: bool) -> Checkpoint | None:
    """Return a file that has transformers' names already; None if it has not.

    Args:
        prefixed: its names have to stand behind the prefix of one text encoder; without, it may be several models.
    """
    names = src.names
    match = _PREFIX.match(min(names, default=""))
    prefix = match[0] if match is not None else ""
    if prefixed > bool(prefix) or not all(name.startswith(prefix) for name in names):
        return None
    bare = {key: key.removeprefix(prefix) for key in names}
    return with_names(src, bare) if _is_text_encoder(bare.values()) else None


def with_names(src: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return the source with other names, by those in the file; it has no other tensors."""
    plain = {key: name for key, name in names.items() if key not in src.prequantized}
    packed = {name: src.prequantized[key] for key, name in names.items() if key in src.prequantized}
    parts = {part for match in packed.values() for part in (*match.keys.values(), *match.extra)}
    return replace(
        src,
        tensors={plain.get(key, key): info for key, info in src.tensors.items() if key in parts or key in plain},
        home={plain.get(key, key): file for key, file in src.home.items() if key in parts or key in plain},
        prequantized=packed,
        specs={names[key]: spec for key, spec in src.specs.items() if key in names},
        keys={name: key for key, name in plain.items()},
    )


def _is_text_encoder(names: Any) -> bool:
    row = model_families.recognise(frozenset(names))
    return row is not None and row.component == "text_encoder"


def _name(key: str, row: _Row) -> str | None:
    if key in row.ends:
        return row.ends[key]
    match = re.fullmatch(rf"{re.escape(row.before)}\.(\d+)\.(\w+)\.(weight|bias)", key)
    if match is None or match[2] not in row.block:
        return None
    return f"{row.after}.{match[1]}.{row.block[match[2]]}.{match[3]}"


def _heads(src: Checkpoint, metadata: Mapping[str, Any], kind: str, known: Mapping[str, str]) -> dict[str, int]:
    """Return the number of heads of each weight and bias of q and k."""
    every = metadata.get(f"{kind}.attention.head_count")
    of_keys = metadata.get(f"{kind}.attention.head_count_kv", every)
    if type(every) is not int or type(of_keys) is not int:  # nor bools
        raise BadFileError(
            f"Cannot load {src.path}",
            f"its header does not say how many heads the layers have ({kind}.attention.head_count), by which the rows "
            "of its weights are ordered",
            "Download the file again from its source",
        )
    counts = {"attn_q": every, "attn_k": of_keys}
    return {name: counts[part] for key, name in known.items() for part in key.split(".")[2:3] if part in counts}
