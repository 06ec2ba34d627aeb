"""NVIDIA ModelOpt's files: what diffusers' quantizer saves after `compress`, and the unified export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.quantizers.bfl.utils import dequantize_nvfp4, quantize_nvfp4
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant.core import code_tables, packed_rows, read_weight
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.formats.checkpoint import single_file
from sdquant.nn import quantized

from .comfy_layers import GOLDEN, read
from .torchao_layers import WEIGHTS

METHOD = {"quant_method": "modelopt"}


def _smooth(columns: int) -> Tensor:
    return torch.linspace(0.5, 2, columns)


def _nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scale, factor = quantize_nvfp4(weight)
    layer = {"weight": codes, "weight_quantizer._scale": scale, "weight_quantizer._double_scale": factor}
    return layer, dequantize_nvfp4(codes, scale, factor)


def _compressed_int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The even column in the high half, 8 added; a scale that divides; smoothed columns."""
    smooth = _smooth(weight.shape[1])
    groups = (weight / smooth).view(-1, 32)
    scale = 7 / groups.abs().amax(1, keepdim=True)
    codes = (groups * scale).round().clamp(-8, 7)
    bits = (codes + 8).to(torch.uint8).view(weight.shape)
    layer = {
        "weight": bits[:, ::2] << 4 | bits[:, 1::2], "weight_quantizer._scale": scale,
        "weight_quantizer._amax": groups.abs().amax(1, keepdim=True), "input_quantizer._pre_quant_scale": smooth,
    }  # fmt: skip
    return layer, (codes / scale).view(weight.shape) * smooth


def _exported_int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Two rows in a byte, the even one in the low half, as `pack_int4_in_uint8` has them."""
    groups = weight.view(len(weight), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    codes = (groups / scale).round().clamp(-8, 7)
    bits = codes.flatten(1).to(torch.int8).view(torch.uint8) & 15
    layer = {"weight": bits[::2] | bits[1::2] << 4, "weight_scale": scale.squeeze(-1)}
    return layer, (codes * scale).view(weight.shape)


def _int8(scale_key: str, columns_key: str | None = None) -> Any:
    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        smooth = _smooth(weight.shape[1]) if columns_key else torch.ones(())
        scale = (weight / smooth).abs().amax(1, keepdim=True) / 127
        codes = (weight / smooth / scale).round().to(torch.int8)
        layer = {"weight": codes, scale_key: scale} | ({columns_key: smooth} if columns_key else {})
        return layer, codes * scale * smooth

    return make


def _fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    layer = {"weight": codes, "weight_quantizer._scale": scale, "weight_quantizer._amax": weight.abs().amax()}
    return layer | {"input_quantizer._amax": torch.tensor(3.0)}, codes.float() * scale


def _exponents(rows: Tensor, largest: float) -> Tensor:
    """The exponent of each 32 weights of a row, uint8 [out, in / 32]."""
    least = rows.view(len(rows), -1, 32).abs().amax(-1).clamp(min=1e-20) / largest
    return (least.log2().ceil() + 127).to(torch.uint8)


def _mxfp4(names: str, flat: bool) -> Any:
    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored = _exponents(weight, 6)
        factors = torch.exp2(stored.float() - 127).repeat_interleave(32, 1)
        table = code_tables.code_table("e2m1", "float32", torch.device("cpu"))
        codes = ((weight / factors).unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)
        layer = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, names: stored.view(-1, 1) if flat else stored}
        return layer, table[codes.int()] * factors

    return make


def _mxfp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    stored = _exponents(weight, 448)
    factors = torch.exp2(stored.float() - 127).repeat_interleave(32, 1)
    codes = (weight / factors).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_quantizer._scale": stored}, codes.float() * factors


def _fp8_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of 128 x 128, as the export has them: [down, 1, across, 1]."""
    down, across = (-(-size // 128) for size in weight.shape)
    grid = torch.linspace(1e-3, 2e-3, down * across).view(down, across)
    factors = grid.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
    codes = (weight / factors).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": grid.view(down, 1, across, 1)}, codes.float() * factors


KINDS: dict[str, tuple[str, Any]] = {
    "fp8": ("fp8", _fp8), "int8": ("int8_row", _int8("weight_quantizer._scale")),
    "int8 smoothed": ("hub-int8", _int8("weight_quantizer._scale", "input_quantizer._pre_quant_scale")),
    "int4 awq": ("hub-int4", _compressed_int4), "nvfp4": ("comfy:nvfp4", _nvfp4),
    "exported int8": ("int8_row", _int8("weight_scale")),
    "exported int8 smoothed": ("hub-int8", _int8("weight_scale", "pre_quant_scale")),
    "exported int4": ("hub-int4", _exported_int4), "exported fp8 blocks": ("fp8", _fp8_blocks),
    "mxfp4": ("mxfp4", _mxfp4("weight_quantizer._scale", True)), "mxfp8": ("mxfp8", _mxfp8),
    "exported mxfp4": ("mxfp4", _mxfp4("weight_scale", False)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "scheme"), [("fp8", "fp8"), ("int8", "int8_row"), ("int4_awq", "hub-int4")])
def test_golden_of_compress(name: str, scheme: str) -> None:
    """A file of one layer: nothing but the names of its tensors tells whose it is."""
    path = GOLDEN / f"modelopt_compress_{name}.safetensors"
    packed, file = read(path), load_file(path)
    weight = packed.spec.scheme.codec.decode(packed, torch.float32)
    want = file.get("golden.weight_effective", file["golden.weight"]).float()
    assert packed.spec.scheme.name == scheme
    assert (weight - want).norm() <= 3e-3 * want.norm()  # rounded to bfloat16
    if name == "int4_awq":  # the others quantize activations
        out, theirs = (
            file["golden.input"].float() @ weight.T + file["layer.bias"].float(),
            file["golden.output"].float(),
        )
        assert (out - theirs).norm() <= 6e-3 * theirs.norm()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A component's folder with layers of all kinds, by turns, and its weights as floats."""
    folder, source = tmp_path_factory.mktemp("modelopt"), sdquant.demo.path("digits-flux") / "transformer"
    file: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    turn = 0
    for name, tensor in load_file(source / WEIGHTS).items():
        if tensor.ndim < 2 or any(size % 32 for size in tensor.shape):
            file[name] = floats[name] = tensor
            continue
        layer, floats[name] = list(KINDS.values())[turn % len(KINDS)][1](tensor.float())
        file |= {f"{name.removesuffix('weight')}{key}": part.clone() for key, part in layer.items()}
        turn += 1
    file["transformer_blocks.0.attn.softmax_quantizer._amax"] = torch.tensor(1.0)  # of no weight
    save_file({name: tensor.contiguous() for name, tensor in file.items()}, folder / WEIGHTS)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {**METHOD, "quant_type": "FP8"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, floats


def test_a_folder_of_all_kinds(mixed: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, floats = mixed
    schemes = {scheme for scheme, _ in KINDS.values()}
    seen = sdquant.verify(folder)
    assert {row.to_dict()["type"] for row in seen.histogram} == {*schemes, "bfloat16"} and seen.warnings == []
    assert any("NVIDIA ModelOpt's 4-bit integers, compressed" in line for line in seen.evidence)
    mine = dict(sdquant.dequantize(folder))
    assert mine.keys() == floats.keys()
    for name, tensor in mine.items():
        assert (tensor - floats[name].float()).norm() <= 1e-6 * tensor.norm(), name
    model = sdquant.load_model(folder, dtype="float32", progress=False)
    packed = dict(quantized(model))
    assert {one.spec.scheme.name for one in packed.values()} == schemes
    for name, one in packed.items():
        assert torch.equal(one.spec.scheme.codec.decode(one, torch.float32), mine[name])
        if one.spec.scheme.codec.by_row(one):
            rows = packed_rows.cut(one, [(3, 8)])
            assert torch.equal(one.spec.scheme.codec.decode(rows, torch.float32), mine[name][3:8])
    sdquant.save(model, tmp_path / "saved")
    again = dict(sdquant.dequantize(tmp_path / "saved"))
    assert all(torch.equal(tensor, mine[name]) for name, tensor in again.items())


def test_an_export_that_nobody_names(tmp_path: Path) -> None:
    """int8 with scales may be ComfyUI's, rotated: only a config tells."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for kind in ("exported int8", "exported int4"):
        layer, floats = KINDS[kind][1](weight)
        lone = tmp_path / "model.safetensors"
        save_file({f"proj.{key}": part.contiguous() for key, part in layer.items()}, lone)
        with pytest.raises(UnsupportedFileError):
            sdquant.detect(lone)
        told = dict(sdquant.dequantize(lone, config=METHOD))["proj.weight"]
        assert (told - floats).norm() <= 1e-6 * floats.norm()


@pytest.mark.parametrize(
    "said",
    [
        {"group_size": 128}, {"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 128}}, {"block_quantize": 128},
        {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}},
    ],
)  # fmt: skip
def test_groups_that_the_config_contradicts(said: dict[str, Any], tmp_path: Path) -> None:
    layer, floats = KINDS["exported int4"][1](torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    lone = tmp_path / "model.safetensors"
    save_file({f"proj.{key}": part.contiguous() for key, part in layer.items()}, lone)
    with pytest.raises(BadFileError, match="groups of 128 weights, but each scale is of 32"):
        dict(sdquant.dequantize(lone, config=METHOD | said))
    right = json.loads(json.dumps(METHOD | said).replace("128", "32"))
    assert (dict(sdquant.dequantize(lone, config=right))["proj.weight"] - floats).norm() <= 1e-6 * floats.norm()


BROKEN: dict[str, tuple[str, type[Exception], str, dict[str, Tensor]]] = {
    "other scales": ("int4 awq", UnsupportedFileError, "scales", {"weight_quantizer._scale": torch.ones(100, 1)}),
    "a scale of zero": ("int4 awq", BadFileError, "zero", {"weight_quantizer._scale": torch.zeros(128, 1)}),
    "infinite": ("int4 awq", BadFileError, "infinite", {"weight_quantizer._scale": torch.full((128, 1), torch.inf)}),
    "few columns": (
        "int4 awq", BadFileError, "64 columns", {"input_quantizer._pre_quant_scale": torch.ones(32)},
    ),
    "smoothed fp8": ("fp8", UnsupportedFileError, "smoothed", {"input_quantizer._pre_quant_scale": torch.ones(64)}),
    "half a branch": ("nvfp4", BadFileError, "lora_b", {"weight_quantizer._svdquant_lora_a": torch.ones(4, 64)}),
    "a branch": ("int8", UnsupportedFileError, "branch", {"weight_quantizer._svdquant_lora_a": torch.ones(4, 64)}),
    "an exported branch": ("exported int8", UnsupportedFileError, "branch", {"svdquant_lora_a": torch.ones(4, 64)}),
    "scales of 32": (
        "nvfp4", UnsupportedFileError, "scales of 32",
        {"weight_quantizer._scale": torch.ones(64, 2).to(torch.float8_e4m3fn)},
    ),
    "exported scales of 32": (
        "nvfp4", UnsupportedFileError, "a scale for 32",
        {"weight_scale": torch.ones(64, 2).to(torch.float8_e4m3fn), "weight_scale_2": torch.ones(())},
    ),
    "exponents of 16": (
        "mxfp8", UnsupportedFileError, "exponents", {"weight_quantizer._scale": torch.ones(64, 4).to(torch.uint8)},
    ),
    "16 bits": ("int8", UnsupportedFileError, "int16", {"weight": torch.ones(64, 64).to(torch.int16)}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_refused(name: str, tmp_path: Path) -> None:
    kind, error, words, changes = BROKEN[name]
    layer, _ = KINDS[kind][1](torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    file = {f"proj.{key}": part.contiguous() for key, part in {**layer, **changes}.items()}
    path = tmp_path / "model.safetensors"
    save_file(file, path)
    with pytest.raises(error, match=words):
        (found,) = single_file(path).prequantized.values()
        read_weight(found, None, (64, 64), load_file(path).__getitem__)
