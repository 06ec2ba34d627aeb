"""Small models of the video families with random weights, as diffusers has them and as their authors write them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sdquant.models.single_file import original_names

State = dict[str, Tensor]
LDM = "model.diffusion_model."


@dataclass(frozen=True)
class Model:
    """A row.

    Attributes:
        family, component: what `detect` says. class_name, config: in diffusers.
        prefixes: that its authors' names have in files. theirs: the one without which diffusers does not know them.
        served: whether diffusers' converter knows all of the model; where not, `key_maps` says why.
        architecture: of its GGUF files; None for what is no main model.
    """

    family: str
    component: str
    class_name: str
    config: dict[str, Any]
    architecture: str | None = None
    prefixes: tuple[str, ...] = ("", LDM)
    theirs: str = ""
    served: bool = True


_WAN: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "text_dim": 32,
    "freq_dim": 32, "ffn_dim": 96, "num_layers": 2, "rope_max_seq_len": 32,
}  # fmt: skip
_IMAGE = {"image_dim": 32, "added_kv_proj_dim": 64}
_LTX: dict[str, Any] = {
    "in_channels": 32, "out_channels": 32, "num_attention_heads": 2, "attention_head_dim": 32,
    "cross_attention_dim": 64, "num_layers": 2, "caption_channels": 32,
}  # fmt: skip
_LTX2: dict[str, Any] = _LTX | {
    "audio_in_channels": 32, "audio_out_channels": 32, "audio_num_attention_heads": 2, "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 64,
}  # fmt: skip
_HUNYUAN: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2,
    "num_single_layers": 2, "num_refiner_layers": 2, "text_embed_dim": 32, "pooled_projection_dim": 32,
    "rope_axes_dim": [8, 12, 12],
}  # fmt: skip
_MOCHI: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2, "pooled_projection_dim": 32, "in_channels": 4,
    "text_embed_dim": 32, "time_embed_dim": 32,
}  # fmt: skip
_COSMOS: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2,
    "text_embed_dim": 32, "adaln_lora_dim": 32, "max_size": [4, 8, 8],
}  # fmt: skip
_WAN_VAE: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
_LTX_VAE: dict[str, Any] = {
    "latent_channels": 8, "block_out_channels": [8, 16, 32, 32], "decoder_block_out_channels": [8, 16, 32, 32],
    "layers_per_block": [2, 1, 1, 1, 1], "decoder_layers_per_block": [1, 1, 1, 1, 2],
}  # fmt: skip
_LTX_VAE_091 = _LTX_VAE | {
    "decoder_block_out_channels": [8, 16, 32], "decoder_layers_per_block": [1, 1, 1, 1], "timestep_conditioning": True,
    "decoder_spatio_temporal_scaling": [True, True, True], "decoder_inject_noise": [True, True, True, False],
    "upsample_residual": [True, True, True], "upsample_factor": [2, 2, 2],
}  # fmt: skip
_LTX_VAE_095 = _LTX_VAE_091 | {
    "block_out_channels": [8, 16, 32, 64], "spatio_temporal_scaling": [True] * 4,
    "down_block_types": ["LTXVideo095DownBlock3D"] * 4,
    "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
}  # fmt: skip
_MOTION: dict[str, Any] = {"motion_num_attention_heads": 2, "motion_max_seq_length": 8, "block_out_channels": [32, 32]}

MODELS: dict[str, Model] = {
    "wan": Model("wan", "transformer", "WanTransformer3DModel", _WAN, "wan"),
    "wan of images": Model("wan", "transformer", "WanTransformer3DModel", _WAN | _IMAGE, "wan"),
    "wan of two frames": Model(
        "wan", "transformer", "WanTransformer3DModel", _WAN | _IMAGE | {"pos_embed_seq_len": 6}, "wan", served=False
    ),
    "wan vace": Model(
        "wan-vace", "transformer", "WanVACETransformer3DModel",
        _WAN | {"vace_layers": [0, 1], "vace_in_channels": 8}, "wan",
    ),
    "skyreels": Model("wan", "transformer", "SkyReelsV2Transformer3DModel", _WAN, "wan"),
    "skyreels of frame rates": Model(
        "wan", "transformer", "SkyReelsV2Transformer3DModel", _WAN | {"inject_sample_info": True}, "wan", served=False
    ),
    "chronoedit": Model("wan", "transformer", "ChronoEditTransformer3DModel", _WAN | _IMAGE, "wan"),
    "wan animate": Model(
        "wan-animate", "transformer", "WanAnimateTransformer3DModel",
        _WAN | _IMAGE | {
            "in_channels": 12, "latent_channels": 4, "motion_encoder_size": 512, "motion_style_dim": 64,
            "motion_encoder_channel_sizes": {str(2**n): 32 for n in range(2, 11)}, "motion_dim": 4,
            "motion_encoder_dim": 32, "face_encoder_hidden_dim": 32, "inject_face_latents_blocks": 1,
        },
        "wan",
    ),
    "wan animate 2": Model(
        "wan-animate-2", "transformer", "WanAnimate2Transformer3DModel",
        {"in_dim": 4, "dim": 64, "ffn_dim": 96, "freq_dim": 32, "text_dim": 32, "out_dim": 4, "num_heads": 2,
         "num_layers": 2, "text_len": 8},
        "wan",
    ),
    "ltx": Model("ltx-video", "transformer", "LTXVideoTransformer3DModel", _LTX, "ltxv"),
    "ltx 2": Model("ltx2", "transformer", "LTX2VideoTransformer3DModel", _LTX2, "ltxv"),
    "ltx 2.3": Model(
        "ltx2", "transformer", "LTX2VideoTransformer3DModel",
        _LTX2 | {"gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True,
                 "use_prompt_embeddings": False},
        "ltxv", served=False,
    ),
    "hunyuan": Model(
        "hunyuan-video", "transformer", "HunyuanVideoTransformer3DModel", _HUNYUAN, "hyvid", served=False
    ),
    "mochi": Model("mochi", "transformer", "MochiTransformer3DModel", _MOCHI, "mochi", served=False),
    "cosmos 1": Model(
        "cosmos", "transformer", "CosmosTransformer3DModel", _COSMOS, "cosmos",
        prefixes=("", "net.", LDM), served=False,
    ),
    "cosmos 2": Model(
        "cosmos", "transformer", "CosmosTransformer3DModel", _COSMOS | {"extra_pos_embed_type": None}, "cosmos",
        prefixes=("", "net.", LDM),
    ),
    "cosmos 2.5": Model(
        "cosmos", "transformer", "CosmosTransformer3DModel",
        _COSMOS | {"extra_pos_embed_type": None, "use_crossattn_projection": True, "crossattn_proj_in_channels": 64,
                   "encoder_hidden_states_channels": 32},
        "cosmos", prefixes=("net.",),
    ),
    "motif": Model(
        "motif-video", "transformer", "MotifVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2,
         "num_single_layers": 2, "text_embed_dim": 32, "rope_axes_dim": [8, 12, 12]},
        "motif_video",
    ),
    "minimax": Model(
        "minimax-h3", "transformer", "MiniMaxH3Transformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 32, "hidden_size": 64, "num_layers": 2,
         "num_refiner_layers": 2, "ffn_dim": 96, "in_channels": 4, "audio_in_channels": 4, "text_dim": 32,
         "freq_dim": 32, "time_embed_hidden_dim": 64, "time_embed_dim": 32, "rope_freq_dim": 4},
        "minimax_h3",
    ),
    "wan vae": Model("wan", "vae", "AutoencoderKLWan", _WAN_VAE, prefixes=("", "vae.")),
    "wan 2.2 vae": Model(
        "wan", "vae", "AutoencoderKLWan",
        _WAN_VAE | {"decoder_base_dim": 8, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2},
        prefixes=("",), served=False,
    ),
    "ltx vae": Model(
        "ltx-video", "vae", "AutoencoderKLLTXVideo", _LTX_VAE, prefixes=("", "vae."), theirs="vae."
    ),
    "ltx 0.9.1 vae": Model(
        "ltx-video", "vae", "AutoencoderKLLTXVideo", _LTX_VAE_091, prefixes=("vae.",), theirs="vae."
    ),
    "ltx 0.9.5 vae": Model(
        "ltx-video", "vae", "AutoencoderKLLTXVideo", _LTX_VAE_095, prefixes=("", "vae."), theirs="vae.", served=False
    ),
    "ltx 2 vae": Model(
        "ltx2", "vae", "AutoencoderKLLTX2Video",
        {"latent_channels": 8, "block_out_channels": [8, 16, 32, 64], "decoder_block_out_channels": [8, 16, 32],
         "layers_per_block": [1, 2, 1, 1, 1], "decoder_layers_per_block": [1, 1, 2, 1]},
        prefixes=("", "vae."),
    ),
    "ltx 2 audio vae": Model(
        "ltx2", "audio_vae", "AutoencoderKLLTX2Audio",
        {"base_channels": 8, "latent_channels": 4, "num_res_blocks": 1, "resolution": 32},
        prefixes=("", "audio_vae."),
    ),
    "motion adapter": Model(
        "animatediff", "motion_adapter", "MotionAdapter",
        _MOTION | {"motion_layers_per_block": 1, "motion_norm_num_groups": 8}, prefixes=("",),
    ),
    "sparse control": Model(
        "animatediff", "controlnet", "SparseControlNetModel",
        _MOTION | {"down_block_types": ["CrossAttnDownBlockMotion", "DownBlockMotion"], "layers_per_block": 1,
                   "norm_num_groups": 8, "cross_attention_dim": 16, "attention_head_dim": 4},
        prefixes=("",),
    ),
}  # fmt: skip


def changed(row: Model, config: dict[str, Any]) -> Model:
    """The row with other values in its config."""
    return replace(row, config=row.config | config)


@dataclass(frozen=True)
class Made:
    """A model on disk.

    Attributes:
        row: what it is. folder: with diffusers' names. state: its weights. authors: these under their authors' names.
        files: of the latter, by prefix; config.json lies beside.
    """

    row: Model
    folder: Path
    state: State
    authors: State
    files: dict[str, Path] = field(default_factory=dict)


def made(name: str, home: Path) -> Made:
    """The model of a row with random weights in bfloat16, written in both layouts."""
    import diffusers

    row = MODELS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, row.class_name)(**row.config).to(torch.bfloat16)
    for key, tensor in model.state_dict().items():
        if not key.endswith("pos_embed.pe"):  # a constant
            tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(home / "diffusers")
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    authors = written(row.class_name, state)
    files = {}
    for prefix in dict.fromkeys((*row.prefixes, row.theirs)):
        place = home / f"prefix {prefix.rstrip('.')}"
        model.save_config(place)
        files[prefix] = place / "model.safetensors"
        save_file({prefix + key: tensor.contiguous() for key, tensor in authors.items()}, files[prefix])
    return Made(row, home / "diffusers", state, authors, files)


def written(class_name: str, state: State) -> State:
    """A state dict of diffusers under its authors' names."""
    if class_name in ("MotionAdapter", "SparseControlNetModel"):
        return dict(_animatediff(state))
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    rows = original_names.written(class_name, shapes)
    assert rows is not None, class_name
    found: State = {}
    for row in rows:
        parts = [state[source] for source in row.sources]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        if row.swapped:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        found[row.name] = tensor.reshape(original_names.shape_of(row, shapes))
    if class_name == "WanAnimateTransformer3DModel":  # what their class keeps and diffusers computes
        found["motion_encoder.enc.net_app.convs.1.conv2.0.kernel"] = torch.ones(4, 4)
    return found


def _animatediff(state: State) -> Any:
    """AnimateDiff's names. Each attention has the places of frames for itself there."""
    for name, tensor in state.items():
        head, found, rest = name.partition(".motion_modules.0.")
        for number in range(2):
            head, found, rest = (head, found, rest) if found else name.partition(f".motion_modules.{number}.")
        if not found:
            yield name, tensor
            continue
        for ours, theirs in (
            (".norm1.", ".norms.0."), (".norm2.", ".norms.1."), (".norm3.", ".ff_norm."),
            (".attn1.", ".attention_blocks.0."), (".attn2.", ".attention_blocks.1."),
        ):  # fmt: skip
            rest = rest.replace(ours, theirs)
        there = f"{head}{found}temporal_transformer.{rest}"
        if not there.endswith("pos_embed.pe"):
            yield there, tensor
            continue
        for number in range(2):
            yield there.replace("pos_embed.pe", f"attention_blocks.{number}.pos_encoder.pe"), tensor.clone()


def pipeline(home: Path, name: str, parts: dict[str, Made]) -> Path:
    """A pipeline folder with these components and a scheduler alone."""
    import inspect

    import diffusers

    cls = getattr(diffusers, name)
    classes = {part: getattr(diffusers, one.row.class_name) for part, one in parts.items()}
    models = {part: cls.from_pretrained(parts[part].folder) for part, cls in classes.items()}
    wanted = inspect.signature(cls.__init__).parameters
    rest = {key: None for key, one in wanted.items() if one.default is one.empty and key not in (*models, "self")}
    cls(**rest | models | {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}).save_pretrained(home)
    return home
