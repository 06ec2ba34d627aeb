"""ComfyUI's int8 and INT8 ConvRot: held to comfy-kitchen's own tensors, products and pictures, in every spelling.

`golden/` has layers as comfy-kitchen 0.2.40 writes them, its own dequantized weights, and what it computes with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfy_kitchen.tensor import TensorWiseINT8Layout
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sdquant
from sdquant import backends
from sdquant.core import Packed, PackedSpec, hadamard, read_weight, registry
from sdquant.core.packed_reader import forms
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.formats.checkpoint import single_file
from sdquant.nn import quantized, quantized_layer
from sdquant.nn.layer_factory import set_compute

from ..test_load_modes import images

GOLDEN = Path(__file__).parent / "golden"
LAYERS = {
    "comfy_int8_convrot_g16": "int8_convrot", "comfy_int8_convrot_g256": "int8_convrot",
    "comfy_int8_rowwise": "int8_row", "comfy_int8_tensorwise": "int8_tensor",
}  # fmt: skip


def _read(path: Path, shape: tuple[int, ...] | None = None) -> Packed:
    (found,) = single_file(path).prequantized.values()
    return read_weight(found, None, shape, load_file(path).__getitem__)


def _line(row: Any) -> Tensor:
    return torch.tensor(list(json.dumps(row).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("name", LAYERS)
class TestGolden:
    def test_the_weight(self, name: str) -> None:
        packed, file = _read(GOLDEN / f"{name}.safetensors"), load_file(GOLDEN / f"{name}.safetensors")
        assert packed.spec.scheme.name == LAYERS[name]
        mine, theirs = backends.get("comfy").decode(packed, torch.float32), file["golden.weight"]
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()

    def test_the_outputs(self, name: str) -> None:
        """With activations in 8 bits, as comfy-kitchen computes, and exact."""
        packed, file = _read(GOLDEN / f"{name}.safetensors"), load_file(GOLDEN / f"{name}.safetensors")
        floats = nn.Linear(256, 8)
        floats.bias.data = file["layer.bias"].float()
        layer = quantized_layer(floats, packed, torch.float32)
        x, eight = file["golden.input"].float().repeat(40, 1), file["golden.output_f32"].repeat(40, 1)
        exact = x @ file["golden.weight"].T + floats.bias
        with torch.no_grad():
            assert (layer(x) - exact).norm() <= 1e-5 * exact.norm()
            set_compute(layer, "int8")
            assert (layer(x) - eight).norm() <= 1e-5 * eight.norm()

    def test_what_is_made_of_the_same_weight(self, name: str) -> None:
        file = load_file(GOLDEN / f"{name}.safetensors")
        packed = _read(GOLDEN / f"{name}.safetensors")
        again = packed.spec.scheme.codec.encode_as(file["golden.source"].float(), packed.spec)
        assert again is not None and again.spec.rotation == packed.spec.rotation
        if not packed.spec.rotation:  # the golden ones were rotated in bfloat16
            assert all(torch.equal(part, again.parts[key]) for key, part in packed.parts.items())


@pytest.mark.parametrize(("columns", "group"), [(512, 256), (320, 64), (48, 16), (40, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int8_convrot_is_that_of_comfy_kitchen(columns: int, group: int, dtype: torch.dtype) -> None:
    """Bit for bit, where it rotates in float32, as the programs do that make such files."""
    weight = torch.randn(700, columns, generator=torch.Generator().manual_seed(3)).to(dtype)
    packed = backends.of_scheme("int8_convrot").encode(weight, backends.parse("int8_convrot"))
    options = {"convrot": True, "convrot_groupsize": group} if group else {}
    codes, params = TensorWiseINT8Layout.quantize(weight.float(), per_channel=True, **options)
    assert packed.spec.rotation == group
    assert torch.equal(packed.parts["codes"], codes) and torch.equal(packed.parts["scale"], params.scale)
    written = packed.spec.scheme.codec.write("proj.weight", packed)
    said = json.loads(bytes(written["proj.comfy_quant"].tolist()))
    assert list(said.items()) == [("format", "int8_tensorwise"), *options.items()]


@pytest.mark.parametrize("name", ["int8_row", "int8_tensor"])
@pytest.mark.parametrize("rows", [1, 700])
def test_plain_int8_is_that_of_comfy_kitchen(name: str, rows: int) -> None:
    weight = torch.randn(rows, 512, generator=torch.Generator().manual_seed(3))
    packed = backends.of_scheme(name).encode(weight, backends.parse(name))
    codes, params = TensorWiseINT8Layout.quantize(weight, per_channel=name == "int8_row")
    assert torch.equal(packed.parts["codes"], codes) and torch.equal(packed.parts["scale"], params.scale)


def _rotated(
    folder: Path,
    line: Any = None,
    listed: Any = None,
    scale: Callable[[Tensor], Tensor] = lambda scale: scale,
    prefix: str = "",
) -> Path:
    """A file with one rotated layer (groups of 64), and what is said of it."""
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(5))
    codes, params = TensorWiseINT8Layout.quantize(weight, per_channel=True, convrot=True, convrot_groupsize=64)
    tensors = {f"{prefix}proj.weight": codes, f"{prefix}proj.weight_scale": scale(params.scale)}
    if line is not None:
        tensors[f"{prefix}proj.comfy_quant"] = _line(line)
    metadata = None if listed is None else {"_quantization_metadata": json.dumps({"layers": {"proj": listed}})}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata)
    return folder / "model.safetensors"


TURNED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize(
    ("line", "listed"),
    [
        (TURNED, None), (None, TURNED), (TURNED, TURNED),
        ({"convrot": True, "convrot_groupsize": 64, "per_row": True}, None),  # INT8-Fast, comfy-quants
        ({"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 64}}, None),
        (None, {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 64}}),
    ],
)  # fmt: skip
def test_spellings(line: Any, listed: Any, prefix: str, tmp_path: Path) -> None:
    path = _rotated(tmp_path, line, listed, prefix=prefix)
    seen = sdquant.verify(path)
    assert (seen.quant, seen.backend, seen.warnings) == ("int8_convrot", "comfy", [])
    assert any("rotated in groups of 64" in line for line in seen.evidence)
    (name,) = single_file(path).prequantized
    assert name == f"{prefix}proj.weight" and _read(path).spec.rotation == 64


@pytest.mark.parametrize("listed", ["", "model.diffusion_model.", "diffusion_model."])
@pytest.mark.parametrize("named", ["", "model.diffusion_model."])
def test_prefixes_of_what_is_listed(named: str, listed: str, tmp_path: Path) -> None:
    """ComfyUI looks the layers up before it takes the prefix off the names, and after."""
    path = _rotated(tmp_path, prefix=named)
    rows = {"layers": {f"{listed}proj": TURNED}}
    save_file(load_file(path), path, {"_quantization_metadata": json.dumps(rows)})
    assert sdquant.verify(path).quant == "int8_convrot" and _read(path).spec.rotation == 64


@pytest.mark.parametrize("scale", [lambda s: s, lambda s: s.flatten(), lambda s: s.bfloat16()])
def test_shapes_of_scales(scale: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    packed = _read(_rotated(tmp_path, TURNED, scale=scale))
    assert forms(packed)["scale"] == ("float32", (6, 1))


@pytest.mark.parametrize("scale", [lambda s: s[0, 0], lambda s: s[0]])
def test_one_scale_for_a_rotated_weight(scale: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """Legal, if poor."""
    path = _rotated(tmp_path, TURNED, scale=scale)
    packed, file = _read(path), load_file(path)
    assert forms(packed)["scale"] == ("float32", ()) and packed.spec.rotation == 64
    params = TensorWiseINT8Layout.Params(
        scale=file["proj.weight_scale"].reshape(()), orig_dtype=torch.float32, orig_shape=(6, 128), convrot=True,
        convrot_groupsize=64,
    )  # fmt: skip
    theirs = TensorWiseINT8Layout.dequantize(file["proj.weight"], params)
    assert torch.allclose(backends.get("comfy").decode(packed, torch.float32), theirs, rtol=0, atol=1e-6)


def test_one_scale_is_of_the_rotated_weight() -> None:
    """No file has such a weight but one of sdquant's own that is written by hand: its details may say anything."""
    spec = PackedSpec(scheme=registry.scheme("int8_tensor"), shape=(6, 128), dtype="float32", details={"rotation": 64})
    weight = hadamard.rotate_by_matrix(torch.eye(128)[:6], 64)  # all alike, before
    again = backends.get("comfy").encode_as(weight, spec)
    assert again is not None and not again.parts["scale"].shape
    assert (backends.get("comfy").decode(again, torch.float32) - weight).norm() < 0.01 * weight.norm()


@pytest.mark.parametrize(
    ("line", "listed", "rotation"),
    [
        (TURNED, {"format": "int8_tensorwise"}, 64), ({"format": "int8_tensorwise"}, TURNED, 0),
        (TURNED, {**TURNED, "convrot_groupsize": 16}, 64),
    ],
)  # fmt: skip
def test_a_metadata_that_says_something_else(line: Any, listed: Any, rotation: int, tmp_path: Path) -> None:
    """convert_to_quant forgets the rotation there: the tensor is right, and a warning says so."""
    path = _rotated(tmp_path, line, listed)
    for seen in (sdquant.detect(path), sdquant.verify(path)):
        (warning,) = seen.warnings
        assert "'proj.weight'" in warning and "The tensors are right" in warning
    assert _read(path).spec.rotation == rotation


@pytest.mark.parametrize("group", [3, 128, 256, 0, -4, 1.5, "64", None, [64], True])
@pytest.mark.parametrize("where", ["line", "listed"])
def test_a_rotation_that_cannot_be(group: Any, where: str, tmp_path: Path) -> None:
    path = _rotated(tmp_path, **{where: {**TURNED, "convrot_groupsize": group}})
    with pytest.raises(BadFileError, match="powers of 4"):
        sdquant.verify(path)


@pytest.mark.parametrize("row", [{**TURNED, "convrot": 1}, {**TURNED, "convrot": "yes"}])
def test_a_flag_that_is_none(row: Any, tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match="neither true nor false"):
        sdquant.detect(_rotated(tmp_path, row))


def test_without_a_marker_nothing_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFileError, match=r"int8 as it is, or rotated, ConvRot"):
        sdquant.detect(_rotated(tmp_path))


@pytest.mark.parametrize("kind", ["comfy int8", "comfy convrot"])
def test_a_file_of_comfy_kitchen_draws_what_its_own_weights_draw(
    kind: str, foreign: Callable[[str], Path], flux: Path, tmp_path: Path
) -> None:
    path = foreign(kind)
    pipe = sdquant.load_model(path, base=flux, dtype="float32", progress=False)
    mine = dict(quantized(pipe.transformer))
    assert pipe.sdquant.plan.warnings == () and len(mine) > 20
    tensors = load_file(path)
    floats = {key: tensor.float() for key, tensor in tensors.items() if tensor.dtype.is_floating_point}
    for key, line in tensors.items():
        if not key.endswith("comfy_quant"):
            continue
        said, name = json.loads(bytes(line.tolist())), key.replace("comfy_quant", "weight")
        options = {option: value for option, value in said.items() if option != "format"}
        scale = floats.pop(f"{name}_scale")
        params = TensorWiseINT8Layout.Params(
            scale=scale, orig_dtype=torch.float32, orig_shape=tuple(tensors[name].shape), **options
        )
        floats[name] = TensorWiseINT8Layout.dequantize(tensors[name], params)
    save_file(floats, tmp_path / "floats.safetensors")
    theirs = images(sdquant.load_model(tmp_path / "floats.safetensors", base=flux, dtype="float32", progress=False), 1)
    assert np.abs(images(pipe, 1).astype(int) - theirs).max() <= 1

    # Saved, and loaded again, it is the same; so it is in every way of offloading.
    sdquant.save(pipe, tmp_path / "saved")
    expected = images(pipe, 1)
    again = sdquant.load_model(tmp_path / "saved", dtype="float32", progress=False)
    assert {name: packed.spec for name, packed in quantized(again.transformer)} == {n: p.spec for n, p in mine.items()}
    assert np.array_equal(images(again, 1), expected)


@pytest.mark.parametrize("mode", ["model", "sequential", "group", "balanced"])
def test_offloaded(mode: str, foreign: Callable[[str], Path], flux: Path) -> None:
    values: dict[str, Any] = {"base": flux, "dtype": "float32", "progress": False}
    expected = images(sdquant.load_model(foreign("comfy convrot"), **values), 1)
    pipe = sdquant.load_model(foreign("comfy convrot"), offload=mode, **values)
    assert np.array_equal(images(pipe, 1), expected)


def test_in_eight_bits(foreign: Callable[[str], Path], flux: Path) -> None:
    """`compute="int8"` multiplies the codes with the rotated activations: it is as good as the exact product."""
    values: dict[str, Any] = {"base": flux, "dtype": "float32", "progress": False}
    exact = images(sdquant.load_model(foreign("comfy convrot"), **values), 1)
    eight = images(sdquant.load_model(foreign("comfy convrot"), compute="int8", **values), 1)
    assert not np.array_equal(eight, exact)
    assert ((eight.astype(float) - exact) ** 2).mean() < 4  # of 255 squared


def test_outliers_cost_nothing() -> None:
    """The point of the rotation: 8-bit products of heavy-tailed numbers."""
    generator = torch.Generator().manual_seed(7)
    weight, x = torch.randn(256, 1024, generator=generator), torch.randn(256, 1024, generator=generator)
    x[:, ::199] *= 20
    exact, noise = x @ weight.T, {}
    for name in ("int8_row", "int8_convrot"):
        floats = nn.Linear(1024, 256, bias=False)
        layer = quantized_layer(floats, backends.of_scheme(name).encode(weight, backends.parse(name)))
        set_compute(layer, "int8")
        with torch.no_grad():
            noise[name] = ((layer(x) - exact).norm() / exact.norm()).item()
    assert noise["int8_convrot"] < noise["int8_row"] / 3


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ({"format": "float8_e4m3fn", "convrot": True}, "rotated, which that format is not"),
        ({"format": "nvfp4", "convrot": True, "convrot_groupsize": 16}, "rotated, which that format is not"),
    ],
)
def test_a_rotation_that_the_format_does_not_have(line: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFileError, match=match):
        sdquant.detect(_rotated(tmp_path, line))


def test_two_rows_for_one_layer(tmp_path: Path) -> None:
    path = _rotated(tmp_path, None, TURNED, prefix="model.diffusion_model.")
    tensors = load_file(path)
    table = {"layers": {"proj": TURNED, "model.diffusion_model.proj": {"format": "int8_tensorwise"}}}
    save_file(tensors, path, {"_quantization_metadata": json.dumps(table)})
    with pytest.raises(BadFileError, match="two different things"):
        sdquant.detect(path)


@pytest.mark.parametrize("word", ["pre_quant_scale", "smooth_factor", "proj_down", "weight_scale_2"])
def test_tensors_that_change_the_weight_are_not_ignored(word: str, tmp_path: Path) -> None:
    path = _rotated(tmp_path, TURNED)
    save_file({**load_file(path), f"proj.{word}": torch.ones(128)}, path)
    with pytest.raises(UnsupportedFileError, match=word):
        sdquant.detect(path)


def test_a_weight_without_dimensions(tmp_path: Path) -> None:
    tensors = {"proj.weight": torch.tensor(1, dtype=torch.int8), "proj.weight_scale": torch.ones(1)}
    path = tmp_path / "model.safetensors"
    save_file({**tensors, "proj.comfy_quant": _line({"format": "int8_tensorwise"})}, path)
    with pytest.raises(BadFileError):
        sdquant.verify(path)


def _blocks(metadata: bool, folder: Path, **changes: Any) -> tuple[Path, Tensor]:
    """convert_to_quant's `int8_blockwise`, and the weight that it stands for: float32 [64, 96]."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(5)).view(2, 32, 3, 32)
    scale = weight.abs().amax((1, 3)) / 127
    codes = (weight / scale[:, None, :, None]).round()
    file = {
        "proj.weight": codes.to(torch.int8).view(64, 96), "proj.weight_scale": scale,
        "proj.input_scale": torch.tensor(1.0),
    }  # fmt: skip
    said = {"format": "int8_blockwise", "orig_dtype": "torch.bfloat16", "group_size": 32, **changes.pop("said", {})}
    file |= {} if metadata else {"proj.comfy_quant": _line(said)}
    file = {name: tensor for name, tensor in {**file, **changes}.items() if tensor is not None}
    table = {"_quantization_metadata": json.dumps({"layers": {"proj": said}})} if metadata else None
    save_file(file, folder / "model.safetensors", table)
    return folder / "model.safetensors", (codes * scale[:, None, :, None]).view(64, 96)


@pytest.mark.parametrize("metadata", [False, True])
def test_scales_of_blocks(metadata: bool, tmp_path: Path) -> None:
    path, weight = _blocks(metadata, tmp_path)
    seen = sdquant.verify(path)
    assert (seen.quant, seen.backend, seen.warnings) == ("hub-int8", "hub", [])
    assert any("ComfyUI's int8_blockwise" in line for line in seen.evidence)
    assert torch.equal(dict(sdquant.dequantize(path))["proj.weight"], weight)
    (found,) = single_file(path).prequantized.values()
    packed = _read(path, (64, 96))
    assert found.nbytes == sum(part.nbytes for part in packed.parts.values())
    layer, x = quantized_layer(nn.Linear(96, 64, bias=False), packed, torch.float32), torch.randn(5, 96)
    assert torch.allclose(layer(x), x @ weight.T, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"proj.weight_scale": None}, r"no 'proj\.weight_scale'"),
        ({"proj.weight_scale": torch.ones(3, 3)}, "64 rows of 3 groups"),
        ({"proj.weight_scale": torch.ones(2, 4)}, "64 rows of 3 groups"),
        ({"proj.weight_scale": torch.full((2, 3), torch.nan)}, "not a number|NaN"),
        ({"said": {"group_size": 36}}, "does not divide"), ({"said": {"group_size": "32"}}, "does not divide"),
        ({"said": {"group_size": 128}}, "does not divide"), ({"proj.weight": torch.ones(96).to(torch.int8)}, "matrix"),
    ],
)  # fmt: skip
def test_damaged_scales_of_blocks(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=word):
        sdquant.verify(_blocks(False, tmp_path, **changes)[0])


@pytest.mark.parametrize("kind", ["int8_tensorwise", "nvfp4", "asym_w4a8_int8"])
def test_experts_in_one_tensor(kind: str, tmp_path: Path) -> None:
    """ComfyUI has such tensors of mixtures; a file that is sound is not called damaged."""
    codes = torch.ones(4, 32, 64, dtype=torch.uint8 if kind == "nvfp4" else torch.int8)
    tensors = {"proj.weight": codes, "proj.weight_scale": torch.ones(4, 32, 1)}
    save_file({**tensors, "proj.comfy_quant": _line({"format": kind, "num_experts": 4})}, tmp_path / "x.safetensors")
    for ask in (sdquant.detect, sdquant.verify, sdquant.dequantize):
        with pytest.raises(UnsupportedFileError, match="the weights of 4 experts in one tensor"):
            ask(tmp_path / "x.safetensors")  # type: ignore[operator]
