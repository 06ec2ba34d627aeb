"""Small Stable Diffusion XL and 3 pipelines with random weights, of the classes that the real ones have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sdquant
from tools.digits_models.nets import vae

PROJECTED = 64  # width of the pooled text of the second CLIP encoder


def _random(model: Any) -> Any:
    """The model in bfloat16, no weight of it at a constant start: a tensor in a wrong place shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
    return model.bfloat16().eval()


def _clip(layers: int, width: int, *, projected: bool = True) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    known = CLIPTextConfig.from_pretrained(sdquant.demo.path("digits-sd") / "text_encoder")
    config = CLIPTextConfig(
        vocab_size=known.vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
    )
    return _random((CLIPTextModelWithProjection if projected else CLIPTextModel)(config))


def clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(sdquant.demo.path("digits-sd") / "tokenizer")


def t5_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(sdquant.demo.path("digits-flux") / "tokenizer_2")


def sdxl(folder: Path) -> Path:
    """A StableDiffusionXLPipeline's folder. Its CLIP encoders differ in width and depth, as the real ones do."""
    from diffusers import DDIMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2), attention_head_dim=(2, 4), use_linear_projection=True,
        cross_attention_dim=32 + PROJECTED, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + PROJECTED,
    )  # fmt: skip
    pipe = StableDiffusionXLPipeline(
        vae=_random(vae()), unet=_random(unet), scheduler=DDIMScheduler(),
        text_encoder=_clip(2, 32, projected=False), text_encoder_2=_clip(3, PROJECTED),
        tokenizer=clip_tokenizer(), tokenizer_2=clip_tokenizer(), add_watermarker=False,
    )  # fmt: skip
    pipe.save_pretrained(folder)
    return folder


def sd3(folder: Path, *, t5: bool = True) -> Path:
    """A StableDiffusion3Pipeline's folder, its transformer with what version 3.5 has more."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import T5EncoderModel

    transformer = SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=128, caption_projection_dim=64, pooled_projection_dim=32 + PROJECTED, pos_embed_max_size=8,
        qk_norm="rms_norm", dual_attention_layers=(0, 1),
    )  # fmt: skip
    text: Any = {"text_encoder_3": None, "tokenizer_3": None}
    if t5:
        flux = sdquant.demo.path("digits-flux")
        text = {
            "text_encoder_3": T5EncoderModel.from_pretrained(flux / "text_encoder_2", dtype=torch.bfloat16),
            "tokenizer_3": t5_tokenizer(),
        }
    pipe = StableDiffusion3Pipeline(
        vae=_random(vae()), transformer=_random(transformer), scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=_clip(2, 32), text_encoder_2=_clip(3, PROJECTED),
        tokenizer=clip_tokenizer(), tokenizer_2=clip_tokenizer(), **text,
    )  # fmt: skip
    pipe.save_pretrained(folder)
    return folder


ROWS: dict[str, Callable[[Path], Path]] = {"sdxl": sdxl, "sd3": sd3, "sd3-no-t5": partial(sd3, t5=False)}
