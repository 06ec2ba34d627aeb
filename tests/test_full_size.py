"""Models at the width of the published ones, with fewer repeats of their blocks: every shape that the real ones have.

Random weights, made here and removed after: at most 8 GB of disk and 10 GB of memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import sdquant
from sdquant import backends
from sdquant.models.components import empty, tied
from sdquant.models.pipelines import weight_bytes, weight_parts
from sdquant.nn.weights import plain, quantized
from sdquant.saving.model_files import config_of

from . import layouts
from .conftest import shell

if TYPE_CHECKING:
    from sdquant.core.backend import Packed

pytestmark = pytest.mark.slow

ON_THE_FLY = [row.name for row in backends.schemes() if row.on_the_fly]
# libgguf takes minutes to search the grids of the types below 4 bits: the shipped models have to do for those.
IN_FILES = [row.name for row in backends.get("gguf").schemes if not row.name.startswith(("iq1", "iq2", "iq3"))]
FLOATS = ("f32", "f16", "bf16")  # types of a GGUF file that become plain layers

# Class and config. Values that are not given here are the classes' own, which are those of the real models.
SDXL_UNET: dict[str, Any] = {
    "cross_attention_dim": 2048, "attention_head_dim": (5, 10, 20), "use_linear_projection": True, "sample_size": 128,
    "block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 1, 1),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
SD3_TRANSFORMER: dict[str, Any] = {  # of 3.5 medium
    "num_layers": 3, "num_attention_heads": 24, "attention_head_dim": 64, "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048, "pos_embed_max_size": 384, "sample_size": 128, "qk_norm": "rms_norm",
    "dual_attention_layers": (0, 1), "out_channels": 16,
}  # fmt: skip
VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 12}
CLIP_G = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 3, "num_attention_heads": 20,
    "projection_dim": 1280, "hidden_act": "gelu",
}  # fmt: skip
T5 = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 2, "num_heads": 64, "feed_forward_proj": "gated-gelu",
    "vocab_size": 32128,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sdxl": ("UNet2DConditionModel", SDXL_UNET),
    "flux": ("FluxTransformer2DModel", {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}),
}
PIPELINES: dict[str, tuple[str, dict[str, tuple[str, dict[str, Any]]]]] = {
    "sdxl": (
        "StableDiffusionXLPipeline",
        {
            "unet": ("UNet2DConditionModel", SDXL_UNET),
            "vae": ("AutoencoderKL", VAE),
            "text_encoder": ("CLIPTextModel", CLIP_L),
            "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G),
        },
    ),
    "sd3": (
        "StableDiffusion3Pipeline",
        {
            "transformer": ("SD3Transformer2DModel", SD3_TRANSFORMER),
            "vae": (
                "AutoencoderKL",
                {**VAE, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False},
            ),
            "text_encoder": ("CLIPTextModelWithProjection", {**CLIP_L, "projection_dim": 768}),
            "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G),
            "text_encoder_3": ("T5EncoderModel", T5),
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a UNet or transformer."""
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, *MODELS[request.param])
    yield folder
    shutil.rmtree(folder)


def write(folder: Path, class_name: str, values: dict[str, Any]) -> None:
    """A component's folder with random weights in bfloat16."""
    model = empty(None, class_name, values)
    folder.mkdir(exist_ok=True)
    config = config_of(model)
    (folder / "config.json").write_text(json.dumps(config))
    ties = tied(model)
    state = {}
    for seed, (name, tensor) in enumerate(sorted(model.state_dict().items())):
        if ties.get(name, (name,))[0] == name:
            generator = torch.Generator().manual_seed(seed)
            state[name] = torch.empty(tensor.shape, dtype=torch.bfloat16).uniform_(-1, 1, generator=generator)
    base = "diffusion_pytorch_model" if "_class_name" in config else "model"
    save_file(state, folder / f"{base}.safetensors", {"format": "pt"})


def one_of_each_shape(packed: dict[str, Packed]) -> dict[str, Packed]:
    """The weights that differ in shape and scheme: encoding all of them again would take as long as the load."""
    return {name: one for (name, one) in {(p.spec.scheme, p.spec.shape): (n, p) for n, p in packed.items()}.values()}


def same_parts(one: Packed, other: Packed) -> bool:
    return one.parts.keys() == other.parts.keys() and all(
        torch.equal(tensor.reshape(-1).view(torch.uint8), other.parts[part].reshape(-1).view(torch.uint8))
        for part, tensor in one.parts.items()
    )


def check_against(folder: Path, model: nn.Module, scheme: str) -> None:
    """What is quantized is what the codec makes of the weights in the folder; the rest is as in the folder."""
    (file,) = folder.glob("*.safetensors")
    packed = dict(quantized(model))
    assert bool(packed) == (scheme not in FLOATS)
    with safe_open(file, "pt") as written:
        for name, one in one_of_each_shape(packed).items():
            spec = backends.parse(scheme if backends.parse(scheme).scheme.on_the_fly else one.spec.scheme.name)
            wanted = one.spec.scheme.codec.encode(written.get_tensor(name), spec)
            assert same_parts(one, wanted), name
        for name, tensor in plain(model).items():
            assert torch.equal(tensor, written.get_tensor(name).to(tensor.dtype)), name
        assert set(packed) | set(plain(model)) == set(written.keys())


@pytest.mark.parametrize("scheme", [*ON_THE_FLY, "nf4,double_quant", "fp8,packing=float8"])
def test_save_and_reload(scheme: str, source: Path, disk: Path) -> None:
    model = sdquant.load_model(source, scheme, progress=False)
    check_against(source, model, scheme)
    sdquant.save(model, disk / "out")
    sdquant.save(model, disk / "model.safetensors")
    nbytes = weight_bytes(model)
    packed = dict(quantized(model))
    for path in (disk / "out", disk / "model.safetensors"):
        seen = sdquant.detect(path)
        assert seen.quant == backends.parse(scheme).scheme.name and seen.warnings == []
        back = sdquant.load_model(path, progress=False)
        again = dict(quantized(back))
        assert again.keys() == packed.keys() and plain(back).keys() == plain(model).keys()
        assert all(same_parts(one, again[name]) and one.spec == again[name].spec for name, one in packed.items())
        assert all(torch.equal(tensor, plain(back)[name]) for name, tensor in plain(model).items())
        assert seen.bytes == nbytes == weight_bytes(back) == back.sdquant.plan.bytes


@pytest.mark.parametrize("scheme", IN_FILES)
def test_gguf(scheme: str, source: Path, disk: Path) -> None:
    from sdquant.saving.export_gguf import quantize_file

    file = quantize_file(source, scheme, disk / "model.gguf", progress=False)
    seen = sdquant.verify(file, progress=False)
    assert seen.quant == scheme
    model = sdquant.load_model(file, dtype="bfloat16", progress=False)
    check_against(source, model, scheme)


@pytest.fixture(scope="module", params=PIPELINES)
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A pipeline's folder."""
    import diffusers

    from .small_pipelines import clip_tokenizer, t5_tokenizer

    class_name, parts = PIPELINES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    scheduler = "DDIMScheduler" if request.param == "sdxl" else "FlowMatchEulerDiscreteScheduler"
    index: dict[str, Any] = {"_class_name": class_name, "scheduler": ["diffusers", scheduler]}
    getattr(diffusers, scheduler)().save_pretrained(folder / "scheduler")
    for name, (kind, values) in parts.items():
        write(folder / name, kind, values)
        index[name] = ["transformers" if name.startswith("text") else "diffusers", kind]
        if name.startswith("text"):
            tokenizer = t5_tokenizer() if kind.startswith("T5") else clip_tokenizer()
            place = name.replace("text_encoder", "tokenizer")
            tokenizer.save_pretrained(folder / place)
            index[place] = ["transformers", type(tokenizer).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    yield request.param, folder
    shutil.rmtree(folder)


def test_a_whole_checkpoint(pipeline: tuple[str, Path], disk: Path) -> None:
    name, folder = pipeline
    state = (layouts.sdxl_checkpoint if name == "sdxl" else layouts.sd3_checkpoint)(folder)
    save_file(state, disk / "model.safetensors")
    del state
    base = shell(folder, disk / "base")
    assert sdquant.detect(disk / "model.safetensors").family == name
    pipe = sdquant.load_model(disk / "model.safetensors", base=base, progress=False)
    for part, module in weight_parts(pipe).items():
        got = {key.removeprefix("text_model."): tensor for key, tensor in plain(module).items()}
        written = {key.removeprefix("text_model."): t for key, t in layouts.weights(folder / part).items()}
        assert got.keys() == written.keys()
        assert all(torch.equal(got[key], tensor) for key, tensor in written.items()), part
    del pipe, module, got, written
    pipe = sdquant.load_model(disk / "model.safetensors", "nf4", base=base, progress=False)
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes
    for part, module in weight_parts(pipe).items():
        if part != "vae":
            check_against(folder / part, module, "nf4")
