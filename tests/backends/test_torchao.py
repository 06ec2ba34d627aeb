"""torchao's folders and files, as diffusers and transformers save them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sdquant
from sdquant.core import packed_rows
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.nn import quantized, quantized_layer

from .. import libraries
from ..test_load_modes import images
from .comfy_layers import GOLDEN, read
from .torchao_layers import KINDS, WEIGHTS, digits, dtype, flattened

SCHEMES = {
    "int8wo": "int8_row", "int8wo_tensor": "int8_tensor", "int8dq": "int8_row", "fp8dq_row": "fp8",
    "fp8dq_tensor": "fp8", "intx_int4": "hub-int4", "mxfp8": "mxfp8", "mxfp4": "mxfp4",
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_golden(name: str) -> None:
    """torchao's own dequantized weight, which is rounded to bfloat16, and the output of its weight-only layers."""
    path = GOLDEN / f"torchao_{name}.safetensors"
    packed, file = read(path), load_file(path)
    codec = packed.spec.scheme.codec
    assert packed.spec.scheme.name == SCHEMES[name] and packed.spec.dtype == "bfloat16"
    assert torch.equal(codec.decode(packed, torch.bfloat16).float(), file["golden.weight"].float())
    assert torch.equal(
        codec.decode(packed_rows.cut(packed, [(5, 9)]), torch.bfloat16), codec.decode(packed, torch.bfloat16)[5:9]
    )
    if name in ("int8wo", "int8wo_tensor", "intx_int4"):
        floats = nn.Linear(128, 32, dtype=torch.bfloat16)
        floats.bias.data = file["layer.bias"]
        with torch.no_grad():
            out = quantized_layer(floats, packed)(file["golden.input"])
        assert (out - file["golden.output"]).norm() <= 6e-3 * out.norm()  # both rounded to bfloat16


@pytest.mark.parametrize("zeros", ["whole", "outside", "broken", "none"])
@pytest.mark.parametrize("kind", ["intx", "int4"])
def test_unsigned_in_memory(kind: str, zeros: str, tmp_path: Path) -> None:
    """By the formulas of torchao's tensors, in every bit: zero points that are no codes are floats, and have no kernel;
    Int4Tensor adds its own after scaling."""
    parts, said, _ = KINDS[kind][1](torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    change = {"outside": lambda z: z * 0 + 9, "broken": lambda z: z.float() + 0.3, "none": torch.zeros_like}
    zero = parts["zero_point"] = change.get(zeros, lambda z: z)(parts["zero_point"])
    tensors, metadata = flattened({"proj.weight": (parts, said, torch.empty(64, 64))})
    save_file({key: part.contiguous() for key, part in tensors.items()}, tmp_path / "model.safetensors", metadata)
    packed = read(tmp_path / "model.safetensors")
    codes, scale = parts["qdata"], parts["scale"].float()
    if kind == "int4":
        codes = torch.stack([codes << 4 >> 4, codes >> 4], -1).flatten(1)
        scale, zero = scale.T, zero.T
    groups, scale, zero = codes.float().view(64, scale.shape[1], -1), scale.unsqueeze(-1), zero.unsqueeze(-1).float()
    floats = groups * scale + zero if kind == "int4" else (groups - zero) * scale
    assert torch.equal(packed.spec.scheme.codec.decode(packed, torch.float32), floats.flatten(1))
    assert (packed.spec.scheme.codec.form(packed) is None) == (kind == "intx" and zeros in ("outside", "broken"))
    if zeros == "none":
        assert "zero" not in packed.parts


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("torchao") / "pipeline"
    shutil.copytree(sdquant.demo.path("digits-flux"), folder, ignore=shutil.ignore_patterns("transformer"))
    return folder, digits(folder / "transformer")


def test_a_folder_of_all_kinds(mixed: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, floats = mixed
    schemes = {scheme for scheme, _ in KINDS.values()}
    for seen in (sdquant.detect(folder / "transformer"), sdquant.verify(folder / "transformer")):
        assert {row.to_dict()["type"] for row in seen.histogram} == {*schemes, "bfloat16"} and seen.warnings == []
        assert any("torchao's Int8Tensor: 8-bit integers" in line for line in seen.evidence)
    mine = dict(sdquant.dequantize(folder / "transformer"))
    assert mine.keys() == floats.keys()
    for name, tensor in mine.items():
        assert (tensor - floats[name].float()).norm() <= 1e-6 * tensor.norm(), name
    values: dict[str, Any] = {"dtype": "float32", "progress": False}
    pipe = sdquant.load_model(folder, **values)
    packed = dict(quantized(pipe.transformer))
    assert pipe.sdquant.plan.warnings == () and {one.spec.scheme.name for one in packed.values()} == schemes
    drawn = images(pipe, 1)
    sdquant.save(pipe, tmp_path / "saved")
    sdquant.verify(tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", **values)
    assert {name: one.spec for name, one in quantized(again.transformer)} == {n: p.spec for n, p in packed.items()}
    assert np.array_equal(images(again, 1), drawn)
    save_file({name: tensor.float() for name, tensor in floats.items()}, tmp_path / "floats.safetensors")
    theirs = images(sdquant.load_model(tmp_path / "floats.safetensors", base=folder, **values), 1)
    assert np.abs(drawn.astype(int) - theirs).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["model", "sequential", "balanced", "group"])
def test_offloaded(mode: str, mixed: tuple[Path, dict[str, Tensor]]) -> None:
    values: dict[str, Any] = {"dtype": "float32", "progress": False}
    expected = images(sdquant.load_model(mixed[0], **values), 1)
    assert np.array_equal(images(sdquant.load_model(mixed[0], offload=mode, **values), 1), expected)


def test_parts_of_a_weight_in_two_shards(mixed: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Each shard has the metadata of the whole model, as diffusers writes it."""
    source = mixed[0] / "transformer"
    tensors = load_file(source / WEIGHTS)
    with safe_open(source / WEIGHTS, "pt") as file:
        metadata = file.metadata()
    homes = {}
    for turn in (0, 1):
        name = f"diffusion_pytorch_model-0000{turn + 1}-of-00002.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[turn::2]}
        save_file(part, tmp_path / name, metadata)
        homes |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": homes}
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(source / "config.json", tmp_path)
    whole = dict(sdquant.dequantize(source))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in sdquant.dequantize(tmp_path))
    assert sdquant.detect(tmp_path).types == sdquant.detect(source).types


def _config(kind: str) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": {}}}}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("int8wo", "Int8WeightOnlyConfig"),
        ("int8dq", "Int8DynamicActivationInt8WeightConfig"),
        ("fp8dq_row", "Float8DynamicActivationFloat8WeightConfig"),
        ("intx_int4", "IntxWeightOnlyConfig"),
    ],
)
def test_without_metadata(name: str, config: str, tmp_path: Path) -> None:
    path = GOLDEN / f"torchao_{name}.safetensors"
    tensors = {key: tensor for key, tensor in load_file(path).items() if key.startswith("layer.")}
    save_file(tensors, tmp_path / "model.safetensors")
    lone = tmp_path / "model.safetensors"
    told = dict(sdquant.dequantize(lone, config=_config(config)))
    assert torch.equal(told["layer.weight"], dict(sdquant.dequantize(path))["layer.weight"])
    with pytest.raises(UnsupportedFileError, match=r"no metadata.*config\.json"):
        sdquant.detect(lone)
    with pytest.raises(UnsupportedFileError, match="'Int4WeightOnlyConfig'"):
        dict(sdquant.dequantize(lone, config=_config("Int4WeightOnlyConfig")))


Change = Callable[[dict[str, Tensor], dict[str, Any], dict[str, str]], object]


def _data(**values: Any) -> Change:
    return lambda tensors, said, metadata: said["_data"].update(values)


def _said(**values: Any) -> Change:
    return lambda tensors, said, metadata: said.update(values)


def _gone(key: str) -> Change:
    return lambda tensors, said, metadata: tensors.pop(key)


def _set(key: str, tensor: Tensor) -> Change:
    return lambda tensors, said, metadata: tensors.update({key: tensor})


REFUSED: dict[str, tuple[str, type[Exception], str, Change]] = {
    "an old class": ("int8 row", UnsupportedFileError, "AffineQuantizedTensor", _said(_type="AffineQuantizedTensor")),
    "tiles": (
        "int4", UnsupportedFileError, "tinygemm.*int4_packing_format='plain'", _said(_type="Int4TilePackedTo4dTensor"),
    ),
    "an attribute of tomorrow": ("int8 row", UnsupportedFileError, "'rotation'", _data(rotation=16)),
    "a part of tomorrow": (
        "fp8 row", UnsupportedFileError, "'outliers'", _said(_tensor_data_names=["qdata", "scale", "outliers"]),
    ),
    "another element": (
        "mxfp8", UnsupportedFileError, "float6", _data(elem_dtype=dtype("float6_e2m3")),
    ),
    "another block": ("nvfp4", UnsupportedFileError, "blocks of 32", _data(block_size=32)),
    "zero points": (
        "int8 row", UnsupportedFileError, "zero points", _set("proj._weight_zero_point", torch.ones(64, 1).char()),
    ),
    "no order of scales": ("nvfp4", BadFileError, "is_swizzled_scales", _data(is_swizzled_scales=None)),
    "no part": ("int8 row", BadFileError, "proj._weight_scale", _gone("proj._weight_scale")),
    "a part that is not said": ("fp8 row", BadFileError, "scale", _said(_tensor_data_names=["qdata"])),
    "no blocks": ("int8 row", BadFileError, "block_size", _data(block_size="all")),
    "blocks that do not fit": ("intx", BadFileError, r"\[1, 24\].*64 codes|block_size", _data(block_size=[1, 24])),
    "other scales": ("intx", BadFileError, r"scales are \[64, 3\]", _set("proj._weight_scale", torch.ones(64, 3))),
    "blocks of rows, and scales of each": ("int8 row", BadFileError, "block_size", _data(block_size=[32, 64])),
    "a block, and scales of rows": ("int8 row", BadFileError, "block_size", _data(block_size=[64, 64])),
    "rows, and one scale": ("int8 tensor", BadFileError, "block_size", _data(block_size=[1, 64])),
    "fp8 rows, and one scale": ("fp8 tensor", BadFileError, "block_size", _data(block_size=[1, 64])),
    "other groups": ("int4", BadFileError, "block_size", _data(block_size=[1, 16])),
    "plain int32": (
        "int4", UnsupportedFileError, "Intel's.*int4_packing_format='plain'", _said(_type="Int4PlainInt32Tensor"),
    ),
    "six bits": ("mxfp8", UnsupportedFileError, "fp6_e2m3", _data(elem_dtype="fp6_e2m3")),
    "codes of more bits": (
        "intx", BadFileError, "4 bits", _set("proj._weight_qdata", torch.full((64, 64), 9, dtype=torch.int8)),
    ),
    "NaN": ("intx", BadFileError, "not a number", _set("proj._weight_scale", torch.full((64, 4), float("nan")))),
    "negative": ("intx", BadFileError, "negative", _set("proj._weight_scale", torch.full((64, 4), -1.0))),
    "no JSON": ("int8 row", BadFileError, "not JSON", lambda t, said, metadata: metadata.update({"proj.weight": "{"})),
    "no list": ("int8 row", BadFileError, "tensor_names", lambda t, said, m: m.update({"tensor_names": "{}"})),
    "not in the list": ("int8 row", BadFileError, "does not list", lambda t, said, m: m.update({"tensor_names": "[]"})),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    kind, error, words, change = REFUSED[name]
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    parts, said, _ = KINDS[kind][1](weight)
    tensors, metadata = flattened({"proj.weight": (parts, said, weight)})
    table = json.loads(metadata["proj.weight"])
    change(tensors, table, metadata)
    if metadata["proj.weight"] != "{":
        metadata["proj.weight"] = json.dumps(table)
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    with pytest.raises(error, match=f"(?s){words}"):
        sdquant.verify(tmp_path / "model.safetensors")


@pytest.mark.parametrize("names", ['["a.weight"]', "every layer", '{"a": 1}'])
def test_a_list_of_names_of_another_tool(names: str, tmp_path: Path) -> None:
    tensors = {
        "b.W_q": torch.ones(4, 4),
        "b.scale": torch.ones(4),
        "a.weight": torch.ones(4, 4),
        "a.scale": torch.ones(4),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"tensor_names": names, "out_weight": "1"})
    assert dict(sdquant.dequantize(tmp_path / "model.safetensors")).keys() == tensors.keys()
    assert sdquant.detect(tmp_path / "model.safetensors").quant is None


@pytest.mark.parametrize("allow", [False, True])
def test_pickles(allow: bool, tmp_path: Path) -> None:
    shutil.copy(sdquant.demo.path("digits-flux") / "transformer" / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": _config("Int8WeightOnlyConfig")}))
    torch.save({"weight": torch.ones(1)}, tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(UnsupportedFileError, match=r"torchao's tensors as Python objects.*0\.16"):
        sdquant.detect(tmp_path, allow_pickle=allow)


@libraries.NEEDS_TORCHAO
def test_a_folder_of_torchaos_own(tmp_path: Path) -> None:
    """Layers in all classes that torchao can make on a CPU, saved by diffusers: the same in every bit."""
    folder = tmp_path / "saved"
    classes = libraries.run_script(
        "torchao_writer.py", str(sdquant.demo.path("digits-flux") / "transformer"), str(folder)
    )
    theirs, mine = load_file(tmp_path / "saved-decoded"), dict(sdquant.dequantize(folder, dtype="bfloat16"))
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == [] and mine.keys() == theirs.keys()
    assert sum(classes.values()) >= 26 and len(classes) == 5
    packed = dict(quantized(sdquant.load_model(folder, progress=False)))
    assert len(packed) >= sum(classes.values()) and sdquant.verify(folder).warnings == []
