"""comfy-kitchen's own products in sdquant's layers (`runtime="library"`): its golden outputs, bit for bit, and layers
that move, are saved and learn as plain ones. Its eager code stands here for its kernels on cards.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy_kitchen
import numpy as np
import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sdquant
from sdquant import backends, compat
from sdquant.backends import _comfy_library
from sdquant.core import Packed
from sdquant.errors import BackendUnavailableError, IncompatibleError
from sdquant.nn import quantized, quantized_layer

from ..compat.machines import machine
from ..test_load_modes import images
from .comfy_layers import GOLDEN, read, write

LAYERS = {
    "comfy_int8_convrot_g16": "output", "comfy_int8_convrot_g256": "output", "comfy_int8_rowwise": "output",
    "comfy_int8_tensorwise": "output", "comfy_asym_w4a8_g16": "output", "comfy_w6a8_g16": "output",
    "comfy_convrot_w4a4_int4": "output", "comfy_svdquant_w4a4_tilepack": "output_w4a4",
}  # fmt: skip


def _layer(packed: Packed, bias: Tensor | None, dtype: torch.dtype = torch.float32, compute: str = "library") -> Any:
    rows, columns = packed.spec.shape
    floats = nn.Linear(columns, rows, bias=bias is not None)
    if bias is not None:
        floats.bias.data = bias.to(dtype)
    return quantized_layer(floats, packed, dtype, compute).requires_grad_(False)


def _stored(layer: Any) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", LAYERS)
def test_golden_outputs(name: str) -> None:
    file = load_file(GOLDEN / f"{name}.safetensors")
    packed = read(GOLDEN / f"{name}.safetensors")
    assert packed.spec.scheme.runtimes == ("plain", "library")
    for dtype, kind in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        wanted = file.get(f"golden.{LAYERS[name]}_{kind}")
        if wanted is None:
            continue
        layer, x = _layer(packed, file["layer.bias"], dtype), file["golden.input"].to(dtype)
        for run in (layer, copy.deepcopy(layer), _stored(layer)):
            with torch.no_grad():
                for _ in range(2):
                    assert torch.equal(run(x), wanted)
                assert torch.equal(run(x[None, :, :]), wanted[None]) and run(x[:0]).shape == (
                    0,
                    len(file["layer.bias"]),
                )
        torch._dynamo.reset()
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), wanted)


@pytest.mark.parametrize(("said", "asked"), [("int8", "int8"), ("int4", "int4"), (None, "int4")])
def test_the_activations_that_a_file_asks_for(
    said: str | None, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of convrot_w4a4, whose line may have a linear_dtype. comfy-kitchen heeds it on cards alone."""
    file = load_file(GOLDEN / "comfy_convrot_w4a4_int4.safetensors")
    line = {"format": "convrot_w4a4", "convrot_groupsize": 256} | ({"linear_dtype": said} if said else {})
    file["layer.comfy_quant"] = torch.tensor(list(json.dumps(line).encode()), dtype=torch.uint8)
    save_file({key: one for key, one in file.items() if key.startswith("layer.")}, tmp_path / "layer.safetensors")
    packed, seen = read(tmp_path / "layer.safetensors"), []
    original = comfy_kitchen.convrot_w4a4_linear
    monkeypatch.setattr(
        comfy_kitchen, "convrot_w4a4_linear", lambda *a, **k: seen.append(k["linear_dtype"]) or original(*a, **k)
    )
    with torch.no_grad():
        got = _layer(packed, file["layer.bias"])(file["golden.input"].float())
    assert seen == [asked] and torch.equal(got, file["golden.output_f32"])
    written = packed.spec.scheme.codec.export("layer.weight", packed)["layer.comfy_quant"]
    again = json.loads(bytes(written.tolist()))
    assert again.get("linear_dtype") == (said if said == "int8" else None)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("exact", [True, False])
def test_a_layer_whose_activations_are_not_to_be_rounded(exact: bool, listed: bool, tmp_path: Path) -> None:
    """`full_precision_matrix_mult` in its line, as ComfyUI heeds it; what is written of it says it again."""
    file = load_file(GOLDEN / "comfy_int8_convrot_g256.safetensors")
    said = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256, "full_precision_matrix_mult": exact}
    tensors = {key.removeprefix("layer."): file[key] for key in ("layer.weight", "layer.weight_scale")}
    path = write(tmp_path, said, tensors, listed)
    assert sdquant.verify(path).warnings == []
    packed, x = read(path), file["golden.input"].float()
    with torch.no_grad():
        got, plain = _layer(packed, file["layer.bias"])(x), _layer(packed, file["layer.bias"], compute="float")(x)
    assert torch.equal(got, plain) == exact and torch.equal(got, file["golden.output_f32"]) != exact
    written = packed.spec.scheme.codec.export("proj.weight", packed)["proj.comfy_quant"]
    again = json.loads(bytes(written.tolist()))
    assert again == (said if exact else {key: value for key, value in said.items() if value is not False})


@pytest.mark.parametrize("scheme", ["int8_convrot", "int8_row", "w4a8", "w6a8", "w4a4"])
def test_activations_that_are_turned(scheme: str) -> None:
    """Rows that are not side by side, as a product or a convolution before leaves them."""
    generator = torch.Generator().manual_seed(1)
    packed = backends.of_scheme(scheme).encode(torch.randn(7, 256, generator=generator), backends.parse(scheme))
    layer, x = _layer(packed, None), torch.randn(256, 33, generator=generator).t()
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.contiguous()))


def test_awq() -> None:
    """Products with the decoded weight, as in plain layers."""
    from sdquant.core import PackedSpec

    generator = torch.Generator().manual_seed(1)
    parts = {
        "codes": torch.randint(0, 256, (24, 64), generator=generator).to(torch.uint8),
        "scale": torch.rand(24, 2, generator=generator), "zero": torch.randn(24, 2, generator=generator),
    }  # fmt: skip
    details = {"group_size": 64}
    scheme = backends.scheme("awq_w4a16")
    packed = Packed(spec=PackedSpec(scheme=scheme, shape=(24, 128), dtype="float32", details=details), parts=parts)
    x = torch.randn(5, 128, generator=generator)
    with torch.no_grad():
        mine, theirs = _layer(packed, None, compute="float")(x), _layer(packed, None)(x)
    assert (mine - theirs).norm() <= 1e-5 * mine.norm()


def _emulated(name: str, seen: list[str]) -> Callable[..., Tensor]:
    """A product of comfy-kitchen for Blackwell, of what its own eager code dequantizes."""
    if name == "scaled_mm_nvfp4":

        def nvfp4(a: Tensor, b: Tensor, fa: Tensor, fb: Tensor, sa: Tensor, sb: Tensor, **how: Any) -> Tensor:
            seen.append(name)
            left, right = (
                comfy_kitchen.dequantize_nvfp4(q, f, s, torch.float32) for q, f, s in ((a, fa, sa), (b, fb, sb))
            )
            return (left @ right.T + how["bias"]).to(how["out_dtype"])

        return nvfp4

    def mxfp8(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, **how: Any) -> Tensor:
        seen.append(name)
        left, right = (comfy_kitchen.dequantize_mxfp8(q, s, torch.float32) for q, s in ((a, sa), (b, sb)))
        return (left @ right.T + how["bias"]).to(how["out_dtype"])

    return mxfp8


@pytest.mark.parametrize(("rows", "columns", "m"), [(64, 128, 32), (40, 72, 5), (7, 200, 33)])
@pytest.mark.parametrize(("scheme", "kind"), [("comfy:nvfp4", "NVFP4"), ("mxfp8", "MXFP8")])
def test_blocks_of_small_floats(
    scheme: str, kind: str, rows: int, columns: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ComfyUI: the product of what the library makes of the activations and of the weight."""
    name = f"scaled_mm_{kind.lower()}"
    seen: list[str] = []
    generator = torch.Generator().manual_seed(1)
    weight, x, bias = (torch.randn(size, generator=generator) for size in ((rows, columns), (m, columns), (rows,)))
    packed = backends.of_scheme(scheme).encode(weight, backends.parse(scheme))
    layer, plain = _layer(packed, bias), _layer(packed, bias, compute="float")
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))  # without such a card
        monkeypatch.setattr(_comfy_library, "fast_on", lambda device: True)
        monkeypatch.setattr(comfy_kitchen, name, _emulated(name, seen))
        out = layer(x)
    left, right = (QuantizedTensor.from_float(t, f"TensorCore{kind}Layout").dequantize() for t in (x, weight))
    wanted = left @ right.T + bias
    assert seen == [name] and (out - wanted).norm() <= 1e-5 * wanted.norm()
    assert not torch.equal(out, plain(x))


def test_the_weights_are_those_of_a_plain_layer() -> None:
    """State dicts, gradients, and the weight itself."""
    packed = backends.of_scheme("int8_convrot").encode(torch.randn(64, 256), backends.parse("int8_convrot"))
    layer, plain = _layer(packed, torch.randn(64)), _layer(packed, torch.randn(64), compute="float")
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain.weight + 0, layer.weight + 0)
    x = [torch.randn(5, 256).requires_grad_() for _ in range(2)]
    x[1].data = x[0].data
    layer(x[0]).sum().backward(), plain(x[1]).sum().backward()
    assert x[0].grad is not None and x[1].grad is not None and torch.equal(x[0].grad, x[1].grad)
    with torch.no_grad():
        assert not torch.equal(layer(x[0]), plain(x[0]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x[0]).dtype == torch.bfloat16
        assert layer.bfloat16()(x[0].bfloat16()).dtype == torch.bfloat16


def test_what_the_library_cannot_is_computed_by_the_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from comfy_kitchen.exceptions import NoCapableBackendError

    def fails(*_: Any, **__: Any) -> Tensor:
        raise NoCapableBackendError("int8_linear", {"cuda": "too old"})

    monkeypatch.setattr(comfy_kitchen, "int8_linear", fails)
    packed = backends.of_scheme("int8_row").encode(torch.randn(64, 256), backends.parse("int8_row"))
    layer, plain, x = _layer(packed, None), _layer(packed, None, compute="float"), torch.randn(3, 256)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(layer(x), plain(x))
    assert caplog.text.count("too old") == 1


class TestModels:
    def test_it_draws_in_every_offload_mode_and_is_saved_as_it_is(
        self, foreign: Callable[[str], Path], flux: Path, tmp_path: Path
    ) -> None:
        values: dict[str, Any] = {"base": flux, "dtype": "float32", "progress": False}
        plain = sdquant.load_model(foreign("comfy convrot"), **values)
        pipe = sdquant.load_model(foreign("comfy convrot"), runtime="library", **values)
        (part,) = (one for one in pipe.sdquant.plan.components if one.weights)
        assert (part.runtime, part.compute) == ("library", None) and not pipe.sdquant.plan.warnings
        layers = [m for m in pipe.transformer.modules() if getattr(m, "compute", None) == "library"]
        assert len(layers) > 20
        expected, exact = images(pipe, 1), images(plain, 1)
        assert not np.array_equal(expected, exact)
        assert ((expected.astype(float) - exact) ** 2).mean() < 4  # of 255 squared
        for mode in ("model", "sequential", "group", "balanced"):
            other = sdquant.load_model(foreign("comfy convrot"), offload=mode, runtime="library", **values)
            assert np.array_equal(images(other, 1), expected), mode
        sdquant.save(pipe, tmp_path / "saved")
        again = sdquant.load_model(tmp_path / "saved", dtype="float32", runtime="library", progress=False)
        assert np.array_equal(images(again, 1), expected)
        one, two = (dict(quantized(p.transformer)) for p in (plain, again))
        assert one.keys() == two.keys()
        for name, packed in one.items():
            assert packed.spec == two[name].spec
            assert all(torch.equal(part, two[name].parts[key]) for key, part in packed.parts.items())

    def test_quantized_later_and_by_the_way(self, flux: Path) -> None:
        made = [
            sdquant.load_model(flux, {"transformer": "int8_convrot"}, mode=mode, runtime="library", progress=False)
            for mode in ("pre", "post")
        ]
        assert all(any(getattr(m, "compute", "") == "library" for m in p.transformer.modules()) for p in made)
        assert np.array_equal(*(images(pipe, 1) for pipe in made))


def test_without_the_library() -> None:
    here = machine(without=("comfy-kitchen",))
    with pytest.raises(BackendUnavailableError, match="comfy-kitchen") as caught:
        compat.check("int8_convrot", runtime="library", machine=here)
    assert "[comfy]" in caught.value.fix and 'runtime="plain"' in caught.value.fix
    compat.check("int8_convrot", machine=here)
    with pytest.raises(IncompatibleError, match="compute= does not change"):
        compat.check("int8_convrot", runtime="library", compute="int8", machine=here)
    assert compat.default_runtime(backends.scheme("int8_convrot"), "cuda:0", isa=None) == "plain"
