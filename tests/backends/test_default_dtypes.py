"""torch's default dtype, which people and other loaders set, does not change what is encoded."""

from __future__ import annotations

import pytest
import torch

from sdquant import backends
from sdquant.core import registry

SCHEMES = [scheme.name for scheme in registry.schemes() if scheme.on_the_fly]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("text", [*SCHEMES, "sdnq-uint4,svd,hadamard", "int4,range"])
def test_the_same_parts(text: str, default: torch.dtype) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    spec = backends.parse(text)
    before_it = weight.clone()
    wanted = backends.encode(weight, spec).parts
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        parts = backends.encode(weight, spec).parts
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(weight, before_it)  # a float32 one is not copied for the encoder
    assert set(parts) == set(wanted)
    for name, part in parts.items():
        assert part.dtype is wanted[name].dtype
        bits, wanted_bits = (one.reshape(-1).view(torch.uint8) for one in (part, wanted[name]))
        assert torch.equal(bits, wanted_bits)
