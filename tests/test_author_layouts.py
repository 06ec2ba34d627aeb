"""Single files in foreign layouts give the same model as the diffusers folder, float or quantized, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sdquant
from sdquant import backends
from sdquant.errors import MissingComponentError, UnsupportedFileError
from sdquant.formats import known_configs, model_families
from sdquant.models.pipelines import main_part, weight_bytes, weight_parts
from sdquant.nn.weights import plain, quantized

from . import layouts
from .test_load_modes import images, same_bits

if TYPE_CHECKING:
    from sdquant.models.hub_references import Reference

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")


@pytest.fixture(scope="module")
def ldm(sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layouts.checkpoint(sd, tmp_path_factory.mktemp("ldm") / "digits-v1.safetensors")


@pytest.fixture(scope="module")
def bfl(flux: Path) -> layouts.State:
    return layouts.bfl(layouts.weights(flux / "transformer"))


def _same_weights(one: Any, other: Any) -> None:
    for name, part in weight_parts(one).items():
        others = plain(weight_parts(other)[name])
        mine = plain(part)
        assert mine.keys() == others.keys()
        assert all(torch.equal(tensor, others[key]) for key, tensor in mine.items())


def test_checkpoint_is_recognised(ldm: Path) -> None:
    seen = sdquant.detect(ldm)
    assert (seen.family, seen.component, seen.prequantized) == ("sd", "checkpoint", False)
    assert "ldm layout" in seen.evidence[0]


def test_float_checkpoint_is_the_folder(ldm: Path, sd: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = sdquant.load_model(ldm, base=sd, progress=False)
    _same_weights(pipe, sdquant.load_model(sd, progress=False))
    assert not caplog.records
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes


@pytest.mark.parametrize("mode", ["pre", "post"])
@pytest.mark.parametrize("scheme", ["nf4", "int8", "qint4", "sdnq-uint4"])
def test_checkpoint_quantizes_as_the_folder_does(scheme: str, mode: str, ldm: Path, sd: Path) -> None:
    pipe = sdquant.load_model(ldm, scheme, base=sd, mode=mode, progress=False)
    same_bits(pipe, sdquant.load_model(sd, scheme, progress=False))
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes


@pytest.mark.parametrize("prefix", PREFIXES)
def test_lone_unet(prefix: str, sd: Path, tmp_path: Path) -> None:
    file = tmp_path / "unet.safetensors"
    save_file(layouts.prefixed(layouts.unet(layouts.weights(sd / "unet"), layouts.config(sd / "unet")), prefix), file)
    assert sdquant.detect(file).component == "unet"
    same_bits(sdquant.load_model(file, "nf4", base=sd, progress=False), sdquant.load_model(sd, "nf4", progress=False))


@pytest.mark.parametrize("name", ["digits-sd", "digits-flux"])
def test_lone_vae(name: str, tmp_path: Path) -> None:
    """ComfyUI's `ae.safetensors` and `vae-ft-mse.safetensors`."""
    base = sdquant.demo.path(name)
    state = {key: tensor.neg() for key, tensor in layouts.weights(base / "vae").items()}
    save_file(layouts.prefixed(layouts.vae(state, layouts.config(base / "vae")), ""), tmp_path / "ae.safetensors")
    seen = sdquant.detect(tmp_path / "ae.safetensors")
    assert (seen.family, seen.component) == ("vae", "vae")
    pipe = sdquant.load_model(tmp_path / "ae.safetensors", "int8", base=base, progress=False)
    got = plain(pipe.vae)
    assert got.keys() == state.keys() and all(torch.equal(got[key], tensor) for key, tensor in state.items())
    assert dict(quantized(main_part(pipe)))
    with pytest.raises(MissingComponentError, match="a vae in the ldm layout"):
        sdquant.load_model(tmp_path / "ae.safetensors", progress=False)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "scheme", [None, "nf4", "int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qint8", "fp8"))]
)
def test_lone_flux_transformer(scheme: str | None, prefix: str, bfl: layouts.State, flux: Path, tmp_path: Path) -> None:
    file = tmp_path / "flux.safetensors"
    save_file(layouts.prefixed(bfl, prefix), file)
    assert (sdquant.detect(file).family, sdquant.detect(file).component) == ("flux", "transformer")
    pipe = sdquant.load_model(file, scheme, base=flux, progress=False)
    whole = sdquant.load_model(flux, scheme, progress=False)
    _same_weights(pipe, whole)
    if scheme:
        same_bits(pipe, whole)
    else:
        assert np.array_equal(images(pipe), images(whole))
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes


@pytest.mark.parametrize("scheme", [None, "int8_convrot"])
def test_flux_as_comfyui_saves_it(scheme: str | None, bfl: layouts.State, flux: Path, tmp_path: Path) -> None:
    """Norms have the names of its own classes there. Without a base its config is made as of the published file."""
    names = [name.replace("_norm.scale", "_norm.weight") for name in bfl]
    assert names != list(bfl)
    file, published = tmp_path / "saved.safetensors", tmp_path / "published.safetensors"
    for path, keys in ((file, names), (published, bfl)):
        save_file({f"model.diffusion_model.{key}": t for key, t in zip(keys, bfl.values(), strict=True)}, path)
    _same_weights(*(sdquant.load_model(path, scheme, base=flux, progress=False) for path in (file, published)))
    wide = {name: (128,) if "_norm." in name else tuple(tensor.shape) for name, tensor in bfl.items()}
    config = known_configs.known("flux", wide)
    assert config and known_configs.known("flux", dict(zip(names, wide.values(), strict=True))) == config


def test_tensors_that_its_model_does_not_use(bfl: layouts.State, flux: Path, tmp_path: Path) -> None:
    file = tmp_path / "flux.safetensors"
    save_file({**bfl, "double_blocks.0.img_attn.lone.weight": torch.ones(8, 8), "ema.decay": torch.ones(1)}, file)
    (line,) = sdquant.plan(file, base=flux).warnings
    assert "2 tensors that its model does not use, the first is 'double_blocks.0.img_attn.lone.weight'" in line


@pytest.mark.parametrize("kind", ["mxfp8", "128 x 128"])
def test_fused_weights_with_scales_of_blocks(kind: str, bfl: layouts.State, flux: Path, tmp_path: Path) -> None:
    """ComfyUI's files are in the layout of the model's authors: what diffusers splits is cut inside a block."""
    from comfy_kitchen.tensor import TensorCoreMXFP8Layout

    quantized_, floats = dict(bfl), dict(bfl)
    for name, tensor in bfl.items():
        if tensor.ndim != 2:
            continue
        stem = name.removesuffix("weight")
        if kind == "mxfp8":
            codes, params = TensorCoreMXFP8Layout.quantize(tensor)
            quantized_ |= {name: codes, stem + "weight_scale": params.scale}
            quantized_[stem + "comfy_quant"] = torch.tensor(list(b'{"format": "mxfp8"}'), dtype=torch.uint8)
            floats[name] = TensorCoreMXFP8Layout.dequantize(codes, params)[: tensor.shape[0], : tensor.shape[1]]
        else:
            scale = torch.rand([-(-n // 128) for n in tensor.shape]) + 0.5
            codes = tensor.to(torch.float8_e4m3fn)
            quantized_ |= {name: codes, stem + "weight_scale_inv": scale}
            each = scale.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[:, : tensor.shape[1]]
            floats[name] = (codes.float() * each).bfloat16()
    save_file(layouts.prefixed(quantized_, PREFIXES[0]), tmp_path / "fp8.safetensors")
    save_file(layouts.prefixed(floats, PREFIXES[0]), tmp_path / "floats.safetensors")
    plainly = plain(sdquant.load_model(tmp_path / "floats.safetensors", base=flux, progress=False).transformer)
    pipe = sdquant.load_model(tmp_path / "fp8.safetensors", base=flux, progress=False)
    packs = dict(quantized(pipe.transformer))
    assert len(packs) > 20
    for name, packed in packs.items():
        assert torch.equal(packed.spec.scheme.codec.decode(packed, torch.bfloat16), plainly[name]), name


@pytest.mark.parametrize("scheme", ["nf4", "fp4", "nf4,block_size=128", "bnb-int8", "fp8,packing=float8"])
def test_quantized_flux_stays_packed_row_by_row(scheme: str, bfl: layouts.State, flux: Path, tmp_path: Path) -> None:
    """Forge's and ComfyUI's files: the fused weights quantized whole, taken apart without being decoded."""
    backend, spec = backends.of_scheme(scheme.partition(",")[0]), backends.parse(scheme)
    state = {}
    for name, tensor in bfl.items():
        if tensor.ndim == 2:
            state |= backend.write(name, backend.encode(tensor, spec))
        else:
            state[name] = tensor
    file = tmp_path / f"flux-{spec.scheme.name}.safetensors"
    save_file(layouts.prefixed(state, PREFIXES[0]), file)
    assert sdquant.detect(file).quant == spec.scheme.name
    pipe = sdquant.load_model(file, base=flux, progress=False)
    whole = sdquant.load_model(flux, scheme, components=["transformer"], progress=False)
    mine, others = dict(quantized(main_part(pipe))), dict(quantized(main_part(whole)))
    assert mine.keys() == others.keys()
    for name, packed in mine.items():
        for part, tensor in packed.parts.items():
            assert torch.equal(tensor.view(torch.uint8), others[name].parts[part].view(torch.uint8)), (name, part)
    assert np.array_equal(images(pipe), images(whole))
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes


@pytest.mark.parametrize(
    "scheme", ["q8_0", "q4_k", *(pytest.param(name, marks=pytest.mark.slow) for name in ("q4_0", "q6_k"))]
)
@pytest.mark.parametrize("model", ["digits-sd", "digits-flux"])
def test_gguf_with_foreign_names(scheme: str, model: str, bfl: layouts.State, tmp_path: Path) -> None:
    """As city96's tools write them: the reference names without a prefix, small tensors in F32."""
    from sdquant.formats.gguf.writer import write_gguf

    path = sdquant.demo.path(model)
    part = "unet" if model == "digits-sd" else "transformer"
    state = layouts.unet(layouts.weights(path / part), layouts.config(path / part)) if model == "digits-sd" else bfl
    backend, spec = backends.get("gguf"), backends.parse(scheme)
    rows = []
    for name, tensor in state.items():
        fits = tensor.ndim == 2 and tensor.shape[1] % 256 == 0
        data = backend.encode(tensor, spec).parts["blocks"] if fits else tensor.float()
        rows.append((name, tuple(tensor.shape), scheme if fits else "f32", lambda data=data: data))
    file = tmp_path / f"{model}-{scheme}.gguf"
    write_gguf(file, rows, {"general.architecture": "flux" if part == "transformer" else "sd1"})
    pipe = sdquant.load_model(file, base=path, progress=False)
    reference = sdquant.load_model(path, progress=False)
    packed = dict(quantized(main_part(pipe)))
    assert packed
    for name, one in packed.items():
        weight = main_part(reference).get_parameter(name)
        again = backend.encode(weight.data, spec)
        assert torch.equal(one.parts["blocks"], again.parts["blocks"]), name
    assert np.isfinite(images(pipe)).all()
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes


def test_without_base_the_fix_is_named(ldm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingComponentError) as error:
        sdquant.load_model(ldm, progress=False)
    assert "base=" in error.value.fix and "stable-diffusion-v1-5" in error.value.why


def test_configs_come_from_the_hub(ldm: Path, sd: Path, shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hub would give is stood in for: this machine cannot reach it."""
    asked = []

    def fetch(what: Reference, *, progress: bool, weights: bool = True, token: str | bool | None = None) -> Path:
        asked.append((what.repository, weights))
        return shell

    monkeypatch.setattr("sdquant.models.hub.fetch", fetch)
    pipe = sdquant.load_model(ldm, "int8", progress=False)
    assert asked == [("stable-diffusion-v1-5/stable-diffusion-v1-5", False)]
    same_bits(pipe, sdquant.load_model(sd, "int8", progress=False))


def test_base_of_another_model_is_refused(ldm: Path, flux: Path) -> None:
    with pytest.raises((UnsupportedFileError, MissingComponentError)) as error:
        sdquant.load_model(ldm, base=flux, progress=False)
    assert str(ldm) in error.value.what


@pytest.fixture
def shell(sd: Path, tmp_path: Path) -> Path:
    """digits-sd without any weights: configs, tokenizer, scheduler."""
    return Path(shutil.copytree(sd, tmp_path / "shell", ignore=shutil.ignore_patterns("*.safetensors")))


def test_a_checkpoint_needs_no_weights_in_its_base(ldm: Path, sd: Path, shell: Path) -> None:
    pipe = sdquant.load_model(ldm, "nf4", "balanced", base=shell, progress=False)
    same_bits(pipe, sdquant.load_model(sd, "nf4", progress=False))


def test_missing_parts_are_named_with_their_places(sd: Path, shell: Path, tmp_path: Path) -> None:
    file = tmp_path / "unet.safetensors"
    save_file(layouts.unet(layouts.weights(sd / "unet"), layouts.config(sd / "unet")), file)
    with pytest.raises(MissingComponentError) as error:
        sdquant.load_model(file, base=shell, progress=False)
    assert "vae" in error.value.why and "text_encoder" in error.value.why and "unet" not in error.value.why
    assert str(shell / "vae") in error.value.fix


def test_rows_that_cannot_be_taken_apart_are_refused(bfl: layouts.State, flux: Path, tmp_path: Path) -> None:
    backend, spec = backends.get("bnb"), backends.parse("nf4,block_size=4096")
    name = "double_blocks.0.img_attn.qkv.weight"
    state = {key: tensor for key, tensor in bfl.items() if key != name}
    state |= backend.write(name, backend.encode(bfl[name], spec))
    save_file(state, tmp_path / "flux-nf4.safetensors")
    with pytest.raises(UnsupportedFileError) as error:
        sdquant.plan(tmp_path / "flux-nf4.safetensors", base=flux)
    assert name in error.value.why


def test_doubly_quantized_scales_are_decoded_for_rows(bfl: layouts.State, flux: Path, tmp_path: Path) -> None:
    backend, spec = backends.get("bnb"), backends.parse("nf4,double_quant")
    name = "double_blocks.0.img_attn.qkv.weight"
    packed = backend.encode(bfl[name], spec)
    state = {key: tensor for key, tensor in bfl.items() if key != name} | backend.write(name, packed)
    save_file(state, tmp_path / "flux-nf4.safetensors")
    pipe = sdquant.load_model(tmp_path / "flux-nf4.safetensors", base=flux, runtime="plain", progress=False)
    attention = pipe.transformer.transformer_blocks[0].attn
    rows = [layer.dequantize(torch.float32) for layer in (attention.to_q, attention.to_k, attention.to_v)]
    assert torch.equal(torch.cat(rows), backend.decode(packed, torch.float32))
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes


@pytest.mark.parametrize(
    ("name", "prefix", "layout"),
    [
        ("text_encoder", "cond_stage_model.model.", "openclip"),  # Stable Diffusion 2
        ("text_encoder", "conditioner.embedders.0.transformer.", "clip"),  # XL, its first one
        ("text_encoder_2", "conditioner.embedders.1.model.", "openclip"),  # XL, its second
        ("text_encoder", "text_encoders.clip_l.transformer.", "clip"),  # SD3, and Flux as ComfyUI keeps it
        ("text_encoder_2", "text_encoders.clip_g.transformer.", "clip"),
    ],
)
def test_text_encoders_in_checkpoints(name: str, prefix: str, layout: str, tmp_path: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    from sdquant.formats import checkpoint as source
    from sdquant.models.single_file import convert as foreign

    sizes = {"hidden_size": 64, "projection_dim": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    config = CLIPTextConfig(**sizes, num_attention_heads=4, vocab_size=99)
    state = CLIPTextModelWithProjection(config).state_dict()
    state = {key: tensor for key, tensor in state.items() if not key.endswith("position_ids")}
    there = layouts.openclip(state) if layout == "openclip" else state
    save_file(layouts.prefixed(there, prefix), tmp_path / "model.safetensors")
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "config.json").write_text(
        config.to_json_string().replace("{", '{"architectures": ["CLIPTextModelWithProjection"],', 1)
    )
    owner = source.without_weights(tmp_path / "owner")
    made = foreign.convert(source.single_file(tmp_path / "model.safetensors"), name, owner)
    assert made is not None
    files = made.open()
    got = {key: made.read(files, key) for key in made.plain}
    wanted = dict(state)
    if prefix == "cond_stage_model.model.":  # diffusers leaves the projection of Stable Diffusion 2 out: unused there
        wanted.pop("text_projection.weight")
    assert {key.removeprefix("text_model.") for key in got} == {key.removeprefix("text_model.") for key in wanted}
    for key, tensor in wanted.items():
        arrived = got.get(key, got.get("text_model." + key.removeprefix("text_model.")))
        assert arrived is not None and torch.equal(arrived, tensor), key
    assert all(info.shape == tuple(got[key].shape) for key, info in made.plain.items())
    assert foreign.unused_keys(source.single_file(tmp_path / "model.safetensors"), [made]) in (
        [],
        [prefix + "text_projection"],
    )


@pytest.mark.parametrize("prefix", PREFIXES)
def test_sd3_transformer(prefix: str, tmp_path: Path) -> None:
    from diffusers import SD3Transformer2DModel

    from sdquant.formats import checkpoint as source
    from sdquant.models.single_file import convert as foreign

    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        num_layers=3, num_attention_heads=2, attention_head_dim=32, caption_projection_dim=64, joint_attention_dim=48,
        pooled_projection_dim=40, sample_size=8, pos_embed_max_size=8,
    )  # fmt: skip
    state = model.state_dict()
    save_file(layouts.prefixed(layouts.sd3(state), prefix), tmp_path / "model.safetensors")
    assert sdquant.detect(tmp_path / "model.safetensors").family == "sd3"
    model.save_config(tmp_path / "owner")
    owner = source.without_weights(tmp_path / "owner")
    made = foreign.convert(source.single_file(tmp_path / "model.safetensors"), "transformer", owner)
    assert made is not None
    files = made.open()
    assert made.plain.keys() == state.keys()
    assert all(torch.equal(made.read(files, key), tensor) for key, tensor in state.items())


@pytest.mark.parametrize("kind", ["checkpoint", "unet", "flux"])
def test_gguf_written_from_a_foreign_file(
    kind: str, ldm: Path, bfl: layouts.State, sd: Path, flux: Path, tmp_path: Path
) -> None:
    """The authors' names, no prefix, the UNet or transformer alone: what ComfyUI's readers take."""
    from sdquant.formats.gguf.file import read_header
    from sdquant.saving.export_gguf import quantize_file

    path, base, source = tmp_path / "model.gguf", flux if kind == "flux" else sd, ldm
    if kind != "checkpoint":
        state = bfl if kind == "flux" else layouts.unet(layouts.weights(sd / "unet"), layouts.config(sd / "unet"))
        source = tmp_path / "model.safetensors"
        save_file(layouts.prefixed(state, PREFIXES[0]), source)
    quantize_file(source, "q8_0", path, progress=False)
    header = read_header(path)
    assert header.metadata["general.architecture"] == ("flux" if kind == "flux" else "sd1")
    assert all(name.split(".")[0] not in ("model", "first_stage_model", "cond_stage_model") for name in header.tensors)
    pipe = sdquant.load_model(path, base=base, progress=False)
    folder = tmp_path / "folder"
    quantize_file(base, "q8_0", folder, components=["transformer" if kind == "flux" else "unet"], progress=False)
    assert np.array_equal(images(pipe), images(sdquant.load_model(folder, progress=False)))


def test_every_foreign_row_is_refused_or_placed() -> None:
    foreign = [row for row in model_families.ROWS if row.foreign]
    assert {row.layout for row in foreign} == {"bfl", "ldm", "openclip", "original", "sgm"}
    components = {"unet", "transformer", "vae", "audio_vae", "controlnet", "motion_adapter", "prior", "decoder"}
    components |= {"text_encoder"}
    assert {row.component for row in foreign} == {"checkpoint", *components}


def _lone(class_name: str, **config: Any) -> tuple[Any, dict[str, Any]]:
    """A model on the meta device and its whole config."""
    import diffusers
    from accelerate import init_empty_weights

    with init_empty_weights():
        model = getattr(diffusers, class_name)(**config)
    return model, dict(model.config)


# At real width. Flux has 2 + 3 blocks here instead of 19 + 38.
FULL = {
    "sd1": ("UNet2DConditionModel", {"cross_attention_dim": 768}),
    "sd2": (
        "UNet2DConditionModel",
        {"cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20), "use_linear_projection": True},
    ),
    "sdxl": (
        "UNet2DConditionModel",
        {
            "cross_attention_dim": 2048, "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
            "block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
    "flux": ("FluxTransformer2DModel", {"num_layers": 2, "num_single_layers": 3, "guidance_embeds": True}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("prefix", PREFIXES[:2])
@pytest.mark.parametrize("family", FULL)
def test_full_size_without_base(family: str, prefix: str, disk: Path) -> None:
    """Every tensor that was written arrives, in the right place, with the config told by names and shapes alone."""
    class_name, sizes = FULL[family]
    model, config = _lone(class_name, **sizes)
    state = {}
    for seed, (name, parameter) in enumerate(model.state_dict().items()):
        generator = torch.Generator().manual_seed(seed)
        state[name] = torch.empty(parameter.shape, dtype=torch.bfloat16).uniform_(-1, 1, generator=generator)
    foreign = layouts.bfl(state) if family == "flux" else layouts.unet(state, config)
    file = disk / "model.safetensors"
    save_file(layouts.prefixed(foreign, prefix), file)
    del foreign
    assert sdquant.detect(file).family == family
    loaded = sdquant.load_model(file, progress=False)
    assert type(loaded).__name__ == class_name
    arrived = loaded.state_dict()
    assert arrived.keys() == state.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in state.items())
    for name in ("cross_attention_dim", "attention_head_dim", "num_attention_heads", "addition_time_embed_dim"):
        ours, theirs = loaded.config.get(name), config.get(name)
        assert theirs is None or ours == theirs or list(ours) == list(theirs), name
    quantized_one = sdquant.load_model(file, "int8", progress=False)
    assert weight_bytes(quantized_one) == quantized_one.sdquant.plan.bytes
