"""Whole files by comfy-quants, convert_to_quant and INT8-Fast: `programs/README.md` says how each was written.

The weights are held to codes times scales by each program's own formula, written out here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant.errors import BadFileError, UnsupportedFileError

PROGRAMS = Path(__file__).parent / "programs"
SHAPES = {"img_in.weight": (256, 16), "txt_in.weight": (256, 128), "final_layer.linear.weight": (16, 256)}


def _of_rows(tensors: dict[str, Tensor], layer: str) -> Tensor:
    """Codes times the scale of their row, turned back by the Kronecker powers of the regular Hadamard matrix."""
    weight = tensors[f"{layer}.weight"].float() * tensors[f"{layer}.weight_scale"]
    options = _options(tensors, layer)
    if not options.get("convrot"):
        return weight
    size, one = options["convrot_groupsize"], (torch.ones(4, 4) - 2 * torch.eye(4).flip(1)) / 2
    turn = one
    while len(turn) < size:
        turn = torch.kron(turn, one)
    return (weight.view(len(weight), -1, size) @ turn.T).flatten(1)


def _of_grid(tensors: dict[str, Tensor], layer: str) -> Tensor:
    """Codes times the scale of their row, or of their square of 16 x 16."""
    codes, scale = tensors[f"{layer}.weight"].float(), tensors[f"{layer}.weight_scale"]
    if scale.ndim == 1:
        return codes * scale[:, None]
    side = _options(tensors, layer)["group_size"]
    return codes * scale.repeat_interleave(side, 0).repeat_interleave(side, 1)


def _of_pairs(tensors: dict[str, Tensor], layer: str) -> Tensor:
    """E2M1, the even column in the high half, times scales of 16 in tiles, times one factor."""
    pairs, tiles = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"].float()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = values[torch.stack([pairs >> 4, pairs & 15], 2).long()].flatten(1)
    down, across = len(tiles) // 128, tiles.shape[1] // 4
    scale = tiles.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)
    each = scale.repeat_interleave(16, 1)[: len(codes), : codes.shape[1]]
    rows, columns = _options(tensors, layer)["orig_shape"]
    return (codes * each * tensors[f"{layer}.weight_scale_2"])[:rows, :columns]


def _of_blocks(tensors: dict[str, Tensor], layer: str) -> Tensor:
    """Codes times powers of two in tiles of 128 rows and 4 blocks, without what was padded."""
    codes, tiles = tensors[f"{layer}.weight"].float(), tensors[f"{layer}.weight_scale"]
    down, across = -(-len(codes) // 128), -(-codes.shape[1] // 128)
    scale = tiles.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)
    each = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)[: len(codes), : codes.shape[1]]
    rows, columns = _options(tensors, layer)["orig_shape"]
    return (codes * each)[:rows, :columns]


def _options(tensors: dict[str, Tensor], layer: str) -> dict[str, Any]:
    options: dict[str, Any] = json.loads(bytes(tensors[f"{layer}.comfy_quant"].tolist()))
    return options


@pytest.mark.parametrize(
    ("name", "quant", "formula"),
    [
        ("comfyquants_int8_convrot", "int8_row", _of_rows),  # convrot where 256 divides the inputs, of one of three
        ("ctq_int8_convrot", "int8_convrot", _of_rows),
        ("ctq_mxfp8", "mxfp8", _of_blocks),
        ("ctq_hybrid_mxfp8", "mxfp8", _of_blocks),
        ("ctq_nvfp4", "comfy:nvfp4", _of_pairs),
        ("ctq_int8_blockwise", "hub-int8", _of_grid),
        ("ctq_fp8_rowwise", "fp8", _of_grid),
        ("ctq_fp8_blockwise", "fp8", _of_grid),
    ],
)
def test_weights_are_those_of_the_program(name: str, quant: str, formula: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"  # a name that promises nothing
    shutil.copy(PROGRAMS / f"{name}.safetensors", path)
    result = sdquant.verify(path)
    assert result.quant == sdquant.detect(path).quant == quant and not result.warnings
    floats, tensors = dict(sdquant.dequantize(path)), load_file(path)
    assert {key: tuple(weight.shape) for key, weight in floats.items() if "bias" not in key} == SHAPES
    for key in SHAPES:
        theirs = formula(tensors, key.removesuffix(".weight"))
        assert (floats[key] - theirs).norm() <= 1e-6 * theirs.norm(), key


def test_int8_fast_says_nothing_of_its_rotation() -> None:
    """Its files with and without it have the same tensors: neither is guessed."""
    for look in (sdquant.detect, sdquant.verify):
        with pytest.raises(UnsupportedFileError, match="no comfy_quant marker describes"):
            look(PROGRAMS / "int8fast_row.safetensors")


@pytest.mark.parametrize("shape", [[300, 16], [256, 40], [256], "256", [-1, 16]])
def test_a_shape_that_its_codes_do_not_have(shape: Any, tmp_path: Path) -> None:
    tensors = load_file(PROGRAMS / "ctq_mxfp8.safetensors")
    row = {**_options(tensors, "img_in"), "orig_shape": shape}
    tensors["img_in.comfy_quant"] = torch.tensor(list(json.dumps(row).encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadFileError, match="says that its shape was"):
        sdquant.detect(tmp_path / "model.safetensors")


def test_rows_that_only_the_bias_tells(tmp_path: Path) -> None:
    """ComfyUI's own files have no shape in them: rows are as many as the bias has, columns as they are padded."""
    tensors = load_file(PROGRAMS / "ctq_mxfp8.safetensors")
    line = torch.tensor(list(b'{"format": "mxfp8"}'), dtype=torch.uint8)
    save_file(
        {k: line.clone() if "comfy_quant" in k else t for k, t in tensors.items()}, tmp_path / "model.safetensors"
    )
    floats = dict(sdquant.dequantize(tmp_path / "model.safetensors"))
    assert floats["final_layer.linear.weight"].shape == (16, 256) and floats["img_in.weight"].shape == (256, 32)
