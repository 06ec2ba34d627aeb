"""ComfyUI's rotated formats of 4 and 6 bits (convrot_w4a4, asym_w4a8_int8): held to comfy-kitchen's own tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import AsymW4A8Int8Layout, TensorCoreConvRotW4A4Layout
from safetensors.torch import load_file
from torch import Tensor, nn

import sdquant
from sdquant import backends
from sdquant.core import packed_rows
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.nn import quantized_layer

from .comfy_layers import GOLDEN, read, write

COMFY = backends.get("comfy")
LAYERS = {"comfy_convrot_w4a4_int4": "w4a4", "comfy_asym_w4a8_g16": "w4a8", "comfy_w6a8_g16": "w6a8"}
FORMATS = {"w4a4": "convrot_w4a4", "w4a8": "asym_w4a8_int8", "w6a8": "asym_w4a8_int8"}


def _weight(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.05).to(dtype)


def _theirs(scheme: str, weight: Tensor, group: int = 64, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of comfy-kitchen, and its own dequantized weight: float32."""
    if scheme == "w4a4":
        codes, four = TensorCoreConvRotW4A4Layout.quantize(weight.float(), convrot_groupsize=group)
        return {"weight": codes, "weight_scale": four.scale}, TensorCoreConvRotW4A4Layout.dequantize(codes, four)
    bits = 6 if scheme == "w6a8" else 4
    codes, eight = AsymW4A8Int8Layout.quantize(weight.float(), convrot_groupsize=group, bits=bits, **options)
    file = {"weight": codes, "weight_s_rel": eight.scale, "weight_s_channel": eight.s_channel}
    if eight.codebook is not None:
        file["weight_codebook"] = eight.codebook
    if eight.correction is not None:
        file["weight_correction"] = eight.correction
    return file, AsymW4A8Int8Layout.dequantize(codes, eight)


def _said(scheme: str, group: int = 64, **options: Any) -> dict[str, Any]:
    return {"format": FORMATS[scheme], **options, "convrot_groupsize": group}


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Sums of the rotation are in another order."""
    return bool((one - other).norm() <= 1e-6 * other.norm())


@pytest.mark.parametrize("name", LAYERS)
def test_golden(name: str) -> None:
    packed, file = read(GOLDEN / f"{name}.safetensors"), load_file(GOLDEN / f"{name}.safetensors")
    assert packed.spec.scheme.name == LAYERS[name]
    assert _is_near(COMFY.decode(packed, torch.float32), file["golden.weight"])
    floats = nn.Linear(256, 8)
    floats.bias.data = file["layer.bias"].float()
    layer, x = quantized_layer(floats, packed, torch.float32), file["golden.input"].float()
    exact = x @ file["golden.weight"].T + floats.bias
    with torch.no_grad():
        assert (layer(x) - exact).norm() <= 1e-5 * exact.norm()
    # What the library computes with quantized activations is as near as those are.
    assert (layer(x) - file["golden.output_f32"]).norm() <= (0.3 if LAYERS[name] == "w4a4" else 0.02) * exact.norm()


@pytest.mark.parametrize(("columns", "group"), [(512, 256), (320, 64)])
@pytest.mark.parametrize("scheme", ["w4a4", "w4a8", "w6a8"])
def test_what_is_made_is_that_of_comfy_kitchen(scheme: str, columns: int, group: int) -> None:
    weight = _weight((70, columns))
    file, floats = _theirs(scheme, weight, group)
    packed = COMFY.encode(weight, backends.parse(scheme))
    written = backends.comfy.BACKEND.export("proj.weight", packed)
    assert written.keys() - {"proj.comfy_quant"} == {f"proj.{key}" for key in file}
    for key, tensor in file.items():
        assert torch.equal(written[f"proj.{key}"].view(torch.uint8), tensor.view(torch.uint8)), key
    assert _is_near(COMFY.decode(packed, torch.float32), floats)


@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("w4a4", {}), ("w4a8", {}), ("w6a8", {}), ("w4a8", {"codebook": False}), ("w4a8", {"group_size": 32}),
        ("w6a8", {"group_size": 32}), ("w4a8", {"scale_dtype": torch.float32}),
    ],
)  # fmt: skip
def test_read(scheme: str, options: dict[str, Any], metadata: bool, tmp_path: Path) -> None:
    file, floats = _theirs(scheme, _weight((24, 128)), **options)
    said = _said(scheme, **{key: value for key, value in options.items() if key == "group_size"})
    path = write(tmp_path, said, file, metadata)
    seen = sdquant.verify(path)
    assert (seen.quant, seen.backend, seen.warnings) == (scheme, "comfy", [])
    packed = read(path, (24, 128))
    assert _is_near(COMFY.decode(packed, torch.float32), floats)
    loose = COMFY.cuttable(packed)
    assert COMFY.by_row(loose) and _is_near(COMFY.decode(packed_rows.cut(loose, [(3, 9)]), torch.float32), floats[3:9])
    layer = quantized_layer(nn.Embedding(24, 128), packed, torch.float32)
    assert _is_near(layer(torch.tensor([3, 0])), floats[[3, 0]])


def _gone(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(file: dict[str, Tensor]) -> None:
        for name in names:
            del file[name]

    return change


def _set(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(file: dict[str, Tensor]) -> None:
        file[name] = make(file[name])

    return change


@pytest.mark.parametrize(
    ("scheme", "change", "options", "word"),
    [
        ("w4a4", _gone("weight_scale"), {}, r"no 'proj\.weight_scale'"),
        ("w4a8", _gone("weight_s_rel"), {}, r"no 'proj\.weight_s_rel'"),
        ("w4a8", _gone("weight_s_channel"), {}, r"no 'proj\.weight_s_channel'"),
        ("w4a4", _set("weight_scale", lambda t: t[1:]), {}, "24 rows"),
        ("w4a4", _set("weight_scale", lambda t: t * torch.nan), {}, "not a number"),
        ("w4a4", _set("weight_scale", lambda t: -t), {}, "negative"),
        ("w4a4", _set("weight", lambda t: t[0]), {}, "not a matrix"),
        ("w4a8", _set("weight", lambda t: t[:, 1:]), {}, "do not make a weight"),
        ("w6a8", _set("weight", lambda t: t[1:]), {}, "do not make a weight"),
        ("w4a8", _set("weight_s_rel", lambda t: t[:, 1:]), {}, "do not make a weight"),
        ("w4a8", _set("weight_s_rel", lambda t: t.bfloat16()), {}, "not a matrix of float8"),
        ("w4a8", _set("weight_s_channel", lambda t: t[1:]), {}, "24 rows"),
        ("w4a8", _set("weight_codebook", lambda t: t[1:]), {}, "16 values"),
        ("w4a8", _set("weight_codebook", lambda t: t * torch.inf), {}, "infinite"),
        ("w4a8", None, {"group_size": 5}, "groups have"),
        ("w4a8", None, {"group_size": "16"}, "groups have"),
        ("w4a8", None, {"group_size": 32}, "do not make a weight|powers of 4"),
        ("w4a8", None, {"group": 128}, "powers of 4"),
        ("w4a4", None, {"group": 1024}, "powers of 4"),
        ("w4a4", None, {"group": None}, "powers of 4"),
    ],
)  # fmt: skip
def test_what_is_damaged(scheme: str, change: Any, options: dict[str, Any], word: str, tmp_path: Path) -> None:
    file, _ = _theirs(scheme, _weight((24, 128)))
    if change is not None:
        change(file)
    with pytest.raises(BadFileError, match=word):
        sdquant.verify(write(tmp_path, _said(scheme, **options), file))


def test_a_correction_is_not_left_out(tmp_path: Path) -> None:
    """comfy-kitchen can make weights that are not symmetric; ComfyUI reads them without what is added to them."""
    file, _ = _theirs("w4a8", _weight((24, 128)), symmetric=False)
    with pytest.raises(UnsupportedFileError, match="weight_correction"):
        sdquant.detect(write(tmp_path, _said("w4a8"), file))
