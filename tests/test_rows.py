"""Some rows of a packed weight, and packed weights put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from sdquant import backends
from sdquant.rows import cut, join

if TYPE_CHECKING:
    from sdquant.backends.base import Packed


def packed(scheme: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Packed:
    torch.manual_seed(seed)
    spec = backends.parse(scheme)
    return backends.get(spec.scheme.backend).encode(torch.randn(48, 256).to(dtype), spec)


def floats(row: Packed) -> torch.Tensor:
    return backends.of_scheme(row.spec.scheme).decode(row, torch.float32)


@pytest.mark.parametrize(
    "scheme",
    ["nf4", "fp4", "fp8", "bnb-int8", "q8_0", "q4_k", "int8", "int8_sym", "int4", "qint8", "qfloat8"],
)
def test_joined_weights_decode_as_one_after_the_other(scheme: str) -> None:
    parts = [packed(scheme, seed) for seed in range(3)]
    whole = join(parts)
    assert whole is not None and whole.spec.shape == (144, 256)
    assert torch.equal(floats(whole), torch.cat([floats(part) for part in parts]))
    again = cut(backends.of_scheme(scheme).cuttable(whole), [(48, 96)])
    assert torch.equal(floats(again), floats(parts[1]))
    assert join(parts[:1]) is parts[0]


def test_what_is_not_alike_is_not_joined() -> None:
    assert join([packed("nf4"), packed("fp4")]) is None
    assert join([packed("qint4", seed) for seed in range(2)]) is None  # its bytes hold rows from far apart
    assert join([packed("nf4"), packed("nf4", dtype=torch.float32)]) is None
