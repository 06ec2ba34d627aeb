"""What only a card does: streams, CUDA graphs, compiled code that launches kernels, and layers of every scheme there.

    SDQUANT_TEST_DEVICE=cpu pytest -m gpu tests/kernels/test_on_card.py

goes through the same steps without a card, as far as a CPU has them.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdquant import backends, offload
from sdquant.core.code_tables import code_table, dynamic_code, e4m3_code, fourbit_code
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import set_compute

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = os.environ.get("SDQUANT_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_card = pytest.mark.skipif(DEVICE != "cuda", reason="a CPU has no streams and no graphs")
SCHEMES = (
    "nf4", "nf4,double_quant", "fp4", "fp8", "bnb-int8", "qint8", "qint4", "qint3", "qfloat8", "int8", "int8_sym",
    "int4", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "q3_k", "q2_k", "iq4_xs", "sdnq-int8", "sdnq-uint4", "sdnq-uint3",
    "sdnq-int8,hadamard", "sdnq-uint4,svd", "int8_tensor", "int8_row", "int8_convrot", "w6a8", "w4a8", "w4a4",
    "svdq-int4", "svdq-nvfp4", "comfy:nvfp4", "mxfp8",
)  # fmt: skip
COMPILED = (
    ("nf4", None), ("nf4", "int8"), ("nf4", "fp8"), ("fp4,double_quant", None), ("q4_k", None), ("iq4_xs", None),
    ("iq3_s", None), ("int8_sym", "int8"), ("fp8", "fp8"), ("sdnq-uint4", None), ("qint4", "int8"),
    ("int8_convrot", None), ("int8_convrot", "int8"), ("w4a8", "int8"), ("svdq-int4", None), ("svdq-int4", "int8"),
    ("comfy:nvfp4", None), ("mxfp8", "int8"),
)  # fmt: skip
ROWS = (0, 1, 2, 16, 63, 64, 65, 300)


def layer_of(scheme: str, columns: int = 512, rows: int = 384, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A quantized layer on the device with random weights and a bias, laid out as in a model that was loaded for it."""
    spec = backends.parse(scheme)
    torch.manual_seed(columns + rows)
    floats = nn.Linear(columns, rows, dtype=dtype)
    layer: Any = quantized_layer(floats, backends.get(spec.scheme.backend).encode(floats.weight.data, spec))
    layer.lay_out(DEVICE)
    return layer.to(DEVICE).requires_grad_(False)


def inputs(rows: int, columns: int = 512, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=made).to(dtype).to(DEVICE)


def decibels(got: Tensor, wanted: Tensor) -> float:
    error = (got.double() - wanted.double()).square().sum()
    return float(10 * torch.log10(wanted.double().square().sum() / error))


def away(layer: Any, x: Tensor) -> float:
    """The distance of a layer's outputs from the product with its decoded weight in float64, on the CPU, in dB."""
    with torch.no_grad():
        y = layer(x).cpu().double()
    assert y.shape == (len(x), layer.out_features) and y.isfinite().all()
    bias = None if layer.bias is None else layer.bias.cpu().double()
    weight = layer.dequantize().cpu().double()
    return decibels(y, F.linear(x.cpu().double(), weight, bias)) if len(x) else float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_of_every_scheme(scheme: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    layer = layer_of(scheme, dtype=dtype)
    worst = {rows: away(layer, inputs(rows, dtype=dtype)) for rows in ROWS}
    least = {torch.bfloat16: 45.0, torch.float16: 60.0, torch.float32: 55.0}[dtype]
    assert {rows: round(value, 1) for rows, value in worst.items() if value < least} == {}
    assert [record.getMessage() for record in caplog.records if "not used" in record.getMessage()] == []


@pytest.mark.parametrize("compute", ["int8", "fp8"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_in_8_bits(scheme: str, compute: str, caplog: pytest.LogCaptureFixture) -> None:
    layer = layer_of(scheme)
    set_compute(layer, compute)
    worst = {rows: away(layer, inputs(rows)) for rows in (1, 64, 300, 2500)}
    assert {
        rows: round(value, 1) for rows, value in worst.items() if value < (33.0 if compute == "int8" else 27.0)
    } == {}
    assert [record.getMessage() for record in caplog.records if "not used" in record.getMessage()] == []


@on_card
@pytest.mark.parametrize("compute", [None, "int8"])
@pytest.mark.parametrize("scheme", ["nf4", "q4_k", "int8_sym", "sdnq-uint4"])
def test_two_streams_of_one_thread(scheme: str, compute: str | None) -> None:
    """Each decodes into memory of its own: the first layer's product is not of the second one's weight."""
    layers = [layer_of(scheme, 1024, 1024), layer_of(scheme, 1024, 2048)]
    for layer in layers:
        set_compute(layer, compute)
    xs = [inputs(400, 1024, seed=1), inputs(400, 1024, seed=2)]
    with torch.no_grad():
        wanted = [layer(x) for layer, x in zip(layers, xs, strict=True)]
        streams = [torch.cuda.Stream() for _ in layers]
        torch.cuda.synchronize()
        found: list[list[Tensor]] = [[], []]
        for _ in range(30):
            for index, (layer, x) in enumerate(zip(layers, xs, strict=True)):
                with torch.cuda.stream(streams[index]):
                    found[index].append(layer(x))
        torch.cuda.synchronize()
    for each, right in zip(found, wanted, strict=True):
        assert all(torch.equal(one, right) for one in each)


@on_card
@pytest.mark.parametrize("compute", [None, "int8", "fp8"])
@pytest.mark.parametrize("scheme", ["nf4", "q4_k", "int8_sym", "sdnq-uint4", "bnb-int8"])
@pytest.mark.parametrize("rows", [1, 300])
def test_a_cuda_graph_is_replayed_after_a_larger_layer_ran(scheme: str, compute: str | None, rows: int) -> None:
    layer, larger = layer_of(scheme), layer_of(scheme, 2048, 2048)
    set_compute(layer, compute)
    x, other = inputs(rows), inputs(rows, seed=5)
    with torch.no_grad():
        wanted, changed = layer(x).clone(), layer(other).clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph, given = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            y = layer(given)
        graph.replay()
        assert torch.equal(y, wanted)
        larger(inputs(300, 2048))
        torch.full((1 << 24,), 3.0, device=DEVICE)  # where memory that was given back would be written over
        given.copy_(other)
        graph.replay()
        assert torch.equal(y, changed)


class Block(nn.Module):
    """Two quantized layers with something for a compiler between them."""

    def __init__(self, scheme: str, compute: str | None) -> None:
        super().__init__()
        self.first, self.second = layer_of(scheme, 512, 512), layer_of(scheme, 512, 512)
        for layer in (self.first, self.second):
            set_compute(layer, compute)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.gelu(self.second(F.layer_norm(F.silu(self.first(x)) + x, (512,))))
        return y


@pytest.mark.slow
@pytest.mark.parametrize("how", ["default", "reduce-overhead"])
@pytest.mark.parametrize(("scheme", "compute"), COMPILED)
def test_compiled(scheme: str, compute: str | None, how: str) -> None:
    """One graph, before anything ran eagerly: the kernels' tables and scratch are nobody else's then."""
    torch._dynamo.reset()
    from sdquant.kernels.triton.launch_config import table_of

    for function in (fourbit_code, dynamic_code, e4m3_code, code_table, table_of):
        function.cache_clear()
    block = Block(scheme, compute)
    fast: Any = torch.compile(block, mode=how, fullgraph=True)
    xs = [inputs(rows, seed=rows) for rows in (1, 300, 1, 300)]
    with torch.no_grad():
        found = [fast(x).clone() for x in xs for _ in range(3)]
        wanted = [block(x) for x in xs for _ in range(3)]
    least = 40 if compute is None else 30  # activations that differ in a last bit may get another code
    assert min(decibels(a, b) for a, b in zip(found, wanted, strict=True)) > least


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("mode", [row.name for row in offload.MODES])
def test_compiled_with_offload(mode: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    stack, x = Stack(), inputs(40, 256, torch.float32)
    wanted = copy.deepcopy(stack).to(DEVICE)(x)
    size = offload.weight_bytes(stack)
    room = {"budget": size // 2} if mode == "balanced" else {}
    handle = offload.apply(stack, mode, device=DEVICE, folder=tmp_path, **room)
    fast: Any = torch.compile(stack)
    for _ in range(3):
        assert decibels(fast(x), wanted) > 70
    handle.remove()
