"""Components that NVIDIA ModelOpt wrote here, whole, by its export and by what diffusers' quantizer saves.

It runs in a process of its own (`modelopt_writer`), where SDQUANT_TEST_LIBRARIES has nvidia-modelopt, omegaconf,
antlr4-python3-runtime and pulp: too much for every run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import demo
from sdquant.errors import ConflictError, UnsupportedFileError
from sdquant.nn import quantized

from . import libraries
from .test_load_modes import images

pytestmark = [libraries.needs("modelopt"), pytest.mark.slow]
# The scheme that it is here, by the way in which it was written.
TRANSFORMER = {
    "export FP8_DEFAULT": "fp8", "export FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "export FP8_2D_BLOCKWISE_WEIGHT_ONLY": "fp8", "export NVFP4_DEFAULT": "comfy:nvfp4",
    "export NVFP4_AWQ_LITE": "comfy:nvfp4", "export W4A16_NVFP4": "comfy:nvfp4", "export INT8_DEFAULT": "int8_row",
    "export INT8_SMOOTHQUANT": "hub-int8", "export MXFP8_DEFAULT": "mxfp8", "export MXFP4_DEFAULT": "mxfp4",
    "compress FP8_DEFAULT": "fp8", "compress INT8_DEFAULT": "int8_row", "compress INT4_AWQ": "hub-int4",
    "compress NVFP4_DEFAULT": "comfy:nvfp4", "compress MXFP8_DEFAULT": "mxfp8", "compress MXFP4_DEFAULT": "mxfp4",
    "compress FP8_2D_BLOCKWISE_WEIGHT_ONLY": "fp8",
    "export NVFP4_SVDQUANT_DEFAULT": "svdquant_nvfp4", "compress NVFP4_SVDQUANT_DEFAULT": "svdquant_nvfp4",
}  # fmt: skip
ENCODER = {
    "export FP8_DEFAULT": "fp8", "export NVFP4_DEFAULT": "comfy:nvfp4", "export INT8_SMOOTHQUANT": "hub-int8",
    "export INT4_BLOCKWISE_WEIGHT_ONLY": "hub-int4",
}  # fmt: skip
REFUSED = {
    "export NVFP4_SVDQUANT_DEFAULT late": "was left unquantized", "export NVFP4_AWQ_LITE late": "was left unquantized",
    "export W4A8_NVFP4_FP8": "a scale for 32", "compress W4A8_NVFP4_FP8": "scales of 32",
}  # fmt: skip
Get = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """The folder that ModelOpt wrote; beside it a file of the weights that it makes of it."""
    places: dict[str, Path] = {}

    def get(part: str, way: str) -> Path:
        if part not in places:
            places[part] = tmp_path_factory.mktemp("written")
            ways = [*TRANSFORMER, *REFUSED] if part == "transformer" else list(ENCODER)
            source = demo.path("digits-flux") / part
            done = libraries.run_script("modelopt_writer.py", str(source), str(places[part]), *ways)
            assert not any(done.values()), done
        return places[part] / way.replace(" ", "-")

    return get


CASES = [("transformer", way, scheme) for way, scheme in TRANSFORMER.items()]
CASES += [("text_encoder_2", way, scheme) for way, scheme in ENCODER.items()]


@pytest.mark.parametrize(("part", "way", "scheme"), CASES)
def test_weights(part: str, way: str, scheme: str, written: Get) -> None:
    """Bit for bit those of ModelOpt, which computes what it compressed in bfloat16."""
    folder = written(part, way)
    seen = sdquant.detect(folder)
    assert seen.quant == scheme and sdquant.verify(folder).quant == scheme
    mine = dict(sdquant.dequantize(folder))
    for name, want in load_file(f"{folder}.safetensors").items():
        if way.startswith("export") and "SVD" not in way:  # whose factors have 16 bits here
            assert torch.equal(mine[name], want), name
        else:
            assert (mine[name] - want).norm() <= 3e-3 * want.norm(), name


@pytest.mark.parametrize(("part", "way", "scheme"), CASES)
def test_it_draws_what_its_weights_draw(part: str, way: str, scheme: str, written: Get, tmp_path: Path) -> None:
    folder = written(part, way)
    floats = Path(shutil.copytree(demo.path("digits-flux") / part, tmp_path / part))
    (file,) = floats.glob("*.safetensors")
    wanted = load_file(f"{folder}.safetensors") if way.startswith("export") else {}
    mine = {name: tensor.float() for name, tensor in sdquant.dequantize(folder)}
    save_file(mine | {name: tensor.float() for name, tensor in wanted.items()}, file, metadata={"format": "pt"})
    drawn = []
    for place in (folder, floats):
        pipe = sdquant.load_model(demo.path("digits-flux"), parts={part: place}, dtype="float32", progress=False)
        kinds = {one.spec.scheme.name for _, one in quantized(getattr(pipe, part))}
        assert kinds == ({scheme} if place is folder else set())
        drawn.append(images(pipe, 1).astype(int))
    assert np.abs(drawn[0] - drawn[1]).max() <= 1


@pytest.mark.parametrize("way", REFUSED)
def test_what_is_not_read_is_refused_alike(way: str, written: Get) -> None:
    folder = written("transformer", way)
    for ask in (sdquant.detect, sdquant.verify, sdquant.plan, sdquant.load_model, sdquant.dequantize):
        with pytest.raises(UnsupportedFileError, match=REFUSED[way]):
            ask(folder)  # type: ignore[operator]


@pytest.mark.parametrize("portable", [True, "nunchaku_lite"])
def test_svdquant_without_factors_of_16_bits_is_no_nunchaku_lite(
    portable: bool | str, written: Get, tmp_path: Path
) -> None:
    """The factor of its scales is any float32. The folder would have floats alone, and said nothing of it."""
    model = sdquant.load_model(written("transformer", "export NVFP4_SVDQUANT_DEFAULT"), progress=False)
    with pytest.raises(ConflictError, match="factors that fit its dtypes"):
        sdquant.save(model, tmp_path / "saved", portable=portable)
    assert not (tmp_path / "saved").exists()
