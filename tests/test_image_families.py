"""Image models of all families that diffusers has key maps for, as single files in the authors' names: every tensor
arrives, float or quantized, and GGUF files that are written have those names."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant import backends
from sdquant.core.packed_reader import read_weight
from sdquant.errors import BadFileError
from sdquant.formats.gguf.file import read_header
from sdquant.models.components import quiet, single_file
from sdquant.models.single_file import original_names
from sdquant.nn.weights import plain, quantized
from sdquant.planning import component_sources
from sdquant.planning.locate import locate
from sdquant.planning.request import make_request
from sdquant.saving.export_gguf import quantize_file
from sdquant.saving.export_single_file import quantize_file as quantize_single

from . import comfy_gguf, layouts
from .image_models import LDM, MODELS, Row, file_of, folder_of, theirs, weights

__all__ = ["folder_of"]

Folder = Callable[[str], Path]
GGUF = [name for name, row in MODELS.items() if row.architecture is not None]


def same(one: Any, other: Any) -> None:
    """Both have the same packed weights, and the same plain tensors."""
    packed, others = dict(quantized(one)), dict(quantized(other))
    assert packed and packed.keys() == others.keys()
    for name, weight in packed.items():
        assert weight.spec == others[name].spec and weight.parts.keys() == others[name].parts.keys(), name
        for part, tensor in weight.parts.items():
            assert torch.equal(tensor, others[name].parts[part]), (name, part)
    equal(plain(one), plain(other))


def equal(one: Any, other: Any) -> None:
    """Two state dicts are the same."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def loaded(folder: Path) -> dict[str, Tensor]:
    """The weights in a folder as a model has them: in float32 those that diffusers keeps in it."""
    name = json.loads((folder / "config.json").read_text())["_class_name"]
    words = set(getattr(diffusers, name)._keep_in_fp32_modules or ())
    return {key: tensor.float() if words & {*key.split(".")} else tensor for key, tensor in weights(folder).items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_arrives(name: str, folder_of: Folder, tmp_path: Path, caplog: Any) -> None:
    row = MODELS[name]
    for prefix in dict.fromkeys((row.prefix, "")):
        file = file_of(row, folder_of(name), tmp_path, prefix)
        seen = sdquant.detect(file)
        assert (seen.family, seen.component, seen.prequantized) == (row.family, row.component, False)
        equal(sdquant.load_model(file, progress=False).state_dict(), loaded(folder_of(name)))
    equal(sdquant.load_model(folder_of(name), progress=False).state_dict(), loaded(folder_of(name)))
    assert not [record for record in caplog.records if record.name.startswith("sdquant")]


def test_a_class_that_diffusers_has_no_converter_for(
    folder_of: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows by which files are written read them, too."""
    classes, _ = single_file()
    row = MODELS["auraflow"]
    monkeypatch.delitem(classes, row.kind)
    file = file_of(row, folder_of("auraflow"), tmp_path)
    equal(sdquant.load_model(file, progress=False).state_dict(), loaded(folder_of("auraflow")))


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row.known])
def test_diffusers_reads_what_is_written(name: str, folder_of: Folder, tmp_path: Path) -> None:
    import diffusers

    row = MODELS[name]
    # Of these it knows the bare names only.
    bare = {"auraflow", "flux2", "flux3", "qwen-image", "stable-cascade-b", "stable-cascade-c"}
    file = file_of(row, folder_of(name), tmp_path, "" if name in bare else None)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers at its own models
        model = getattr(diffusers, row.kind).from_single_file(
            str(file), config=str(folder_of(name)), torch_dtype=torch.bfloat16
        )
    equal(model.state_dict(), weights(folder_of(name)))


def wide(name: str) -> tuple[Any, dict[str, Tensor]]:
    """The config of a model of the published width, and its state with two columns of each matrix."""
    import diffusers

    depth = {key: value for key, value in MODELS[name].config.items() if key in ("num_layers", "num_single_layers")}
    with init_empty_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers at its own Chroma
        model = getattr(diffusers, MODELS[name].kind)(**depth)
    shapes = {key: (t.shape[0], *(min(2, n) for n in t.shape[1:])) for key, t in model.state_dict().items()}
    return model.config, {key: torch.randn(shape) for key, shape in shapes.items()}


@pytest.mark.parametrize("name", ["chroma", "flux2"])
def test_norms_by_the_names_that_comfyui_leaves_them(name: str, folder_of: Folder, tmp_path: Path) -> None:
    """Its node ModelSave writes the names that its own classes have. `verify` still finds what the file lacks."""
    file, row = file_of(MODELS[name], folder_of(name), tmp_path), MODELS[name]
    there = {re.sub(r"(_norm|norms\.\d+)\.scale$", r"\1.weight", key): t for key, t in load_file(file).items()}
    assert any(key.endswith(".norm.query_norm.weight") for key in there)
    save_file(there, file)
    equal(sdquant.load_model(file, progress=False).state_dict(), loaded(folder_of(name)))
    assert sdquant.verify(file).family == row.family
    gone = next(key for key in there if key.endswith(".norm.query_norm.weight"))
    save_file({key: tensor for key, tensor in there.items() if key != gone}, file)
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadFileError, match=re.escape(gone.removesuffix("weight"))):
        sdquant.verify(file)


@pytest.mark.parametrize("name", ["chroma", "lumina2"])
def test_diffusers_key_map_of_the_published_width_finds_the_way_back(name: str) -> None:
    torch.manual_seed(0)
    config, state = wide(name)
    classes, _ = single_file()
    row = dataclasses.replace(MODELS[name], added={})
    back = classes[row.kind]["checkpoint_mapping_fn"](theirs(row, state), config=dict(config))
    equal(back, state)


@pytest.mark.parametrize("name", MODELS)
def test_quantized_on_the_fly(name: str, folder_of: Folder, tmp_path: Path) -> None:
    """While loading and after it, the weights are those of the folder."""
    file = file_of(MODELS[name], folder_of(name), tmp_path)
    whole = sdquant.load_model(folder_of(name), "int8", progress=False)
    same(sdquant.load_model(file, "int8", progress=False), whole)
    same(sdquant.load_model(file, "int8", mode="post", progress=False), whole)


@pytest.mark.parametrize("name", ["flux2", "chroma", "z-image", "qwen-image-2.1", "sana-1.5", "hidream", "krea2"])
@pytest.mark.parametrize("scheme", ["fp8", "nf4"])
def test_quantized_on_disk(scheme: str, name: str, folder_of: Folder, tmp_path: Path) -> None:
    """One file as Forge and ComfyUI read it: what is quantized there are rows of the authors' layers."""
    row = MODELS[name]
    file = quantize_single(folder_of(name), scheme, tmp_path / "model.safetensors", progress=False)
    seen = sdquant.detect(file)
    assert (seen.family, seen.quant) == (row.family, scheme)
    src = seen.sources["model"]
    files = src.open()
    there: dict[str, Tensor] = {}
    for key, found in src.prequantized.items():
        packed = read_weight(found, None, None, lambda part: src.read(files, part))
        there[key] = backends.of_scheme(found.scheme).decode(packed, torch.float32)
    for file_ in files.values():
        file_.close()
    assert there
    _holds(row, sdquant.load_model(file, progress=False), there, loaded(folder_of(name)))


def _holds(row: Row, model: Any, there: dict[str, Tensor], floats: dict[str, Tensor]) -> None:
    """The model's quantized weights are parts of the decoded ones of a file, and all others are floats."""
    packed = dict(quantized(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in floats.items()}
    wanted: dict[str, Tensor] = {}
    for part in original_names.written(row.kind, shapes) or ():
        if part.name in there and len(shapes[part.sources[0]]) > 1:
            pieces = there[part.name].split([shapes[source][0] for source in part.sources])
            wanted |= dict(zip(part.sources, pieces, strict=True))
    assert packed.keys() == wanted.keys()
    for name, weight in packed.items():
        got = weight.spec.scheme.codec.decode(weight, torch.float32)
        assert torch.equal(got, wanted[name]), name
    equal(plain(model), {name: tensor for name, tensor in floats.items() if name not in packed})


@pytest.mark.parametrize("name", GGUF)
def test_gguf_has_the_authors_names(name: str, folder_of: Folder, tmp_path: Path, caplog: Any) -> None:
    """ComfyUI-GGUF reads the file where it knows the model; we read the same weights as in the folder."""
    row = MODELS[name]
    folder = folder_of(name)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "sdquant"):
        file = quantize_file(folder, "q8_0", tmp_path / "model.gguf", progress=False)
    assert not caplog.records
    header, wanted = read_header(file), theirs(dataclasses.replace(row, added={}), weights(folder_of(name)))
    assert header.metadata["general.architecture"] == row.architecture
    assert header.tensors.keys() == wanted.keys()
    if row.architecture in comfy_gguf.IMAGE_MODELS:
        _, tensors, types = comfy_gguf.read(file)
        assert {key: tensor.shape for key, tensor in tensors.items()} == {key: t.shape for key, t in wanted.items()}
        floats = {key for key, kind in types.items() if kind != "Q8_0"}
        assert all(torch.equal(tensors[key], wanted[key].float()) for key in floats)
    seen = sdquant.detect(file)
    assert (seen.family, seen.component, seen.quant) == (row.family, row.component, "q8_0")
    model = sdquant.load_model(file, progress=False)
    packed, state, backend = dict(quantized(model)), loaded(folder_of(name)), backends.get("gguf")
    assert len(packed) > 3
    for key, weight in packed.items():
        expected = backend.encode(state[key], backends.parse("q8_0")).parts["blocks"]
        assert torch.equal(weight.parts["blocks"].flatten(), expected.flatten()), key
    equal(plain(model), {key: tensor for key, tensor in state.items() if key not in packed})


@pytest.mark.parametrize("name", ["chroma", "z-image", "lumina2", "krea2", "stable-cascade-b", "controlnet"])
def test_a_lone_file_in_diffusers_names_is_told_too(name: str, folder_of: Folder) -> None:
    """Not only by the config beside it: Chroma has most of Flux's names, and Z-Image many of its authors'."""
    (file,) = folder_of(name).glob("*.safetensors")
    seen = sdquant.detect(file)
    assert (seen.family, seen.component) == (MODELS[name].family, MODELS[name].component)
    assert any("diffusers layout" in line for line in seen.evidence)


@pytest.mark.parametrize(
    ("main", "beside"), [("sana", "dc-ae"), ("digits-sd", "controlnet"), ("z-image", "z-image-controlnet")]
)
def test_a_part_beside_the_main_one_is_not_made_of_it(
    main: str, beside: str, sd: Path, folder_of: Folder, tmp_path: Path
) -> None:
    """Converters rename whatever they are given: a transformer's file has no autoencoder, the base keeps its own."""
    whole = {"unet": sd / "unet"} if main == "digits-sd" else {"transformer": folder_of(main)}
    whole |= {MODELS[beside].component: folder_of(beside)}
    index: dict[str, Any] = {"_class_name": "DiffusionPipeline"}
    for part, folder in whole.items():
        shutil.copytree(folder, tmp_path / "base" / part)
        index[part] = ["diffusers", layouts.config(folder)["_class_name"]]
    (tmp_path / "base" / "model_index.json").write_text(json.dumps(index))
    if main == "digits-sd":
        state = layouts.unet(layouts.weights(sd / "unet"), layouts.config(sd / "unet"))
        save_file(layouts.prefixed(state, LDM), tmp_path / "unet.safetensors")
    else:
        file_of(MODELS[main], folder_of(main), tmp_path / "a")
    one = tmp_path / "unet.safetensors" if main == "digits-sd" else tmp_path / "a" / "model.safetensors"
    other = file_of(MODELS[beside], folder_of(beside), tmp_path / "b")
    for file, part in zip((one, other), whole, strict=True):
        parts = component_sources.whole_of(
            locate(make_request(file, base=str(tmp_path / "base"))), complete=True
        ).sources
        assert {name for name, src in parts.items() if file in src.files} == {part}
        assert parts[part].plain.keys() == weights(whole[part]).keys()


def test_after_loading_as_while_loading_what_is_no_layer_stays_as_it_is(tmp_path: Path, caplog: Any) -> None:
    """A table of embeddings whose name does not say so: the plan asks the model."""
    from diffusers import FluxControlNetModel

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers at its own ControlNet
        FluxControlNetModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
            joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12), num_mode=3,
        ).save_pretrained(tmp_path)  # fmt: skip
    one, other = (sdquant.load_model(tmp_path, "int8", mode=mode, progress=False) for mode in ("pre", "post"))
    same(one, other)
    assert not [record for record in caplog.records if record.name.startswith("sdquant")]
    for model in (one, other):
        (part,) = model.sdquant.plan.components
        assert "controlnet_mode_embedder.weight" not in {weight.name for weight in part.weights}
