"""Classes of components: those that a model_index.json names, in whichever module of diffusers they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import sdquant
from sdquant.errors import MissingComponentError, UnsupportedFileError

from . import comparison
from .pipeline_factory import build, class_named, model, silent


@pytest.mark.parametrize("name", ["StableDiffusionSafetyChecker", "LTX2TextConnectors", "CLIPImageProjection"])
def test_a_lone_component_of_a_class_that_only_a_pipeline_has(name: str, tmp_path: Path) -> None:
    kind = class_named(name)
    with silent():
        model(kind, "part", torch.float32, {}).save_pretrained(tmp_path)
        known = kind.from_pretrained(tmp_path)
    loaded = sdquant.load_model(tmp_path, progress=False)
    assert type(loaded) is type(known)
    comparison.same_tensors(loaded, known)


def test_an_old_class_is_loaded_as_diffusers_loads_it(tmp_path: Path) -> None:
    """The folders of PixArt on the hub name `Transformer2DModel`, which is diffusers' `PixArtTransformer2DModel`."""
    from diffusers import Transformer2DModel

    folder = tmp_path / "pixart"
    with silent():
        build("PixArtAlphaPipeline").save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "Transformer2DModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    place = folder / "transformer" / "config.json"
    config = json.loads(place.read_text())
    place.write_text(json.dumps({**config, "_class_name": "Transformer2DModel"}))
    with silent():
        known = Transformer2DModel.from_pretrained(folder / "transformer")
    for loaded in (
        sdquant.load_model(folder, progress=False).transformer,
        sdquant.load_model(folder / "transformer", progress=False),
    ):
        assert type(loaded) is type(known)
        comparison.same_tensors(loaded, known)


def test_the_index_has_the_last_word_on_a_class(tmp_path: Path) -> None:
    """Z-Image's text encoder is a `Qwen3Model`, and its config.json names the `Qwen3ForCausalLM` it came out of."""
    folder = tmp_path / "z-image"
    with silent():
        build("ZImagePipeline").save_pretrained(folder)
    place = folder / "text_encoder" / "config.json"
    config = json.loads(place.read_text())
    place.write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    known = comparison.reference(folder, "ZImagePipeline")
    loaded = sdquant.load_model(folder, progress=False)
    assert type(loaded.text_encoder) is type(known.text_encoder)
    comparison.same_tensors(loaded.text_encoder, known.text_encoder)
    plan = sdquant.plan(folder, "int8")
    assert {part.name: part.class_name for part in plan.components}["text_encoder"] == "Qwen3Model"


@pytest.mark.parametrize("row", [["stable_diffusion", "UNet"], ["os", "UNet2DConditionModel"], ["torch", "nn"]])
def test_a_class_of_no_library_is_refused(row: list[str], tmp_path: Path, sd: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(sd, tmp_path / "sd"))
    index = json.loads((folder / "model_index.json").read_text())
    index["unet"] = row
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedFileError):
        sdquant.load_model(folder, progress=False)


def test_lists_in_the_index_are_values_where_they_name_no_component(tmp_path: Path, sd: Path) -> None:
    """Krea 2 has its text encoder's layers there, a dozen numbers; two of them are none the less no component."""
    import shutil

    folder = Path(shutil.copytree(sd, tmp_path / "sd"))
    place = folder / "model_index.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "layers": [2, 5, 8], "patch_size": [2, 2]}))
    loaded, known = sdquant.load_model(folder, progress=False), sdquant.load_model(sd, progress=False)
    comparison.same_tensors(loaded.unet, known.unet)


def test_a_scheduler_that_is_not_there_is_refused_before_weights_are_read(
    tmp_path: Path, sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from sdquant.formats.checkpoint import Checkpoint

    folder = Path(shutil.copytree(sd, tmp_path / "sd"))
    shutil.rmtree(folder / "scheduler")
    monkeypatch.setattr(Checkpoint, "open", lambda self: pytest.fail("weights were read"))
    with pytest.raises(MissingComponentError, match="names a scheduler"):
        sdquant.load_model(folder, progress=False)
