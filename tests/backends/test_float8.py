"""Float8 weights in every spelling, and with scales of blocks, held against the formula of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant import backends, demo
from sdquant.core.backend import Packed, PrequantizedWeight, TensorInfo
from sdquant.core.packed_reader import read_weight
from sdquant.core.packed_rows import cut
from sdquant.errors import BadFileError
from sdquant.nn import QuantizedLayer

from .comfy_layers import GOLDEN, read

BACKEND = backends.get("bnb")
NAME = "proj.weight"


def _weight(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16()


def _infos(file: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {
        key: TensorInfo(dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape), nbytes=t.numel() * t.itemsize)
        for key, t in file.items()
    }


def _read(file: dict[str, Tensor], shape: tuple[int, ...], side: dict[str, Any] | None = None) -> Packed:
    (found,) = BACKEND.find(_infos(file), side or {})
    return BACKEND.read(found, shape, file.__getitem__)


def _same_again(packed: Packed) -> bool:
    """Whether the weight comes back out of a file of sdquant's own."""
    spec, file = packed.spec, BACKEND.write(NAME, packed)
    keys = {part: BACKEND.key(NAME, part, spec) for part in packed.parts}
    found = PrequantizedWeight(name=NAME, scheme=spec.scheme.name, keys=keys, evidence="", details=spec.details)
    back = read_weight(found, spec, spec.shape, file.__getitem__)
    return back.spec == spec and all(
        torch.equal(back.parts[part].float(), t.float()) for part, t in packed.parts.items()
    )


def _line(kind: str) -> Tensor:
    return torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)


def _blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, the scale of each block, and what both stand for, by a loop over the blocks."""
    rows, columns = weight.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    codes, scale = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(down, across)
    value = torch.empty(rows, columns)
    for i in range(down):
        for j in range(across):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            part = weight[at].float()
            scale[i, j] = part.abs().amax() / 448
            codes[at] = (part / scale[i, j]).to(torch.float8_e4m3fn)
            value[at] = codes[at].float() * scale[i, j]
    return codes, scale, value


@pytest.mark.parametrize("key", ["weight_scale_inv", "weight_scale", "scale_weight"])
@pytest.mark.parametrize(
    ("shape", "block", "said"),
    [
        ((256, 384), (128, 128), False),
        ((200, 136), (128, 128), False),  # cut off at the end, as DeepSeek's and transformers' are
        ((200, 136), (128, 128), True),
        ((96, 80), (48, 40), True),  # of a size that only the config tells
        ((128, 192), (64, 64), False),
        ((8, 256), (1, 32), False),
    ],
)
def test_scales_of_blocks(shape: tuple[int, int], block: tuple[int, int], said: bool, key: str) -> None:
    codes, scale, value = _blocks(_weight(shape), block)
    side = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}} if said else {}
    packed = _read({NAME: codes, f"proj.{key}": scale}, shape, side)
    assert torch.equal(BACKEND.decode(packed, torch.float32), value)
    assert _same_again(packed)
    rows = (3, shape[0] - 2)
    some = cut(BACKEND.cuttable(packed), [rows])
    assert torch.equal(BACKEND.decode(some, torch.float32), value[slice(*rows)])


def test_groups_of_columns_in_three_dimensions() -> None:
    codes, scale, value = _blocks(_weight((8, 128)), (1, 64))
    packed = _read({NAME: codes, "proj.weight_scale": scale[..., None]}, (8, 128))
    assert torch.equal(BACKEND.decode(packed, torch.float32), value)


@pytest.mark.parametrize("grid", [(2, 1), (8, 4), (256, 2), (256, 1), (1, 1)])  # (256, 4) is MXFP8
def test_scales_that_are_exponents(grid: tuple[int, int]) -> None:
    codes = _weight((256, 128)).to(torch.float8_e4m3fn)
    scale = torch.arange(100, 100 + grid[0] * grid[1]).remainder(150).add(50).to(torch.uint8).view(grid)
    scale = scale.view(torch.float8_e8m0fnu)
    packed = _read({NAME: codes, "proj.weight_scale_inv": scale}, (256, 128))
    each = scale.float().repeat_interleave(256 // grid[0], 0).repeat_interleave(128 // grid[1], 1)
    assert torch.equal(BACKEND.decode(packed, torch.float32), codes.float() * each)
    assert packed.parts["scale"].dtype == torch.uint8 and _same_again(packed)


@pytest.mark.parametrize(
    ("scale", "extra", "word"),
    [
        (torch.ones(2, 3), {}, "shape"),
        (torch.ones(1, 128), {}, "shape"),  # one for each column: nobody's
        (torch.ones(64, 1, 1), {}, "shape"),
        (torch.ones(64, 4, 2), {}, "shape"),
        (torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu), {}, "not a number"),
        (torch.ones(2, 2, dtype=torch.uint8), {}, "float32"),
        (torch.ones(2, 2), {"proj.comfy_quant": _line("mxfp8")}, "mxfp8"),
        (torch.tensor([[float("inf"), 1.0]]), {}, "infinite"),
    ],
)
def test_what_no_format_has(scale: Tensor, extra: dict[str, Tensor], word: str) -> None:
    codes = _weight((128, 128)).to(torch.float8_e4m3fn)
    with pytest.raises(BadFileError, match=word):
        _read({NAME: codes, "proj.weight_scale": scale} | extra, (128, 128))


@pytest.mark.parametrize("size", [128, [128], [0, 128], ["a", 1], [True, 1], [64, 64]])
def test_a_block_size_that_does_not_fit(size: Any) -> None:
    codes, scale, _ = _blocks(_weight((128, 256)), (128, 128))
    side = {"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}
    with pytest.raises(BadFileError):
        _read({NAME: codes, "proj.weight_scale_inv": scale}, (128, 256), side)


SPELLINGS: dict[str, dict[str, Tensor]] = {
    "2025": {"scale_weight": torch.tensor(0.25), "scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)},
    "2025, activations in 8 bits": {
        "scale_weight": torch.tensor([0.25]), "scale_input": torch.tensor([0.5]), "scaled_fp8": torch.empty(0),
    },
    "2025, in full precision": {
        "scale_weight": torch.tensor([0.25]), "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
    },
    "2025, a marker of float32": {"scale_weight": torch.tensor([0.25]), "scaled_fp8": torch.empty(0)},
    "2026": {"weight_scale": torch.tensor(0.25), "comfy_quant": _line("float8_e4m3fn")},
    "2026, in half precision": {"weight_scale": torch.tensor([0.25]).bfloat16(), "comfy_quant": _line("float8_e4m3fn")},
    "2026, activations": {
        "weight_scale": torch.tensor(0.25), "input_scale": torch.tensor(0.5), "comfy_quant": _line("float8_e4m3fn"),
    },
    "2026, by row": {"weight_scale": torch.full((24,), 0.25), "comfy_quant": _line("float8_e4m3fn_rowwise")},
    "Black Forest Labs'": {"weight_scale": torch.full((24,), 0.25)},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_one_scale(name: str, prefix: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Scales for activations do not change weights."""
    codes = _weight((24, 64)).to(dtype)
    file = {f"{prefix}proj.weight": codes}
    for key, tensor in SPELLINGS[name].items():
        if key == "comfy_quant" and dtype == torch.float8_e5m2:
            tensor = _line("float8_e5m2")
        file[key if key == "scaled_fp8" else f"{prefix}proj.{key}"] = tensor
    save_file(file, tmp_path / "model.safetensors")
    seen = sdquant.verify(tmp_path / "model.safetensors")
    assert (seen.quant, seen.warnings) == ("fp8", [])
    (found,) = seen.sources["model"].prequantized.values()
    packed = read_weight(found, None, (24, 64), file.__getitem__)
    assert torch.equal(BACKEND.decode(packed, torch.float32), codes.float() * 0.25)
    assert packed.spec.details.get("input_scale") == (0.5 if "activations" in name else None)


def test_the_scale_of_inputs_is_saved(tmp_path: Path) -> None:
    model = sdquant.load_model(demo.path("digits-flux") / "transformer", "fp8,packing=float8", progress=False)
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    layers[3].set_detail("input_scale", 0.1)
    sdquant.save(model, tmp_path / "out")
    again = sdquant.load_model(tmp_path / "out", progress=False)
    found = [layer.spec.details for layer in again.modules() if isinstance(layer, QuantizedLayer)]
    assert found == [layer.spec.details for layer in layers]
    assert sum("input_scale" in details for details in found) == 1


def test_golden() -> None:
    """comfy-kitchen's layer, with a scale for activations: its output is the product of those with the same weight."""
    path = GOLDEN / "comfy_fp8_e4m3_tensor.safetensors"
    packed, file = read(path), load_file(path)
    weight = BACKEND.decode(packed, torch.float32)
    assert torch.equal(weight, file["golden.weight"])
    x, theirs = file["golden.input_dequantized"], file["golden.output_f32"]
    assert (x @ weight.T + file["layer.bias"].float() - theirs).norm() < 1e-5 * theirs.norm()
