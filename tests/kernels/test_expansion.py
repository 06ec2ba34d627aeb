"""Codes of 4 and 6 bits that stand for 8-bit integers, W4A8 and W6A8: expanded in C as torch does it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import sdquant
from sdquant.kernels import expand_rows
from sdquant.kernels.triton import imports
from tests.kernels.instructions import others, use

ROWS = 37


def values_of(codes: Tensor, bits: int, table: Tensor | None) -> Tensor:
    """Return what each code stands for before it is scaled: float32 [rows, columns]."""
    planes = codes.shape[1] * 4 // bits
    low = torch.stack((codes[:, :planes] & 15, codes[:, :planes] >> 4), -1).flatten(1).long()
    if table is None:
        high = torch.stack([codes[:, planes:] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1).long()
        return (low | high << 4).float() - 32
    return table[low] if table.ndim == 1 else table.gather(1, low)


@pytest.mark.parametrize("group", [4, 8, 16, 48])
@pytest.mark.parametrize("table", ["one", "of rows", "none: 6 bits"])
@pytest.mark.parametrize("is_float8", [True, False])
def test_integers_are_torchs(group: int, table: str, is_float8: bool) -> None:
    generator = torch.Generator().manual_seed(group)
    bits, groups = 6 if table == "none: 6 bits" else 4, 144 // group
    codes = torch.randint(0, 256, (ROWS, 144 * bits // 8), dtype=torch.uint8, generator=generator)
    scale = torch.rand(ROWS, groups, generator=generator) * 60
    stored = scale.to(torch.float8_e4m3fn) if is_float8 else scale
    scale = stored.float()
    shape = {"one": (16,), "of rows": (ROWS, 16)}.get(table)
    known = None if shape is None else torch.rand(shape, generator=generator) * 8 - 4
    expected = (values_of(codes, bits, known).view(ROWS, groups, group) * scale[..., None]).round_().clamp_(-127, 127)
    assert int(expected.abs().max()) == 127  # some are too large
    for name in ("", *others("portable", "avx2")):
        assert use(name)
        out = torch.full((ROWS, 144), 99, dtype=torch.int8)
        assert expand_rows(codes, bits, stored, known, out), name
        assert torch.equal(out, expected.view(ROWS, 144).to(torch.int8)), name
    use("")


@pytest.mark.parametrize("scheme", ["w4a8", "w6a8"])
@pytest.mark.parametrize("columns", [160, 256])
@pytest.mark.parametrize("compute", [None, "int8"])
def test_products_are_those_of_the_integers(
    scheme: str, columns: int, compute: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8-bit activations nothing is rounded but them; the C code and torch give the same numbers."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(columns, 64))
    exact = torch.nn.Linear(columns, 64)
    x = torch.randn(77, columns)
    options = {} if compute is None else {"compute": compute}
    sdquant.quantize(layer, scheme, progress=False, **options)
    with torch.no_grad():
        packed = layer[0]
        exact.weight.copy_(packed.dequantize())
        exact.bias.copy_(packed.bias)
        y, wanted = layer(x), exact(x)
    error = float((y - wanted).norm() / wanted.norm())
    assert error < (1e-5 if compute is None else 0.012)
    if compute is not None:
        assert error > 1e-4  # its activations were rounded
    monkeypatch.setattr("sdquant.backends._comfy_w4a8.expand_rows", lambda *_: False)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
        assert torch.equal(packed.dequantize(), exact.weight)


@pytest.mark.parametrize(("bits", "columns", "is_taken"), [(4, 16, 1), (4, 12, 0), (6, 48, 1), (6, 40, 0)])
def test_a_card_reads_rows_by_words(bits: int, columns: int, is_taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that begins between two words would be a misaligned address, which ends all work on a card."""
    launches: list[tuple[object, ...]] = []
    kernels = SimpleNamespace(expansion=lambda *of: lambda device: launches.append(of))
    monkeypatch.setattr(imports, "expansion", lambda device: kernels)
    codes = torch.empty(3, columns * bits // 8, dtype=torch.uint8, device="meta")
    scale, out = torch.empty(3, columns // 4, device="meta"), torch.empty(3, columns, dtype=torch.int8, device="meta")
    assert expand_rows(codes, bits, scale, None, out) == bool(is_taken) and len(launches) == is_taken
