"""The two narrow products of a low-rank branch in C: those of torch, in float32."""

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


@pytest.mark.skipif(isa() not in ("avx512bf16", "amx"), reason="no such kernels on this machine")
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "rank"),
    [(24, 64, 64, 16), (29, 70, 45, 5), (77, 768, 3072, 32), (130, 33, 300, 48), (300, 520, 130, 128)],
)
def test_products(rows: int, inputs: int, outputs: int, rank: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (rows, inputs), (inputs, rank), (outputs, rank), (rows, outputs)
    x, down, up, y = (torch.randn(size, generator=generator) for size in sizes)
    wanted = y.double() + x.double() @ down.double() @ up.double().T
    for is_turned in (False, True):
        for given in (x, x.t().contiguous().t()):
            got = y.clone()
            assert narrow.add_product(got, given, down.t() if is_turned else down, up, is_turned=is_turned)
            assert (got - wanted).norm() <= 1e-6 * wanted.norm()
    got = y.clone()
    for other in (x.bfloat16(), x[:5], x.to("meta"), x.clone().requires_grad_()):
        assert not narrow.add_product(got[: len(other)], other, down, up, is_turned=False)
    assert torch.equal(got, y)


def test_a_branch_of_no_rank_is_left_to_torch() -> None:
    """In C it would be a division by zero, which ends the process."""
    y = torch.ones(40, 32)
    assert not narrow.add_product(y, torch.ones(40, 64), torch.ones(64, 0), torch.ones(32, 0), is_turned=False)
    assert torch.equal(y, torch.ones(40, 32))
