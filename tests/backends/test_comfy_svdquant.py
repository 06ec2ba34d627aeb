"""comfy-kitchen's SVDQuant, with a low-rank branch beside the codes, and AWQ: held to its own tensors and products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import TensorCoreAWQW4A16Layout
from safetensors.torch import load_file
from torch import Tensor, nn

import sdquant
from sdquant import backends
from sdquant.core import Packed, packed_rows
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.kernels import dispatch
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import set_compute

from .comfy_layers import GOLDEN, read, write

COMFY = backends.get("comfy")
SVD = GOLDEN / "comfy_svdquant_w4a4_tilepack.safetensors"
TILES = {"format": "svdquant_w4a4", "layout": "kitchen_tile_packed_w4a4"}


def _golden() -> dict[str, Tensor]:
    return {key.removeprefix("layer."): tensor for key, tensor in load_file(SVD).items() if key.startswith("layer.")}


def _layer() -> nn.Module:
    floats = nn.Linear(128, 128, dtype=torch.float32)
    floats.bias.data = load_file(SVD)["layer.bias"].float()
    return quantized_layer(floats, read(SVD, (128, 128)), torch.float32)


def test_the_weight() -> None:
    packed, theirs = read(SVD, (128, 128)), load_file(SVD)["golden.weight"].float()
    assert packed.spec.scheme.name == "svdquant_w4a4"
    weight = COMFY.decode(packed, torch.float32)
    assert (weight - theirs).norm() <= 3e-3 * theirs.norm()  # which is rounded to half precision


def test_products() -> None:
    """The branch is computed beside the codes: the same as with the whole weight; the library's has 4-bit inputs."""
    layer, file = _layer(), load_file(SVD)
    weight = COMFY.decode(read(SVD), torch.float32)
    for rows in (1, 4, 40):
        x = file["golden.input"].float().repeat(10, 1)[:rows].requires_grad_()
        exact = x @ weight.T + file["layer.bias"].float()
        out = layer(x)
        assert (out - exact).norm() <= 1e-5 * exact.norm()
        mine, theirs = torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(exact.sum(), x)[0]
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    with torch.no_grad():
        out = layer(file["golden.input"].float())
        assert (out - file["golden.output_w4a4_f32"]).norm() < 0.3 * out.norm()
        set_compute(layer, "int8")
        eight, exact = layer(x), x @ weight.T + file["layer.bias"].float()
        assert (eight - exact).norm() <= 0.02 * exact.norm()


def test_the_codes_have_kernels_and_the_layer_is_a_layer() -> None:
    packed = read(SVD)
    branch = COMFY.low_rank(packed)
    assert branch is not None and COMFY.form(packed) is None
    residual = replace(packed, parts=branch.residual_of(packed.parts))
    reader = dispatch.way(COMFY, residual, COMFY.form(residual), torch.bfloat16).reader
    assert (reader is None) is (not dispatch.readers("cpu"))
    layer, x = _layer(), torch.randn(3, 128)
    other = copy.deepcopy(layer)
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), layer(x))
        assert (layer.bfloat16()(x.bfloat16()) - other(x)).norm() < 0.02 * other(x).norm()


def test_natural_order(tmp_path: Path) -> None:
    file, packed = _golden(), read(SVD)
    parts = packed.parts
    natural = {
        "weight": (parts["codes"] ^ 0x88).view(torch.int8), "weight_scale": parts["scale"].T, "proj_up": parts["up"],
        "proj_down": file["proj_down"], "smooth_factor": file["smooth_factor"],
    }  # fmt: skip
    for spelling in ("", "weight_"):  # comfy-quants', and that of comfy-kitchen's state dicts
        tensors = {
            (spelling + key if key.startswith(("proj", "smooth")) else key): tensor for key, tensor in natural.items()
        }
        path = write(tmp_path, {"format": "svdquant_w4a4", "act_unsigned": False}, tensors)
        assert sdquant.verify(path).quant == "svdquant_w4a4"
        back = read(path, (128, 128))
        assert all(torch.equal(back.parts[key], part) for key, part in parts.items())


UNSIGNED = GOLDEN / "nunchaku_svdq_int4_unsigned_fc2.safetensors"


def _unsigned(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """comfy-kitchen's layer with shifted activations, of the golden tensors in natural order."""
    file = load_file(UNSIGNED)
    natural = {key.removeprefix("natural."): tensor for key, tensor in file.items() if key.startswith("natural.")}
    codes = natural.pop("codes")
    layer = {
        "weight": (codes[:, ::2] & 15) | codes[:, 1::2] << 4, "weight_scale": natural["weight_scale"],
        **{key: natural[key] for key in ("proj_down", "proj_up", "smooth_factor", "bias")},
    }  # fmt: skip
    return write(tmp_path, {"format": "svdquant_w4a4", "act_unsigned": True}, layer), file


def test_shifted_activations(tmp_path: Path) -> None:
    """The shift is in the bias: the layer's output is that of the library, whose inputs have 4 bits."""
    path, file = _unsigned(tmp_path)
    assert any("shifted activations" in line for line in sdquant.verify(path).evidence)
    floats = dict(sdquant.dequantize(path))
    bias, wanted = floats["proj.bias"], file["golden.bias_effective"].float()
    assert (bias - wanted).norm() <= 1e-3 * wanted.norm()  # half precision is left of it
    x = file["golden.input"].float()
    out = torch.nn.functional.linear(x, floats["proj.weight"], bias)
    for key, far in (("w4a16", 2e-3), ("w4a4", 0.1)):
        theirs = file[f"golden.output_{key}_f32"]
        assert (out - theirs).norm() < far * theirs.norm(), key
    missing = {key.removeprefix("proj."): t for key, t in load_file(path).items() if key != "proj.comfy_quant"}
    bias = missing.pop("bias")
    said = {"format": "svdquant_w4a4", "act_unsigned": True}
    with pytest.raises(UnsupportedFileError, match="no bias is made for that"):
        sdquant.detect(write(tmp_path, said, missing))
    with pytest.raises(BadFileError, match="not the bias of its weight"):
        sdquant.verify(write(tmp_path, said, {**missing, "bias": bias[1:]}))


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({**TILES, "act_unsigned": 1}, "shifted is 1"), ({**TILES, "lowrank_branch_input_basis": "smooth"}, "basis"),
        ({**TILES, "layout": "another"}, "order"),
    ],
)  # fmt: skip
def test_what_would_come_out_wrong(said: dict[str, Any], word: str, tmp_path: Path) -> None:
    file = {key: tensor for key, tensor in _golden().items() if key != "comfy_quant"}
    with pytest.raises(UnsupportedFileError, match=word):
        sdquant.detect(write(tmp_path, said, file))


@pytest.mark.parametrize(
    ("key", "change", "word"),
    [
        ("weight_scale", None, r"no 'proj\.weight_scale'"), ("smooth_factor", None, r"no 'proj\.smooth_factor'"),
        ("proj_down", None, r"no 'proj\.proj_down'"), ("proj_up", None, r"no 'proj\.proj_up'"),
        ("weight", lambda t: t[:, :, 1:], "tiles are 32 x 128"), ("weight", lambda t: t[0], "tiles of 128 rows"),
        ("weight_scale", lambda t: t[:, 1:], "belongs to the weight"),
        ("smooth_factor", lambda t: t[1:], "belongs to the weight"), ("smooth_factor", lambda t: t * 0, "not positive"),
        ("proj_down", lambda t: t[:, 1:], "belongs to the weight"),
        ("proj_up", lambda t: t * torch.nan, "not a number"),
    ],
)  # fmt: skip
def test_what_is_damaged(key: str, change: Callable[[Tensor], Tensor] | None, word: str, tmp_path: Path) -> None:
    file = {name: tensor for name, tensor in _golden().items() if name != "comfy_quant"}
    if change is None:
        del file[key]
    else:
        file[key] = change(file[key])
    with pytest.raises(BadFileError, match=word):
        sdquant.verify(write(tmp_path, TILES, file))


def _awq(group: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(-128, 128, (24, 64), dtype=torch.int8, generator=generator)
    scale = (torch.rand(128 // group, 24, generator=generator) / 50 + 0.001).bfloat16()
    zero = (torch.randn(128 // group, 24, generator=generator) / 100).bfloat16()
    params = TensorCoreAWQW4A16Layout.Params(
        scale=scale.float(), zeros=zero.float(), group_size=group, orig_dtype=torch.float32, orig_shape=(24, 128)
    )
    floats = TensorCoreAWQW4A16Layout.dequantize(codes, params)
    return {"weight": codes, "weight_scale": scale, "weight_zero": zero}, floats


@pytest.mark.parametrize("group", [64, 32])
@pytest.mark.parametrize("word", ["weight_zero", "weight_zeros"])
def test_awq(word: str, group: int, tmp_path: Path) -> None:
    file, floats = _awq(group)
    file[word] = file.pop("weight_zero")
    path = write(tmp_path, {"format": "awq_w4a16", **({"group_size": group} if group != 64 else {})}, file)
    seen = sdquant.verify(path)
    assert (seen.quant, seen.warnings) == ("awq_w4a16", [])
    packed = read(path, (24, 128))
    assert torch.equal(COMFY.decode(packed, torch.float32), floats)
    assert torch.equal(COMFY.decode(packed_rows.cut(packed, [(3, 9)]), torch.float32), floats[3:9])
    reader = dispatch.way(COMFY, packed, COMFY.form(packed), torch.bfloat16).reader
    assert (reader is None) is (not dispatch.readers("cpu"))
    layer, x = quantized_layer(nn.Linear(128, 24, bias=False), packed, torch.float32), torch.randn(3, 128)
    assert torch.allclose(layer(x), x @ floats.T, atol=1e-5)
    for key in ("weight_scale", word):
        with pytest.raises(BadFileError, match=r"no 'proj\.weight_"):
            sdquant.detect(write(tmp_path, {"format": "awq_w4a16"}, {k: t for k, t in file.items() if k != key}))
    with pytest.raises(BadFileError, match="does not divide"):
        sdquant.verify(write(tmp_path, {"format": "awq_w4a16", "group_size": 48}, file))


def test_small_factors_for_smoothing_in_float16() -> None:
    """A file in bfloat16 has factors that float16 does not: as zeros, the inputs would be infinite."""
    packed = read(SVD, (128, 128))
    small = {**packed.parts, "smooth": torch.full_like(packed.parts["smooth"], 2.0**-25, dtype=torch.bfloat16)}
    packed = Packed(spec=packed.spec, parts=small)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(0)) * 1e-4
    exact = x @ COMFY.decode(packed, torch.float32).T
    out = dispatch.linear(COMFY, packed, COMFY.form(packed), x.half(), None, None)
    assert out.isfinite().all() and (out.float() - exact).norm() <= 0.01 * exact.norm()
