"""GGUF files that `sdquant quantize` writes, in the readers of others: ComfyUI-GGUF's rules and diffusers itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

import sdquant
from sdquant import backends
from sdquant.core.gguf_mixes import FILE_TYPES
from sdquant.errors import UnsupportedFileError
from sdquant.formats.gguf.file import read_header, write_gguf
from sdquant.models.pipelines import main_part
from sdquant.models.single_file import original_names
from sdquant.nn.weights import plain, quantized
from sdquant.saving.export_gguf import quantize_file

from . import comfy_gguf, layouts

if TYPE_CHECKING:
    from .layouts import State

PARTS = {"digits-sd": "unet", "digits-flux": "transformer"}


def authors_names(model: str) -> State:
    """A shipped model's weights under its authors' names, written from the rules of those layouts."""
    part = sdquant.demo.path(model) / PARTS[model]
    state = layouts.weights(part)
    return layouts.bfl(state) if model == "digits-flux" else layouts.unet(state, layouts.config(part))


@pytest.mark.parametrize("model", PARTS)
@pytest.mark.parametrize("scheme", ["q8_0", "q4_0", "q4_k_m", "q3_k_s", "tq2_0", "bf16", "f32"])
def test_comfyui_reads_what_is_written(scheme: str, model: str, tmp_path: Path) -> None:
    """Every tensor is there under the name and in the shape of the reference, with the values of our own codec."""
    file = quantize_file(sdquant.demo.path(model), scheme, tmp_path / "model.gguf", progress=False)
    architecture, tensors, types = comfy_gguf.read(file)
    assert architecture == ("sd1" if model == "digits-sd" else "flux")
    wanted = authors_names(model)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {name: tuple(t.shape) for name, t in wanted.items()}
    backend = backends.get("gguf")
    for name, weight in wanted.items():
        kind = types[name].lower()
        expected = backend.decode(backend.encode(weight, backends.parse(kind)), torch.float32)
        assert torch.equal(tensors[name], expected), (name, kind)
    used = set(types.values())
    assert "F32" in used and (scheme in ("bf16", "f32") or scheme.upper().removesuffix("_M").removesuffix("_S") in used)
    quantized_kinds = used - {"F32", "BF16"}
    assert all(tensors[name].ndim > 1 for name, kind in types.items() if kind in quantized_kinds)


@pytest.mark.parametrize("model", PARTS)
def test_the_ends_of_a_model_stay_floats(model: str, tmp_path: Path) -> None:
    _, _, types = comfy_gguf.read(
        quantize_file(sdquant.demo.path(model), "q4_0", tmp_path / "model.gguf", progress=False)
    )
    ends = {
        "digits-sd": {"input_blocks.0.0", "out.2", "time_embed.0", "time_embed.2"},
        "digits-flux": {
            "img_in", "txt_in", "time_in.in_layer", "time_in.out_layer", "vector_in.in_layer", "vector_in.out_layer",
            "guidance_in.in_layer", "guidance_in.out_layer", "final_layer.linear", "final_layer.adaLN_modulation.1",
        },
    }[model]  # fmt: skip
    floats = {name.removesuffix(".weight") for name, kind in types.items() if kind == "BF16"}
    assert floats == {name for name in ends if f"{name}.weight" in types and types[f"{name}.weight"] != "F32"}
    assert all(types[f"{name}.weight"] in ("BF16", "F32") for name in ends)


def test_metadata_is_what_city96s_tools_write(tmp_path: Path) -> None:
    for scheme in ("q8_0", "q4_k_m", "f16"):
        file = quantize_file(sdquant.demo.path("digits-flux"), scheme, tmp_path / f"{scheme}.gguf", progress=False)
        metadata = read_header(file).metadata
        assert metadata["general.architecture"] == "flux" and metadata["general.quantization_version"] == 2
        assert FILE_TYPES[metadata["general.file_type"]] == scheme
        assert gguf.LlamaFileType(metadata["general.file_type"]).name.removeprefix("MOSTLY_").lower() == scheme


@pytest.mark.parametrize("model", PARTS)
@pytest.mark.parametrize("scheme", ["q8_0", "q4_k"])
def test_we_read_it_back_with_and_without_base(scheme: str, model: str, tmp_path: Path) -> None:
    """In the dtype of the source, though the file has small tensors in F32; the weights are those of the file."""
    path = sdquant.demo.path(model)
    file = quantize_file(path, scheme, tmp_path / "model.gguf", progress=False)
    _, there, _ = comfy_gguf.read(file)
    loose = sdquant.load_model(file, progress=False)
    whole = main_part(sdquant.load_model(file, base=path, progress=False))
    assert {p.dtype for p in plain(loose).values()} == {torch.bfloat16}
    source = sdquant.load_model(path / PARTS[model], progress=False)
    names = {one.name: one for one in original_names.written(type(source).__name__, _shapes(source)) or ()}
    packed, floats = dict(quantized(loose)), plain(loose)
    assert packed and packed.keys() == dict(quantized(whole)).keys()
    for row in names.values():
        halves = there[row.name].split([source.get_parameter(part).shape[0] for part in row.sources])
        for part, expected in zip(row.sources, halves, strict=True):
            if part in packed:
                assert torch.equal(backends.get("gguf").decode(packed[part], torch.float32), expected), part
            else:
                assert torch.equal(floats[part].float(), source.get_parameter(part).float()), part


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


# Models with as many levels as the published ones have, by which readers tell them, and hardly any width.
_UNET = {"block_out_channels": (32, 32, 64, 64), "norm_num_groups": 8, "sample_size": 16, "attention_head_dim": 4}
_SD3 = {"num_attention_heads": 2, "attention_head_dim": 32, "caption_projection_dim": 64, "joint_attention_dim": 64,
        "pooled_projection_dim": 32, "sample_size": 8, "pos_embed_max_size": 8}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Stable Diffusion 1": ("sd1", "UNet2DConditionModel", {**_UNET, "cross_attention_dim": 768}),
    "Stable Diffusion 2": (
        "sd1", "UNet2DConditionModel", {**_UNET, "cross_attention_dim": 1024, "use_linear_projection": True},
    ),
    "Stable Diffusion XL": (
        "sdxl",
        "UNet2DConditionModel",
        {
            **_UNET, "block_out_channels": (32, 64, 64), "cross_attention_dim": 64, "use_linear_projection": True,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 3), "addition_embed_type": "text_time",
            "addition_time_embed_dim": 32, "projection_class_embeddings_input_dim": 256,
        },
    ),
    "Stable Diffusion 3": ("sd3", "SD3Transformer2DModel", {**_SD3, "num_layers": 2}),
    "Stable Diffusion 3.5": (
        "sd3",
        "SD3Transformer2DModel",
        {**_SD3, "num_layers": 3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
    ),
    "Flux": (
        "flux",
        "FluxTransformer2DModel",
        {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
         "axes_dims_rope": (8, 12, 12), "joint_attention_dim": 64, "pooled_projection_dim": 64, "in_channels": 16,
         "guidance_embeds": True},
    ),
}  # fmt: skip


def made(class_name: str, config: dict[str, Any], seed: int = 0) -> Any:
    """A random model in bfloat16."""
    import diffusers

    torch.manual_seed(seed)
    return getattr(diffusers, class_name)(**config).to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("name", MODELS)
def test_architectures_are_told_by_their_tensors(name: str, tmp_path: Path) -> None:
    """What is in `general.architecture` is what ComfyUI-GGUF finds by itself; and we find the way back."""
    architecture, class_name, config = MODELS[name]
    model = made(class_name, config)
    model.save_pretrained(tmp_path / "model")
    file = quantize_file(tmp_path / "model", "q8_0", tmp_path / "model.gguf", progress=False)
    tag, tensors, types = comfy_gguf.read(file)
    assert tag == comfy_gguf.told(set(tensors)) == architecture
    assert "Q8_0" in types.values()
    loaded = sdquant.load_model(file, progress=False)
    assert type(loaded) is type(model)
    packed, floats = dict(quantized(loaded)), plain(loaded)
    backend = backends.get("gguf")
    for key, weight in model.state_dict().items():
        if key in packed:
            # Rows of the fused weights were quantized by themselves: their blocks are those of the parts.
            assert torch.equal(
                packed[key].parts["blocks"], backend.encode(weight, backends.parse("q8_0")).parts["blocks"]
            )
        else:
            assert torch.equal(floats[key], weight), key


@pytest.mark.parametrize("prefix", ["", comfy_gguf.PREFIX])
def test_a_lone_file_with_names_of_diffusers(prefix: str, flux: Path, tmp_path: Path) -> None:
    """Without a config: the class is told by the names, which are translated all the same."""
    save_file(layouts.prefixed(layouts.weights(flux / "transformer"), prefix), tmp_path / "flux.safetensors")
    file = quantize_file(tmp_path / "flux.safetensors", "q8_0", tmp_path / "lone.gguf", progress=False)
    folder = quantize_file(flux, "q8_0", tmp_path / "whole.gguf", progress=False)
    (one, tensors, types), other = comfy_gguf.read(file), comfy_gguf.read(folder)
    assert (one, types) == (other[0], other[2])
    assert all(torch.equal(tensor, other[1][name]) for name, tensor in tensors.items())


def test_what_gguf_has_no_type_for_is_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 32), "mask": torch.zeros(4, dtype=torch.bool)}, tmp_path / "a.safetensors")
    with pytest.raises(UnsupportedFileError, match="'mask' is bool"):
        quantize_file(tmp_path / "a.safetensors", "q8_0", tmp_path / "a.gguf", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_rows_of_the_reference_names_fit_what_diffusers_maps() -> None:
    """A name that is not known leaves the file with diffusers' names: half a translation would be worse."""
    shapes = {"x_embedder.weight": (8, 8), "something_new.weight": (8, 8)}
    assert original_names.written("FluxTransformer2DModel", shapes) is None
    assert original_names.written("WanTransformer3DModel", shapes) is None
    assert original_names.written(None, shapes) is None


def test_models_without_a_map_are_written_with_diffusers_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "cross_attention_dim": 64, "num_layers": 1}
    model = made("PixArtTransformer2DModel", {**sizes, "caption_channels": 64, "sample_size": 8})
    model.save_pretrained(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        file = quantize_file(tmp_path / "model", "q8_0", tmp_path / "model.gguf", progress=False)
    assert "tensor names that other tools use" in caplog.text and "PixArtTransformer2DModel" in caplog.text
    assert read_header(file).tensors.keys() == model.state_dict().keys()
    with pytest.raises(comfy_gguf.Refused, match="PixArt"):
        comfy_gguf.read(file)
    loaded = sdquant.load_model(file, progress=False)
    assert plain(loaded).keys() | dict(quantized(loaded)).keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("row", "metadata", "words"),
    [
        (("a.weight", (4, 32), "f32", bytes(512)), {"general.architecture": "sd2"}, "Unexpected architecture"),
        (("a.weight", (4, 32), "f32", bytes(512)), {}, "Unknown model"),
        (("a.scale", (4, 32), "bf16", bytes(256)), {"general.architecture": "flux"}, "no layer"),
        (("a.weight", (2, 2, 2, 2, 2), "bf16", bytes(64)), {"general.architecture": "wan"}, "no layer"),
        (("a.bias", (32,), "q8_0", bytes(34)), {"general.architecture": "flux"}, "norms and biases"),
        (("a.weight", (4, 1, 8, 8), "mxfp4", bytes(136)), {"general.architecture": "sd1"}, "stored shape"),
    ],
)
def test_the_reader_is_strict(row: Any, metadata: dict[str, str], words: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", [row], metadata)
    with pytest.raises(comfy_gguf.Refused, match=words):
        comfy_gguf.read(tmp_path / "model.gguf")


def _diffusers(file: Path, config: Path) -> Any:
    """The Flux transformer of a file as diffusers itself reads it."""
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    return FluxTransformer2DModel.from_single_file(
        str(file),
        config=str(config),
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )


def _same_for_diffusers(theirs: Any, ours: Any) -> set[str]:
    """Every tensor is the same in both; returns the types of those that stay packed in diffusers."""
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    packed, floats, kinds = dict(quantized(ours)), plain(ours), set()
    found = dict(theirs.named_parameters())
    assert found.keys() == packed.keys() | floats.keys()
    for name, tensor in found.items():
        if not hasattr(tensor, "quant_type"):
            assert torch.equal(tensor.float(), floats[name].float()), name
            continue
        kinds.add(tensor.quant_type.name)
        got = dequantize_gguf_tensor(tensor).float()
        if name not in packed:  # a weight in BF16 is one of a quantized layer there
            assert torch.equal(got, floats[name].float()), name
            continue
        expected = backends.get("gguf").decode(packed[name], torch.float32)
        # It computes with scales and codes in half precision; a step of the finest codes is 1/127.
        assert got.shape == expected.shape and (got - expected).abs().max() <= 4e-3 * expected.abs().max(), name
    return kinds


@pytest.mark.parametrize(("scheme", "kinds"), [("q8_0", {"Q8_0"}), ("q4_0", {"Q4_0"}), ("q4_k_m", {"Q4_K", "Q6_K"})])
def test_diffusers_reads_the_file_in_a_folder(scheme: str, kinds: set[str], flux: Path, tmp_path: Path) -> None:
    """With diffusers' names, which it needs no key map for: that of Flux is for layers of the published width only."""
    quantize_file(flux, scheme, tmp_path / "out", components=["transformer"], progress=False)
    file = tmp_path / "out" / "transformer" / "model.gguf"
    theirs = _diffusers(file, flux / "transformer")
    ours = sdquant.load_model(tmp_path / "out" / "transformer", dtype="float32", progress=False)
    assert _same_for_diffusers(theirs, ours) == kinds | {"BF16"}
    torch.manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 16, ours.config.in_channels),
        "encoder_hidden_states": torch.randn(1, 8, ours.config.joint_attention_dim),
        "pooled_projections": torch.randn(1, ours.config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]), "guidance": torch.tensor([1.0]),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3),
    }  # fmt: skip
    if not ours.config.guidance_embeds:
        del inputs["guidance"]
    with torch.no_grad():
        one, other = theirs(**inputs).sample, ours(**inputs).sample
    assert (one - other).norm() / other.norm() < 0.01


@pytest.mark.slow
def test_diffusers_reads_the_file_for_comfyui(tmp_path: Path) -> None:
    """A Flux of the published width, under its authors' names: diffusers' own key map takes it apart."""
    config = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
    made("FluxTransformer2DModel", config).save_pretrained(tmp_path / "model")
    file = quantize_file(tmp_path / "model", "q4_k_m", tmp_path / "model.gguf", progress=False)
    assert comfy_gguf.told(set(read_header(file).tensors)) == "flux"
    kinds = _same_for_diffusers(_diffusers(file, tmp_path / "model"), sdquant.load_model(file, progress=False))
    assert kinds == {"Q4_K", "Q5_K", "Q6_K", "BF16"}
