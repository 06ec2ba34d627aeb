"""libgguf as a reader: the bits of torch's decoding for every type that it is used for, and only those."""

from __future__ import annotations

import pytest
import torch

from sdquant.backends._gguf_decode import DECODERS, decode_blocks
from sdquant.core.gguf_types import TYPES
from sdquant.kernels.libgguf import Libgguf, reader

from .blocks import DTYPES, SHAPES, bits, form_of, random_blocks

KINDS = ("q4_0", "q4_1", "q3_k", "q4_k", "q5_k", "iq4_xs", "iq2_xxs", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "mxfp4",
         "nvfp4")  # fmt: skip
IN_FLOAT32 = (*KINDS, "q5_0", "q5_1", "q2_k")


@pytest.mark.parametrize("kind", IN_FLOAT32)
def test_decoding_gives_the_bits_of_torch(kind: str) -> None:
    found = reader()
    assert found is not None
    for rows, columns in SHAPES:
        parts = {"blocks": random_blocks(kind, rows * columns // TYPES[kind].block)}
        form = form_of(kind, rows, columns)
        for dtype in DTYPES:
            assert found.reads(form, parts, dtype) == (kind in KINDS or dtype == torch.float32)
            wanted = torch.empty(rows, columns, dtype=dtype)
            decode_blocks(kind, parts["blocks"], wanted)
            got = torch.full_like(wanted, torch.nan)
            found.decode_into(form, parts, got)
            assert torch.equal(bits(got), bits(wanted)), (rows, columns, dtype)


def test_more_than_a_tile_and_more_than_one_thread() -> None:
    rows, columns = 12_288, 320  # blocks across rows
    parts = {"blocks": random_blocks("q4_k", rows * columns // 256)}
    wanted, got = torch.empty(rows, columns).half(), torch.full((rows, columns), torch.nan).half()
    decode_blocks("q4_k", parts["blocks"], wanted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        Libgguf().decode_into(form_of("q4_k", rows, columns), parts, got)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got, wanted)


def test_types_that_torch_decodes_as_fast_are_left_to_it() -> None:
    for kind in set(DECODERS) - set(IN_FLOAT32):
        parts = {"blocks": random_blocks(kind, 512 // TYPES[kind].block)}
        assert not any(Libgguf().reads(form_of(kind, 2, 256), parts, dtype) for dtype in DTYPES), kind
