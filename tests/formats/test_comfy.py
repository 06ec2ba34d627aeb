"""What ComfyUI's files say of their layers' formats: read, held against the tensors, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import TensorCoreMXFP8Layout, TensorWiseINT8Layout
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant import backends
from sdquant.core.packed_reader import read_weight
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.formats.checkpoint import single_file

PREFIX = "model.diffusion_model."


def _weight(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16()


def _line(row: Any) -> Tensor:
    return torch.tensor(list(json.dumps(row).encode()), dtype=torch.uint8)


def _file(folder: Path, layers: Any = None, **tensors: Tensor) -> Path:
    """A file with one layer in MXFP8 and a metadata of `layers`."""
    codes, params = TensorCoreMXFP8Layout.quantize(_weight((64, 64)))
    both = {f"{PREFIX}proj.weight": codes, f"{PREFIX}proj.weight_scale": params.scale}
    metadata = {"_quantization_metadata": layers if isinstance(layers, str) else json.dumps({"layers": layers})}
    save_file(both | tensors, folder / "model.safetensors", metadata if layers is not None else None)
    return folder / "model.safetensors"


@pytest.mark.parametrize("layer", ["proj", f"{PREFIX}proj"])
@pytest.mark.parametrize("row", [{"format": "mxfp8"}, "mxfp8"])
def test_the_metadata(layer: str, row: Any, tmp_path: Path) -> None:
    seen = sdquant.verify(_file(tmp_path, {layer: row}))
    assert seen.quant == "mxfp8" and seen.warnings == []


def test_a_line_beside_the_weight(tmp_path: Path) -> None:
    path = _file(tmp_path, **{f"{PREFIX}proj.comfy_quant": _line({"format": "mxfp8"})})
    assert sdquant.verify(path).quant == "mxfp8"


@pytest.mark.parametrize(
    ("layers", "word"),
    [
        ("{", "not a table"), ("[]", "not a table"), ('{"layers": 3}', "not a table"), ("[" * 9000, "not a table"),
        ({"proj": {}}, "not a table"), ({"proj": 3}, "not a table"), ({"proj": {"format": 3}}, "not a text"),
        ({"other": {"format": "mxfp8"}}, "no weight"), ({"proj": {"format": "float8_e5m2"}}, "float8_e4m3fn"),
        ({"proj": {"format": "int8_tensorwise"}}, "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_a_metadata_that_makes_no_sense(layers: Any, word: str, tmp_path: Path) -> None:
    path = _file(tmp_path, layers)
    with pytest.raises(BadFileError, match=word) as caught:
        sdquant.detect(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "line", "word"),
    [
        ("proj", _line("int8_tensorwise"), "mxfp8"), ("proj", _line([]), "no format"), ("proj", _line({}), "no format"),
        ("proj", torch.tensor([123], dtype=torch.uint8), "no format"), ("proj", _line("x" * 5000), "one line"),
        ("other", _line("mxfp8"), "not in the file"),
    ],
)  # fmt: skip
def test_a_line_that_makes_no_sense(key: str, line: Tensor, word: str, tmp_path: Path) -> None:
    path = _file(tmp_path, {"proj": "mxfp8"}, **{f"{PREFIX}{key}.comfy_quant": line})
    with pytest.raises(BadFileError, match=word) as caught:
        sdquant.detect(path)
    assert str(path) in str(caught.value) and f"{PREFIX}{key}.comfy_quant" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"format": "nvfp5"}, "nvfp5"),
        ({"format": "int4_blockwise", "group_size": 128}, "int4_blockwise"),
    ],
)
@pytest.mark.parametrize("where", ["metadata", "line"])
def test_formats_that_are_not_read(row: Any, word: str, where: str, tmp_path: Path) -> None:
    beside = {f"{PREFIX}proj.comfy_quant": _line(row)} if where == "line" else {}
    path = _file(tmp_path, {"proj": row} if where == "metadata" else None, **beside)
    with pytest.raises(UnsupportedFileError, match=rf"{word} \(1 layers\)") as caught:
        sdquant.detect(path)
    assert str(path) in caught.value.what and "GGUF" in caught.value.fix and f"{PREFIX}proj" in caught.value.why


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape", [(48, 80), (1, 16)])
def test_int8_is_that_of_comfy_kitchen(shape: tuple[int, int], per_channel: bool, tmp_path: Path) -> None:
    codes, params = TensorWiseINT8Layout.quantize(_weight(shape), per_channel=per_channel)
    file = {"proj.weight": codes, "proj.weight_scale": params.scale, "proj.comfy_quant": _line("int8_tensorwise")}
    save_file(file, tmp_path / "model.safetensors")
    (found,) = single_file(tmp_path / "model.safetensors").prequantized.values()
    packed = read_weight(found, None, shape, file.__getitem__)
    assert found.scheme == ("int8_row" if per_channel else "int8_tensor")
    theirs = TensorWiseINT8Layout.dequantize(codes, params)
    assert torch.equal(backends.get("comfy").decode(packed, torch.bfloat16), theirs)


@pytest.mark.parametrize(
    ("scale", "word"),
    [(torch.ones(3, 1), "4 rows"), (torch.ones(4, 2), "4 rows"), (None, r"it has no 'proj\.weight_scale'")],
)
def test_int8_whose_scale_does_not_fit(scale: Tensor | None, word: str, tmp_path: Path) -> None:
    file = {"proj.weight": torch.ones(4, 8, dtype=torch.int8), "proj.comfy_quant": _line("int8_tensorwise")}
    save_file(file | ({} if scale is None else {"proj.weight_scale": scale}), tmp_path / "model.safetensors")
    with pytest.raises(BadFileError, match=word):
        sdquant.verify(tmp_path / "model.safetensors")


def test_int8_runs_in_plain_layers_and_so_in_every_offload_mode(foreign: Callable[[str], Path], flux: Path) -> None:
    values: dict[str, Any] = {"base": flux, "offload": "sequential", "progress": False}
    pipe = sdquant.load_model(foreign("comfy int8"), **values)
    assert {type(module).__module__ for module in pipe.transformer.modules() if "Quantized" in type(module).__name__}
    assert not any(type(module).__module__.startswith("optimum") for module in pipe.transformer.modules())
    (part,) = (part for part in pipe.sdquant.plan.components if part.action == "found")
    assert part.runtime == "plain" and pipe.sdquant.plan.warnings == ()


_PLAIN = {"quant_method": "comfyui", "format": "int8_tensorwise"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_PLAIN, ()),
        ({**_PLAIN, "convrot": True, "convrot_groupsize": 16}, ("rotated in groups of 16", "not rotated of 1 weights")),
        ({"quant_method": "comfyui", "format": "float8_e4m3fn"}, ("says float8_e4m3fn", "says int8_tensorwise")),
        ({"quant_method": "gptq"}, ("GPTQ", "int8_tensor")),
    ],
    ids=["the same", "another rotation", "another format", "another method"],
)
def test_a_config_that_says_another_thing_than_the_file(
    config: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    """The file is right, and a warning names both; what no marker describes is as the config says."""
    marked = {**_int8("marked"), "marked.comfy_quant": _line({"format": "int8_tensorwise"})}
    save_file(marked, tmp_path / "x.safetensors")
    src = single_file(tmp_path / "x.safetensors", given=config)
    assert "rotation" not in src.prequantized["marked.weight"].details
    assert len(src.warnings) == bool(words) and all(word in src.warnings[0] for word in words), src.warnings
    assert sdquant.detect(tmp_path / "x.safetensors", config=config).warnings == list(src.warnings)


def test_a_config_for_what_has_no_marker_is_no_contradiction(tmp_path: Path) -> None:
    fp8 = {"other.weight": torch.ones(32, 32).to(torch.float8_e4m3fn), "other.weight_scale": torch.ones(())}
    save_file(
        {**_int8("bare"), **fp8, "other.comfy_quant": _line({"format": "float8_e4m3fn"})}, tmp_path / "x.safetensors"
    )
    src = single_file(tmp_path / "x.safetensors", given=_PLAIN)
    assert {row.scheme for row in src.prequantized.values()} == {"int8_tensor", "fp8"} and src.warnings == ()


def test_a_config_of_modelopt_for_a_file_of_comfyui(tmp_path: Path) -> None:
    golden = load_file(Path(__file__).parents[1] / "backends" / "golden" / "comfy_nvfp4_padded.safetensors")
    layer = {key: tensor for key, tensor in golden.items() if key.startswith("layer.")}
    save_file(layer, tmp_path / "x.safetensors")
    src = single_file(tmp_path / "x.safetensors", given={"quant_method": "modelopt"})
    (warning,) = src.warnings
    assert "ModelOpt" in warning and "comfy_quant tensors of 1 weights" in warning and "'layer.weight'" in warning


def _int8(layer: str) -> dict[str, Tensor]:
    return {f"{layer}.weight": torch.ones(32, 32, dtype=torch.int8), f"{layer}.weight_scale": torch.ones(())}


def _line(row: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8)
