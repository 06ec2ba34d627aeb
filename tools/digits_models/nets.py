"""The untrained networks of the shipped models, and the pipelines they make together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdquant.training import digits

if TYPE_CHECKING:
    from diffusers import (
        AutoencoderKL,
        FluxPipeline,
        FluxTransformer2DModel,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )

LATENT_CHANNELS = 4
VAE_FACTOR = 4  # a 32x32 image is an 8x8 latent


def vae() -> AutoencoderKL:
    """[b, 3, 32, 32] in -1..1 <-> [b, 4, 8, 8]; 648 k parameters."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=digits.SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def unet(text_width: int) -> UNet2DConditionModel:
    """A UNet with convolutions and cross-attention at both levels; 1.1 M parameters."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=digits.SIZE // VAE_FACTOR,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=text_width,
        norm_num_groups=8,
    )


def flux(text_width: int) -> FluxTransformer2DModel:
    """A Flux transformer with one double and one single block, inner dimension 256 and a guidance embedding."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=text_width,
        pooled_projection_dim=text_width,
        guidance_embeds=True,
        axes_dims_rope=(8, 28, 28),
    )


def sd_pipeline(**parts: Any) -> StableDiffusionPipeline:
    """The Stable Diffusion pipeline of the given parts, with its scheduler (v-prediction, 1000 steps)."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    scheduler = DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="v_prediction",
    )
    return StableDiffusionPipeline(
        scheduler=scheduler, safety_checker=None, feature_extractor=None, requires_safety_checker=False, **parts
    )


def flux_pipeline(shift: float = 1.0, **parts: Any) -> FluxPipeline:
    """The Flux pipeline of the given parts, with its flow-matching scheduler, whose `shift` is for noisy steps."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False), **parts)
