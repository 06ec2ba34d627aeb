"""Products in 8-bit integers of rows that are not finite: NaN, whichever way computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdquant import backends
from sdquant.kernels import int8_linear
from sdquant.kernels.cpu import extension
from sdquant.kernels.int8_reference import InC, Steps, quantized_rows
from sdquant.nn import quantized_layer

INF, NAN = float("inf"), float("nan")
ROWS = 200  # with AMX fewer are multiplied exactly where codes are made again
SCHEMES = (  # multiplied directly, by runs, quantized again by row and by run, rotated, expanded, with a branch
    "int8", "int8_row", "qint8", "bnb-int8", "sdnq-int8", "q8_0", "int4", "nf4", "fp8", "mxfp8", "int8_convrot", "w4a8",
    "svdq-int4",
)  # fmt: skip


def inputs(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(1))
    x[1, 3], x[2, 5], x[3, 7], x[4, :], x[5, :2] = INF, -INF, NAN, INF, torch.tensor([INF, NAN])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_way(scheme: str, dtype: torch.dtype) -> None:
    spec = backends.parse(scheme)
    torch.manual_seed(0)
    floats = nn.Linear(512, 64, dtype=dtype).requires_grad_(False)
    backend, x = spec.scheme.codec, inputs(dtype)
    packed = backend.encode(floats.weight.data, spec)
    layer: Any = quantized_layer(floats, packed, compute="int8")
    with torch.inference_mode():
        found = [layer(x) for _ in range(12)]  # the first ones are computed by turns
        found.append(layer._linear(x, layer._bias(x)))
        form = backend.form(packed)
        if form is not None and not (packed.spec.rotation or backend.integers(packed) or backend.low_rank(packed)):
            ways = (Steps, InC) if extension() is not None else (Steps,)
            found += [int8_linear.by_steps(backend, packed, x, floats.bias, by) for by in ways]
    for y in found:
        assert y[1:6].isnan().all() and y[0].isfinite().all() and y[6:].isfinite().all()
        assert torch.equal(y[6:], found[0][6:])


def test_the_scale_is_not_a_number() -> None:
    codes, scale = quantized_rows(inputs(torch.float32))
    assert scale[1:6].isnan().all() and scale[6:].isfinite().all()
    assert codes[6:].abs().amax() == 127
