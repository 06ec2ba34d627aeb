"""Lone files without a config: what their own tensors show, tensor by tensor, by shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from sdquant.formats import model_families, sized_configs
from sdquant.models import components, lone_files, original_names

from . import video_models
from .image_models import MODELS

Shapes = dict[str, tuple[int, ...]]
_HEADS = {"attention_head_dim": 32, "num_attention_heads": 2}
_WAN: dict[str, Any] = {
    **_HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 48, "freq_dim": 32, "ffn_dim": 96, "num_layers": 4,
}  # fmt: skip
_SD3: dict[str, Any] = {
    "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 4, "attention_head_dim": 64,
    "num_attention_heads": 2, "joint_attention_dim": 48, "caption_projection_dim": 128, "pooled_projection_dim": 40,
    "pos_embed_max_size": 6,
}  # fmt: skip
_FLUX: dict[str, Any] = {
    **_HEADS, "num_layers": 4, "num_single_layers": 4, "in_channels": 16, "joint_attention_dim": 48,
    "pooled_projection_dim": 40, "axes_dims_rope": [8, 12, 12], "guidance_embeds": True,
}  # fmt: skip
# The model's class and config by name, and the inputs whose columns nothing in a file shows.
_INPUTS = ("img_in", "x_embedder", "all_x_embedder.2-1", "txt_in", "context_embedder")
_WAN_INPUTS = (
    "patch_embedding", "text_embedding.0", "time_embedding.0", "condition_embedder.text_embedder.linear_1",
    "condition_embedder.time_embedder.linear_1",
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{name: (row.kind, dict(row.config), _INPUTS) for name, row in MODELS.items() if name in (
        "flux2", "chroma", "z-image", "qwen-image"
    )},
    "flux": (
        "FluxTransformer2DModel", _FLUX, (*_INPUTS, "vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
    ),
    "wan": ("WanTransformer3DModel", _WAN, _WAN_INPUTS),
    "wan i2v": (
        "WanTransformer3DModel", {**_WAN, "in_channels": 9, "image_dim": 24, "added_kv_proj_dim": 64},
        _WAN_INPUTS,
    ),
    "sd3": (
        "SD3Transformer2DModel", _SD3,
        (*_INPUTS, "x_embedder.proj", "pos_embed.proj", "y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
    ),
    "sd3.5": (
        "SD3Transformer2DModel", {**_SD3, "qk_norm": "rms_norm", "dual_attention_layers": [0, 1]},
        (*_INPUTS, "x_embedder.proj", "pos_embed.proj", "y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
    ),
}  # fmt: skip
FAMILIES["chroma"] = (*FAMILIES["chroma"][:2], (*_INPUTS, "distilled_guidance_layer.in_proj"))
_CAPTIONS = ("caption_projection.linear_1", "audio_caption_projection.linear_1", "y_embedder.y_proj.fc1")
_TEXTS = (
    "context_embedder.proj_in",
    "txt_in.input_embedder",
    "context_embedder.time_text_embed.text_embedder.linear_1",
    "txt_in.c_embedder.linear_1",
    "time_text_embed.text_embedder.linear_1",
    "vector_in.in_layer",
)
_PATCHES = (
    "x_embedder.proj",
    "img_in.proj",
    "patch_embed.proj",
    "x_embedder.proj.1",
    "pos_embed.proj",
    "init_x_linear",
    "patch_embedding",
    "vace_patch_embedding",
    "proj_in",
    "patchify_proj",
    "audio_proj_in",
    "audio_patchify_proj",
)
_HIDREAM = ("p_embedder.pooled_embedder.linear_1", "caption_projection.8.linear")
_LAST = "final_layer.linear.weight"
_PLACES = ("pos_embed.pos_embed", "positional_encoding")
# What is as many as it has rows, and what has no bias that would tell.
_ROWS = re.compile(r"(learnable_pos_embed|extra_pos_embedder)\.pos_emb_[thw]$")
_NO_BIAS = ("cosmos 1", "cosmos 2", "cosmos 2.5")
_WIDE = {"num_attention_heads": 2, "attention_head_dim": 32}
# Families of the other tables of models, and those whose small models nothing else needs. Inputs as above.
FAMILIES |= {
    name: (row.kind, dict(row.config), inputs)
    for name, row, inputs in (
        ("auraflow", MODELS["auraflow"], (*_PATCHES, "context_embedder", "cond_seq_linear", *_PLACES)),
        (
            "hidream",
            MODELS["hidream"],
            (*_PATCHES, "p_embedder.pooled_embedder.linear_1", "caption_projection.8.linear"),
        ),
        ("lumina2", MODELS["lumina2"], ("x_embedder",)),
        ("sana", MODELS["sana"], (*_PATCHES, *_CAPTIONS)),
        ("sana-sprint", MODELS["sana-sprint"], (*_PATCHES, *_CAPTIONS)),
    )
}
FAMILIES |= {
    name: (video_models.MODELS[name].class_name, dict(video_models.MODELS[name].config), inputs)
    for name, inputs in (
        ("cosmos 1", _PATCHES),
        ("cosmos 2", _PATCHES),
        ("cosmos 2.5", (*_PATCHES, "crossattn_proj.0")),
        ("hunyuan", (*_PATCHES, *_TEXTS)),
        ("ltx", (*_PATCHES, *_CAPTIONS)),
        ("ltx 2", (*_PATCHES, *_CAPTIONS)),
        ("ltx 2.3", _PATCHES),
        (
            "mochi",
            (
                *_PATCHES,
                "time_embed.caption_proj",
                "t5_yproj",
                "time_embed.timestep_embedder.linear_1",
                "t_embedder.mlp.0",
            ),
        ),
        ("wan vace", FAMILIES["wan"][2] + _PATCHES),
    )
}
FAMILIES |= {
    name: (kind, {**_WIDE, **config}, (*_PATCHES, *_CAPTIONS, *_TEXTS, *inputs))
    for name, kind, config, inputs in (
        ("pixart", "PixArtTransformer2DModel", {"cross_attention_dim": 64, "caption_channels": 48}, ()),
        (
            "cogview", "CogView4Transformer2DModel",
            {"text_embed_dim": 48, "time_embed_dim": 24, "condition_dim": 8, "attention_head_dim": 40},
            ("patch_embed.text_proj", "time_condition_embed.condition_embedder.linear_1"),
        ),
        (
            "cogvideox", "CogVideoXTransformer3DModel", {"text_embed_dim": 48, "time_embed_dim": 24},
            ("patch_embed.text_proj",),
        ),
        (
            "cogvideox 1.5", "CogVideoXTransformer3DModel",
            {"text_embed_dim": 48, "time_embed_dim": 24, "patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 24},
            ("patch_embed.text_proj",),
        ),
        (
            "hunyuan-image", "HunyuanImageTransformer2DModel",
            {"num_single_layers": 4, "text_embed_dim": 48, "guidance_embeds": True, "rope_axes_dim": [16, 16]}, (),
        ),
        (
            "hunyuan-video-1.5", "HunyuanVideo15Transformer3DModel",
            {"text_embed_dim": 48, "text_embed_2_dim": 40, "image_embed_dim": 24, "rope_axes_dim": [8, 12, 12],
             "use_meanflow": True},
            ("context_embedder_2.linear_1",),
        ),
        (
            "sana-video", "SanaVideoTransformer3DModel",
            {"num_cross_attention_heads": 2, "cross_attention_head_dim": 32, "cross_attention_dim": 64,
             "caption_channels": 48, "guidance_embeds": True}, (),
        ),
    )
}  # fmt: skip
# What a pair of classes has in common tells neither: the class is then that of most files, or none.
_ONE_OF_SEVERAL = {
    "SkyReelsV2Transformer3DModel": "WanTransformer3DModel", "ChronoEditTransformer3DModel": "WanTransformer3DModel",
    "AutoencoderKLWan": None,
}  # fmt: skip
NAMED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    **{name: (row.kind, row.family, row.component, row.config) for name, row in MODELS.items()},
    **{name: (row.class_name, row.family, row.component, row.config) for name, row in video_models.MODELS.items()},
}
# Models that share most names with one of another family or kind: class, config, and what their own names tell.
_UNET_2D = {
    "block_out_channels": [32, 32], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "cross_attention_dim": 16, "norm_num_groups": 8,
    "attention_head_dim": 8,
}  # fmt: skip
_UNET_3D = {
    "block_out_channels": [32, 32], "down_block_types": ["CrossAttnDownBlock3D", "DownBlock3D"],
    "up_block_types": ["UpBlock3D", "CrossAttnUpBlock3D"], "cross_attention_dim": 16, "norm_num_groups": 8,
}  # fmt: skip
_ALIKE: dict[str, tuple[dict[str, Any], str, str]] = {
    "FluxControlNetModel": ({**_FLUX, "num_layers": 1, "num_single_layers": 1}, "flux", "controlnet"),
    "QwenImageControlNetModel": ({**MODELS["qwen-image"].config}, "qwen-image", "controlnet"),
    "SD3ControlNetModel": ({**_SD3, "num_layers": 1}, "sd3", "controlnet"),
    "PixArtTransformer2DModel": (
        {**_HEADS, "num_layers": 1, "cross_attention_dim": 64, "caption_channels": 32, "sample_size": 8},
        "pixart", "transformer",
    ),
    "CogVideoXTransformer3DModel": (
        {**_HEADS, "num_layers": 1, "text_embed_dim": 32, "time_embed_dim": 32}, "cogvideox", "transformer",
    ),
    "HunyuanImageTransformer2DModel": (
        {**_HEADS, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 32},
        "hunyuan-image", "transformer",
    ),
    "HunyuanVideo15Transformer3DModel": (
        {**_HEADS, "num_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 32, "text_embed_2_dim": 32,
         "image_embed_dim": 32},
        "hunyuan-video-1.5", "transformer",
    ),
    "SanaVideoTransformer3DModel": (
        {**_HEADS, "num_layers": 1, "num_cross_attention_heads": 2, "cross_attention_head_dim": 32,
         "cross_attention_dim": 64, "caption_channels": 32},
        "sana-video", "transformer",
    ),
    "ConsisIDTransformer3DModel": (
        {**_HEADS, "num_layers": 1, "text_embed_dim": 32, "time_embed_dim": 32, "is_train_face": True, "LFE_depth": 5,
         "LFE_num_querie": 4, "LFE_vit_dim": 32, "LFE_output_dim": 32, "LFE_num_heads": 2, "LFE_id_dim": 32},
        "consisid", "transformer",
    ),
    "LatteTransformer3DModel": (
        {**_HEADS, "num_layers": 1, "cross_attention_dim": 64, "caption_channels": 32, "sample_size": 8,
         "in_channels": 4, "patch_size": 2},
        "latte", "transformer",
    ),
    "UNet3DConditionModel": (_UNET_3D, "text-to-video", "unet"),
    "I2VGenXLUNet": (_UNET_3D, "i2vgen-xl", "unet"),
    "AudioLDM2UNet2DConditionModel": (
        {**_UNET_2D, "cross_attention_dim": [[16, 16], [16, 16]]}, "audioldm2", "unet",
    ),
    "UNet2DModel": (
        {"block_out_channels": [32, 32], "down_block_types": ["AttnDownBlock2D", "DownBlock2D"],
         "up_block_types": ["UpBlock2D", "AttnUpBlock2D"], "norm_num_groups": 8}, "unconditional", "unet",
    ),
    "UNet2DConditionModel": (  # as Kandinsky's
        {**_UNET_2D, "down_block_types": ["ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"],
         "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
         "up_block_types": ["SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"]}, "sd", "unet",
    ),
    "ControlNetUnionModel": (
        {"block_out_channels": [32, 32], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
         "cross_attention_dim": 16, "norm_num_groups": 8, "conditioning_embedding_out_channels": [8, 16],
         "addition_time_embed_dim": 8}, "controlnet", "controlnet",
    ),
    "VQModel": ({"norm_num_groups": 8}, "vq", "vae"),
    "AsymmetricAutoencoderKL": ({"norm_num_groups": 8}, "asymmetric", "vae"),
    "AutoencoderKLTemporalDecoder": ({"block_out_channels": [32]}, "svd", "vae"),
    "AutoencoderKLFlux2": ({"block_out_channels": [32], "down_block_types": ["DownEncoderBlock2D"],
                            "up_block_types": ["UpDecoderBlock2D"]}, "flux2", "vae"),
    "UNetMotionModel": (
        {"block_out_channels": [32, 32], "down_block_types": ["CrossAttnDownBlockMotion", "DownBlockMotion"],
         "up_block_types": ["UpBlockMotion", "CrossAttnUpBlockMotion"], "cross_attention_dim": 16,
         "norm_num_groups": 8, "num_attention_heads": 4, "motion_num_attention_heads": 4},
        "animatediff", "unet",
    ),
}  # fmt: skip
# Classes, their families, and what their constructors have no default for.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "AuraFlowTransformer2DModel": ("auraflow", {}),
    "ChromaTransformer2DModel": ("chroma", {}),
    "ChronoEditTransformer3DModel": ("wan", {}),
    "CogVideoXTransformer3DModel": ("cogvideox", {}),
    "CogView3PlusTransformer2DModel": ("cogview", {}),
    "CogView4Transformer2DModel": ("cogview", {}),
    "CosmosTransformer3DModel": ("cosmos", {}),
    "Flux2Transformer2DModel": ("flux2", {}),
    "FluxTransformer2DModel": ("flux", {}),
    "HiDreamImageTransformer2DModel": (
        "hidream",
        {"patch_size": 2, "in_channels": 16, "caption_channels": [4096, 4096], "axes_dims_rope": [64, 32, 32],
         "num_routed_experts": 4, "num_activated_experts": 2, "llama_layers": [0, 1]},
    ),
    "HunyuanImageTransformer2DModel": ("hunyuan-image", {}),
    "HunyuanVideo15Transformer3DModel": ("hunyuan-video-1.5", {}),
    "HunyuanVideoTransformer3DModel": ("hunyuan-video", {}),
    "LTX2VideoTransformer3DModel": ("ltx2", {}),
    "LTXVideoTransformer3DModel": ("ltx-video", {}),
    "Lumina2Transformer2DModel": ("lumina2", {}),
    "MochiTransformer3DModel": ("mochi", {}),
    "PixArtTransformer2DModel": ("pixart", {"caption_channels": 4096}),
    "QwenImageTransformer2DModel": ("qwen-image", {}),
    "SanaTransformer2DModel": ("sana", {}),
    "SanaVideoTransformer3DModel": ("sana-video", {}),
    "SD3Transformer2DModel": ("sd3", {}),
    "WanTransformer3DModel": ("wan", {}),
    "WanVACETransformer3DModel": ("wan-vace", {}),
    "ZImageTransformer2DModel": ("z-image", {}),
}  # fmt: skip
_LISTS = ("num_layers", "num_single_layers", "n_layers", "num_mmdit_layers", "num_single_dit_layers")


def _layouts(kind: str, config: dict[str, Any]) -> Iterator[Shapes]:
    """The shapes of such a model of at least four blocks, in its authors' names, where sdquant knows them, and in
    diffusers'."""
    deep = {"num_layers": 4} | {key: 4 if key in _LISTS else value for key, value in config.items()}
    model = components.empty("diffusers", kind, deep)
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    theirs = {row.name: original_names.shape_of(row, ours) for row in original_names.written(kind, ours) or []}
    if theirs and theirs != ours:
        yield theirs
    yield ours


@pytest.mark.parametrize("name", NAMED)
def test_names_of_diffusers_tell_each_family(name: str) -> None:
    """What is recognised under its authors' names is recognised under those of diffusers, too."""
    kind, family, component, config = NAMED[name]
    names = set(components.empty("diffusers", kind, config).state_dict(keep_vars=True))
    for prefix in ("", *model_families.PREFIXES):
        row = model_families.recognise({prefix + name for name in names})
        assert row is not None and (row.family, row.component) == (family, component)
        assert row.foreign or row.class_name == _ONE_OF_SEVERAL.get(kind, kind)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_sizes_of_diffusers_own_models(kind: str) -> None:
    """Each class as its default config has it, mostly that of the published model, in both layouts."""
    family, config = PUBLISHED[kind]
    model = components.empty("diffusers", kind, config)
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    theirs = {row.name: original_names.shape_of(row, ours) for row in original_names.written(kind, ours) or []}
    for shapes in filter(None, (ours, theirs)):
        row = model_families.recognise(shapes)
        assert row is not None and row.family == family
        sizes = sized_configs.sized(family, shapes)
        assert lone_files._expected(sizes, row.foreign and shapes is theirs) == shapes


def test_each_family_of_sizes_is_held_to_diffusers() -> None:
    """SD's UNets have configs of their own (`known_configs`)."""
    assert {family for family, _ in PUBLISHED.values()} == sized_configs.FAMILIES


@pytest.mark.parametrize("kind", _ALIKE)
def test_names_tell_a_model_from_one_like_it(kind: str) -> None:
    config, family, component = _ALIKE[kind]
    row = model_families.recognise(set(components.empty("diffusers", kind, config).state_dict(keep_vars=True)))
    assert row is not None and (row.family, row.component, row.class_name) == (family, component, kind)


@pytest.mark.parametrize(
    ("sign", "family"),
    [("input_blocks.1.0.time_stack.in_layers.2.weight", "svd"), ("input_blocks.0.1.proj_in.weight", "text-to-video")],
)
def test_authors_names_tell_videos_from_images(sign: str, family: str) -> None:
    """Stable Video Diffusion's file has all the names of an SDXL checkpoint, the VAE's too."""
    names = ["input_blocks.0.0.weight", "label_emb.0.0.weight", "time_embed.0.weight"]
    for prefix, more in (("model.diffusion_model.", {"first_stage_model.decoder.conv_in.weight"}), ("", set())):
        images = {prefix + name for name in names} | more
        row = model_families.recognise(images)
        assert row is not None and row.family == "sdxl"
        row = model_families.recognise(images | {prefix + sign})
        assert row is not None and (row.family, row.component, row.class_name) == (family, "unet", None)


@pytest.mark.parametrize("kind", ["LongCatImageTransformer2DModel", "OvisImageTransformer2DModel"])
def test_a_model_like_flux_is_not_taken_for_it(kind: str) -> None:
    config = {key: value for key, value in _FLUX.items() if key != "axes_dims_rope"} | {"num_layers": 1}
    assert model_families.recognise(set(components.empty("diffusers", kind, config).state_dict(keep_vars=True))) is None


def _look(shapes: Shapes, family: str) -> tuple[lone_files.Fault | None, list[str]]:
    file = lone_files.LoneFile(shapes=shapes, family=family, filename="model.safetensors")
    return lone_files.fault(file), lone_files.doubts(file)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_tensor_that_is_missing_or_cut(name: str) -> None:
    kind, config, inputs = FAMILIES[name]
    for shapes in _layouts(kind, config):
        row = model_families.recognise(shapes)
        assert row is not None and _look(shapes, row.family) == (None, [])
        for key, shape in shapes.items():
            fault, _ = _look({other: size for other, size in shapes.items() if other != key}, row.family)
            assert fault is not None, f"{key} is missing, and nobody says so"
            no_witness = _ROWS.search(key) or (name in _NO_BIAS and key in ("proj_out.weight", _LAST))
            if shape[0] > 1 and not no_witness:
                fault, doubts = _look(shapes | {key: (shape[0] // 2, *shape[1:])}, row.family)
                assert fault is not None or doubts, f"{key} has half of its rows, and nobody says so"
            if len(shape) > 1 and shape[1] > 1 and key.removesuffix(".weight") not in inputs:
                fault, _ = _look(shapes | {key: (shape[0], shape[1] // 2, *shape[2:])}, row.family)
                assert fault is not None, f"{key} has half of its columns, and nobody says so"


@pytest.mark.parametrize(
    ("family", "shapes", "widths"),
    [
        ("flux", {"img_in.weight": (3072, 32), "img_in.bias": (3072,)}, ("64 or 128 or 384",)),
        ("flux", {"img_in.weight": (3072, 384), "txt_in.weight": (3072, 2048)}, ("4096",)),
        ("flux", {"img_in.weight": (256, 12), "final_layer.linear.weight": (8, 256)}, ("a multiple of the 8",)),
        ("flux", {"img_in.weight": (256, 24), "final_layer.linear.weight": (8, 256)}, ()),
        ("chroma", {"img_in.weight": (256, 24), "final_layer.linear.weight": (8, 256)}, ("the 8",)),
        ("qwen-image", {"img_in.weight": (3072, 64), "txt_in.weight": (3072, 3584)}, ()),
        ("z-image", {"x_embedder.weight": (3840, 16), "cap_embedder.1.weight": (3840, 2560)}, ("64",)),
    ],
)
def test_inputs_that_no_published_model_has(family: str, shapes: Shapes, widths: tuple[str, ...]) -> None:
    """Nothing else in a file shows them, and there may be a variant that has them: a warning."""
    names = next(
        row.names
        for row in model_families.ROWS
        if row.family == family and row.layout in ("bfl", "original") and row.component == "transformer"
    )
    there = {name.removeprefix("model.diffusion_model."): (8, 8) for name in names} | shapes
    assert (recognised := model_families.recognise(there)) is not None and recognised.family == family
    _, doubts = _look(there, family)
    assert len(doubts) == len(widths) and all(text in line for text, line in zip(widths, doubts, strict=True)), doubts


def test_the_tables_of_a_text_encoder() -> None:
    block = "encoder.block.{}.layer.0.SelfAttention.q.weight"
    shapes: Shapes = {"shared.weight": (99, 64), "encoder.final_layer_norm.weight": (64,)}
    shapes |= {block.format(number): (32, 64) for number in range(4)}
    assert _look(shapes, "t5") == (None, [])
    fault, _ = _look(shapes | {"shared.weight": (99, 32)}, "t5")
    assert fault is not None and fault.name == "shared.weight"


def test_a_part_of_a_model_is_not_accused() -> None:
    """Files with some blocks, or of a model that is only like one that is known."""
    (shapes, *_) = _layouts(*FAMILIES["sd3"][:2])
    marks = {"joint_blocks.0.context_block.attn.qkv.weight"}
    some = {name: shape for name, shape in shapes.items() if not name.startswith("joint_blocks.0.")}
    assert _look(some, "unknown") == (None, [])
    shard = lone_files.LoneFile(
        shapes={name: shape for name, shape in shapes.items() if name not in marks}, family=None,
        filename="model-00001-of-00002.safetensors",
    )  # fmt: skip
    assert lone_files.fault(shard) is None and lone_files.doubts(shard) == []
    like = {"cap_embedder.0.weight": (8,), "x_embedder.weight": (8, 8), "layers.0.other.weight": (8, 8)}
    fault, doubts = _look(like, "unknown")
    assert fault is None and len(doubts) == 1 and "z-image" in doubts[0]
