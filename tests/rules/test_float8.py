"""float8 products: torch's kernel and float32 give the same, with sizes that the kernel has to be padded for."""

from __future__ import annotations

import pytest
import torch

from sdquant.rules.core import float8

TYPES = [(torch.float8_e4m3fn, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.float8_e5m2)]


def _codes(device: str, types: tuple[torch.dtype, torch.dtype]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randn(rows, 77, generator=draw).to(kind).to(device) for rows, kind in zip((5, 19), types, strict=True)
    ]


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_the_kernel_gives_what_floats_give(types: tuple[torch.dtype, torch.dtype]) -> None:
    left, right = _codes("cpu", types)
    wanted = left.double() @ right.double().T
    for found in (float8.product(left, right), float8.by_kernel(left, right)):
        assert found.dtype == torch.float32 and found.shape == (5, 19)
        assert torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_on_a_card(types: tuple[torch.dtype, torch.dtype]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    left, right = _codes("cuda", types)
    wanted = left.double() @ right.double().T
    assert (float8.product(left, right).double() - wanted).abs().max() <= float8.TOLERANCE * wanted.abs().max()
    if torch.cuda.get_device_capability() >= float8.LEAST_CAPABILITY:
        assert float8._has_kernel(0, *types)
