"""Some rows of a packed weight, and packed weights put together again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sdquant import backends
from sdquant.core import Packed, PackedSpec
from sdquant.core.packed_rows import cut, join
from sdquant.formats.safetensors_writer import write
from sdquant.utils.buffers import dense


def packed(scheme: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Packed:
    torch.manual_seed(seed)
    spec = backends.parse(scheme)
    return backends.get(spec.scheme.backend).encode(torch.randn(48, 256).to(dtype), spec)


def floats(row: Packed) -> torch.Tensor:
    return row.spec.scheme.codec.decode(row, torch.float32)


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


def test_parts_of_columns_are_of_all_rows() -> None:
    """The hub's weights in the order of groups, and some of several may have no zero points."""
    spec = PackedSpec(scheme=backends.scheme("hub-int8"), shape=(4, 8), dtype="bfloat16")
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).int()
    codes = torch.arange(32, dtype=torch.uint8).view(4, 8)
    parts = {"codes": codes, "scale": torch.ones(4, 2), "order": order, "columns": torch.arange(8.0)}
    one, other = (Packed(spec=spec, parts=parts | {"codes": some}) for some in (codes, codes.flip(0)))
    whole = join([one, other])
    assert whole is not None and torch.equal(floats(whole), torch.cat([floats(one), floats(other)]))
    assert torch.equal(floats(cut(whole, [(3, 6)])), floats(whole)[3:6])
    for part in ({"order": order.flip(0)}, {"zero": torch.ones(4, 2).byte()}):
        assert join([one, Packed(spec=spec, parts=parts | part)]) is None


def strided(part: torch.Tensor) -> torch.Tensor:
    """The same numbers, as a part is that SDNQ wrote for its quantized products: [rows, 1], and the last stride is
    another than 1. torch calls it contiguous, and views its bytes as no other dtype."""
    turned = part.reshape(1, -1).t()
    assert part.shape != turned.shape or turned.is_contiguous()
    return turned if part.shape == turned.shape else part


@pytest.mark.parametrize(
    "scheme", [row.name for row in backends.schemes() if row.on_the_fly and row.backend != "rules"]
)
def test_whatever_the_stride_of_a_dimension_of_size_one(scheme: str, tmp_path: Path) -> None:
    spec = backends.parse(f"{scheme},rank=16" if scheme.startswith("svdquant") else scheme)  # it is a small weight
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    usual = backends.get(spec.scheme.backend).encode(weight, spec)
    other = replace(usual, parts={name: strided(part) for name, part in usual.parts.items()})
    backend = backends.of_scheme(scheme)
    assert torch.equal(floats(other), floats(usual))
    if backend.by_row(usual):
        assert torch.equal(floats(cut(other, [(8, 24), (32, 40)])), floats(cut(usual, [(8, 24), (32, 40)])))
        assert (whole := join([other, usual])) is not None and torch.equal(floats(whole)[48:], floats(usual))
    write(tmp_path / "one.safetensors", backend.write("a.weight", other), {})
    write(tmp_path / "two.safetensors", backend.write("a.weight", usual), {})
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_dense_copies_only_what_it_must() -> None:
    for tensor in (torch.ones(3, 4), torch.ones(5, 1), torch.ones(()), torch.ones(0, 4)):
        assert dense(tensor) is tensor
    for tensor in (torch.ones(1536)[::1536], torch.ones(1, 7).t(), torch.ones(4, 3).t()):
        made = dense(tensor)
        assert torch.equal(made, tensor) and made.view(torch.uint8).shape[-1] == 4 * tensor.shape[-1]
