"""The models that diffusers' pipelines take from transformers, small: by class, a config of the same make."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from sdquant.models.components import quiet

# Widths that every scheme can pack: rows of 64, of whole blocks.
_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 160,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LANGUAGE: dict[str, Any] = {**_TEXT, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128}
_VISION: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "num_channels": 3,
}  # fmt: skip
_CLIP = {**_TEXT, "projection_dim": 64, "max_position_embeddings": 77}
_T5 = {"d_model": 64, "d_ff": 128, "d_kv": 32, "num_heads": 2, "num_layers": 2, "vocab_size": 160}
_GEMMA = {**_LANGUAGE, "num_key_value_heads": 2, "query_pre_attn_scalar": 32, "sliding_window": 16}
_QWEN_VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [1],
}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}}
_QWEN = {"text_config": {**_LANGUAGE, **_MROPE}, "vision_config": _QWEN_VISION}
_QWEN3_VISION = {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
_QWEN3 = {"text_config": {**_LANGUAGE, **_MROPE}, "vision_config": _QWEN3_VISION}
_MISTRAL = {
    "text_config": {**_LANGUAGE, "model_type": "mistral"},
    "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 32},
}
_AUDIO = {
    "hidden_size": 64, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "spec_size": 32,
    "num_mel_bins": 16, "window_size": 4, "patch_size": 4, "patch_stride": [4, 4], "projection_dim": 64,
    "num_hidden_layers": 2,
}  # fmt: skip


_OURS = "diffusers' own, in a module of a pipeline: its folder's config.json does not say which"
_BROKEN = "diffusers 0.42 cannot make or save it with transformers 5"


@dataclass(frozen=True)
class Row:
    """A model.

    Attributes:
        config: fields of its config. kind: its class, where pipelines name a base of it.
        usual: what is tried on every day, as schemes, "" for floats; the rest are slow tests.
        bare: whether it has no layer that can be quantized.
        apart: why it is not tried at all; "" if it is.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    kind: str | None = None
    usual: tuple[str, ...] = ()
    bare: bool = False
    apart: str = ""


_UPSAMPLED = {"upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4]}

ROWS: Mapping[str, Row] = {
    "BertModel": Row(_TEXT),
    "Blip2QFormerModel": Row(apart=_OURS),
    "BlipForConditionalGeneration": Row(
        {"text_config": {**_TEXT, "encoder_hidden_size": 64}, "vision_config": _VISION}
    ),
    "CLIPTextModel": Row(_CLIP, usual=("", "nf4")),
    "CLIPTextModelWithProjection": Row(_CLIP),
    "CLIPVisionModel": Row(_VISION),
    "CLIPVisionModelWithProjection": Row({**_VISION, "projection_dim": 64}, usual=("",)),
    "ClapModel": Row({"text_config": {**_TEXT, "projection_dim": 64}, "audio_config": _AUDIO, "projection_dim": 64}),
    "ClapTextModelWithProjection": Row({**_TEXT, "projection_dim": 64}),
    "ContextCLIPTextModel": Row(apart=_OURS),
    "DPTForDepthEstimation": Row(
        {
            **_VISION, "num_hidden_layers": 4, "image_size": 32, "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [32, 32, 32, 32], "fusion_hidden_size": 32,
        },
    ),
    "GPT2LMHeadModel": Row({"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 160, "n_positions": 64}, bare=True),
    "Gemma2PreTrainedModel": Row(_GEMMA, "Gemma2Model"),
    "Gemma3ForConditionalGeneration": Row({"text_config": _GEMMA, "vision_config": _VISION}, usual=("", "int8")),
    "Gemma4ForConditionalGeneration": Row(
        {
            "text_config": {**_GEMMA, "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 32},
            "vision_config": {**_VISION, "head_dim": 32, "num_key_value_heads": 2, "position_embedding_size": 64},
        },
    ),
    "Gemma4UnifiedForConditionalGeneration": Row(
        {
            "text_config": _GEMMA,
            "vision_config": {"patch_size": 8, "mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64},
            "audio_config": {"audio_embed_dim": 64},
        },
    ),
    "GemmaPreTrainedModel": Row(_LANGUAGE, "GemmaModel"),
    "GlmImageForConditionalGeneration": Row(
        {
            "text_config": {**_LANGUAGE, "vision_vocab_size": 64, "head_dim": 32, **_MROPE},
            "vision_config": {
                "depth": 2, "hidden_size": 64, "num_heads": 2, "image_size": 32, "intermediate_size": 128,
            },
            "vq_config": {"embed_dim": 64, "num_embeddings": 32, "latent_channels": 64},
        },
    ),
    "GlmModel": Row(_LANGUAGE),
    "IFSafetyChecker": Row(apart=_BROKEN),
    "LlamaForCausalLM": Row(_LANGUAGE),
    "LlamaModel": Row(_LANGUAGE),
    "LlavaForConditionalGeneration": Row(
        {
            "text_config": {**_LANGUAGE, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        },
        usual=("",),
    ),
    "Ministral3ForCausalLM": Row(_LANGUAGE),
    "Mistral3ForConditionalGeneration": Row(_MISTRAL, usual=("",)),
    "Mistral3Model": Row(_MISTRAL),
    "MultilingualCLIP": Row(apart=_OURS),
    "PaintByExampleImageEncoder": Row(apart=_BROKEN),
    "Qwen2VLForConditionalGeneration": Row(
        {
            "text_config": {**_LANGUAGE, **_MROPE},
            "vision_config": {
                "depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2,
            },
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": Row(_QWEN, usual=("", "nf4")),
    "Qwen2_5_VLTextModel": Row({**_LANGUAGE, **_MROPE}),
    "Qwen3ForCausalLM": Row(_LANGUAGE),
    "Qwen3Model": Row(_LANGUAGE),
    "Qwen3VLForConditionalGeneration": Row(_QWEN3, usual=("",)),
    "Qwen3VLModel": Row(_QWEN3),
    "RobertaSeriesModelWithTransformation": Row(apart=_OURS),
    "SafeStableDiffusionSafetyChecker": Row(apart=_BROKEN),
    "Siglip2VisionModel": Row({**_VISION, "num_patches": 4}),
    "SiglipModel": Row({"text_config": {**_TEXT, "max_position_embeddings": 16}, "vision_config": _VISION}),
    "SiglipVisionModel": Row(_VISION),
    "SmolLM3ForCausalLM": Row(_LANGUAGE),
    "SpeechT5HifiGan": Row({"model_in_dim": 64, "upsample_initial_channel": 64, **_UPSAMPLED}),
    "StableDiffusionSafetyChecker": Row(apart=_OURS),
    "T5EncoderModel": Row(_T5, usual=("",)),
    "T5Gemma2Encoder": Row({"text_config": {**_GEMMA, "dropout_rate": 0.0}, "vision_config": _VISION}),
    "T5GemmaEncoder": Row(apart="made of the encoder's part of another class's config, by diffusers alone"),
    "T5GemmaEncoderModel": Row({"encoder": _GEMMA, "decoder": _GEMMA, "vocab_size": 160, "is_encoder_decoder": False}),
    "UMT5EncoderModel": Row(_T5),
    "VitsModel": Row(
        {
            "hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 64, "flow_size": 32, "spectrogram_bins": 17,
            "upsample_initial_channel": 32, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4],
            "duration_predictor_flow_bins": 4, "prior_encoder_num_flows": 2, "posterior_encoder_num_wavenet_layers": 2,
            "prior_encoder_num_wavenet_layers": 2,
        },
    ),
    # Named by no pipeline's annotations, but by their documentation or their checkpoints.
    "Dinov2Model": Row(_VISION, usual=("", "int8")),
}  # fmt: skip


@cache
def named() -> Mapping[str, type]:
    """The model classes of transformers (or made of one) that diffusers' pipelines say they take, by name."""
    with quiet():
        import diffusers
        from transformers import PreTrainedModel

        pipelines = [
            cls
            for name in dir(diffusers)
            if isinstance(cls := getattr(diffusers, name, None), type) and issubclass(cls, diffusers.DiffusionPipeline)
        ]
        hints = [hint for cls in pipelines for hint in typing.get_type_hints(cls.__init__).values()]
    found = {cls.__name__: cls for hint in hints for cls in _classes(hint) if issubclass(cls, PreTrainedModel)}
    found.pop("PreTrainedModel")  # whatever there is
    return found


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


def kind(name: str) -> Any:
    """The class of a row."""
    import transformers

    known = ROWS[name].kind or name
    if not hasattr(transformers, known):
        named()  # diffusers puts classes there, too
    return getattr(transformers, known, None) or named()[known]


def model(name: str) -> Any:
    """A model of a row, with random weights, the same each time."""
    cls = kind(name)
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        made = cls(cls.config_class(**ROWS[name].config)).eval()
        for parameter in made.parameters():
            parameter.requires_grad_(False).copy_(torch.randn(parameter.shape) * 0.05)
    return made
