"""Files of a few blocks over and over, which steps are timed with."""

from __future__ import annotations

import torch

from bench.repeated import NOTE, repeated, without_outputs
from sdquant import backends


def test_blocks_repeat() -> None:
    """Three blocks of 32, in a weight of seven."""
    weight, spec = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)), backends.parse("q4_0")
    whole = backends.get("gguf").encode(weight, spec).parts["blocks"]
    with repeated(3):
        some = backends.get("gguf").encode(weight, spec).parts["blocks"]
    assert torch.equal(some, whole[[0, 1, 2, 0, 1, 2, 0]]) and not torch.equal(some, whole)
    assert torch.equal(backends.get("gguf").encode(weight, spec).parts["blocks"], whole)


def test_what_comes_out_is_not_told() -> None:
    rows = [{"quant": None, "snr": None, "note": None}, {"quant": "iq1_m", "snr": -2.0, "note": None}]
    assert without_outputs(rows, 64) == [rows[0], {"quant": "iq1_m", "snr": None, "note": NOTE.format(64)}]
