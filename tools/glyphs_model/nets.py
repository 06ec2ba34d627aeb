"""The untrained networks of glyphs-flux. Widths are multiples of 256, as large models' are, so that K-quants fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tools.glyphs_model import glyphs

if TYPE_CHECKING:
    from pathlib import Path

    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextModel, T5EncoderModel, T5Tokenizer

WIDTH = 256  # of the transformer and of both text encoders
CHANNELS = 12  # of a latent: as many numbers as the image has
FACTOR = 2  # a 16x16 image is an 8x8 latent
T5_LENGTH = 512


def vae() -> AutoencoderKL:
    """[b, 3, 16, 16] in -1..1 <-> [b, 12, 8, 8]."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 64),
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=8,
        sample_size=glyphs.SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def flux() -> FluxTransformer2DModel:
    """A Flux transformer with one double and two single blocks, without guidance embedding (as Flux.1-schnell)."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * CHANNELS,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=64,
        num_attention_heads=WIDTH // 64,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 28, 28),
    )


def corpus() -> list[str]:
    """Prompts that hold every word."""
    return [glyph.prompt for glyph in glyphs.shapes() + glyphs.samples(200)]


def t5_tokenizer() -> T5Tokenizer:
    """A unigram tokenizer whose pieces are the words of the prompts and single characters."""
    from transformers import T5Tokenizer

    pieces: dict[str, float] = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0}
    for word in sorted({word for line in corpus() for word in line.split()}):
        pieces["▁" + word] = -3.0
    pieces["▁"] = -8.0
    for letter in [chr(code) for code in range(33, 127)]:
        pieces.setdefault(letter, -9.0)
    return T5Tokenizer(vocab=list(pieces.items()), extra_ids=0, model_max_length=T5_LENGTH)


def t5_encoder(tokenizer: T5Tokenizer) -> T5EncoderModel:
    """A T5 encoder of two layers."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        d_kv=64,
        num_heads=4,
        d_ff=WIDTH,
        num_layers=2,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return cast("T5EncoderModel", T5EncoderModel(config))


def clip_encoder(tokenizer: Any) -> CLIPTextModel:
    """A CLIP text encoder of one layer."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return cast("CLIPTextModel", CLIPTextModel(config))


def clip_tokenizer(workdir: Path) -> Any:
    """A byte-pair tokenizer trained on the prompts."""
    from tools.digits_models import text

    return text.clip_tokenizer(workdir, corpus())
