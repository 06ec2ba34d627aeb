"""Triton's own launches on a card that is not there."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import re

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from . import driver  # noqa: E402
from .memory import Fault  # noqa: E402


@triton.jit
def add_kernel(x, y, out, count, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = (at < count) | (not MASKED)
    tl.store(out + at, tl.load(x + at, mask=live) + tl.load(y + at, mask=live), mask=live)


@triton.jit
def dot_kernel(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    both = at[:, None] * N + at[None, :]
    tl.store(out + both, tl.dot(tl.load(x + both), tl.load(y + both)))


@pytest.fixture(autouse=True)
def _kept(compiled_kernels: object) -> None: ...


def test_numbers_and_bounds() -> None:
    x, y = torch.randn(2, 1000)
    held = torch.full((1200,), 7.0)
    with driver.use() as card:
        add_kernel[8,](x, y, held[:1000], 1000, True, 128, enable_fp_fusion=False)
        assert torch.equal(held[:1000], x + y) and bool((held[1000:] == 7).all()) and card.launched == ["add_kernel"]
        with pytest.raises(Fault, match=re.escape("beyond the 4000 bytes of ")):
            add_kernel[8,](x, y, held[:1000], 1000, False, 128, enable_fp_fusion=False)
    assert "data_ptr" not in vars(torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_tensor_cores(dtype: torch.dtype) -> None:
    x, y = torch.randint(-9, 9, (2, 32, 32)).to(dtype)
    out = torch.empty(32, 32, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    with driver.use():
        dot_kernel[1,](x, y, out, 32, enable_fp_fusion=False)
    assert torch.equal(out.float(), x.float() @ y.float())
