"""Folders that are broken or foreign: detect, verify, plan, load_model and commands give one and the same answer."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant.cli import main
from sdquant.errors import BadFileError, MissingComponentError, SdquantError, UnsupportedFileError
from sdquant.formats import safetensors
from sdquant.models import bounds

from .entry_points import answers, copied, one_answer

Change = Callable[[Path], None]


def _edit(file: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _index(**rows: Any) -> Change:
    return _edit("model_index.json", **rows)


def _write(file: str, text: str) -> Change:
    return lambda folder: (folder / file).write_text(text) and None


def _remove(file: str) -> Change:
    return lambda folder: (folder / file).unlink()


def _tensors(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file)

    return rewrite


UNET = "unet/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/config.json"
# What is done to the pipeline of digits-sd: the error, and what it names.
CASES: dict[str, tuple[Change, type[SdquantError], tuple[str, ...]]] = {
    "unknown class of transformers": (
        _index(tokenizer=["transformers", "NoSuchTokenizer"]), UnsupportedFileError, ("tokenizer", "NoSuchTokenizer")
    ),
    "unknown class of diffusers": (
        _index(scheduler=["diffusers", "NoSuchScheduler"]), UnsupportedFileError, ("scheduler", "NoSuchScheduler")
    ),
    "wrong library": (_index(text_encoder=["diffusers", "CLIPTextModel"]), UnsupportedFileError, ("CLIPTextModel",)),
    "unknown library": (_index(text_encoder=["os", "system"]), UnsupportedFileError, ("'os'", "system")),
    "unknown pipeline": (_index(_class_name="NoSuchPipeline"), UnsupportedFileError, ("NoSuchPipeline",)),
    "pipeline of a model's class": (_index(_class_name="UNet2DModel"), UnsupportedFileError, ("UNet2DModel",)),
    "list for a pipeline": (_index(_class_name=["StableDiffusionPipeline"]), UnsupportedFileError, ("_index",)),
    "row of three": (_index(unet=["diffusers", "UNet2DConditionModel", 1]), UnsupportedFileError, ("unet",)),
    "number for a class": (_index(unet=["diffusers", 7]), UnsupportedFileError, ("unet", "7")),
    "component that is nowhere": (
        _index(image_encoder=["transformers", "CLIPVisionModel"]), MissingComponentError, ("image_encoder",)
    ),
    "component outside": (_index(**{"../unet": ["diffusers", "UNet2DConditionModel"]}), BadFileError, ("../unet",)),
    "component of another class": (
        _edit("unet/config.json", _class_name="FluxTransformer2DModel"), BadFileError,
        ("unet", "FluxTransformer2DModel", "UNet2DConditionModel"),
    ),
    "no config": (_remove("unet/config.json"), MissingComponentError, ("unet", "config.json")),
    "config that is a list": (_write("unet/config.json", "[]"), BadFileError, ("config.json",)),
    "endless layers": (_edit(TEXT, num_hidden_layers=10**9), BadFileError, ("num_hidden_layers",)),
    "endless layers in a table": (_edit(TEXT, text_config={"num_layers": 10**9}), BadFileError, ("num_layers",)),
    "fewer layers than none": (_edit(TEXT, num_hidden_layers=-1), BadFileError, ("num_hidden_layers = -1",)),
    "endless positions": (_edit(TEXT, max_position_embeddings=10**9), BadFileError, ("max_position_embeddings",)),
    "a vocabulary of terabytes": (_edit(TEXT, vocab_size=10**12), BadFileError, ("vocab_size", "GiB")),
    "a number of 70 bits": (_edit(TEXT, vocab_size=2**70), BadFileError, ("vocab_size",)),
    "a width of terabytes": (_edit(TEXT, hidden_size=1 << 20), BadFileError, ("hidden_size", "GiB")),
    "channels without end": (
        _edit("unet/config.json", block_out_channels=[1 << 40, 1 << 40]), BadFileError, ("block_out_channels", "GiB")
    ),
    "endless steps": (
        _edit("scheduler/scheduler_config.json", num_train_timesteps=10**12), BadFileError, ("num_train_timesteps",)
    ),
    "no config of the scheduler": (
        _remove("scheduler/scheduler_config.json"), MissingComponentError, ("scheduler_config.json",)
    ),
    "weights of no tensors": (
        lambda folder: save_file({}, folder / UNET), BadFileError, ("unet", "no tensors")
    ),
    "weights that end": (
        lambda folder: (folder / UNET).write_bytes((folder / UNET).read_bytes()[:-10]), BadFileError, ("bytes short",)
    ),
    "a text for a number of steps": (
        _edit("scheduler/scheduler_config.json", num_train_timesteps="many"), BadFileError, ("scheduler_config.json",)
    ),
    "a component that the class needs": (
        lambda folder: (folder / "model_index.json").write_text(
            json.dumps({k: v for k, v in json.loads((folder / "model_index.json").read_text()).items() if k != "vae"})
        ),
        MissingComponentError, ("vae", "StableDiffusionPipeline"),
    ),
    "a tensor that is missing": (
        _tensors(UNET, lambda t: t.pop("conv_in.weight")), BadFileError, ("unet", "conv_in.weight", "1 of the")
    ),
    "a tensor of another shape": (
        _tensors(UNET, lambda t: t.update({"conv_in.bias": torch.zeros(7)})), BadFileError, ("conv_in.bias", "[7]")
    ),
    "tensors of another model": (
        _tensors(UNET, lambda t: [t.update({f"other.{key}": t.pop(key)}) for key in list(t)]), BadFileError, ("unet",)
    ),
    "a web page for weights": (_write(UNET, "<html>" + "x" * 99), BadFileError, ("web page",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def sd() -> Path:
    return Path(sdquant.demo.path("digits-sd"))


@pytest.mark.parametrize("name", CASES)
def test_one_answer(name: str, sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a weight is read: some were found when all had been loaded."""

    def get(self: Any, key: str) -> Any:
        raise AssertionError(f"{key} was read")

    change, kind, words = CASES[name]
    folder = copied(sd, tmp_path / "pipe")
    change(folder)
    monkeypatch.setattr(safetensors.SafetensorsFile, "get", get)
    said = answers(folder)
    assert {type(error) for error in said.values()} == {kind}, said
    assert len({str(error) for error in said.values()}) == 1, said
    text = str(said["load_model"])
    assert str(folder) in text and all(word in text for word in words), text
    assert "\n" not in text and "from their source again" not in text


def test_the_pipeline_itself(sd: Path, tmp_path: Path) -> None:
    """The control."""
    assert set(answers(copied(sd, tmp_path / "pipe")).values()) == {None}


def test_on_the_command_line(sd: Path, tmp_path: Path, capsys: Any) -> None:
    folder = copied(sd, tmp_path / "pipe")
    CASES["unknown class of transformers"][0](folder)
    for words in (["inspect"], ["inspect", "--verify"], ["plan"]):
        assert main([*words, str(folder)]) == 2
        assert "NoSuchTokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, 7, "NoSuchModel"], ids=str)
def test_a_config_without_a_class_is_of_that_which_the_index_names(value: Any, sd: Path, tmp_path: Path) -> None:
    """As diffusers loads it. It was planned, and refused in the end."""
    folder = copied(sd, tmp_path / "pipe")
    _edit("unet/config.json", _class_name=value)(folder)
    assert set(answers(folder).values()) == {None}


def test_a_lone_component_of_a_class_that_nobody_has(sd: Path, tmp_path: Path) -> None:
    folder = copied(sd / "unet", tmp_path / "unet")
    _edit("config.json", _class_name="NoSuchModel")(folder)
    one_answer(folder, UnsupportedFileError, "NoSuchModel")


def test_a_class_that_transformers_had_once(sd: Path, tmp_path: Path) -> None:
    """diffusers knows its heir."""
    folder = copied(sd, tmp_path / "pipe")
    _index(feature_extractor=["transformers", "CLIPFeatureExtractor"])(folder)
    (folder / "feature_extractor").mkdir()
    (folder / "feature_extractor" / "preprocessor_config.json").write_text("{}")
    assert set(answers(folder).values()) == {None}


def test_a_lone_file_without_a_config(sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its weights can be planned; the plan says what loading will want, once, and in the same words."""
    file = Path(shutil.copy(sd / UNET, tmp_path / "unet.safetensors"))
    (warning,) = sdquant.plan(file, "int8").warnings
    with pytest.raises(MissingComponentError) as caught:
        sdquant.load_model(file, "int8", progress=False)
    assert caught.value.why in warning and caught.value.fix in warning and "base=" in warning
    assert not caplog.messages


class TestBounds:
    def test_a_table_is_not_made(self) -> None:
        """The mask of GPT-2 is of the square of its positions."""
        from transformers import GPTNeoConfig, GPTNeoModel

        values = {"max_position_embeddings": 200_000, "num_layers": 1, "attention_types": [[["global"], 1]]}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(BadFileError, match=r"max_position_embeddings = 200000.*GiB"):
            bounds.refuse_oversized("GPTNeoModel", values, lambda: GPTNeoModel(GPTNeoConfig(**values)))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB: of 37 GiB

    def test_the_largest_that_there_is_is_made(self) -> None:
        from diffusers import SD3Transformer2DModel

        values = {"pos_embed_max_size": 192, "num_layers": 1, "attention_head_dim": 64, "num_attention_heads": 38}
        bounds.refuse_oversized("SD3Transformer2DModel", values, lambda: SD3Transformer2DModel(**values))

    def test_many_tables(self) -> None:
        with pytest.raises(BadFileError, match="layers_of"):
            bounds.refuse_oversized("X", {"layers_of": 40}, lambda: [torch.zeros(1 << 28) for _ in range(40)])

    def test_what_cannot_be_made_on_meta_is_made_for_real(self) -> None:
        bounds.refuse_oversized("X", {}, lambda: torch.arange(3)[1].item())
