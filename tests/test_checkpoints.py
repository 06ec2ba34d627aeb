"""Whole checkpoints of Stable Diffusion XL and 3 in Stability's one-file layouts: each tensor arrives in its component,
float or quantized, with a base that has only configs or that has weights too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import backends
from sdquant.errors import MissingComponentError
from sdquant.models.generate import draw
from sdquant.models.pipelines import main_part, weight_bytes, weight_parts
from sdquant.nn.weights import plain, quantized

from . import layouts
from .conftest import shell
from .test_load_modes import same_bits

WRITE = {"sdxl": layouts.sdxl_checkpoint, "sd3": layouts.sd3_checkpoint, "sd3-no-t5": layouts.sd3_checkpoint}
MAIN = {"sdxl": "unet", "sd3": "transformer", "sd3-no-t5": "transformer"}


def one_step(pipe: Any) -> Any:
    return np.asarray(draw(pipe, ["a seven"], seeds=[0], steps=1)[0])


@pytest.fixture(scope="module")
def one_file(small: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """one_file(name): that small pipeline as one checkpoint. Do not change it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("checkpoint") / f"{name}.safetensors"
            save_file(WRITE[name](small(name)), made[name])
        return made[name]

    return get


@pytest.fixture(params=["configs", "weights"])
def base(request: pytest.FixtureRequest, small: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """base(name): the pipeline's folder without any weights, or with weights that are not those of the checkpoint."""

    def get(name: str) -> Path:
        folder = shell(small(name), tmp_path / "base")
        if request.param == "weights":
            for file in small(name).rglob("*.safetensors"):
                wrong = {key: torch.zeros_like(tensor) for key, tensor in load_file(file).items()}
                save_file(wrong, folder / file.relative_to(small(name)))
        return folder

    return get


def arrived_as_written(pipe: Any, folder: Path) -> None:
    """Every tensor in the folder is in the pipeline, and the pipeline has no other."""
    for name, part in weight_parts(pipe).items():
        got = {key.removeprefix("text_model."): tensor for key, tensor in plain(part).items()}
        written = {key.removeprefix("text_model."): t for key, t in layouts.weights(folder / name).items()}
        assert got.keys() == written.keys()
        assert all(torch.equal(got[key], tensor) for key, tensor in written.items()), name


@pytest.mark.parametrize("name", WRITE)
def test_every_tensor_arrives(name: str, small: Any, one_file: Any, base: Any, caplog: Any) -> None:
    seen = sdquant.detect(one_file(name))
    assert (seen.family, seen.component, seen.prequantized) == (name[:4].rstrip("-"), "checkpoint", False)
    pipe = sdquant.load_model(one_file(name), base=base(name), progress=False)
    arrived_as_written(pipe, small(name))
    assert not [record for record in caplog.records if record.name.startswith("sdquant")]
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes
    assert np.array_equal(one_step(pipe), one_step(sdquant.load_model(small(name), progress=False)))


@pytest.mark.parametrize(
    ("name", "scheme", "mode"),
    [("sdxl", "nf4", "pre"), ("sdxl", "int8", "post"), ("sd3", "int8", "pre"), ("sd3", "nf4", "post")],
)
def test_quantizes_as_the_folder_does(
    name: str, scheme: str, mode: str, small: Any, one_file: Any, tmp_path: Path
) -> None:
    base = shell(small(name), tmp_path / "base")
    pipe = sdquant.load_model(one_file(name), scheme, base=base, mode=mode, progress=False)
    whole = sdquant.load_model(small(name), scheme, progress=False)
    assert [part for part, module in weight_parts(pipe).items() if not dict(quantized(module))] == ["vae"]
    same_bits(pipe, whole)
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes
    assert np.array_equal(one_step(pipe), one_step(whole))


@pytest.mark.parametrize(("scheme", "ranks"), [("nf4", (2,)), ("fp8,packing=float8", (2, 4))])
@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_quantized_on_disk(
    name: str, scheme: str, ranks: tuple[int, ...], small: Any, one_file: Any, tmp_path: Path
) -> None:
    """As Forge's and ComfyUI's users have them: the UNet or transformer quantized, the rest of the checkpoint not."""
    spec = backends.parse(scheme)
    backend = backends.get(spec.scheme.backend)
    state = {}
    for key, tensor in load_file(one_file(name)).items():
        packs = key.startswith("model.diffusion_model.") and key.endswith(".weight") and tensor.ndim in ranks
        state |= backend.write(key, backend.encode(tensor, spec)) if packs else {key: tensor}
    file = tmp_path / f"model-{spec.scheme.name}.safetensors"
    save_file(state, file)
    assert sdquant.detect(file).quant == spec.scheme.name
    pipe = sdquant.load_model(file, base=shell(small(name), tmp_path / "base"), progress=False)
    whole = sdquant.load_model(small(name), scheme, components=[MAIN[name]], progress=False)
    mine, others = dict(quantized(main_part(pipe))), dict(quantized(main_part(whole)))
    assert mine and mine.keys() == others.keys()
    for key, packed in mine.items():
        assert packed.parts.keys() == others[key].parts.keys()
        for part, tensor in packed.parts.items():
            assert torch.equal(tensor.view(torch.uint8), others[key].parts[part].view(torch.uint8)), (key, part)
    for part, module in weight_parts(whole).items():
        others = plain(weight_parts(pipe)[part])
        assert all(torch.equal(others[key], tensor) for key, tensor in plain(module).items()), part
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes
    assert np.array_equal(one_step(pipe), one_step(whole))


PLACES = {
    ("sdxl", "text_encoder"): "conditioner.embedders.0.",
    ("sdxl", "text_encoder_2"): "conditioner.embedders.1.",
    ("sdxl", "vae"): "first_stage_model.",
    ("sd3", "text_encoder"): "text_encoders.clip_l.",
    ("sd3", "text_encoder_2"): "text_encoders.clip_g.",
    ("sd3", "text_encoder_3"): "text_encoders.t5xxl.",
    ("sd3", "vae"): "first_stage_model.",
}


@pytest.mark.parametrize(("name", "part"), PLACES)
def test_what_is_not_in_the_file_is_named_with_its_place(
    name: str, part: str, small: Any, one_file: Any, tmp_path: Path
) -> None:
    prefix, whole = PLACES[name, part], load_file(one_file(name))
    file, base = tmp_path / "model.safetensors", shell(small(name), tmp_path / "base")
    save_file({key: tensor for key, tensor in whole.items() if not key.startswith(prefix)}, file)
    with pytest.raises(MissingComponentError) as error:
        sdquant.plan(file, base=base)
    assert error.value.why == f"neither of them has weights for {part}"
    assert str(base / part) in error.value.fix
    # With them put there it is whole.
    (weights,) = (small(name) / part).glob("*.safetensors")
    (base / part / weights.name).write_bytes(weights.read_bytes())
    arrived_as_written(sdquant.load_model(file, base=base, progress=False), small(name))


@pytest.mark.parametrize(("name", "part"), [("sdxl", "vae"), ("sdxl", "text_encoder_2"), ("sd3", "text_encoder_3")])
def test_parts_in_other_dtypes_compute_together(
    name: str, part: str, small: Any, one_file: Any, tmp_path: Path
) -> None:
    wide = PLACES[name, part]
    state = {key: t.float() if key.startswith(wide) else t for key, t in load_file(one_file(name)).items()}
    save_file(state, tmp_path / "model.safetensors")
    base = shell(small(name), tmp_path / "base")
    pipe = sdquant.load_model(tmp_path / "model.safetensors", base=base, progress=False)
    arrived_as_written(pipe, small(name))  # in bfloat16, which most of the file is
    assert np.array_equal(one_step(pipe), one_step(sdquant.load_model(small(name), progress=False)))


def test_a_projection_that_is_not_there_changes_nothing(small: Any, one_file: Any, tmp_path: Path) -> None:
    """Stability's own files of version 3 have none for CLIP-L, and mean the identity."""
    name = "text_encoders.clip_l.transformer.text_projection.weight"
    state = load_file(one_file("sd3-no-t5"))
    width, _ = state.pop(name).shape
    save_file(state, tmp_path / "model.safetensors")
    base = shell(small("sd3-no-t5"), tmp_path / "base")
    pipe = sdquant.load_model(tmp_path / "model.safetensors", base=base, progress=False)
    assert torch.equal(pipe.text_encoder.text_projection.weight, torch.eye(width, dtype=torch.bfloat16))
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes


def test_the_refiner_of_xl_has_its_only_text_encoder_elsewhere(small: Any, tmp_path: Path) -> None:
    from sdquant.formats import checkpoint
    from sdquant.models.single_file import convert

    folder = small("sdxl") / "text_encoder_2"
    state = layouts.openclip(layouts.weights(folder))
    save_file(layouts.prefixed(state, "conditioner.embedders.0.model."), tmp_path / "refiner.safetensors")
    made = convert.convert(
        checkpoint.single_file(tmp_path / "refiner.safetensors"), "text_encoder_2", checkpoint.without_weights(folder)
    )
    assert made is not None
    files, written = made.open(), layouts.clip(layouts.weights(folder))
    assert {key for key in made.plain} == {key for key in written}
    assert all(torch.equal(made.read(files, key), tensor) for key, tensor in written.items())
