"""Every scheme on a card: the launches of a forward, at every number of rows, and with every way to compute.

At most three where weights alone are quantized, four of products in 8 bits: for layers that are prepared, the first
time and then, and in compiled graphs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sdquant import backends
from sdquant.core.backend import Packed, PackedSpec
from sdquant.kernels import dispatch, prepack
from sdquant.kernels.preparation import prepared
from sdquant.kernels.triton import triton_kernels
from sdquant.kernels.triton.blocks import block_of

from .card_launches import Count

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

OUTPUTS, INPUTS = 128, 512
ROWS = (1, 4, 16, 77, 1024, 4608)
MOST = {None: 3, "int8": 4, "fp8": 4}
SCHEMES = [row.name for row in backends.schemes()]
VARIANTS = [
    "nf4,double_quant", "int4,group_size=-1", "sdnq-uint4,hadamard=true", "sdnq-uint4,svd=true",
    "sdnq-uint4,svd=true,hadamard=true", "sdnq-int8,svd=true", "sdnq-int8,group_size=-1",
    "rules,weight_qtype=int4", "rules,weight_qtype=nf4,tile_size=64", "rules,weight_qtype=float8_e4m3fn",
    "rules,weight_qtype=mxfp8,tile_size=32", "rules,weight_qtype=nvfp4,tile_size=16",
]  # fmt: skip
# What sdquant reads and does not make: details, and dtypes and shapes of parts.
_HUB = {"scale": ("float16", (OUTPUTS, 8)), "zero": ("uint8", (OUTPUTS, 8))}
_AWQ = {"scale": ("bfloat16", (OUTPUTS, 8)), "zero": ("bfloat16", (OUTPUTS, 8))}
_SDNQ = {"scale": ("bfloat16", (OUTPUTS, 8, 1)), "zero_point": ("bfloat16", (OUTPUTS, 8, 1))}
FILES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]] = {
    "awq_w4a16": ("awq_w4a16", {"group_size": 64}, {"codes": ("uint8", (OUTPUTS, INPUTS // 2)), **_AWQ}),
    **{
        f"hub-int{bits}": (f"hub-int{bits}", {}, {"codes": ("uint8", (OUTPUTS, INPUTS * bits // 8)), **_HUB})
        for bits in range(2, 9)
    },
    "gptq with an order": (
        "hub-int4",
        {},
        {
            "codes": ("uint8", (OUTPUTS, INPUTS // 2)), **_HUB,
            "order": ("int32", (INPUTS,)), "columns": ("float32", (INPUTS,)),
        },
    ),
    **{
        f"sdnq {code}": ("sdnq-other", {"code": code}, {"weight": ("uint8", (OUTPUTS * INPUTS // 16, words)), **parts})
        for code, words, parts in (
            ("uint1", 2, _SDNQ), ("uint5", 10, _SDNQ), ("uint7", 14, _SDNQ),
            ("float6_e3m2fn", 12, {"scale": _SDNQ["scale"]}),
        )
    },
}  # fmt: skip
# Whose codes no kernel reads: torch decodes them, in as many operators as `tests/backends/test_few_launches.py` allows.
UNREAD = {name for name, (scheme, _, _) in FILES.items() if scheme == "sdnq-other"}
MADE = [name for name in SCHEMES if name not in {scheme for scheme, _, _ in FILES.values()}]


def weight(name: str) -> tuple[PackedSpec, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """A weight as it is laid out for cards: its description, dtypes and shapes."""
    if name in FILES:
        scheme, details, parts = FILES[name]
        spec = PackedSpec(scheme=backends.scheme(scheme), shape=(OUTPUTS, INPUTS), dtype="bfloat16", details=details)
        return spec, {key: (getattr(torch, dtype), shape) for key, (dtype, shape) in parts.items()}
    of = backends.parse(name)
    floats = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    packed = prepack.laid_out(of.scheme.codec.encode(floats, of), "cuda:0")
    return packed.spec, {key: (part.dtype, tuple(part.shape)) for key, part in packed.parts.items()}


def calls(
    spec: PackedSpec, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], compute: str | None, dtype: torch.dtype,
    names: list[str],
) -> Iterator[tuple[str, int, list[str]]]:  # fmt: skip
    """What is called, the number of rows, and what it launches: first what Triton compiles, then what is bound."""
    backend = spec.scheme.codec
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parts = {key: torch.empty(shape, dtype=dtype, device="cuda:0") for key, (dtype, shape) in shapes.items()}
        packed, bias = Packed(spec=spec, parts=parts), torch.empty(OUTPUTS, dtype=dtype, device="cuda:0")
        form, own = backend.form(packed), {**{f"weight_{key}": part for key, part in parts.items()}, "bias": bias}
        run = prepared(backend, packed, form, dtype, compute, "weight_")

        def unbound(x: Tensor) -> Tensor:
            return dispatch.linear(backend, packed, form, x, bias, compute)

        def layer(x: Tensor) -> Tensor:
            y = None if run is None else run(x, own)
            return unbound(x) if y is None else y

        for m in ROWS:
            x = torch.empty(m, INPUTS, dtype=dtype, device="cuda:0")
            for what, call in (("a layer", layer), ("a layer again", layer), ("unbound", unbound)):
                names.clear()
                with Count() as count:
                    y = call(x)
                assert (y.shape, y.dtype, str(y.device)) == ((m, OUTPUTS), dtype, "cuda:0")
                yield what, m, names + count.names


def too_many(name: str, compute: str | None, dtype: torch.dtype, names: list[str], more: int = 0) -> list[str]:
    """A line for each call of more launches than are allowed, and `more` beyond those."""
    return [
        f"{name}, {compute}, {dtype}, {m} rows, {what}: {launched}"
        for what, m, launched in calls(*weight(name), compute, dtype, names)
        if len(launched) > more + MOST[compute]
    ]


@pytest.mark.parametrize("compute", MOST)
@pytest.mark.parametrize("name", [name for name in (*MADE, *VARIANTS, *FILES) if name not in UNREAD])
def test_few_launches_of_every_scheme(name: str, compute: str | None, launched: list[str]) -> None:
    assert too_many(name, compute, torch.bfloat16, launched) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["svdquant_w4a4", "nf4", "w4a8", "int8_convrot"])
def test_few_launches_in_other_dtypes(name: str, dtype: torch.dtype, launched: list[str]) -> None:
    assert [line for compute in (None, "int8") for line in too_many(name, compute, dtype, launched)] == []
    # Torch's product of float8 writes bfloat16 on most cards: the bias becomes that, and results become `dtype`.
    assert too_many(name, "fp8", dtype, launched, more=2) == []


@pytest.mark.parametrize("name", ["svdquant_w4a4", "nf4", "w4a8", "sdnq-uint4,svd=true,hadamard=true"])
def test_few_launches_where_decoding_is_faster_from_two_rows_on(
    name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On cards with the memory of data centers."""
    monkeypatch.setattr(triton_kernels, "_few", lambda device: 1)
    assert too_many(name, None, torch.bfloat16, launched) == []


@pytest.mark.parametrize("name", sorted(UNREAD))
def test_what_no_kernel_reads(name: str) -> None:
    """A row to take away, when there is one."""
    spec, shapes = weight(name)
    parts = {key: torch.empty(shape, dtype=dtype, device="meta") for key, (dtype, shape) in shapes.items()}
    form = spec.scheme.codec.form(Packed(spec=spec, parts=parts))
    assert form is None or block_of(form) is None


def test_every_scheme_is_here() -> None:
    assert {*MADE, *(scheme for scheme, _, _ in FILES.values())} == set(SCHEMES)
