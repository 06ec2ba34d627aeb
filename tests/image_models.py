"""Small models of the image families that diffusers has key maps for, with random weights, and their files in the
authors' names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdquant.models.single_file import original_names

State = dict[str, Tensor]
LDM = "model.diffusion_model."


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model.

    Attributes:
        kind: its class in diffusers. family, component: what its names tell.
        prefix: what files of the family have before the names, if any.
        architecture: the tag of its GGUF files; None for what is not written as GGUF.
        known: whether diffusers itself reads the file: two of its converters have the published widths in them, and it
            has none for the later models of some families.
        added: tensors of the authors' files that diffusers has no use for, by their shapes.
        config: of a model of hardly any width.
    """

    kind: str
    family: str
    component: str = "transformer"
    prefix: str = LDM
    architecture: str | None
    known: bool = True
    added: dict[str, tuple[int, ...]] = field(default_factory=dict)
    config: dict[str, Any]


_HEADS = {"attention_head_dim": 32, "num_attention_heads": 2}
_DEPTH = {"num_layers": 2, "num_single_layers": 2}
_SANA: dict[str, Any] = {
    **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 32, "cross_attention_dim": 64, "caption_channels": 32, "sample_size": 8,
}  # fmt: skip
_CONTROLNET: dict[str, Any] = {
    "block_out_channels": [32, 32, 64, 64], "norm_num_groups": 8, "cross_attention_dim": 64, "attention_head_dim": 4,
    "conditioning_embedding_out_channels": [8, 8, 8, 16],
}  # fmt: skip
_STAGE_B: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "patch_size": 2, "conditioning_dim": 64,
    "block_out_channels": [32, 64, 64, 64], "num_attention_heads": [0, 0, 2, 2],
    "down_num_layers_per_block": [1, 1, 1, 1], "up_num_layers_per_block": [1, 1, 1, 1],
    "down_blocks_repeat_mappers": [1, 1, 1, 1], "up_blocks_repeat_mappers": [3, 3, 2, 2],
    "block_types_per_layer": [
        *[["SDCascadeResBlock", "SDCascadeTimestepBlock"]] * 2,
        *[["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"]] * 2,
    ],
    "clip_text_pooled_in_channels": 32, "effnet_in_channels": 16, "pixel_mapper_in_channels": 3,
    "timestep_conditioning_type": ["sca"], "dropout": [0.1] * 4, "self_attn": [True] * 4,
}  # fmt: skip
_DC_AE: dict[str, Any] = {
    "latent_channels": 8, "attention_head_dim": 8, "encoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
    "decoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"], "encoder_block_out_channels": [8, 16, 32],
    "decoder_block_out_channels": [8, 16, 32], "encoder_layers_per_block": [0, 1, 2],
    "decoder_layers_per_block": [0, 1, 2], "encoder_qkv_multiscales": [[], [], [5]],
    "decoder_qkv_multiscales": [[], [], [5]],
}  # fmt: skip

MODELS: dict[str, Row] = {
    "flux2": Row(
        kind="Flux2Transformer2DModel", family="flux2", architecture="flux",
        config={**_HEADS, **_DEPTH, "in_channels": 16, "joint_attention_dim": 64, "timestep_guidance_channels": 32,
                "axes_dims_rope": [8, 8, 8, 8]},
    ),
    "flux3": Row(
        kind="Flux3Transformer2DModel", family="flux3", architecture="flux3",
        config={**_HEADS, **_DEPTH, "in_channels": 16, "cond_in_channels": 16, "joint_attention_dim": 64,
                "timestep_channels": 32, "axes_dims_rope": [8, 8, 8, 8], "flow_map": True},
    ),
    "chroma": Row(
        kind="ChromaTransformer2DModel", family="chroma", architecture="flux", known=False,
        config={**_HEADS, **_DEPTH, "in_channels": 16, "joint_attention_dim": 64, "axes_dims_rope": [8, 12, 12],
                "approximator_num_channels": 8, "approximator_hidden_dim": 64, "approximator_layers": 2},
    ),
    "z-image": Row(
        kind="ZImageTransformer2DModel", family="z-image", architecture="lumina2", added={"norm_final.weight": (64,)},
        config={"in_channels": 4, "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
                "cap_feat_dim": 32, "axes_dims": [8, 12, 12]},
    ),
    "z-image-controlnet": Row(
        kind="ZImageControlNetModel", family="z-image", component="controlnet", prefix="", architecture="lumina2",
        config={"control_layers_places": [0, 2], "control_refiner_layers_places": [0, 1], "control_in_dim": 8,
                "add_control_noise_refiner": "control_noise_refiner", "dim": 64, "n_heads": 2, "n_kv_heads": 2},
    ),
    "lumina2": Row(
        kind="Lumina2Transformer2DModel", family="lumina2", architecture="lumina2", known=False,
        added={"norm_final.weight": (96,)},
        config={"hidden_size": 96, "num_layers": 2, "num_refiner_layers": 2, "num_attention_heads": 6,
                "num_kv_heads": 2, "multiple_of": 32, "axes_dim_rope": [8, 4, 4], "axes_lens": [32, 32, 32],
                "cap_feat_dim": 32, "in_channels": 4},
    ),
    "auraflow": Row(
        kind="AuraFlowTransformer2DModel", family="auraflow", prefix="model.", architecture="aura",
        # ComfyUI-GGUF tells the model by its fourth block.
        config={**_HEADS, "sample_size": 8, "num_mmdit_layers": 4, "num_single_dit_layers": 1,
                "joint_attention_dim": 32, "caption_projection_dim": 64, "pos_embed_max_size": 16},
    ),
    "hidream": Row(
        kind="HiDreamImageTransformer2DModel", family="hidream", architecture="hidream",
        config={**_HEADS, "patch_size": 2, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
                "caption_channels": [32, 64], "text_emb_dim": 32, "num_routed_experts": 2, "num_activated_experts": 1,
                "axes_dims_rope": [16, 16], "max_resolution": [16, 16], "llama_layers": [0, 1]},
    ),
    "sana": Row(
        kind="SanaTransformer2DModel", family="sana", architecture="sana", prefix="", config=_SANA,
        added={"pos_embed": (1, 64, 64), "y_embedder.y_embedding": (300, 32)},
    ),
    "sana-1.5": Row(
        kind="SanaTransformer2DModel", family="sana", architecture="sana", prefix="", known=False,
        config={**_SANA, "qk_norm": "rms_norm_across_heads"},
    ),
    "sana-sprint": Row(
        kind="SanaTransformer2DModel", family="sana", architecture="sana", prefix="", known=False,
        config={**_SANA, "qk_norm": "rms_norm_across_heads", "guidance_embeds": True},
        added={"logvar_linear.weight": (1, 64), "logvar_linear.bias": (1,)},
    ),
    "qwen-image": Row(
        kind="QwenImageTransformer2DModel", family="qwen-image", architecture="qwen_image",
        config={**_HEADS, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 32,
                "axes_dims_rope": [8, 12, 12]},
    ),
    "qwen-image-2.1": Row(
        kind="QwenImage21Transformer2DModel", family="qwen-image-2.1", architecture="qwen_image21",
        config={**_HEADS, "in_channels": 16, "out_channels": 16, "num_layers": 2, "context_in_dim": 32,
                "axes_dims_rope": [8, 12, 12]},
    ),
    "krea2": Row(
        kind="Krea2Transformer2DModel", family="krea2", architecture="krea2",
        config={**_HEADS, "in_channels": 16, "num_layers": 2, "num_key_value_heads": 1, "intermediate_size": 96,
                "timestep_embed_dim": 32, "text_hidden_dim": 64, "num_text_layers": 2, "text_num_attention_heads": 2,
                "text_num_key_value_heads": 2, "text_intermediate_size": 96, "num_layerwise_text_blocks": 1,
                "num_refiner_text_blocks": 1, "axes_dims_rope": [8, 12, 12]},
    ),
    "ernie-image": Row(
        kind="ErnieImageTransformer2DModel", family="ernie-image", architecture="ernie",
        config={"hidden_size": 64, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 96,
                "in_channels": 16, "out_channels": 16, "text_in_dim": 32, "rope_axes_dim": [8, 12, 12]},
    ),
    "stable-cascade-c": Row(
        kind="StableCascadeUNet", family="stable-cascade", component="prior", architecture="stable-cascade",
        config={"in_channels": 4, "out_channels": 4, "conditioning_dim": 32, "block_out_channels": [64, 64],
                "num_attention_heads": [2, 2], "down_num_layers_per_block": [1, 2],
                "up_num_layers_per_block": [2, 1], "clip_text_in_channels": 32, "clip_text_pooled_in_channels": 32,
                "clip_image_in_channels": 32, "switch_level": [False]},
    ),
    "stable-cascade-b": Row(
        kind="StableCascadeUNet", family="stable-cascade", component="decoder", architecture="stable-cascade",
        config=_STAGE_B,
    ),
    "controlnet": Row(
        kind="ControlNetModel", family="controlnet", component="controlnet", prefix="control_model.",
        architecture="controlnet", config=_CONTROLNET,
    ),
    "controlnet-xl": Row(
        kind="ControlNetModel", family="controlnet", component="controlnet", prefix="control_model.", known=False,
        architecture="controlnet",
        config={**_CONTROLNET, "block_out_channels": [32, 32, 64], "transformer_layers_per_block": [1, 1, 2],
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 16,
                "projection_class_embeddings_input_dim": 96},
    ),
    "dc-ae": Row(
        kind="AutoencoderDC", family="dc-ae", component="vae", prefix="", architecture=None,
        config={**_DC_AE, "encoder_layers_per_block": [1, 1, 2], "decoder_layers_per_block": [1, 1, 2],
                "downsample_block_type": "Conv", "upsample_block_type": "interpolate"},
    ),
    "dc-ae-deep": Row(
        kind="AutoencoderDC", family="dc-ae", component="vae", prefix="", architecture=None, config=_DC_AE,
    ),
}  # fmt: skip


def saved(row: Row, folder: Path) -> Path:
    """A component folder with a random model in bfloat16: its weights, and norms that are not all one."""
    import diffusers

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers at its own HiDream
        model = getattr(diffusers, row.kind)(**row.config).to(torch.bfloat16)
    model.load_state_dict({name: torch.randn(t.shape).to(t.dtype) for name, t in model.state_dict().items()})
    model.save_pretrained(folder)
    return folder


def weights(folder: Path) -> State:
    """The state dict in a component folder."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def theirs(row: Row, state: State) -> State:
    """A state dict under the authors' names, without a prefix."""
    parts = original_names.written(row.kind, {name: tuple(tensor.shape) for name, tensor in state.items()})
    assert parts is not None, f"no map for {row.kind}"
    made: State = {}
    for part in parts:
        tensor = torch.cat([state[source] for source in part.sources])
        if part.swapped:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        made[part.name] = tensor if part.shape is None else tensor.reshape(part.shape)
    return made | {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in row.added.items()}


def file_of(row: Row, folder: Path, place: Path, prefix: str | None = None) -> Path:
    """The authors' file of the model in a folder, with the config.json beside it."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    before = row.prefix if prefix is None else prefix
    state = {before + name: tensor.contiguous() for name, tensor in theirs(row, weights(folder)).items()}
    save_file(state, place / "model.safetensors")
    return place / "model.safetensors"


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder_of(name): the component folder of that model. Do not change it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = saved(MODELS[name], tmp_path_factory.mktemp("image") / name)
        return made[name]

    return get
