"""Pieces that no other test tries as the reports tried them; `table` says which is whose."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sdquant
from sdquant.cli import main
from sdquant.errors import SdquantError
from sdquant.models.components import quiet
from sdquant.models.generate import draw
from sdquant.nn import QuantizedLayer, layer_checks, packed_tensor
from sdquant.nn.weights import quantized
from sdquant.planning.request import Request
from sdquant.training import config
from tests import encoders
from tests.pipelines import comparison
from tests.pipelines.pipeline_factory import build, silent

PACKAGE = Path(sdquant.__file__).parent


def _picture(pipe: Any) -> bytes:
    made: bytes = draw(pipe, ["a handwritten seven"], seeds=[7], steps=2)[0].tobytes()
    return made


def test_qwen_image_by_call_and_by_command(tmp_path: Path) -> None:
    """T01. The folder has names that only transformers' older classes have."""
    folder, out = tmp_path / "qwen-image", tmp_path / "out"
    with silent():
        build("QwenImagePipeline").save_pretrained(folder)
    known = comparison.reference(folder, "QwenImagePipeline")
    loaded = sdquant.load_model(folder, {"transformer": "nf4"}, progress=False)
    comparison.same_tensors(loaded.text_encoder, known.text_encoder)
    assert (
        comparison.quantize_known(loaded, known)
        == sum(len(part.weights) for part in loaded.sdquant.plan.components)
        > 0
    )
    words = [str(folder), "--quant", "transformer=nf4"]
    assert main(["plan", *words]) == main(["inspect", "--verify", str(folder)]) == 0
    assert main(["quantize", str(folder), str(out), *words[1:], "--no-progress"]) == 0
    again = sdquant.load_model(out, progress=False)
    comparison.same_tensors(again.text_encoder, loaded.text_encoder)
    comparison.same_tensors(again.transformer, loaded.transformer)


def test_quantos_modules_in_a_vision_language_encoder(tmp_path: Path) -> None:
    """T16. Its patches are of a Conv3d, which quanto has no module for."""
    name = "Qwen2_5_VLForConditionalGeneration"
    with quiet():
        encoders.model(name).save_pretrained(tmp_path)
    made = sdquant.plan(tmp_path, "qint8", runtime="library")
    model = sdquant.load_model(tmp_path, "qint8", runtime="library", progress=False)
    after = sdquant.quantize(sdquant.load_model(tmp_path, progress=False), "qint8", runtime="library", progress=False)
    planned = {weight.name for weight in made.components[0].weights}
    assert set(dict(quantized(model))) == set(dict(quantized(after))) == planned
    patches = [layer for layer in model.modules() if isinstance(layer, nn.Conv3d)]
    assert patches and not any(isinstance(layer, QuantizedLayer) for layer in patches)


def test_a_cast_of_a_pipeline_is_told(sd: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T08. All that is not packed takes more memory, in the pipeline that another one was made from, too."""
    from diffusers import StableDiffusionImg2ImgPipeline

    for change in (
        lambda pipe: pipe.to(torch.float32),
        lambda pipe: StableDiffusionImg2ImgPipeline.from_pipe(
            pipe, dtype=torch.float32, safety_checker=None, image_encoder=None, feature_extractor=None
        ),
    ):
        layer_checks.warn_of_cast.cache_clear()
        caplog.clear()
        pipe = sdquant.load_model(sd, "int8", dtype="float16", progress=False)
        change(pipe)
        assert pipe.unet.conv_in.bias.dtype == torch.float32
        (said,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "takes more memory" in text]
        assert "dtype='float32'" in said


def test_saved_while_projections_are_fused(sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T22. Joined projections are floats, which is said; the folder has the quantized ones."""
    packed_tensor._say_floats.cache_clear()
    pipe = sdquant.load_model(sd, "int8", progress=False)
    wanted = _picture(pipe)
    pipe.fuse_qkv_projections(vae=False)
    assert [record for record in caplog.records if "float weight" in record.getMessage()]
    pipe.save_pretrained(tmp_path / "saved")
    assert _picture(sdquant.load_model(tmp_path / "saved", progress=False)) == wanted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # diffusers' own
@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize(("mode", "budget"), [("model", None), ("balanced", "1400KB")])
def test_a_compiled_unet_with_offload(mode: str, budget: str | None, how: str, sd: Path) -> None:
    """T17. The slots of the blocks that take turns were traced with the model."""
    torch._dynamo.reset()
    pipe = sdquant.load_model(sd, "nf4", mode, budget=budget, progress=False)
    wanted = _picture(pipe)
    if how == "whole":
        pipe.unet = torch.compile(pipe.unet, backend="aot_eager")
    else:
        pipe.unet.compile_repeated_blocks(backend="aot_eager")
    assert _picture(pipe) == wanted and _picture(pipe) == wanted


@pytest.mark.parametrize(
    ("quant", "runtime"),
    [
        ("int8", "plain"),
        ("nf4", "library"),
        ("nf4,double_quant", "library"),
        ("bnb-int8", "library"),
        ("qint8", "library"),
    ],
)
def test_a_pipeline_on_the_meta_device(quant: str, runtime: str, sd: Path, tmp_path: Path) -> None:
    """S. It has no values from then on, and whoever wants them is told."""
    pipe = sdquant.load_model(sd, quant, runtime=runtime, progress=False)
    pipe.to("meta")
    assert all(tensor.is_meta for part in (pipe.unet, pipe.text_encoder) for tensor in part.parameters())
    for call in (
        lambda: sdquant.save(pipe, tmp_path / "saved"),
        lambda: sdquant.quantize(pipe, "int8", progress=False),
    ):
        with pytest.raises(SdquantError, match=r"meta device|quantized"):
            call()
    floats = sdquant.load_model(sd, progress=False).to("meta")
    with pytest.raises(SdquantError, match="meta device"):
        sdquant.quantize(floats, quant, runtime=runtime, progress=False)


def _advised() -> dict[str, set[str]]:
    """The names that stand before a "=" in what the package's errors advise, by place."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and len(node.args) == 3 and ast.unparse(node.func).endswith("Error"):
                texts = [one.value for one in ast.walk(node.args[2]) if isinstance(one, ast.Constant)]
                names = set(re.findall(r"\b([a-z_]+)=", " ".join(text for text in texts if isinstance(text, str))))
                if names:
                    found[f"{path.relative_to(PACKAGE)}:{node.lineno}"] = names
    return found


def test_advice_names_arguments_that_exist() -> None:
    """S. One told of `config=`, which load_model has not; errors say that `dequantize` has it."""
    calls = (sdquant.quantize, sdquant.save, sdquant.dequantize, sdquant.Config, config.load)
    rows = config.keys()
    known = {row.name for row in (*fields(Request), *rows)}
    known |= {name for call in calls for name in inspect.signature(call).parameters}
    known |= {"tile_size", "unet", "text_encoder", "component", "key", "inputs"}  # a rule's, examples', the bench's
    known |= {"weights_only"}  # torch.load's
    known |= {option for row in sdquant.backends.schemes() for option in row.options}
    advised = _advised()
    assert len(advised) > 40
    assert {place: names - known for place, names in advised.items() if names - known} == {}
