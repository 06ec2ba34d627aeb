"""The other kinds of Stable Diffusion, as whole checkpoints in their authors' layout and as lone UNets: for inpainting
and instructions, version 2 with its OpenCLIP, the upscaler, and the refiner of XL."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sdquant
from sdquant import backends
from sdquant.formats.gguf.file import read_header
from sdquant.models.components import quiet
from sdquant.models.pipelines import weight_parts
from sdquant.nn.weights import plain, quantized
from sdquant.saving.export_gguf import quantize_file
from tools.digits_models.nets import vae

from . import comfy_gguf, layouts, small_pipelines
from .conftest import shell

LDM = "model.diffusion_model."
_LEVELS: dict[str, Any] = {
    "block_out_channels": (32, 32, 64, 64), "norm_num_groups": 8, "sample_size": 16, "attention_head_dim": 4,
    "cross_attention_dim": 32,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kind.

    Attributes:
        pipeline: its class in diffusers. family: what names and shapes tell. unet: config.
        text: how many layers its OpenCLIP has, and how many diffusers keeps of it; None for CLIP.
        scale: of its latents. more: further arguments of the pipeline. mode: in which its UNet is quantized here.
    """

    pipeline: str
    family: str = "sd"
    unet: dict[str, Any]
    text: tuple[int, int] | None = None
    scale: float = 0.18215
    more: dict[str, Any] = field(default_factory=dict)
    mode: str = "pre"


_SAFE = {"safety_checker": None, "feature_extractor": None}
KINDS: dict[str, Row] = {
    "inpainting": Row(pipeline="StableDiffusionInpaintPipeline", unet={**_LEVELS, "in_channels": 9}, more=_SAFE),
    "pix2pix": Row(pipeline="StableDiffusionInstructPix2PixPipeline", unet={**_LEVELS, "in_channels": 8}, more=_SAFE),
    # Of the last layer nothing is used; which is the last, diffusers knows by its number.
    "sd2": Row(
        pipeline="StableDiffusionPipeline", unet={**_LEVELS, "use_linear_projection": True}, text=(24, 23), more=_SAFE,
    ),
    "upscaler": Row(
        pipeline="StableDiffusionUpscalePipeline", text=(24, 23), scale=0.08333, mode="post",
        unet={
            **_LEVELS, "in_channels": 7, "num_class_embeds": 1000, "use_linear_projection": True,
            "down_block_types": ("DownBlock2D", *["CrossAttnDownBlock2D"] * 3),
            "up_block_types": (*["CrossAttnUpBlock2D"] * 3, "UpBlock2D"),
            "only_cross_attention": (True, True, True, False),
        },
    ),
    "refiner": Row(
        pipeline="StableDiffusionXLImg2ImgPipeline", family="sdxl", text=(3, 3), mode="post",
        unet={
            **_LEVELS, "use_linear_projection": True, "transformer_layers_per_block": 2,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 5 * 8 + 32,
        },
    ),
}  # fmt: skip


def _made(row: Row, folder: Path) -> None:
    import diffusers

    kept = row.text[1] if row.text else 2
    refines = row.family == "sdxl"
    place = {"text_encoder": None, "tokenizer": None} if refines else {}
    end = "_2" if refines else ""
    more: dict[str, Any] = {"add_watermarker": False} if refines else dict(row.more)
    if row.pipeline == "StableDiffusionUpscalePipeline":
        more["low_res_scheduler"] = diffusers.DDPMScheduler()
    decoder = small_pipelines._random(vae())
    decoder.register_to_config(scaling_factor=row.scale)
    pipe = getattr(diffusers, row.pipeline)(
        vae=decoder, unet=small_pipelines._random(diffusers.UNet2DConditionModel(**row.unet)),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False), **place,
        **{
            f"text_encoder{end}": small_pipelines._clip(kept, 32, projected=refines),
            f"tokenizer{end}": small_pipelines.clip_tokenizer(),
        },
        **more,
    )  # fmt: skip
    pipe.save_pretrained(folder)


def each(*slow: str) -> Any:
    """For each kind; some not on every day, because others or other tests show nearly the same."""
    marked = [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in KINDS]
    return pytest.mark.parametrize("name", marked)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder_of(kind): the folder of a small pipeline of that kind. Do not change it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("kinds") / name
            with quiet():
                _made(KINDS[name], made[name])
        return made[name]

    return get


def _text(row: Row, folder: Path) -> layouts.State:
    """The text encoder as the checkpoint has it, with what OpenCLIP keeps besides."""
    if row.family == "sdxl":
        text = layouts.openclip(layouts.weights(folder / "text_encoder_2"))
        return layouts.prefixed({**text, "logit_scale": torch.ones(())}, "conditioner.embedders.0.model.")
    state = layouts.weights(folder / "text_encoder")
    if row.text is None:
        return layouts.prefixed(layouts.clip(state), "cond_stage_model.transformer.")
    there, kept = row.text
    bare = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    for at in range(kept, there):
        old, new = f"encoder.layers.{at - 1}.", f"encoder.layers.{at}."
        bare |= {name.replace(old, new): tensor for name, tensor in bare.items() if name.startswith(old)}
    text = layouts.openclip({**bare, "text_projection.weight": torch.ones(32, 32, dtype=torch.bfloat16)})
    return layouts.prefixed({**text, "logit_scale": torch.ones(())}, "cond_stage_model.model.")


def _unet(folder: Path) -> layouts.State:
    """The UNet as CompVis name it; the table of the upscaler's noise levels is a plain one."""
    state = layouts.weights(folder / "unet")
    table = state.pop("class_embedding.weight", None)
    made = layouts.unet(state, layouts.config(folder / "unet"))
    return made if table is None else {**made, "label_emb.weight": table}


def _checkpoint(row: Row, folder: Path, path: Path) -> Path:
    state = {
        **layouts.prefixed(_unet(folder), LDM),
        **layouts.prefixed(
            layouts.vae(layouts.weights(folder / "vae"), layouts.config(folder / "vae")), "first_stage_model."
        ),
        **_text(row, folder),
        "alphas_cumprod": torch.ones(1000),
    }
    if row.pipeline == "StableDiffusionUpscalePipeline":
        state["low_scale_model.betas"] = torch.ones(1000)
    save_file(state, path)
    return path


@each("pix2pix")
def test_a_whole_checkpoint(name: str, folder_of: Any, tmp_path: Path, caplog: Any) -> None:
    row, folder = KINDS[name], folder_of(name)
    file = _checkpoint(row, folder, tmp_path / "model.safetensors")
    seen = sdquant.detect(file)
    assert (seen.family, seen.component) == (row.family, "checkpoint")
    base = shell(folder, tmp_path / "base")
    pipe = sdquant.load_model(file, base=base, progress=False)
    assert type(pipe).__name__ == row.pipeline
    for part, module in weight_parts(pipe).items():
        got = {key.removeprefix("text_model."): tensor for key, tensor in plain(module).items()}
        written = {key.removeprefix("text_model."): t for key, t in layouts.weights(folder / part).items()}
        assert got.keys() == written.keys()
        assert all(torch.equal(got[key], tensor) for key, tensor in written.items()), part
    assert not [record.message for record in caplog.records if record.name.startswith("sdquant")]


@each("pix2pix", "sd2")
def test_a_lone_unet(name: str, folder_of: Any, tmp_path: Path) -> None:
    folder, mode = folder_of(name) / "unet", KINDS[name].mode
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    file = tmp_path / "model.safetensors"
    save_file(layouts.prefixed(_unet(folder_of(name)), LDM if mode == "pre" else ""), file)
    state = sdquant.load_model(file, progress=False).state_dict()
    wanted = layouts.weights(folder)
    assert state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)
    one = sdquant.load_model(file, "nf4", mode=mode, progress=False)
    whole = dict(quantized(sdquant.load_model(folder, "nf4", progress=False)))
    packed = dict(quantized(one))
    assert packed and packed.keys() == whole.keys()
    for key, weight in packed.items():
        assert all(torch.equal(part, whole[key].parts[name]) for name, part in weight.parts.items()), key


@each("pix2pix", "sd2")
def test_gguf_of_the_unet(name: str, folder_of: Any, tmp_path: Path, caplog: Any) -> None:
    """Under the authors' names, in the shapes of the layers, and we read the same weights back."""
    folder = folder_of(name) / "unet"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        file = quantize_file(folder, "q8_0", tmp_path / "model.gguf", progress=False)
    assert not [record for record in caplog.records if record.name.startswith("sdquant")]
    architecture, tensors, types = comfy_gguf.read(file)
    assert architecture == ("sdxl" if name == "refiner" else "sd1")
    if name != "upscaler":  # in which text comes in a level later, as in XL
        assert comfy_gguf.told(set(tensors)) == architecture
    wanted = _unet(folder_of(name))
    assert {key: tensor.shape for key, tensor in tensors.items()} == {key: t.shape for key, t in wanted.items()}
    assert "Q8_0" in types.values() and any("orig_shape" in key for key in read_header(file).metadata)
    model, backend = sdquant.load_model(file, progress=False), backends.get("gguf")
    packed, state = dict(quantized(model)), layouts.weights(folder)
    assert packed
    for key, weight in packed.items():
        expected = backend.decode(backend.encode(state[key], backends.parse("q8_0")), torch.float32)
        assert torch.equal(backend.decode(weight, torch.float32), expected), key
    floats = plain(model)
    assert packed.keys() | floats.keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in floats.items())
