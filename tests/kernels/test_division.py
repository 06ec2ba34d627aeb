"""The same numbers on a card as on a CPU, where torch divides by a Python number with another rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sdquant import backends
from sdquant.core.backend import Unfit
from sdquant.kernels import fp8_linear, int8_reference
from sdquant.rules.core.how_to_quantize import HowToQuantize
from sdquant.rules.core.qarray import quantize
from sdquant.rules.core.qtypes import qtype
from sdquant.utils.tensors import divided

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What other packages' own code encodes, which divides as it does: backends and schemes.
THEIRS = ("sdnq", "gguf", "bnb-int8", "int4", "qfloat8", "qint4", "qint3", "qint2")
DIVISIONS = (Tensor.div, Tensor.div_, Tensor.__truediv__, torch.div, torch.true_divide, Tensor.true_divide)


class AsOnACard(TorchFunctionMode):
    """Division by a number as CUDA does it (ATen's BinaryDivTrueKernel.cu): times the reciprocal, both in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        number = args[1] if len(args) > 1 else None
        if func not in DIVISIONS or kwargs or not isinstance(number, int | float) or not args[0].is_floating_point():
            return func(*args, **(kwargs or {}))
        self.count += 1
        x: Tensor = args[0]
        made = (x.float() * torch.tensor(float(number)).reciprocal()).to(x.dtype)
        return x.copy_(made) if func is Tensor.div_ else made


def weight(dtype: torch.dtype, columns: int = 128) -> Tensor:
    return torch.randn(400, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_card_rounds_twice() -> None:
    x = weight(torch.float32)
    with AsOnACard() as card:
        assert not torch.equal(x / 127, torch.div(x, torch.tensor(127.0))) and card.count == 1
        assert torch.equal(divided(x, 127), torch.div(x, torch.tensor(127.0)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", [7, 127, 255, 448.0, 32767])
def test_divided_has_the_bits_of_a_cpu(by: float, dtype: torch.dtype) -> None:
    assert torch.equal(divided(weight(dtype), by), weight(dtype) / by)


def same(make: Callable[[], Any]) -> None:
    here = make()
    with AsOnACard():
        there = make()
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))


def ours() -> Iterator[str]:
    for row in backends.schemes():
        if row.on_the_fly and row.backend not in (*THEIRS, "rules") and row.name not in THEIRS:
            yield row.name
    yield "fp8,packing=float8"


@pytest.mark.parametrize("text", [*ours()])
def test_a_weight_is_encoded_alike(text: str) -> None:
    spec = backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    for dtype in DTYPES:
        try:
            same(lambda dtype=dtype: backend.encode(weight(dtype), spec).parts.values())  # type: ignore[misc]
        except Unfit as error:
            pytest.skip(f"{text} holds no {dtype} weight: {error}")


@pytest.mark.parametrize("row", ["int4", "int8", "int16", "float8_e4m3fn", "mxfp8", "nvfp4", "nf4"])
@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_rules_find_the_same_scales(row: str, method: str) -> None:
    if method == "minmax" and row not in ("int4", "int8", "int16"):
        return

    tile = qtype(row).tile
    how = HowToQuantize(
        qtype=row, channelwise_axes=(0,), tiled_axes={} if tile is None else {1: tile}, calibration_method=method
    )

    def scales(dtype: torch.dtype) -> list[Tensor]:
        made = quantize(weight(dtype), how)
        return [made.qvalue.view(torch.uint8), made.scale]

    for dtype in DTYPES:
        same(lambda dtype=dtype: scales(dtype))  # type: ignore[misc]


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_become_the_same_integers(dtype: torch.dtype) -> None:
    same(lambda: int8_reference.quantized_rows(weight(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_become_the_same_float8_by_the_scale_of_a_file(dtype: torch.dtype) -> None:
    x = weight(dtype, 4096)  # of which few are near the middle of two codes

    def codes() -> list[Tensor]:
        made, scale = fp8_linear._quantized_by(0.0123, x)
        return [made.view(torch.uint8), scale]

    same(codes)
