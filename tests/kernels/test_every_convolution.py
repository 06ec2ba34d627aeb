"""Every scheme on a card: the launches of a convolution and of an embedding, held as those of linear layers are.

A convolution is decoded in one launch, and torch's own is the second. In integers torch copies patches and results.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sdquant import backends
from sdquant.core import Geometry, Unfit, gguf_types
from sdquant.core.backend import Packed, PackedSpec
from sdquant.kernels import dispatch, prepack
from sdquant.kernels.preparation import prepared_convolution

from .card_launches import Count
from .test_every_scheme import MADE, VARIANTS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

BF16 = torch.bfloat16
OUTPUTS, INPUTS = 512, 256
WIDTH, TABLE_ROWS = 512, 1024
SIDES = (8, 64)
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
# Codes of activations, those of a weight, and their product; torch pads, copies patches, and turns results around.
MOST = {None: 2, "int8": 6}
# Weights that torch converts before they are quantized.
MORE = {(name, "int8"): 1 for name in ("f32", "f16", "bf16")}
# Whose branch or rotation torch decodes, too, in as many operators as `tests/backends/test_few_launches.py` allows:
# nobody has asked for these of convolutions, or of embeddings.
BY_TORCH = {name for name in VARIANTS if "svd=true" in name or "hadamard=true" in name}
ROTATED = {"int8_convrot", "w4a8", "w6a8", "w4a4", "svdquant_w4a4", "svdquant_nvfp4"}
# One for each part that rows are taken of, and one that decodes these.
MOST_LOOKED_UP = 4


def weight(name: str, *shape: int, laid_out: bool = True) -> tuple[PackedSpec, Shapes]:
    of = backends.parse(name)
    floats = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    packed = of.scheme.codec.encode(floats, of)
    packed = prepack.laid_out(packed, "cuda:0") if laid_out else packed
    return packed.spec, {key: (part.dtype, tuple(part.shape)) for key, part in packed.parts.items()}


def on_card(spec: PackedSpec, shapes: Shapes) -> Packed:
    parts = {key: torch.empty(shape, dtype=dtype, device="cuda:0") for key, (dtype, shape) in shapes.items()}
    return Packed(spec=spec, parts=parts)


def convolutions(
    spec: PackedSpec, shapes: Shapes, compute: str | None, names: list[str]
) -> Iterator[tuple[str, list[str]]]:
    """What is convolved, and what it launches: as in compiled graphs, and of a layer, from its third call on."""
    backend, how = spec.scheme.codec, Geometry(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        packed, bias = on_card(spec, shapes), torch.empty(OUTPUTS, dtype=BF16, device="cuda:0")
        form = backend.form(packed)
        run = prepared_convolution(backend, packed, form, BF16, compute, "weight_")
        layer: Any = SimpleNamespace(
            _parameters={**{f"weight_{key}": part for key, part in packed.parts.items()}, "bias": bias},
            stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, padding_mode="zeros", weight_function=[],
            bias_function=[],
        )  # fmt: skip

        def unbound(x: Tensor) -> Tensor:
            return dispatch.convolve(backend, packed, form, x, bias, how, compute)

        def of_layer(x: Tensor) -> Tensor:
            y = None if run is None else run(x, layer)
            return unbound(x) if y is None else y

        for side in SIDES:
            x = torch.empty(2, spec.shape[1], side, side, dtype=BF16, device="cuda:0")
            for _ in range(2):  # in which torch's product, and then the exact convolution, are tried
                with Count():
                    of_layer(x)
            calls: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (("unbound", unbound), ("a layer", of_layer))
            for what, call in calls:
                names.clear()
                with Count() as count:
                    y = call(x)
                assert (y.shape, y.dtype, str(y.device)) == ((2, OUTPUTS, side, side), BF16, "cuda:0")
                yield f"{what}, {side} pixels", names + count.names


def is_for_layers_alone(name: str) -> bool:
    return name not in ("nvfp4", "mxfp4") and backends.parse(name).scheme.backend == "comfy"


CONVOLVED = [name for name in (*MADE, *VARIANTS) if not is_for_layers_alone(name) and name not in BY_TORCH]


@pytest.mark.parametrize("compute", MOST)
@pytest.mark.parametrize("name", CONVOLVED)
def test_few_launches_of_a_convolution(name: str, compute: str | None, launched: list[str]) -> None:
    most = MOST[compute] + MORE.get((name, compute), 0)
    every = convolutions(*weight(name, OUTPUTS, INPUTS, 3, 3), compute, launched)
    assert [f"{what}: {names}" for what, names in every if len(names) > most] == []


@pytest.mark.parametrize("name", [name for name in CONVOLVED if gguf_types.TYPES.get(name, None) is not None])
def test_a_convolution_whose_rows_are_not_whole_blocks(name: str, launched: list[str]) -> None:
    """As of 320 channels. With `compute="int8"` torch decodes such a weight before it is quantized again."""
    every = convolutions(*weight(name, OUTPUTS, 320, 3, 3), None, launched)
    assert [f"{what}: {names}" for what, names in every if len(names) > MOST[None]] == []


@pytest.mark.parametrize("name", [name for name in (*MADE, *VARIANTS) if is_for_layers_alone(name)])
def test_formats_for_linear_layers_alone(name: str) -> None:
    """A row to take away, when they are for convolutions."""
    with pytest.raises(Unfit):
        weight(name, OUTPUTS, INPUTS, 3, 3)


@pytest.mark.parametrize("count", [1, 77, 4608])
@pytest.mark.parametrize("name", [name for name in (*MADE, *VARIANTS) if name not in BY_TORCH | ROTATED])
def test_few_launches_of_an_embedding(name: str, count: int, launched: list[str]) -> None:
    spec, shapes = weight(name, TABLE_ROWS, WIDTH, laid_out=False)
    backend = spec.scheme.codec
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        packed = on_card(spec, shapes)
        indices, form = torch.empty(1, count, dtype=torch.int64, device="cuda:0"), backend.form(packed)
        with Count() as counted:
            rows = dispatch.embedding(backend, packed, form, indices, BF16)
    assert (rows.shape, rows.dtype) == ((1, count, WIDTH), BF16)
    names = launched + counted.names
    assert len(names) <= MOST_LOOKED_UP, names


def test_every_kind_is_here() -> None:
    """What is left out exists, and cannot be decoded by one kernel."""
    assert {*BY_TORCH, *ROTATED} <= {*MADE, *VARIANTS}
    for name in sorted(BY_TORCH | ROTATED):
        spec, shapes = weight(name, TABLE_ROWS, WIDTH, laid_out=False)
        packed = Packed(
            spec=spec,
            parts={key: torch.empty(shape, dtype=dtype, device="meta") for key, (dtype, shape) in shapes.items()},
        )
        codec = spec.scheme.codec
        assert codec.form(packed) is None or packed.spec.rotation or codec.low_rank(packed) is not None
