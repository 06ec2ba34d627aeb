"""Which model a set of tensor names belongs to. Ordered rows; the first whose names are all there wins."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row: the tensors that must be there (whole names), and what they mean."""

    family: str
    component: str
    layout: str  # "diffusers" or the name of the foreign layout
    names: tuple[str, ...]
    class_name: str | None = None

    @property
    def foreign(self) -> bool:
        """Return whether the tensor names are not those of diffusers or transformers."""
        return self.layout not in ("diffusers", "transformers")

    @property
    def draws(self) -> bool:
        """Return whether it is a denoiser, or a checkpoint that has one, rather than a text encoder or VAE."""
        return self.component not in ("text_encoder", "vae")


_UNET = ("conv_in.weight", "time_embedding.linear_1.weight", "down_blocks.0.resnets.0.conv1.weight", "conv_out.weight")
# Kandinsky's and DeepFloyd's UNets, the only ones of their class whose attention is that of unconditional ones.
_SIMPLE_CROSS = "mid_block.attentions.0.add_k_proj.weight"
_LDM = "model.diffusion_model."
# What may stand before the names of a UNet or transformer: in files of ComfyUI, of trainers, of NVIDIA.
PREFIXES = (_LDM, "diffusion_model.", "model.", "net.")
_FIRST_STAGE = "first_stage_model.decoder.conv_in.weight"

# Families that diffusers has key maps for: what tells them from each other, those with more of it first. Z-Image files
# say "lumina2", and Chroma and FLUX.2 share names with FLUX.1.
_OTHERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("flux2", ("single_stream_modulation.lin.weight", "double_blocks.0.img_attn.qkv.weight")),
    ("chroma", ("distilled_guidance_layer.in_proj.weight", "double_blocks.0.img_attn.qkv.weight")),
    ("flux3", ("early_stream_modulations.image.lin.weight", "emb_in.image.weight")),
    ("z-image", ("cap_embedder.0.weight", "layers.0.adaLN_modulation.0.weight", "x_embedder.weight")),
    ("lumina2", ("cap_embedder.0.weight", "layers.0.adaLN_modulation.1.weight")),
    ("auraflow", ("cond_seq_linear.weight", "double_layers.0.attn.w2q.weight")),
    ("ltx2", ("patchify_proj.weight", "av_ca_a2v_gate_adaln_single.emb.timestep_embedder.linear_1.weight")),
    ("ltx-video", ("patchify_proj.weight", "transformer_blocks.0.scale_shift_table")),
    ("mochi", ("blocks.0.attn.qkv_x.weight",)),
    (
        "hunyuan-video",
        ("txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.weight", "double_blocks.0.img_attn_qkv.weight"),
    ),
    ("sana", ("blocks.0.cross_attn.q_linear.weight", "blocks.0.mlp.inverted_conv.conv.weight")),
    ("wan-vace", ("head.modulation", "vace_blocks.0.after_proj.weight")),
    ("wan-animate", ("head.modulation", "motion_encoder.dec.direction.weight")),
    ("wan-animate-2", ("head.modulation", "blocks.0.block.self_attn.q.weight")),
    ("wan", ("head.modulation", "blocks.0.self_attn.q.weight")),
    ("hidream", ("double_stream_blocks.0.block.adaLN_modulation.1.weight",)),
    ("cosmos", ("x_embedder.proj.1.weight", "blocks.block0.blocks.0.block.attn.to_q.0.weight")),
    ("cosmos", ("x_embedder.proj.1.weight", "blocks.0.adaln_modulation_cross_attn.1.weight")),
    ("qwen-image", ("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight")),
    ("qwen-image-2.1", ("txt_in.text_norm.weight", "transformer_blocks.0.img_mlp.gate_up.weight")),
    ("krea2", ("txtfusion.projector.weight", "tproj.1.weight")),
    ("ernie-image", ("text_proj.weight", "layers.0.adaLN_sa_ln.weight")),
    (
        "motif-video",
        ("x_embedder.proj.weight", "context_embedder.linear_1.weight", "single_transformer_blocks.0.proj_mlp.weight"),
    ),
    ("minimax-h3", ("token_refiner.blocks.0.attn.qkv_proj.weight", "video_patch_proj.weight")),
)
# The same for components of other names.
_BESIDE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("stable-cascade", "prior", ("clip_txt_mapper.weight", "down_blocks.0.2.attention.attn.in_proj_weight")),
    ("stable-cascade", "decoder", ("clip_mapper.weight", "effnet_mapper.0.weight")),
    ("z-image", "controlnet", ("control_all_x_embedder.2-1.weight", "control_layers.0.adaLN_modulation.0.weight")),
    ("controlnet", "controlnet", ("input_hint_block.0.weight", "zero_convs.0.0.weight", "time_embed.0.weight")),
    ("dc-ae", "vae", ("decoder.project_in.main.conv.weight", "decoder.stages.1.op_list.0.main.conv.conv.weight")),
)
CONTROL = "control_model."  # what stands before a ControlNet's names in its authors' files
# What goes with them, in files of its own or, behind the prefix, in checkpoints: family, component, prefix, names.
_LTX_VAE = "encoder.down_blocks.0.res_blocks.0.conv1.conv.weight"
_MOTION = "down_blocks.0.motion_modules.0.temporal_transformer.norm.weight"
_PARTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("wan", "vae", "vae.", ("encoder.conv1.weight", "decoder.middle.0.residual.0.gamma")),
    ("ltx-video", "vae", "vae.", (_LTX_VAE, "decoder.up_blocks.9.res_blocks.0.conv1.conv.weight")),
    ("ltx-video", "vae", "vae.", (_LTX_VAE, "decoder.last_time_embedder.timestep_embedder.linear_1.weight")),
    ("ltx2", "vae", "vae.", (_LTX_VAE, "decoder.up_blocks.6.res_blocks.0.conv1.conv.weight")),
    (
        "ltx2", "audio_vae", "audio_vae.",
        ("per_channel_statistics.mean-of-means", "decoder.up.0.block.0.conv1.conv.weight"),
    ),
    ("animatediff", "controlnet", "", (_MOTION, "controlnet_down_blocks.0.weight")),
    ("animatediff", "motion_adapter", "", (_MOTION,)),
)  # fmt: skip

_WAN_TIME = "condition_embedder.time_proj.weight"
_REFINER = ("x_embedder.proj.weight", "context_embedder.token_refiner.refiner_blocks.0.attn.to_q.weight")
_OWN_MOTION = "down_blocks.0.motion_modules.0.norm.weight"
_TRANSFORMERS = ("context_embedder.weight", "transformer_blocks.0.attn.add_q_proj.weight")
# What is told by diffusers' own names, which some files have behind a prefix: family, component, class, names.
_DIFFUSERS: tuple[tuple[str, str, str | None, tuple[str, ...]], ...] = (
    ("wan-vace", "transformer", "WanVACETransformer3DModel", (_WAN_TIME, "vace_blocks.0.proj_out.weight")),
    ("wan-animate", "transformer", "WanAnimateTransformer3DModel",
     (_WAN_TIME, "motion_encoder.motion_synthesis_weight")),
    ("wan-animate-2", "transformer", "WanAnimate2Transformer3DModel",
     ("head.modulation", "blocks.0.self_attn.to_q.weight")),
    ("anyflow", "transformer", "AnyFlowTransformer3DModel",
     (_WAN_TIME, "condition_embedder.delta_embedder.linear_1.weight")),
    ("helios", "transformer", "HeliosTransformer3DModel", (_WAN_TIME, "patch_long.weight")),
    ("wan", "transformer", "WanTransformer3DModel",  # SkyReels' and ChronoEdit's have these names, too
     (_WAN_TIME, "scale_shift_table", "blocks.0.attn1.to_q.weight")),
    ("ltx2", "transformer", "LTX2VideoTransformer3DModel",
     ("audio_proj_in.weight", "audio_time_embed.linear.weight", "transformer_blocks.0.audio_ff.net.0.proj.weight")),
    ("ltx-video", "transformer", "LTXVideoTransformer3DModel",
     ("proj_in.weight", "time_embed.linear.weight", "transformer_blocks.0.scale_shift_table")),
    ("mochi", "transformer", "MochiTransformer3DModel",
     ("time_embed.pooler.to_kv.weight", "transformer_blocks.0.norm1_context.linear.weight")),
    ("minimax-h3", "transformer", "MiniMaxH3Transformer3DModel",
     ("audio_proj_in.weight", "token_refiner.refiner_blocks.0.attn.to_q.weight")),
    ("cosmos", "controlnet", "CosmosControlNetModel",
     ("patch_embed_base.proj.weight", "control_blocks.0.attn1.to_q.weight")),
    ("cosmos", "transformer", "CosmosTransformer3DModel",
     ("time_embed.t_embedder.linear_1.weight", "transformer_blocks.0.norm1.linear_1.weight")),
    ("hunyuan-video-1.5", "transformer", "HunyuanVideo15Transformer3DModel",
     (*_REFINER, "image_embedder.linear_1.weight")),
    ("framepack", "transformer", "HunyuanVideoFramepackTransformer3DModel",
     (*_REFINER, "clean_x_embedder.proj.weight")),
    ("hunyuan-video", "transformer", "HunyuanVideoTransformer3DModel",
     (*_REFINER, "time_text_embed.text_embedder.linear_1.weight")),
    ("hunyuan-image", "transformer", "HunyuanImageTransformer2DModel",
     (*_REFINER, "single_transformer_blocks.0.proj_mlp.weight")),
    ("sana-video", "transformer", "SanaVideoTransformer3DModel",
     ("caption_norm.weight", "transformer_blocks.0.ff.conv_temp.weight")),
    ("latte", "transformer", "LatteTransformer3DModel",
     ("adaln_single.linear.weight", "temporal_transformer_blocks.0.attn1.to_q.weight")),
    ("pixart", "transformer", "PixArtTransformer2DModel",  # Allegro's has these names, too
     ("pos_embed.proj.weight", "adaln_single.linear.weight", "transformer_blocks.0.attn2.to_q.weight")),
    ("consisid", "transformer", "ConsisIDTransformer3DModel",
     ("patch_embed.text_proj.weight", "local_facial_extractor.latents")),
    ("cogvideox", "transformer", "CogVideoXTransformer3DModel",
     ("patch_embed.text_proj.weight", "transformer_blocks.0.norm1.norm.weight")),
    ("cogview", "transformer", None,  # CogView 3 Plus, or 4
     ("patch_embed.text_proj.weight", "time_condition_embed.condition_embedder.linear_1.weight")),
    ("nucleus-image", "transformer", "NucleusMoEImageTransformer2DModel",
     ("txt_norm.weight", "transformer_blocks.0.encoder_proj.weight")),
    ("animatediff", "unet", "UNetMotionModel", ("conv_in.weight", "conv_out.weight", _OWN_MOTION)),
    ("animatediff", "controlnet", "SparseControlNetModel", ("controlnet_cond_embedding.weight", _OWN_MOTION)),
    ("animatediff", "motion_adapter", "MotionAdapter", (_OWN_MOTION,)),
    # ControlNets have most names of the model that they steer.
    ("flux", "controlnet", "FluxControlNetModel", (*_TRANSFORMERS, "controlnet_x_embedder.weight")),
    ("qwen-image", "controlnet", "QwenImageControlNetModel", ("txt_norm.weight", "controlnet_x_embedder.weight")),
    ("sd3", "controlnet", "SD3ControlNetModel", ("controlnet_blocks.0.weight", "pos_embed_input.proj.weight")),
    ("sana", "controlnet", "SanaControlNetModel", ("controlnet_blocks.0.weight", "input_block.weight")),
    ("ltx2", "audio_vae", "AutoencoderKLLTX2Audio", ("latents_mean", "encoder.down.0.block.0.conv1.conv.weight")),
    ("hunyuan-video", "vae", "AutoencoderKLHunyuanVideo",
     ("encoder.mid_block.attentions.0.to_q.weight", "encoder.down_blocks.0.resnets.0.conv1.conv.weight",
      "quant_conv.weight")),
    ("ltx-video", "vae", "AutoencoderKLLTXVideo",
     ("latents_mean", "decoder.up_blocks.0.time_embedder.timestep_embedder.linear_1.weight")),
    ("ltx2", "vae", "AutoencoderKLLTX2Video",
     ("latents_mean", "encoder.down_blocks.0.downsamplers.0.conv.conv.weight",
      "decoder.up_blocks.0.upsamplers.0.conv.conv.weight")),
    ("ltx-video", "vae", "AutoencoderKLLTXVideo",
     ("latents_mean", "encoder.down_blocks.0.resnets.0.conv1.conv.weight", "decoder.conv_out.conv.weight")),
    ("wan", "vae", None,  # Qwen-Image's has these names, too
     ("encoder.norm_out.gamma", "encoder.mid_block.attentions.0.to_qkv.weight")),
    ("dc-ae", "vae", "AutoencoderDC",
     ("encoder.down_blocks.1.0.conv1.weight", "decoder.up_blocks.1.0.conv.weight", "decoder.norm_out.weight")),
    ("chroma", "transformer", "ChromaTransformer2DModel",
     ("distilled_guidance_layer.in_proj.weight", "single_transformer_blocks.0.proj_mlp.weight")),
    ("flux2", "transformer", "Flux2Transformer2DModel",
     ("single_stream_modulation.linear.weight", "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight")),
    ("flux3", "transformer", "Flux3Transformer2DModel",
     ("early_stream_modulations.image.linear.weight", "x_embedders.image.weight")),
    ("z-image", "transformer", "ZImageTransformer2DModel",
     ("all_x_embedder.2-1.weight", "layers.0.adaLN_modulation.0.weight")),
    ("lumina2", "transformer", "Lumina2Transformer2DModel",
     ("time_caption_embed.caption_embedder.0.weight", "layers.0.norm1.linear.weight")),
    ("auraflow", "transformer", "AuraFlowTransformer2DModel",
     ("time_step_proj.linear_1.weight", "joint_transformer_blocks.0.norm1.linear.weight")),
    ("sana-wm", "transformer", "SanaWMTransformer3DModel",  # other names of it are those of Sana's own layout
     ("plucker_embedder.proj.weight", "blocks.0.cross_attn.q_linear.weight")),
    ("sana", "transformer", "SanaTransformer2DModel",
     ("caption_norm.weight", "patch_embed.proj.weight", "transformer_blocks.0.ff.conv_inverted.weight")),
    ("qwen-image-2.1", "transformer", "QwenImage21Transformer2DModel",
     ("txt_in.text_norm.weight", "transformer_blocks.0.img_mlp.gate_layer.weight")),
    ("krea2", "transformer", "Krea2Transformer2DModel", ("text_fusion.projector.weight", "time_mod_proj.weight")),
    ("stable-cascade", "prior", "StableCascadeUNet",
     ("clip_txt_mapper.weight", "down_blocks.0.2.attention.to_q.weight")),
    ("stable-cascade", "decoder", "StableCascadeUNet", ("clip_txt_pooled_mapper.weight", "effnet_mapper.0.weight")),
    ("controlnet", "controlnet", "ControlNetUnionModel",
     ("controlnet_cond_embedding.conv_in.weight", "task_embedding", "control_add_embedding.linear_1.weight")),
    ("controlnet", "controlnet", "ControlNetModel",
     ("controlnet_cond_embedding.conv_in.weight", "controlnet_mid_block.weight", "time_embedding.linear_1.weight")),
    ("flux", "transformer", "FluxTransformer2DModel",
     (*_TRANSFORMERS, "x_embedder.weight", "time_text_embed.timestep_embedder.linear_1.weight",
      "single_transformer_blocks.0.proj_mlp.weight")),
    ("sd3", "transformer", "SD3Transformer2DModel", (*_TRANSFORMERS, "pos_embed.proj.weight")),
    ("i2vgen-xl", "unet", "I2VGenXLUNet", (*_UNET, "image_latents_proj_in.0.weight")),
    ("text-to-video", "unet", "UNet3DConditionModel", (*_UNET, "transformer_in.proj_in.weight")),
    ("audioldm2", "unet", "AudioLDM2UNet2DConditionModel", (*_UNET, "mid_block.attentions.1.proj_in.weight")),
    ("sd", "unet", "UNet2DConditionModel", (*_UNET, _SIMPLE_CROSS)),
    ("unconditional", "unet", "UNet2DModel", (*_UNET, "mid_block.attentions.0.group_norm.weight")),
    ("allegro", "vae", "AutoencoderKLAllegro", ("encoder.temp_conv_in.weight", "decoder.temp_conv_in.weight")),
    ("svd", "vae", "AutoencoderKLTemporalDecoder", ("encoder.conv_in.weight", "decoder.time_conv_out.weight")),
    ("flux2", "vae", "AutoencoderKLFlux2",
     ("encoder.down_blocks.0.resnets.0.conv1.weight", "decoder.conv_in.weight", "bn.running_mean")),
    ("vq", "vae", "VQModel",
     ("encoder.down_blocks.0.resnets.0.conv1.weight", "decoder.conv_in.weight", "quantize.embedding.weight")),
    ("asymmetric", "vae", "AsymmetricAutoencoderKL",
     ("encoder.conv_in.weight", "decoder.condition_encoder.layers.0.weight")),
    ("sdxl", "unet", "UNet2DConditionModel", (*_UNET, "add_embedding.linear_1.weight")),
    ("sd", "unet", "UNet2DConditionModel", _UNET),
)  # fmt: skip

# What may stand before OpenCLIP's own names of a text encoder in a file of its own.
OPENCLIP_PREFIXES = ("", "model.")

# Language models that pipelines encode text with: what tells them from each other, those with more of it first. Their
# layers stand behind one of these prefixes: in ComfyUI's files and transformers' of text alone the first, in those that
# see as well the others, in those of a bare text model none.
LANGUAGE_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
_BIAS, _Q_NORM = "layers.0.self_attn.k_proj.bias", "layers.0.self_attn.q_norm.weight"
_BEFORE_FF = "layers.0.pre_feedforward_layernorm.weight"
_LAYER = ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight", "layers.0.input_layernorm.weight")
_LANGUAGE: tuple[tuple[str, tuple[str, ...], str | None], ...] = (  # family, names, a name of the vision beside it
    ("qwen2.5-vl", (_BIAS,), "blocks.0.mlp.gate_proj.weight"),
    ("qwen2-vl", (_BIAS,), "blocks.0.mlp.fc1.weight"),
    ("qwen3-vl", (_Q_NORM,), "blocks.0.mlp.linear_fc1.weight"),
    ("qwen2", (_BIAS,), None),
    ("gemma4", (_Q_NORM, _BEFORE_FF, "layers.0.layer_scalar"), None),
    ("gemma3", (_Q_NORM, _BEFORE_FF), None),
    ("gemma2", (_BEFORE_FF,), None),
    ("qwen3", (_Q_NORM,), None),
    ("llama", ("layers.0.post_attention_layernorm.weight",), None),
)

ROWS: tuple[Family, ...] = (
    *(
        Family(
            family=family, component=component, layout="diffusers", class_name=class_name,
            names=tuple(prefix + name for name in names),
        )
        for family, component, class_name, names in _DIFFUSERS
        for prefix in ("", *PREFIXES)
    ),
    Family(  # before diffusers' own: the names at both ends are the same
        family="vae",
        component="vae",
        layout="ldm",
        names=("encoder.down.0.block.0.conv1.weight", "decoder.up.0.block.0.conv1.weight", "decoder.conv_in.weight"),
    ),
    Family(
        family="vae",
        component="vae",
        layout="diffusers",
        names=("encoder.conv_in.weight", "decoder.conv_in.weight", "decoder.conv_out.weight"),
        class_name="AutoencoderKL",
    ),
    Family(  # every block has a bias of positions
        family="umt5",
        component="text_encoder",
        layout="transformers",
        names=(
            "encoder.final_layer_norm.weight",
            "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
        class_name="UMT5EncoderModel",
    ),
    Family(
        family="t5",
        component="text_encoder",
        layout="transformers",
        # The table of embeddings is `shared.weight`, `encoder.embed_tokens.weight`, or both.
        names=("encoder.final_layer_norm.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
        class_name="T5EncoderModel",
    ),
    Family(
        family="clip",
        component="text_encoder",
        layout="transformers",
        names=("embeddings.token_embedding.weight", "encoder.layers.0.self_attn.q_proj.weight"),
        class_name="CLIPTextModel",
    ),
    Family(
        family="clip",
        component="text_encoder",
        layout="transformers",
        names=("text_model.embeddings.token_embedding.weight", "text_model.encoder.layers.0.self_attn.q_proj.weight"),
        class_name="CLIPTextModel",
    ),
    *(
        Family(
            family="clip", component="text_encoder", layout="openclip", class_name="CLIPTextModel",
            names=(f"{prefix}token_embedding.weight", f"{prefix}transformer.resblocks.0.attn.in_proj_weight"),
        )
        for prefix in OPENCLIP_PREFIXES
    ),
    *(
        Family(
            family=family, component="text_encoder", layout="transformers",
            names=(*(prefix + name for name in (*_LAYER, *names)), *([eyes + vision] if vision else [])),
        )
        for family, names, vision in _LANGUAGE
        for prefix in LANGUAGE_PREFIXES
        for eyes in (("visual.", "model.visual.") if vision else ("",))
    ),
    *(  # Stable Video Diffusion and ModelScope's, which have all names of images' models, and layers of frames
        Family(
            family=family, component="unet", layout="original",
            names=(f"{prefix}input_blocks.0.0.weight", prefix + name),
        )
        for prefix in (*PREFIXES, "")
        for family, name in (
            ("svd", "input_blocks.1.0.time_stack.in_layers.2.weight"),
            ("text-to-video", "input_blocks.0.1.proj_in.weight"),
            ("text-to-video", "init_attn.0.proj_in.weight"),
        )
    ),
    # Checkpoints that hold the VAE too, before the models alone.
    Family(
        family="flux", component="checkpoint", layout="bfl",
        names=(_LDM + "double_blocks.0.img_attn.qkv.weight", "vae.decoder.conv_in.weight"),
    ),
    Family(
        family="sd3", component="checkpoint", layout="sgm",
        names=(_LDM + "joint_blocks.0.context_block.attn.qkv.weight", _FIRST_STAGE),
    ),
    Family(
        family="sdxl", component="checkpoint", layout="sgm",
        names=(_LDM + "input_blocks.0.0.weight", _LDM + "label_emb.0.0.weight", _FIRST_STAGE),
    ),
    Family(family="sd", component="checkpoint", layout="ldm", names=(_LDM + "input_blocks.0.0.weight", _FIRST_STAGE)),
    *(
        Family(
            family=family, component="checkpoint", layout="original",
            names=(*(_LDM + name for other, names in _OTHERS if other == family for name in names), "vae." + _LTX_VAE),
        )
        for family in ("ltx2", "ltx-video")
    ),
    *(
        Family(family=family, component=component, layout=layout, names=tuple(prefix + name for name in names))
        for prefix in (*PREFIXES, CONTROL, "")
        for family, component, layout, names in (
            *((family, "transformer", "original", names) for family, names in _OTHERS),
            *((family, component, "original", names) for family, component, names in _BESIDE),
            ("flux", "transformer", "bfl", ("double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight")),
            ("sd3", "transformer", "sgm", ("joint_blocks.0.context_block.attn.qkv.weight",)),
            ("sdxl", "unet", "sgm", ("input_blocks.0.0.weight", "label_emb.0.0.weight")),
            ("sd", "unet", "ldm", ("input_blocks.0.0.weight", "time_embed.0.weight")),
        )
    ),
    *(
        Family(family=family, component=component, layout="original", names=tuple(prefix + name for name in names))
        for family, component, own, names in _PARTS
        for prefix in dict.fromkeys(("", own))
    ),
)  # fmt: skip

# Stable Diffusion versions by the width of the text that the UNet attends to.
_SD_BY_TEXT_WIDTH: Mapping[int, str] = {768: "sd1", 1024: "sd2"}


def recognise(names: Collection[str]) -> Family | None:
    """Return the first row all of whose names are present; None if there is none."""
    for row in ROWS:
        if all(name in names for name in row.names):
            return row
    return None


def nearly(names: Collection[str]) -> Iterator[tuple[Family, str]]:
    """Yield each row of which one name is not present, with that name, if no row has all of its names there."""
    for row in ROWS if recognise(names) is None else ():
        absent = [name for name in row.names if name not in names]
        if len(absent) == 1:
            yield row, absent[0]


def sd_version(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return "sd1" or "sd2" by the width of the cross-attention, "sd" if it is neither."""
    for name, shape in shapes.items():
        if name.endswith("attn2.to_k.weight") and len(shape) == 2:
            return _SD_BY_TEXT_WIDTH.get(shape[1], "sd")
    return "sd"
