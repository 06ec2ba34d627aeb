"""GGUF's block types in C: each instruction set gives the bits of torch's decoding and gguf-py's numbers."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import libgguf
import numpy as np
import pytest
import torch

from sdquant.backends._gguf_decode import DECODERS, decode_blocks
from sdquant.core.gguf_types import TYPES
from sdquant.core.packed_layout import PackedLayout
from sdquant.kernels.cpu import extension, isa
from sdquant.kernels.cpu.cpu_kernels import Native

from .blocks import DTYPES, SHAPES, bits, form_of, random_blocks

if extension() is None:
    pytest.skip("the C extension is not built", allow_module_level=True)

KINDS = tuple(DECODERS)
SLOW_TO_WRITE = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s")


@pytest.fixture(params=["portable", "avx2", "avx512bf16", "amx"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    if not extension().choose(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    extension().choose("")


def written_blocks(kind: str, count: int) -> torch.Tensor:
    """Those of ggml's own writer for Gaussian weights, where it does not take seconds to begin with."""
    row = TYPES[kind]
    if kind in SLOW_TO_WRITE:
        return random_blocks(kind, count)
    weights = np.random.default_rng(row.id).standard_normal((count, row.block), dtype=np.float32)
    importance = np.ones(row.block, dtype=np.float32) if libgguf.quantize_requires_imatrix(row.id) else None
    return torch.from_numpy(libgguf.quantize_rows(weights, row.id, imatrix=importance)).view(count, row.nbytes)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_the_bits_of_torch(kind: str, instructions: str) -> None:
    assert isa() == instructions
    reader = Native()
    for rows, columns in SHAPES:
        count = rows * columns // TYPES[kind].block
        for blocks in (random_blocks(kind, count), written_blocks(kind, count)):
            for dtype in DTYPES:
                wanted = torch.empty(rows, columns, dtype=dtype)
                decode_blocks(kind, blocks, wanted)
                form, parts = form_of(kind, rows, columns), {"blocks": blocks}
                assert reader.reads(form, parts, dtype)
                got = torch.full_like(wanted, torch.nan)
                reader.decode_into(form, parts, got)
                assert torch.equal(bits(got), bits(wanted)), (rows, columns, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_the_numbers_of_gguf_py(kind: str, instructions: str) -> None:
    blocks = torch.cat([random_blocks(kind, 40), written_blocks(kind, 24)])
    theirs = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(TYPES[kind].id))
    got = torch.empty(64, TYPES[kind].block)
    Native().decode_into(form_of(kind, *got.shape), {"blocks": blocks}, got)
    assert np.array_equal(got.numpy(), theirs.reshape(got.shape))


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_sums_in_float32(kind: str, instructions: str) -> None:
    """Against float64: the error of a sum of n products in float32 (Higham's bound), and one rounding to the dtype."""
    rows, columns = 21, 768
    blocks = written_blocks(kind, rows * columns // TYPES[kind].block)
    form, parts, reader = form_of(kind, rows, columns), {"blocks": blocks}, Native()
    for dtype in DTYPES:
        whole = reader.unrounded(form, parts, dtype)
        assert whole is (instructions in ("avx2", "avx512vnni") and dtype == torch.bfloat16)
        weight = torch.empty(rows, columns, dtype=torch.float32 if whole else dtype)
        reader.decode_into(form, parts, weight)
        for m in (1, 2, 5, 16, 130):
            x = torch.randn(m, columns, generator=torch.Generator().manual_seed(m)).to(dtype)
            got = torch.full((m, rows), torch.nan, dtype=dtype)
            reader.product(form, parts, x, None, got)
            exact = x.double().numpy() @ weight.double().numpy().T
            most = np.abs(x.double().numpy()) @ np.abs(weight.double().numpy()).T
            allowed = columns * 2.0**-24 * most + torch.finfo(dtype).eps * np.abs(exact)
            assert (np.abs(got.double().numpy() - exact) <= allowed).all(), (dtype, m)


def test_threads_share_blocks_that_cross_rows() -> None:
    """Rows that are no whole blocks, more than one thread's share of them."""
    rows, columns = 12_288, 320
    blocks = random_blocks("q4_k", rows * columns // 256)
    wanted, got = torch.empty(rows, columns), torch.full((rows, columns), torch.nan)
    decode_blocks("q4_k", blocks, wanted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        Native().decode_into(form_of("q4_k", rows, columns), {"blocks": blocks}, got)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got, wanted)


def test_what_cannot_be_read_or_multiplied_is_said() -> None:
    reader, blocks = Native(), {"blocks": written_blocks("q8_0", 8)}
    wrong = PackedLayout(rows=4, columns=64, codes="blocks", packing="q8_0", group=64)
    assert not reader.reads(wrong, blocks, torch.bfloat16)
    assert not reader.reads(form_of("q8_0", 4, 64), blocks, torch.float64)
    assert reader.few(form_of("q4_k", 64, 320), blocks, torch.bfloat16) == 0
