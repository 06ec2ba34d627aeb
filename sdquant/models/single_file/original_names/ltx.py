"""LTX-Video and LTX-2, as Lightricks name them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .rows import Rules, renamed

if TYPE_CHECKING:
    from .rows import OutputTensor, Shapes

_NORMS: Rules = (("norm_q", "q_norm"), ("norm_k", "k_norm"))
_LTX: Rules = (("^proj_in", "patchify_proj"), ("^time_embed", "adaln_single"), *_NORMS)
_LTX2: Rules = (
    *_LTX,
    ("^audio_proj_in", "audio_patchify_proj"),
    ("^audio_time_embed", "audio_adaln_single"),
    ("^prompt_adaln", "prompt_adaln_single"),
    ("^audio_prompt_adaln", "audio_prompt_adaln_single"),
    ("^av_cross_attn_video_scale_shift", "av_ca_video_scale_shift_adaln_single"),
    ("^av_cross_attn_audio_scale_shift", "av_ca_audio_scale_shift_adaln_single"),
    ("^av_cross_attn_video_a2v_gate", "av_ca_a2v_gate_adaln_single"),
    ("^av_cross_attn_audio_v2a_gate", "av_ca_v2a_gate_adaln_single"),
    ("video_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_video"),
    ("audio_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_audio"),
)


def ltx(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from renamed(shapes, _LTX)


def ltx2(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from renamed(shapes, _LTX2)
