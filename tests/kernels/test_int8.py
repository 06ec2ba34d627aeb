"""Products in 8-bit integers: against exact integer arithmetic in numpy, for every scheme."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdquant import backends
from sdquant.core.backend import Geometry, Packed, Unfit
from sdquant.kernels import base, int8_linear, int8_reference, int_matmul
from sdquant.kernels.cpu import int8 as native
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import set_compute

from .instructions import others, use
from .test_packed_layout import SPECS

if TYPE_CHECKING:
    from sdquant.nn.quantized_layers import QuantizedLayer

GGUF = ("q8_0", "q4_0", "q4_k", "q6_k", "f16")
BYTES_BY_ROW = (
    "bnb-int8", "qint8", "int8", "int8_sym", "sdnq-int8",
    "rules,weight_qtype=int8", "rules,weight_calibration_method=minmax",
)  # fmt: skip
Array = npt.NDArray[Any]


ANY = int8_linear.Least(rows=1, again=1, channels=1, columns=1)
NATIVE = native.sizes(64) is not None


@pytest.fixture(
    autouse=True,
    params=[
        "torch",
        "steps in c",
        pytest.param("c", marks=pytest.mark.skipif(not NATIVE, reason="no C")),
        *[f"c with {name}" for name in others("avx512bf16", "avx2")],
    ],
)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each test by torch and by the C kernels; integers at any size, so that small tensors tell."""
    monkeypatch.setattr(int8_linear, "BY_C", ANY)
    monkeypatch.setattr(int8_linear, "BY_AMX", ANY)
    monkeypatch.setattr(int8_linear, "BY_AVX2", ANY)
    monkeypatch.setattr(int8_linear, "BY_TORCH", replace(ANY))
    monkeypatch.setattr(int_matmul, "fast", lambda device: True)  # which torch's own product is with VNNI alone
    name = str(request.param)
    if name == "torch":
        monkeypatch.setattr(int8_reference, "extension", lambda: None)
    if not name.startswith("c"):
        monkeypatch.setattr(native, "sizes", lambda columns: None)
        yield name
        return
    assert use(name.removeprefix("c").removeprefix(" with "))
    yield "c"
    use("")


def codes(x: Array) -> tuple[Array, Array]:
    """[m, k] -> int64 codes, float32 scales [m, 1], by the formulas of the module."""
    largest = np.abs(x.astype(np.float32)).max(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        made = np.where(largest > 0, np.rint(x.astype(np.float32) * (np.float32(127) / largest)), 0)
    return made.astype(np.int64), largest / np.float32(127)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The formula of the module for a weight [n, k] whose rows are quantized; in x's dtype."""
    a, a_scale = codes(x.float().numpy())
    b, b_scale = codes(weight.float().numpy())
    y = (a @ b.T).astype(np.float32) * a_scale * b_scale.T
    return torch.from_numpy(y if bias is None else y + bias.float().numpy()).to(x.dtype)


def layer_in(text: str, module: nn.Module) -> QuantizedLayer | None:
    """A layer in a scheme, in integers; None where the scheme cannot hold the weight."""
    spec = backends.parse(text)
    weight: Any = module.weight
    try:
        packed = backends.get(spec.scheme.backend).encode(weight.data, spec)
    except Unfit:
        return None
    layer = quantized_layer(module, packed).eval()
    set_compute(layer, "int8")
    return layer


def decibels(got: Tensor, wanted: Tensor) -> float:
    error = (got.double() - wanted.double()).square().sum()
    return float(10 * torch.log10(wanted.double().square().sum() / error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_quantized_by_the_formula(dtype: torch.dtype) -> None:
    x = torch.randn(9, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] = 0
    x[4] *= 1000
    x[5, ::2] = 0.5  # ties, where the largest is 127 / 2
    x[5, 0] = 63.5
    made, scale = int8_reference.quantized_rows(x)
    wanted, scales = codes(x.float().numpy())
    assert made.dtype == torch.int8 and np.array_equal(made.numpy(), wanted)
    assert np.array_equal(scale.numpy(), scales)
    assert made[3].abs().max() == 0 and scale[3] == 0


def test_rows_that_are_not_finite_stay_so() -> None:
    x = torch.ones(3, 64)
    x[0, 5], x[1, 6] = torch.nan, torch.inf
    _, scale = int8_reference.quantized_rows(x)
    assert scale.isfinite().view(-1).tolist() == [False, False, True]
    layer = layer_in("int8_sym", nn.Linear(64, 8))
    assert layer is not None
    with torch.no_grad():
        assert layer(x).isfinite().all(1).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", [*SPECS, *GGUF])
def test_a_linear_is_the_exact_product_of_codes(text: str, dtype: torch.dtype) -> None:
    """Weights that are bytes by row are not quantized again; their codes are multiplied as they are."""
    torch.manual_seed(1)
    module = nn.Linear(256, 48).to(dtype)
    layer = layer_in(text, module)
    assert layer is not None
    x = torch.randn(2, 19, 256).to(dtype)
    with torch.no_grad():
        got = layer(x)
    assert got.dtype == dtype and got.shape == (2, 19, 48)
    flat = x.view(-1, 256)
    if text in BYTES_BY_ROW:
        a, a_scale = codes(flat.float().numpy())
        parts = {name: part.numpy().astype(np.int64) for name, part in layer.packed.parts.items() if name != "scale"}
        assert int8_reference.direct(layer.spec.scheme.codec.form(layer.packed))
        # The scale of a row, from the decoded weight: (code - zero) * scale, rounded to what the backend computes in.
        weight = layer.dequantize(torch.float32).double().numpy()
        raw = next(part for part in parts.values() if part.size == 48 * 256).reshape(48, 256)
        zero = parts["zero_point"].reshape(-1, 1) if "zero_point" in parts else 0
        shifted = raw - zero
        scale = (weight * shifted).sum(1) / (shifted * shifted).sum(1)  # least squares
        assert np.abs(weight - shifted * scale[:, None]).max() <= 2**-8 * np.abs(weight).max()
        y = (a @ shifted.T) * a_scale.astype(np.float64) * scale
        wanted = torch.from_numpy(y + module.bias.detach().double().numpy())
        assert decibels(got.view(-1, 48), wanted) > {torch.float32: 60, torch.bfloat16: 48, torch.float16: 60}[dtype]
    else:
        wanted = product(flat, layer.dequantize(torch.float32), module.bias.detach())
        assert torch.equal(got.view(-1, 48), wanted)
    exact = F.linear(x.float(), layer.dequantize(torch.float32), module.bias.detach().float())
    assert decibels(got, exact) > 33


def by_runs(x: Tensor, weight: Array, scale: Array, bias: Tensor) -> Tensor:
    """The formula of the module for codes [n, runs, columns] and scales [n, runs] of a weight; in x's dtype."""
    a, a_scale = codes(x.float().numpy())
    each = weight.shape[2]
    total = np.zeros((len(a), len(weight)), np.float32)
    for run in range(weight.shape[1]):
        sums = a[:, run * each : (run + 1) * each] @ weight[:, run].astype(np.int64).T
        total += sums.astype(np.float32) * scale[:, run]
    return torch.from_numpy(total * a_scale + bias.float().numpy()).to(x.dtype)


def both_in_runs(x: Tensor, weight: Array, scale: Array, bias: Tensor) -> Tensor:
    """The same where activations have a scale for each run, too."""
    runs, each = weight.shape[1:]
    a, a_scale = codes(x.float().numpy().reshape(-1, each))
    a, a_scale = a.reshape(len(x), runs, each), a_scale.reshape(len(x), runs, 1)
    total = np.zeros((len(x), len(weight)), np.float32)
    for run in range(runs):
        sums = a[:, run] @ weight[:, run].astype(np.int64).T
        total += sums.astype(np.float32) * a_scale[:, run] * scale[:, run]
    return torch.from_numpy(total + bias.float().numpy()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_with_several_scales_in_a_row_are_taken_as_they_are(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module = nn.Linear(768, 50).to(dtype)
    module.weight.data.normal_()
    layer = layer_in("sdnq-int8", module)
    assert layer is not None and layer.packed.parts["scale"].numel() == 50 * 3
    assert int8_reference.coding(layer.packed, layer._form) is base.Coding.BY_RUN
    x = torch.randn(37, 768).to(dtype)
    bias = module.bias.detach()
    got = int8_linear.linear(layer._backend, layer.packed, layer._form, x, bias)
    parts = layer.packed.parts
    scale = parts["scale"].float().numpy().reshape(50, 3)
    assert torch.equal(got, by_runs(x, parts["weight"].numpy().reshape(50, 3, 256), scale, bias))
    exact = F.linear(x.float(), layer.dequantize(torch.float32), bias.float())
    by_row = product(x, layer.dequantize(torch.float32), bias)
    assert decibels(got, exact) > decibels(by_row, exact) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fine_weights_are_quantized_again_by_run(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By row, 8 bits would cost as much as the format does. So on a card, where activations have a scale for a row."""
    monkeypatch.setattr(int8_reference, "_BOTH", ())
    torch.manual_seed(1)
    module = nn.Linear(768, 50).to(dtype)
    module.weight.data.normal_()
    layer = layer_in("q8_0", module)
    assert layer is not None
    x = torch.randn(37, 768).to(dtype)
    bias = module.bias.detach()
    got = int8_linear.linear(layer._backend, layer.packed, layer._form, x, bias)
    weight, scale = codes(layer.dequantize(torch.float32).numpy().reshape(-1, 256))
    assert torch.equal(got, by_runs(x, weight.reshape(50, 3, 256), scale.reshape(50, 3), bias))
    exact = F.linear(x.float(), layer.dequantize(torch.float32), bias.float())
    assert decibels(got, exact) > decibels(product(x, layer.dequantize(torch.float32), bias), exact) + 0.3


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("mxfp8", torch.float32), ("mxfp8", torch.bfloat16), ("mxfp8", torch.float16), ("fp8", torch.bfloat16),
     ("q6_k", torch.bfloat16), ("q8_0", torch.bfloat16)],
)  # fmt: skip
def test_activations_of_fine_formats_are_in_runs_too(text: str, dtype: torch.dtype, by: str) -> None:
    """With one scale for a row, a channel of outliers costs 6 to 9 dB."""
    torch.manual_seed(1)
    module = nn.Linear(768, 50).to(dtype)
    module.weight.data.normal_()
    layer = layer_in(text, module)
    assert layer is not None
    x = torch.randn(37, 768).to(dtype)
    x[:, 5] *= 20
    bias = module.bias.detach()
    got = int8_linear.linear(layer._backend, layer.packed, layer._form, x, bias)
    weight, scale = codes(layer.dequantize(torch.float32).numpy().reshape(-1, 256))
    assert torch.equal(got, both_in_runs(x, weight.reshape(50, 3, 256), scale.reshape(50, 3), bias))
    exact = F.linear(x.float(), layer.dequantize(torch.float32), bias.float())
    assert decibels(got, exact) > decibels(product(x, layer.dequantize(torch.float32), bias), exact) + 3
    with torch.no_grad():
        for _ in range(2 if by == "c" else 0):  # by what is bound to it
            assert torch.equal(got, layer(x))
    for row in (0, 36):  # what is not finite stays in its row
        x[row, 300] = torch.nan
        found = int8_linear.linear(layer._backend, layer.packed, layer._form, x, bias)
        assert found[row].isnan().all() and torch.equal(found[1:36], got[1:36])


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (1, 3)], ids=str)
def test_convolutions_with_several_scales_in_a_row(size: tuple[int, int], by: str) -> None:
    """Each position of the kernel has scales of its own, and sums in the order of its activations in memory."""
    torch.manual_seed(2)
    module = nn.Conv2d(512, 40, size)
    layer = layer_in("sdnq-int8", module)
    taps = size[0] * size[1]
    assert layer is not None and layer.packed.parts["scale"].numel() == 40 * 2 * taps and layer._form is not None
    assert int8_linear._by_c(layer._backend, layer.packed, layer._form, torch.float32) == (by == "c")
    image = torch.randn(2, 512, 6, 7)
    how = Geometry(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)
    bias = module.bias.detach()  # type: ignore[union-attr]
    got = int8_linear.convolve(layer._backend, layer.packed, layer._form, image, bias, how)
    seen = F.unfold(image, size).view(2, 512, taps, -1).permute(0, 3, 2, 1).reshape(-1, taps * 512)  # by tap
    parts = layer.packed.parts
    weight = parts["weight"].view(40, 2, 256, taps).permute(0, 3, 1, 2).reshape(40, 2 * taps, 256).numpy()
    scale = parts["scale"].view(40, 2, taps).permute(0, 2, 1).reshape(40, 2 * taps).float().numpy()
    wanted = by_runs(seen, weight, scale, bias)
    assert torch.equal(got, wanted.view(2, -1, 40).transpose(1, 2).reshape(got.shape))


def test_scales_of_fewer_columns_than_a_run_are_not_taken() -> None:
    """What the kernels multiply at a time has one scale; other weights are quantized again."""
    row, again, run = base.Coding.BY_ROW, base.Coding.AGAIN, base.Coding.BY_RUN
    sdnq = ((512, run), (256, row), (1600, run), (960, again))
    q8_0 = ((512, again | run | base.Coding.BOTH), (256, again), (320, again))
    mxfp8 = ((512, again | run | base.Coding.BOTH), (256, again), (320, again))
    for text, cases in (("sdnq-int8", sdnq), ("q8_0", q8_0), ("mxfp8", mxfp8)):
        for columns, coding in cases:
            layer = layer_in(text, nn.Linear(columns, 8))
            assert layer is not None
            assert int8_reference.coding(layer.packed, layer._form) == coding, (text, columns)
    for text, channels in (("sdnq-int8", 96), ("q8_0", 512)):
        conv = layer_in(text, nn.Conv2d(channels, 64, 3))
        if conv is not None:  # blocks of q8_0 need 32 columns of a kernel
            assert int8_reference.coding(conv.packed, conv._form) is again


def test_by_torch_several_scales_in_a_row_do_not_pay(by: str) -> None:
    layer = layer_in("sdnq-int8", nn.Linear(512, 64))
    assert layer is not None
    assert int8_linear.pays(layer.packed, layer._form, torch.empty(100, 512), 100) == (by == "c")


@pytest.mark.parametrize("text", ["int8", "int8_sym", "qint8", "nf4", "q4_0"])
@pytest.mark.parametrize(
    ("kind", "shape", "more"),
    [
        (nn.Conv2d, (2, 32, 9, 7), {"kernel_size": 3, "padding": 1}),
        (nn.Conv2d, (1, 32, 8, 8), {"kernel_size": 3, "padding": 1, "stride": 2}),
        (nn.Conv2d, (1, 32, 9, 9), {"kernel_size": (3, 1), "dilation": 2, "padding": (2, 1)}),
        (nn.Conv2d, (2, 32, 4, 5), {"kernel_size": 1}),
        (nn.Conv1d, (2, 32, 11), {"kernel_size": 3, "padding": 1}),
        (nn.Conv3d, (1, 32, 3, 4, 5), {"kernel_size": (3, 3, 3), "padding": 1}),
        (nn.Conv2d, (1, 32, 8, 8), {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}),
    ],
)
def test_a_convolution_is_the_product_with_its_patches(
    text: str, kind: Any, shape: tuple[int, ...], more: dict[str, Any]
) -> None:
    torch.manual_seed(2)
    module = kind(32, 40, **more)
    layer = layer_in(text, module)
    if layer is None:
        pytest.skip("the scheme cannot hold this kernel")
    x = torch.randn(shape)
    with torch.no_grad():
        got = layer(x)
        set_compute(layer, None)
        exact = layer(x)
    assert got.shape == exact.shape and got.is_contiguous()
    assert 28 < decibels(got, exact) < 60
    if kind is nn.Conv2d and not int8_reference.direct(layer._form) and "padding_mode" not in more:
        # numpy's way: torch's own unfolding of patches, quantized one by one.
        how = {name: getattr(module, name) for name in ("dilation", "padding", "stride")}
        patches = F.unfold(x, module.kernel_size, **how).transpose(1, 2)
        weight = layer.dequantize(torch.float32).view(40, -1)
        wanted = product(patches.reshape(-1, weight.shape[1]), weight, module.bias.detach())
        assert torch.equal(got, wanted.view(len(x), -1, 40).transpose(1, 2).reshape(got.shape))


def test_large_weights_go_in_tiles_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    module, x = nn.Linear(64, 300), torch.randn(33, 64)
    for text in ("int8", "int8_sym", "nf4", "q8_0"):
        layer = layer_in(text, module)
        assert layer is not None
        with torch.no_grad():
            whole = layer(x)
            with monkeypatch.context() as patched:
                patched.setattr(int8_linear, "_TILE", 1 << 10)
                assert len(list(int8_linear._tiles(layer._backend, layer.packed, 33, 1 << 10))) == 3
                assert torch.equal(layer(x), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", ["int8", "int8_sym", "nf4", "qint4", "qint3", "sdnq-uint4", "sdnq-int8", "q8_0"])
def test_c_and_torch_are_the_same_bits(text: str, dtype: torch.dtype, by: str) -> None:
    """At sizes that leave rests of panels, groups and vectors, at whole ones, and of more than one block."""
    if by != "c":
        pytest.skip("the other case compares the two")
    torch.manual_seed(7)
    rests = (((70, 512), (1, 5, 13, 77, 3000)), ((33, 768), (29,)), ((48, 96), (40,)))
    # Rows that are multiplied as they lie in the weight, in one go and in several; and rows too far apart for it.
    whole = (((64, 640), (16, 33, 4000)), ((96, 1088), (1, 77, 2500)), ((64, 2048), (50,)), ((32, 768), (17,)))
    large = (((2048, 64), (4100,)),)  # results that do not fit the second cache
    for (n, k), counts in (*rests, *whole, *large):
        layer = layer_in(text, nn.Linear(k, n, dtype=dtype))
        if layer is None:
            continue
        assert layer._form is not None and int8_linear._by_c(layer._backend, layer.packed, layer._form, dtype)
        for m in counts:
            x = torch.randn(m, k).to(dtype)
            wanted = int8_linear.by_steps(layer._backend, layer.packed, x, layer.bias.detach(), int8_reference.Steps)
            with torch.no_grad():
                assert torch.equal(layer(x), wanted), (n, k, m)
    conv = layer_in(text, nn.Conv2d(64, 40, 3, padding=1, dtype=dtype))
    assert conv is not None and conv._form is not None
    assert int8_linear._by_c(conv._backend, conv.packed, conv._form, dtype)
    for image in (torch.randn(2, 64, 13, 17), torch.randn(1, 64, 40, 40), torch.randn(3, 64, 4, 4)):
        image = image.to(dtype)
        how = Geometry(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
        wanted = int8_linear.convolve_by_steps(
            conv._backend, conv.packed, image, conv.bias.detach(), how, int8_reference.Steps
        )
        with torch.no_grad():
            assert torch.equal(conv(image), wanted)
            last = conv(image.contiguous(memory_format=torch.channels_last))
        assert torch.equal(last, wanted) and last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("text", ["int8", "int8_sym", "sdnq-int8"])
def test_weights_that_begin_inside_a_line(text: str, by: str) -> None:
    """As in files of others, from which weights are mapped."""
    if by != "c":
        pytest.skip("it is about the C kernels")
    torch.manual_seed(9)
    layer, x = layer_in(text, nn.Linear(1600, 64)), torch.randn(50, 1600)
    assert layer is not None
    with torch.no_grad():
        wanted = layer(x)
        name, codes = max(layer.packed.parts.items(), key=lambda part: part[1].numel())
        for off in (1, 8, 63, 64):
            memory = torch.empty(codes.numel() + 128, dtype=codes.dtype)
            at = (off - memory.data_ptr()) % 64
            moved = memory[at : at + codes.numel()].view(codes.shape).copy_(codes)
            parts = {**layer.packed.parts, name: moved}
            coding = int8_reference.coding(layer.packed, layer._form)
            got = native.linear(layer._form, parts, coding, x, layer.bias.detach())  # type: ignore[arg-type]
            assert torch.equal(got, wanted)


def test_threads_share_the_work(by: str) -> None:
    if by != "c":
        pytest.skip("it is about the C kernels")
    torch.manual_seed(8)
    linear, conv = layer_in("int8", nn.Linear(512, 200)), layer_in("nf4", nn.Conv2d(64, 128, 3, padding=1))
    before = torch.get_num_threads()
    for layer, x in (
        (linear, torch.randn(70, 512)),
        (linear, torch.randn(3000, 512)),
        (conv, torch.randn(1, 64, 50, 50)),
    ):
        assert layer is not None
        try:
            found = []
            for count in (1, 3):
                torch.set_num_threads(count)
                with torch.no_grad():
                    found.append(layer(x))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(*found)


def test_a_kernel_that_is_wrong_is_left_out(
    by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if by != "c":
        pytest.skip("it is about the C kernels")
    layer = layer_in("int8_sym", nn.Linear(64, 48))
    assert layer is not None
    x = torch.randn(20, 64)
    wanted = int8_linear.by_steps(layer._backend, layer.packed, x, layer.bias.detach(), int8_reference.Steps)
    real = native.linear
    monkeypatch.setattr(int8_linear, "_verdicts", {})
    monkeypatch.setattr(native, "linear", lambda *args: real(*args) * 1.01)  # a processor that multiplies wrongly
    with torch.no_grad():
        assert torch.equal(layer(x), wanted)
    assert "their results are wrong" in caplog.text


def test_one_scale_for_all_rows() -> None:
    """As a form with a group of several rows has it."""
    scheme = backends.parse("int8_sym")
    packed = backends.get("nncf").encode(torch.randn(6, 64), scheme)
    form = backends.get("nncf").form(packed)
    assert form is not None
    for group, count in ((6 * 64, 1), (3 * 64, 2)):
        parts = {**packed.parts, "scale": torch.linspace(1, 2, count)}
        made = int8_reference.Steps(torch.device("cpu")).weight(
            backends.get("nncf"), Packed(spec=packed.spec, parts=parts), replace(form, group=group)
        )
        assert torch.equal(made.signed(), packed.parts["codes"].view(6, 64)) and made.added() == 0
        assert made.scales().tolist() == [1.0] * 6 if count == 1 else made.scales().tolist() == [1.0] * 3 + [2.0] * 3


def test_few_rows_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BY_C", "BY_AMX", "BY_AVX2", "BY_TORCH"):
        monkeypatch.setattr(int8_linear, name, int8_linear.Least(rows=32, again=64, channels=64, columns=128))
    torch.manual_seed(4)
    for text, rows in (("int8_sym", 32), ("qint4", 64)):
        layer = layer_in(text, nn.Linear(128, 32))
        assert layer is not None
        x = torch.randn(rows, 128)
        with torch.no_grad():
            exact = F.linear(x, layer.dequantize(torch.float32), layer.bias)
            assert torch.allclose(layer(x[:-1]), exact[:-1], atol=1e-5)
            assert not torch.allclose(layer(x), exact, atol=1e-5)
    for channels, inputs, quantized in ((64, 128, True), (63, 128, False), (64, 127, False)):
        conv = layer_in("int8_sym", nn.Conv2d(inputs, channels, 1))
        assert conv is not None
        with torch.no_grad():
            got = conv(torch.ones(1, inputs, 8, 8).cumsum(1).cumsum(2).cumsum(3))
            set_compute(conv, None)
            exact = conv(torch.ones(1, inputs, 8, 8).cumsum(1).cumsum(2).cumsum(3))
            assert torch.allclose(got, exact, rtol=1e-6) != quantized


@pytest.mark.parametrize("text", ["int8", "nf4"])
def test_the_gradient_is_that_of_the_float_weight(text: str) -> None:
    torch.manual_seed(5)
    linear, conv = layer_in(text, nn.Linear(64, 32)), layer_in(text, nn.Conv2d(64, 32, 1, bias=False))
    assert linear is not None and conv is not None
    for layer, x in ((linear, torch.randn(40, 64)), (conv, torch.randn(1, 64, 6, 7))):
        x.requires_grad_()
        y = layer(x)
        grad = torch.randn_like(y)
        y.backward(grad)
        found, x.grad = x.grad, None
        with torch.no_grad():
            assert torch.equal(layer(x), y)
        set_compute(layer, None)
        exact = layer(x)
        assert decibels(y.detach(), exact.detach()) < 60  # it was in integers
        exact.backward(grad)
        assert found is not None and x.grad is not None and torch.allclose(found, x.grad, atol=1e-5)


def test_a_compiled_layer_computes_the_same() -> None:
    torch.manual_seed(6)
    linear, conv = layer_in("int8", nn.Linear(64, 32)), layer_in("nf4", nn.Conv2d(32, 32, 3, padding=1))
    for layer, x in ((linear, torch.randn(40, 64)), (conv, torch.randn(1, 32, 6, 7))):
        assert layer is not None
        with torch.no_grad():
            eager = layer(x)
            torch._dynamo.reset()
            assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), eager)


def test_groups_and_other_devices_stay_exact() -> None:
    layer = layer_in("int8_sym", nn.Conv2d(64, 64, 3, padding=1, groups=2))
    same = layer_in("int8_sym", nn.Conv2d(64, 64, 3, padding="same"))
    x = torch.randn(1, 64, 8, 8)
    for one in (layer, same):
        assert one is not None
        with torch.no_grad():
            got = one(x)
            set_compute(one, "float")
            assert torch.equal(got, one(x))
    assert same is not None
    assert int8_linear.pays(same.packed, same._form, torch.empty(100, 64), 100)
    assert not int8_linear.pays(same.packed, same._form, torch.empty(100, 64, device="meta"), 100)
    assert not int8_linear.pays(same.packed, same._form, torch.empty(100, 64, dtype=torch.float64), 100)


def test_large_results_are_written_whole(by: str) -> None:
    """Of more bytes than `pages` has its own way for."""
    layer = layer_in("int8_sym", nn.Linear(64, 2048))
    assert layer is not None
    x = torch.randn(4200, 64)
    with torch.no_grad():
        got = layer(x)
    assert got.nbytes > 32 << 20 and torch.equal(got[-3:], layer(x[-3:]))
