"""torch.compile takes bitsandbytes' modules whole, those too whose rows are not whole blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sdquant


# What the compiler does with the autograd functions of bitsandbytes.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("scheme", ["nf4", "nf4,double_quant", "fp4", "bnb-int8"])
@pytest.mark.parametrize("columns", [64, 16])  # of 16 four rows share a scale, which sdquant decodes itself
def test_one_graph(scheme: str, columns: int) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    net: nn.Module = nn.Sequential(nn.Linear(columns, 96), nn.SiLU())
    sdquant.quantize(net, scheme, runtime="library", progress=False)
    fast = torch.compile(net, backend="aot_eager", fullgraph=True)
    for rows in (3, 5):
        x = torch.randn(rows, columns)
        with torch.no_grad():
            assert torch.equal(fast(x), net(x))
    one, other = (x.clone().requires_grad_() for _ in range(2))
    fast(one).sum().backward()
    net(other).sum().backward()
    assert one.grad is not None and torch.equal(one.grad, other.grad)
