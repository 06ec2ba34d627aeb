"""The two narrow products of a low-rank branch in C: those of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdquant.kernels.cpu import isa, narrow


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


SIZES = [
    (1, 64, 64, 16), (12, 390, 70, 34), (24, 64, 64, 16), (29, 70, 45, 5), (77, 768, 3072, 32), (130, 33, 300, 48),
    (300, 520, 130, 128), (25, 64, 70, 600), (45, 98, 40, 70), (33, 2048, 96, 512), (64, 30, 31, 2),
]  # fmt: skip


@pytest.mark.skipif(isa() not in ("avx512bf16", "amx"), reason="no such kernels on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs", "rank"), SIZES)
def test_products(dtype: torch.dtype, rows: int, inputs: int, outputs: int, rank: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (rows, inputs), (inputs, rank), (outputs, rank), (rows, outputs)
    x, down, up, y = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    if not narrow.can(dtype, inputs, rank):
        assert dtype is torch.bfloat16 and (inputs % 2 or rank % 2 or rank > 512)
        assert not narrow.add_product(y, x, down, up, is_turned=False)
        return
    between = (x.double() @ down.double()).to(dtype)
    wanted = y.double() + between.double() @ up.double().T
    off = 1e-6 if dtype is torch.float32 else 4e-3
    for is_turned in (False, True):
        for given in (x, x.t().contiguous().t()):
            got = y.clone()
            assert narrow.add_product(got, given, down.t() if is_turned else down, up, is_turned=is_turned)
            assert (got - wanted).norm() <= off * wanted.norm()
    got = y.clone()
    for other in (x.half(), x.to("meta"), x.clone().requires_grad_()):
        assert not narrow.add_product(got[: len(other)], other, down, up, is_turned=False)
    assert torch.equal(got, y)


def test_a_branch_of_no_rank_is_left_to_torch() -> None:
    """In C it would be a division by zero, which ends the process."""
    y = torch.ones(40, 32)
    assert not narrow.add_product(y, torch.ones(40, 64), torch.ones(64, 0), torch.ones(32, 0), is_turned=False)
    assert torch.equal(y, torch.ones(40, 32))
