"""Where there is no Triton (Windows, Macs, old cards) a layer is dequantized in few operators of torch, of any scheme.

Counted with tensors that have shapes only, on a device that is not the CPU: "meta".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sdquant import backends
from sdquant.core import bit_fields
from sdquant.core.backend import Packed, PackedSpec
from sdquant.utils import chunk_sizes, device_constants

MOST = 20
ROWS, COLUMNS = 12288, 3072
SCHEMES = [row.name for row in backends.schemes() if row.on_the_fly]
VARIANTS = [
    "nf4,double_quant", "int4,group_size=-1", "sdnq-uint4,fp32_scales=true", "sdnq-int8,group_size=-1",
    "sdnq-uint4,hadamard=true", "sdnq-uint3,svd=true", "sdnq-int6,svd=true,hadamard=true", "rules,weight_qtype=int4",
    "rules,weight_qtype=int3", "rules,weight_qtype=int7", "rules,weight_qtype=nf4,tile_size=64",
    "rules,weight_qtype=mxfp8,tile_size=32", "rules,weight_qtype=nvfp4,tile_size=16",
    "rules,weight_qtype=float8_e4m3fn",
]  # fmt: skip
# What sdquant reads and does not make: the details of such weights, and their parts.
_HUB = {"scale": ("float16", (ROWS, 48)), "zero": ("uint8", (ROWS, 48))}
_SDNQ = {"scale": ("bfloat16", (ROWS, 48, 1)), "zero_point": ("bfloat16", (ROWS, 48, 1))}
FILES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]] = {
    "awq": (
        "awq_w4a16",
        {"group_size": 64},
        {"codes": ("uint8", (ROWS, 1536)), "scale": ("bfloat16", (ROWS, 48)), "zero": ("bfloat16", (ROWS, 48))},
    ),
    **{
        f"hub of {bits} bits": (f"hub-int{bits}", {}, {"codes": ("uint8", (ROWS, COLUMNS * bits // 8)), **_HUB})
        for bits in range(2, 9)
    },
    "hqq across rows": (
        "hub-int4",
        {"axis": 0},
        {"codes": ("uint8", (ROWS, 1536)), "scale": ("float16", (1, 64)), "shift": ("float16", (1, 64))},
    ),
    "gptq with an order": (
        "hub-int4",
        {},
        {"codes": ("uint8", (ROWS, 1536)), **_HUB, "order": ("int32", (COLUMNS,)), "columns": ("float32", (COLUMNS,))},
    ),
    **{
        f"sdnq {code}": ("sdnq-other", {"code": code}, {"weight": (dtype, (ROWS * COLUMNS // 16, words)), **parts})
        for code, dtype, words, parts in (
            ("uint1", "uint8", 2, _SDNQ), ("uint5", "uint8", 10, _SDNQ), ("uint7", "uint8", 14, _SDNQ),
            ("uint15", "int16", 15, _SDNQ), ("float6_e3m2fn", "uint8", 12, {"scale": _SDNQ["scale"]}),
        )
    },
}  # fmt: skip


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of operators that write something."""

    FREE = ("empty", "empty_like", "new_empty", "empty_strided", "lift_fresh", "detach", "scalar_tensor")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in (*self.FREE, "_unsafe_view", "_reshape_alias"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _no_autocast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tables be kept for the device, which has no autocast."""
    asked = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind != "meta" and asked(kind))
    monkeypatch.setattr(device_constants, "_modes", lambda: 0)
    yield


def operators(spec: PackedSpec, parts: dict[str, torch.Tensor]) -> list[str]:
    """The operators that dequantizing such a weight takes when its tables are made."""
    packed, backend = Packed(spec=spec, parts=parts), backends.of_scheme(spec.scheme.name)
    out = torch.empty(spec.shape, dtype=torch.bfloat16, device="meta")
    with torch.no_grad():
        backend.decode_into(packed, out)
        with Count() as count:
            backend.decode_into(packed, out)
    return count.names


def shapes(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


@pytest.mark.parametrize("text", [*SCHEMES, *VARIANTS])
def test_at_most_twenty_operators_for_a_layer(text: str) -> None:
    backend, spec, rows = backends.get(backends.parse(text).scheme.backend), backends.parse(text), 128
    made = backend.encode(torch.randn(rows, COLUMNS).mul_(0.02).bfloat16(), spec)
    layout = dict(backend.layout(spec, (ROWS, COLUMNS), "bfloat16"))
    parts = {
        name: shapes(layout[name].dtype, layout[name].shape) if name in layout else part.to("meta")
        for name, part in made.parts.items()
    }
    names = operators(replace(made.spec, shape=(ROWS, COLUMNS)), parts)
    assert len(names) <= MOST, names


@pytest.mark.parametrize("name", FILES)
def test_at_most_twenty_operators_for_what_is_read(name: str) -> None:
    scheme, details, parts = FILES[name]
    spec = PackedSpec(scheme=backends.scheme(scheme), shape=(ROWS, COLUMNS), dtype="bfloat16", details=details)
    names = operators(spec, {key: shapes(*part) for key, part in parts.items()})
    assert len(names) <= MOST, names


GGUF = [row.name for row in backends.schemes() if row.backend == "gguf"]


@pytest.mark.parametrize("name", GGUF)
def test_at_most_twenty_operators_for_gguf(name: str) -> None:
    kind = "_".join(name.split("_")[:2]) if name.startswith("q") else name  # of most of the weights of a mix
    details = {"type": kind}
    spec = PackedSpec(scheme=backends.scheme(name), shape=(ROWS, COLUMNS), dtype="bfloat16", details=details)
    layout = spec.scheme.codec.layout(backends.parse(name), spec.shape, spec.dtype)
    names = operators(spec, {part: shapes(of.dtype, of.shape) for part, of in layout.items()})
    assert len(names) <= MOST, names


def test_every_scheme_is_counted() -> None:
    assert {*SCHEMES, *GGUF, *(scheme for scheme, _, _ in FILES.values())} == {row.name for row in backends.schemes()}


@pytest.mark.parametrize("text", [*SCHEMES, *VARIANTS])
def test_the_same_weights_in_few_operators(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other devices, done on the CPU."""
    spec = backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    packed = backend.encode(torch.randn(96, 768, generator=torch.Generator().manual_seed(0)).mul_(0.02), spec)
    expected = backend.decode(packed, torch.float32)
    monkeypatch.setattr(bit_fields, "launches", lambda device: True)
    monkeypatch.setattr(chunk_sizes, "CPU", chunk_sizes.ELSEWHERE)
    found = backend.decode(packed, torch.float32)
    # Rotations are products, of which BLAS adds the terms in another order if there are more rows.
    rotated = packed.spec.rotation or "svd" in text or text.startswith("svdquant")
    assert torch.allclose(found, expected, atol=1e-6) if rotated else torch.equal(found, expected)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15])
def test_the_fields_of_every_width(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sdquant.backends._sdnq_bits import fields, words

    dtype, most = (torch.uint8, 256) if bits < 8 else (torch.int32, 1 << 16)
    units = torch.randint(0, most, (50, words(bits)), generator=torch.Generator().manual_seed(0)).to(dtype)
    if bits > 8:
        units = units.to(torch.int16).to(dtype)  # as they are read: half of them negative
    one_by_one = bit_fields.unpack_units(units, fields(bits), torch.int32)
    monkeypatch.setattr(bit_fields, "launches", lambda device: True)
    assert torch.equal(bit_fields.unpack_units(units, fields(bits), torch.int32), one_by_one)
    assert one_by_one.min() >= 0 and one_by_one.max() < 1 << bits
