"""The nodes for ComfyUI, in a stand-in for it: the shipped Flux in its authors' names, against sdquant's own load."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import backends
from sdquant.compat import hardware
from sdquant.errors import (
    ConflictError,
    IncompatibleError,
    MissingComponentError,
    SdquantError,
    SettingsError,
    UnsupportedFileError,
)
from sdquant.hosts import comfy_load, comfy_nodes
from sdquant.kernels import prepack
from sdquant.models.pipelines import main_part
from sdquant.nn.weights import quantized
from sdquant.saving import export_gguf, export_single_file
from sdquant.utils.install import install_alone

from .. import comfy_safetensors

FLUX = "digits-flux"
LAYER = "diffusion_model.double_blocks.0.img_attn.qkv.weight"


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).reshape(-1, 2)
    return {
        "img": torch.randn(2, 16, 16), "txt": torch.randn(2, 5, 128), "y": torch.randn(2, 128),
        "t": torch.tensor([0.3, 0.9]), "guidance": torch.tensor([3.5, 3.5]),
        "img_ids": torch.cat([torch.zeros(16, 1), grid], 1), "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip


@torch.no_grad()
def theirs(patcher: Any) -> torch.Tensor:
    """What the model of ComfyUI gives, loaded as ComfyUI does before it samples."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher])
    out: torch.Tensor = patcher.model.diffusion_model(**inputs())
    return out


@torch.no_grad()
def ours(model: Any) -> torch.Tensor:
    """What diffusers' transformer gives."""
    x = inputs()
    out: torch.Tensor = model(
        hidden_states=x["img"], encoder_hidden_states=x["txt"], pooled_projections=x["y"], timestep=x["t"],
        guidance=x["guidance"], img_ids=x["img_ids"], txt_ids=x["txt_ids"], return_dict=False,
    )[0]  # fmt: skip
    return out


def own_load(path: Path, **options: Any) -> Any:
    base = sdquant.demo.path(FLUX)
    return main_part(sdquant.load_model(path, base=base, dtype="float32", runtime="plain", progress=False, **options))


def written(comfy: SimpleNamespace, form: str) -> Path:
    """A file of the shipped model in ComfyUI's folder of diffusion models."""
    base = sdquant.demo.path(FLUX)
    if form in backends_of("gguf"):
        return export_gguf.quantize_file(base, form, comfy.models / f"flux-{form}.gguf", progress=False)
    if form in export_single_file.SCHEMES:
        return export_single_file.quantize_file(base, form, comfy.models / f"flux-{form}.safetensors", progress=False)
    target = comfy.models / f"flux-{form}.safetensors"
    if form == "float":
        save_file(floats(comfy), target)
    else:  # diffusers' names, as `sdquant.save` writes them
        part = main_part(sdquant.load_model(base, quant=form, runtime="plain", progress=False))
        sdquant.save(part, target)
    return target


def backends_of(name: str) -> set[str]:
    return {row.name for row in backends.get(name).schemes}


def floats(comfy: SimpleNamespace) -> dict[str, torch.Tensor]:
    """The shipped model in its authors' names."""
    from sdquant.models.detection import detect
    from sdquant.saving import original_layout

    src = detect(sdquant.demo.path(FLUX)).sources["transformer"]
    files = src.open()
    parts, _ = original_layout.names(src, alone=True)
    tensors = {part.name: original_layout.read(part, src, files).clone() for part in parts}
    for file in files.values():
        file.close()
    return tensors


def load(comfy: SimpleNamespace, path: Path, quant: str = comfy_load.AS_FOUND) -> Any:
    return run(comfy, "LoadDiffusionModel", model_name=path.name, quantize=quant)[0]


def run(comfy: SimpleNamespace, name: str, **inputs: Any) -> Any:
    """What a node gives."""
    node = comfy.nodes.NODE_CLASS_MAPPINGS[f"Sdquant{name}"]()
    return getattr(node, node.FUNCTION)(**inputs)


def save(comfy: SimpleNamespace, model: Any, prefix: str) -> Any:
    return run(comfy, "SaveDiffusionModel", model=model, filename_prefix=prefix)


@pytest.mark.parametrize("form", ["nf4", "fp8", "qint8", "int8_convrot", "q4_k", "iq4_xs", "int8_sym", "float"])
def test_a_file_gives_what_our_own_load_gives(comfy: SimpleNamespace, form: str) -> None:
    path = written(comfy, form)
    files = comfy.nodes.NODE_CLASS_MAPPINGS["SdquantLoadDiffusionModel"].INPUT_TYPES()["required"]["model_name"][0]
    assert files == [path.name]
    patcher = load(comfy, path)
    packed = dict(quantized(patcher.model))
    assert (LAYER in packed) is (form != "float")
    assert {row.spec.scheme.name for row in packed.values()} <= {"int8_row" if form == "qint8" else form, "q6_k"}
    torch.testing.assert_close(theirs(patcher), ours(own_load(path)), rtol=1e-4, atol=1e-4)


def test_fields_apart_give_the_same_images_and_files(comfy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GGUF weights are kept for cards; here on the CPU."""
    path = written(comfy, "iq4_xs")
    blocks = load(comfy, path)
    monkeypatch.setattr(prepack, "wanted", lambda form, device: True)
    fields = load(comfy, path)
    assert {name for row in dict(quantized(blocks.model)).values() for name in row.parts} == {"blocks"}
    assert {name for row in dict(quantized(fields.model)).values() for name in row.parts} == {"fields"}
    assert fields.model_size() == blocks.model_size()
    torch.testing.assert_close(theirs(fields), theirs(blocks), rtol=1e-4, atol=1e-4)
    for patcher, name in ((fields, "fields"), (blocks, "blocks")):
        save(comfy, patcher, name)
    one, other = (comfy.output / f"{name}_00001_.safetensors" for name in ("fields", "blocks"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("quant", ["int8", "nf4,double_quant", "qint4"])
def test_float_weights_are_quantized_on_load(comfy: SimpleNamespace, quant: str) -> None:
    patcher = load(comfy, written(comfy, "float"), quant)
    packed = dict(quantized(patcher.model))
    exact = floats(comfy)
    assert len(packed) > 10 and {row.spec.scheme.name for row in packed.values()} == {quant.partition(",")[0]}
    assert not any("img_in" in name or "final_layer" in name for name in packed)
    for name, row in packed.items():  # the codec's own numbers
        encoded = row.spec.scheme.codec.encode(exact[name.removeprefix("diffusion_model.")], backends.parse(quant))
        assert all(torch.equal(part, encoded.parts[key]) for key, part in row.parts.items()), name
    seen, meant = theirs(patcher), ours(own_load(sdquant.demo.path(FLUX) / "transformer"))
    error = float((seen - meant).norm() / meant.norm())
    assert 1e-4 < error < 0.25


def test_memory_is_counted_as_it_is(comfy: SimpleNamespace) -> None:
    from sdquant.models.pipelines import weight_bytes

    whole, packed = (load(comfy, written(comfy, form)) for form in ("float", "nf4"))
    assert packed.model_size() == weight_bytes(packed.model) < 0.45 * whole.model_size()
    assert packed.loaded_size() == 0
    theirs(packed)
    assert packed.loaded_size() == packed.model_size()
    freed = packed.partially_unload(packed.offload_device, packed.model_size() // 2)
    assert packed.model_size() // 2 <= freed == packed.model_size() - packed.loaded_size()


def test_a_state_dict_has_the_names_and_shapes_of_the_float_model(comfy: SimpleNamespace) -> None:
    patcher = load(comfy, written(comfy, "q4_k"))
    shown = patcher.model.diffusion_model.state_dict()
    assert {name: tuple(t.shape) for name, t in shown.items()} == {n: tuple(t.shape) for n, t in floats(comfy).items()}
    name = LAYER.removeprefix("diffusion_model.")
    decoded = shown[name].to(torch.float32, copy=True)
    assert type(decoded) is torch.Tensor
    exact = floats(comfy)[name].float()
    assert (decoded - exact).norm() < 0.1 * exact.norm()
    with pytest.raises(IncompatibleError, match="would be lost"):
        shown[name].data.copy_(exact)


def lora() -> dict[str, Any]:
    torch.manual_seed(1)
    return {LAYER: ("lora", (0.05 * torch.randn(768, 4), 0.05 * torch.randn(4, 256), 4.0))}


@pytest.mark.parametrize("memory", [1e32, 200_000, 1])
def test_a_lora_takes_effect_at_its_size(comfy: SimpleNamespace, memory: float) -> None:
    """Loaded whole, in part, and not at all (`memory` bytes): the same, and as if it were in the decoded weight."""
    patcher = load(comfy, written(comfy, "qint8"))
    plain = theirs(patcher)
    changed = patcher.clone()
    assert changed.add_patches(lora(), 0.8) == [LAYER]
    changed.add_patches({LAYER.replace("weight", "bias"): (torch.full((768,), 0.01),)})

    model = patcher.model.diffusion_model
    state = {name: tensor.to(torch.float32, copy=True) for name, tensor in model.state_dict().items()}
    for name, row in quantized(model):
        state[name] = row.spec.scheme.codec.decode(row, torch.float32)
    up, down, _ = lora()[LAYER][1]
    name = LAYER.removeprefix("diffusion_model.")
    state[name] = state[name] + 0.8 * up @ down
    state[name.replace("weight", "bias")] += 0.01
    save_file(state, comfy.models / "merged.safetensors")
    meant = theirs(load(comfy, comfy.models / "merged.safetensors"))
    assert (meant - plain).norm() > 0.01 * plain.norm()

    changed.partially_load(changed.load_device, memory)
    with torch.no_grad():
        seen = changed.model.diffusion_model(**inputs())
    torch.testing.assert_close(seen, meant, rtol=2e-3, atol=2e-3)
    changed.partially_unload(changed.offload_device, changed.model_size())  # as it is moved out, too
    with torch.no_grad():
        torch.testing.assert_close(changed.model.diffusion_model(**inputs()), seen, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(theirs(patcher), plain)  # and it is gone with the clone


@pytest.mark.parametrize("kind", ["lora", "model_as_lora"])
def test_a_hooks_lora_takes_effect_and_goes(comfy: SimpleNamespace, kind: str) -> None:
    """A LoRA for some prompts or steps, which ComfyUI writes into the weights while it samples."""
    patcher = load(comfy, written(comfy, "nf4"))
    exact = patcher.model.get_submodule(LAYER.rpartition(".")[0]).weight.to(torch.float32, copy=True)
    plain = theirs(patcher)
    up, down, _ = lora()[LAYER][1]
    bias = LAYER.replace("weight", "bias")
    value = lora()[LAYER] if kind == "lora" else (kind, (exact + 0.5 * up @ down,))
    hooked = patcher.clone()
    hooked.add_patches({LAYER: (torch.full((768, 256), 0.001),)})
    hooked.add_weight_wrapper(LAYER, lambda weight: weight * 1.5)
    before, merged = theirs(hooked), hooked.clone()
    merged.add_patches({LAYER: value if kind == "lora" else (0.5 * up @ down,), bias: (torch.ones(768),)})
    meant = theirs(merged)
    theirs(hooked)
    hooked.add_hook_patches("hook", {LAYER: value, bias: (torch.ones(768),)})
    run = lambda: hooked.model.diffusion_model(**inputs())  # noqa: E731
    with torch.no_grad():
        hooked.patch_hooks(("hook",))
        torch.testing.assert_close(run(), meant, rtol=2e-3, atol=2e-3)
        assert (meant - before).norm() > 0.01 * before.norm()
        other = hooked.clone()
        other.unpatch_hooks()
        torch.testing.assert_close(run(), before, rtol=1e-5, atol=1e-5)
        hooked.patch_hooks(("hook",))
        hooked.patch_hooks(None)
        torch.testing.assert_close(run(), before, rtol=1e-5, atol=1e-5)
        hooked.patch_hooks(("hook",))
    hooked.unpatch_model(hooked.offload_device)
    torch.testing.assert_close(theirs(patcher), plain)


def test_a_weight_wrapper_is_applied_and_goes(comfy: SimpleNamespace) -> None:
    patcher = load(comfy, written(comfy, "nf4"))
    plain, changed = theirs(patcher), patcher.clone()
    changed.add_weight_wrapper(LAYER, lambda weight: weight * 0)
    assert not torch.allclose(theirs(changed), plain, atol=1e-2)
    assert torch.equal(theirs(patcher), plain)


@pytest.mark.parametrize("kind", ["Linear", "Conv1d", "Conv2d", "Conv3d"])
def test_a_layer_runs_packed_or_float_weights(comfy: SimpleNamespace, kind: str) -> None:
    from sdquant.hosts.comfy_ops import ComfyPackedLayer, ComfyPackedTensor, operations

    dims = 0 if kind == "Linear" else int(kind[4])
    made = lambda: getattr(operations(), kind)(16, 8, *(() if not dims else (3,)), dtype=torch.float32)  # noqa: E731
    torch.manual_seed(0)
    weight, bias = torch.randn(8, 16, *(3,) * dims).bfloat16(), torch.randn(8).bfloat16()
    packed = backends.get("nncf").encode(weight, backends.parse("int8"))
    x = torch.randn(2, 16, *(5,) * dims)
    both = []
    for form in (ComfyPackedTensor(packed), backends.get("nncf").decode(packed, torch.float32)):
        layer = made()
        assert layer.load_state_dict({"weight": form, "bias": bias}) == ([], [])
        both.append(layer(x))
        assert layer(x.bfloat16()).dtype == torch.bfloat16
        assert isinstance(layer, ComfyPackedLayer) is isinstance(form, ComfyPackedTensor)
        assert layer.weight.shape == weight.shape
        assert {name for name, _ in layer.named_parameters()} >= {"bias"} and not layer.weight.is_meta
        assert isinstance(layer, getattr(sys.modules["comfy.ops"].manual_cast, kind))
    torch.testing.assert_close(both[0], both[1])
    if kind == "Conv3d":  # a frame less than the kernel is long: its first part is not used
        wide = made()
        wide.load_state_dict({"weight": ComfyPackedTensor(packed), "bias": bias})
        torch.testing.assert_close(wide(x[:, :, :2], autopad="causal_zero"), layer(x[:, :, :2], autopad="causal_zero"))
    small = backends.get("nncf").encode(weight[:4], backends.parse("int8"))
    with pytest.raises(RuntimeError, match="the model expects"):
        made().load_state_dict({"weight": ComfyPackedTensor(small), "bias": bias}, strict=False)
    assert made().load_state_dict({"bias": bias}, strict=False).missing_keys == ["weight"]


def test_a_checkpoint_of_several_models_lends_its_diffusion_model(comfy: SimpleNamespace) -> None:
    path = written(comfy, "fp8")
    state = {f"model.diffusion_model.{name}": tensor for name, tensor in load_file(path).items()}
    marker = state.pop("model.diffusion_model.scaled_fp8")
    assert marker.numel() == 2
    state |= {
        "vae.decoder.conv_in.weight": torch.zeros(4, 4, 3, 3),
        "text_encoders.t5xxl.shared.weight": torch.zeros(9, 9),
    }
    save_file(state, comfy.models / "whole.safetensors")
    assert torch.equal(theirs(load(comfy, comfy.models / "whole.safetensors")), theirs(load(comfy, path)))


def test_a_model_can_be_merged_into_another(comfy: SimpleNamespace) -> None:
    packed, whole = load(comfy, written(comfy, "qint8")), load(comfy, written(comfy, "float"))
    merged = whole.clone()
    for key, patch in packed.get_key_patches("diffusion_model.").items():
        merged.add_patches({key: (patch[0][0].to(torch.float32),)}, 1.0, 0.0)
    torch.testing.assert_close(theirs(merged), theirs(packed), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("quant", ["nf4", "qint8", "fp8", "int4", "bnb-int8", "qfloat8", "q4_k"])
def test_a_saved_model_reloads_equal(comfy: SimpleNamespace, quant: str) -> None:
    found = quant == "q4_k"
    patcher = load(comfy, written(comfy, quant if found else "float"), comfy_load.AS_FOUND if found else quant)
    shown = save(comfy, patcher, "diffusion_models/mine")
    (said,) = shown["ui"]["text"]
    assert said.startswith("Saved as mine_00001_.safetensors") and shown["result"] == ()
    assert ("own loader does not know" in said) == (quant != "qint8")
    path = comfy.output / "diffusion_models" / "mine_00001_.safetensors"
    again = load(comfy, path)
    before, after = dict(quantized(patcher.model)), dict(quantized(again.model))
    assert before.keys() == after.keys()
    for name, row in before.items():
        one, other = (each.spec.scheme.codec.decode(each, torch.bfloat16) for each in (row, after[name]))
        assert torch.equal(one, other), name
    # ComfyUI's int8 has scales in float32, which we round a product less by.
    spare = 1e-2 if quant == "qint8" else 0.0
    torch.testing.assert_close(theirs(again), theirs(patcher), rtol=spare, atol=spare)
    assert sdquant.verify(path).quant == sdquant.detect(path).quant
    if quant in ("nf4", "qint8"):  # as ComfyUI's own loader and Forge read it
        decoded, names = comfy_safetensors.read(path)
        assert {f"diffusion_model.{name}" for name in names} == set(before)
        for name in names:
            weight = patcher.model.get_submodule(f"diffusion_model.{name}".rpartition(".")[0]).dequantize(
                torch.bfloat16
            )
            assert torch.equal(decoded[name].to(torch.bfloat16), weight), name
    else:
        with pytest.raises(comfy_safetensors.Refused, match="load it with the node"):  # not noise
            comfy_safetensors.read(path)
    content = path.read_bytes()
    assert "mine_00002_.safetensors" in save(comfy, patcher, "diffusion_models/mine")["ui"]["text"][0]
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "prefix", ["../out", "/etc/x", "a/../../b", "", "  ", "x\0y", "C:\\x", "a/b/", "a|b", "link/x"]
)
def test_nothing_is_written_outside_the_output_folder(comfy: SimpleNamespace, prefix: str, tmp_path: Path) -> None:
    (comfy.output / "link").symlink_to(tmp_path)
    patcher = load(comfy, written(comfy, "qint8"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SettingsError):
        save(comfy, patcher, prefix)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_with_a_lora_or_without_packed_weights_is_not_saved(comfy: SimpleNamespace) -> None:
    patcher = load(comfy, written(comfy, "qint8"))
    patcher.add_patches(lora())
    with pytest.raises(ConflictError, match="LoRA"):
        save(comfy, patcher, "x")
    with pytest.raises(ConflictError, match="Save Diffusion Model"):  # which ComfyUI's own nodes call
        comfy.comfy.sd.save_checkpoint(str(comfy.output / "own.safetensors"), patcher)
    with pytest.raises(ConflictError, match="Save Diffusion Model"):  # in later versions
        patcher.state_dict_for_saving(None, None, None)
    with pytest.raises(SettingsError, match="no weights that sdquant packed"):
        save(comfy, load(comfy, written(comfy, "float")), "x")
    assert list(comfy.output.iterdir()) == []


def test_what_cannot_be_loaded_is_said(comfy: SimpleNamespace) -> None:
    with pytest.raises(ConflictError, match="already quantized"):
        load(comfy, written(comfy, "nf4"), "int8")
    with pytest.raises(IncompatibleError, match="q4_k"):
        load(comfy, written(comfy, "float"), "q4_k")
    with pytest.raises(MissingComponentError, match="none of ComfyUI's"):
        load(comfy, Path("nothing.safetensors"))
    other = {f"layers.{n}.weight": torch.zeros(64, 64) for n in range(3)}
    save_file(other, comfy.models / "other.safetensors")
    with pytest.raises(UnsupportedFileError, match="does not recognize a diffusion model"):
        load(comfy, comfy.models / "other.safetensors")
    broken = floats(comfy)
    broken["double_blocks.0.img_mlp.0.weight"][3, 4] = float("nan")
    save_file(broken, comfy.models / "broken.safetensors")
    with pytest.raises(SdquantError, match="values that are NaN"):
        load(comfy, comfy.models / "broken.safetensors", "nf4")


def test_packed_weights_that_the_model_has_fused_are_joined_or_refused(comfy: SimpleNamespace) -> None:
    """diffusers has q, k and v apart; here they are one weight. Scales of a whole weight cannot be two at once."""
    path = written(comfy, "int8_sym")
    state = load_file(path)
    assert any("to_q" in name for name in state)
    packed = dict(quantized(load(comfy, path).model))
    assert packed[LAYER].spec.shape == (768, 256)
    src = sdquant.detect(sdquant.demo.path(FLUX)).sources["transformer"]
    files = src.open()
    scaled: dict[str, torch.Tensor] = {}
    for key in src.tensors:
        weight = src.read(files, key)
        if weight.ndim == 2 and ".attn." in key:
            scale = weight.abs().max().float() / 448
            scaled[key] = (weight.float() / scale).to(torch.float8_e4m3fn)
            scaled[key.replace("weight", "scale_weight")] = scale
        else:
            scaled[key] = weight.clone()
    for file in files.values():
        file.close()
    save_file(scaled, comfy.models / "apart.safetensors")
    with pytest.raises(UnsupportedFileError, match="cannot be joined like that"):
        load(comfy, comfy.models / "apart.safetensors")


def test_the_nodes_say_what_they_are_and_can(comfy: SimpleNamespace) -> None:
    assert comfy.nodes.NODE_CLASS_MAPPINGS.keys() == comfy.nodes.NODE_DISPLAY_NAME_MAPPINGS.keys()
    for node in comfy.nodes.NODE_CLASS_MAPPINGS.values():
        assert callable(getattr(node, node.FUNCTION)) and node.CATEGORY == "model/loaders" and node.DESCRIPTION
        for _, options in node.INPUT_TYPES()["required"].values():
            assert options["tooltip"]
    path = written(comfy, "nf4")
    shown = run(comfy, "Inspect", model_name=path.name)
    assert shown["ui"]["text"] == list(shown["result"]) and "quantization: nf4 (bnb)" in shown["result"][0]


def test_the_list_of_schemes_has_what_can_be_made_and_others_are_refused_before_the_run(
    comfy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = comfy.nodes.NODE_CLASS_MAPPINGS["SdquantLoadDiffusionModel"]

    def schemes() -> list[str]:
        found: list[str] = node.INPUT_TYPES()["required"]["quantize"][0]
        return found

    assert schemes()[0] == comfy_load.AS_FOUND and {"nf4", "int8", "qint4", "fp8", "int8_convrot"} < set(schemes())
    assert not {"q4_k", "rules"} & set(schemes())
    assert node.VALIDATE_INPUTS(quantize="nf4,double_quant") is True and node.VALIDATE_INPUTS() is True
    monkeypatch.setattr(hardware, "versions", dict)  # the two documented lines, and no other package
    assert {"fp8", "int8_convrot", "w4a8"} < set(schemes()) and not {"nf4", "int8", "qint4", "sdnq-int8"} & set(
        schemes()
    )
    assert "bitsandbytes" in node.VALIDATE_INPUTS(quantize="nf4")
    assert "no list of rules" in node.VALIDATE_INPUTS(quantize="rules")
    assert "q4_k" in node.VALIDATE_INPUTS(quantize="q4_k")  # which files have, and nothing makes on load
    assert "nosuch" in node.VALIDATE_INPUTS(quantize="nosuch")
    with pytest.raises(IncompatibleError, match="no list of rules"):
        load(comfy, written(comfy, "float"), "rules")


def test_a_model_of_another_node_is_quantized_with_its_lora_and_saved(comfy: SimpleNamespace) -> None:
    whole = load(comfy, written(comfy, "float"))
    changed = whole.clone()
    changed.add_patches(lora(), 0.8)
    changed.model_options["transformer_options"] = {"mine": 1}
    changed.object_patches["diffusion_model.default_ref_method"] = "index_timestep_zero"  # as a node for Flux has it
    before, meant = theirs(whole), theirs(changed)
    (made,) = run(comfy, "QuantizeModel", model=changed, quantize="int8")
    assert len(dict(quantized(made.model))) > 10 and made.model_options["transformer_options"] == {"mine": 1}
    assert made.object_patches == changed.object_patches
    error = (theirs(made) - meant).norm() / (meant - before).norm()
    assert error < 0.5  # with the LoRA
    assert torch.equal(theirs(whole), before)
    save(comfy, made, "diffusion_models/merged")
    again = load(comfy, comfy.output / "diffusion_models" / "merged_00001_.safetensors")
    assert torch.equal(theirs(again), theirs(made))
    with pytest.raises(ConflictError, match="already quantized"):
        run(comfy, "QuantizeModel", model=made, quantize="int8")


def test_a_quantized_model_predicts_what_it_did(comfy: SimpleNamespace) -> None:
    """ComfyUI reads from tensors beside an SDXL's diffusion model that it predicts velocities."""
    whole = load(comfy, written(comfy, "float"))
    whole.model.model_type, whole.model.model_sampling.zsnr = comfy.comfy.sd.ModelType.V_PREDICTION, True
    (made,) = run(comfy, "QuantizeModel", model=whole, quantize="int8")
    save(comfy, made, "diffusion_models/velocities")
    path = comfy.output / "diffusion_models" / "velocities_00001_.safetensors"
    both = {"vae.decoder.conv_in.weight": torch.zeros(4, 3, 3, 3), "ztsnr": torch.tensor([])}
    both |= {f"model.diffusion_model.{name}": tensor for name, tensor in floats(comfy).items()}
    save_file({**both, "v_pred": torch.tensor([])}, comfy.models / "checkpoint.safetensors")
    for patcher in (made, load(comfy, path), load(comfy, comfy.models / "checkpoint.safetensors")):
        assert patcher.model.model_type is comfy.comfy.sd.ModelType.V_PREDICTION
        assert patcher.model.model_sampling.zsnr
    assert torch.equal(theirs(load(comfy, path)), theirs(made))


@pytest.mark.parametrize("place", ["object_patches", "wrappers"])
def test_what_would_run_the_float_layers_is_refused(comfy: SimpleNamespace, place: str) -> None:
    """A compiled model, or a method of one of its layers, in the place of the model's."""
    whole = load(comfy, written(comfy, "float"))
    if place == "object_patches":
        whole.object_patches["diffusion_model.img_in.forward"] = whole.model.diffusion_model.img_in.forward
    else:
        whole.wrappers["apply_model"]["torch.compile"] = [whole.model.diffusion_model.forward]
    with pytest.raises(ConflictError, match=r"changed how its float layers run .*'Quantize Model"):
        run(comfy, "QuantizeModel", model=whole, quantize="int8")


def test_the_copy_in_custom_nodes_works_and_says_what_is_missing(comfy: SimpleNamespace, tmp_path: Path) -> None:
    target = tmp_path / "custom_nodes" / "sdquant"
    shutil.copytree(Path(comfy.nodes.__file__).parent, target)
    # As ComfyUI does: under the name of the path, so that the package of that name stays what it is.
    run = (
        "import importlib.util, sys; sys.path.insert(0, sys.argv[1])\n"
        "import folder_paths; folder_paths.folder_names_and_paths.update(unet=([], set()), clip=([], set()))\n"
        "if sys.argv[3] == 'without': sys.modules['sdquant'] = None\n"
        "spec = importlib.util.spec_from_file_location('custom_nodes.x', sys.argv[2])\n"
        "made = importlib.util.module_from_spec(spec); spec.loader.exec_module(made)\n"
        "print(len(made.NODE_CLASS_MAPPINGS), made.WEB_DIRECTORY)\n"
        "print([name for name in ('gradio', 'diffusers', 'transformers') if name in sys.modules])"
    )
    standin = str(Path(__file__).parent / "comfy_standin")
    done = [
        subprocess.run(
            [sys.executable, "-c", run, standin, str(target / "__init__.py"), how], capture_output=True, text=True
        )
        for how in ("with", "without")
    ]
    assert done[0].stdout.splitlines() == [f"{len(comfy_nodes.NODES) + 1} ./web", "[]"]  # with SwarmUI's
    assert done[1].returncode == 1 and install_alone("python") in done[1].stderr
