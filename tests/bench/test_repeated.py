"""Weights of a few blocks over and over, which steps are timed with."""

from __future__ import annotations

import argparse

import pytest
import torch

from bench.repeated import NOTE, blocks, repeated, repeats, without_outputs
from sdquant import backends


def test_blocks_repeat() -> None:
    """Three blocks of 32, in a weight of seven."""
    weight, spec = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)), backends.parse("q4_0")
    backend = backends.get("gguf")
    whole = backend.encode(weight, spec)
    with repeated(3):
        some = backend.encode(weight, spec)
        enough = backend.encode(weight[:3], spec)
        floats = backend.encode(weight, backends.parse("f16"))
    assert some.spec == whole.spec
    assert torch.equal(some.parts["blocks"], whole.parts["blocks"][[0, 1, 2, 0, 1, 2, 0]])
    assert not torch.equal(some.parts["blocks"], whole.parts["blocks"])
    assert torch.equal(enough.parts["blocks"], whole.parts["blocks"][:3])
    assert torch.equal(backend.decode(floats, torch.float16), weight.half())
    assert torch.equal(backend.encode(weight, spec).parts["blocks"], whole.parts["blocks"])


def test_what_comes_out_is_not_told() -> None:
    """Of what repeats alone."""
    rows = [{"quant": name, "snr": snr, "note": None} for name, snr in ((None, None), ("nf4", 9.0), ("f16", 50.0))]
    repeating = {"quant": "q4_k_m", "snr": -2.0, "note": None}
    assert without_outputs([*rows, repeating], 64) == [*rows, repeating | {"snr": None, "note": NOTE.format(64)}]
    assert [name for name in ("iq1_m", "q8_0", "f32", "bf16", "int8", "rules") if repeats(name)] == ["iq1_m", "q8_0"]


def test_one_block_at_the_least() -> None:
    assert blocks("1") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="0 is no number of blocks"):
        blocks("0")
