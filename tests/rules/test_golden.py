"""Bit for bit what the real Qwix computes, of the version that docs/rules.md names: see golden/make.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sdquant.rules.core.einsum import einsum
from sdquant.rules.core.how_to_quantize import HowToQuantize
from sdquant.rules.core.qarray import dequantize, quantize
from sdquant.rules.providers.product import Site
from sdquant.rules.qconfig import QuantizationRule

FILE = np.load(Path(__file__).parent / "golden" / "qwix.npz")
CASES = sorted({name.rpartition("|")[0] for name in FILE.files})


def array(case: str, name: str) -> torch.Tensor:
    return torch.from_numpy(FILE[f"{case}|{name}"])


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("quantize")])
def test_scales_and_numbers(case: str) -> None:
    """mxfp8 and mxfp4 had the scales of 0.1.8, rounded up."""
    _, name, tile, method, dtype = case.split("|")
    how = HowToQuantize(
        qtype=name,
        channelwise_axes=(0,),
        tiled_axes={1: int(tile)} if int(tile) else {},
        calibration_method=method,
    )
    done = quantize(array(case, "x").to(getattr(torch, dtype)), how)
    assert torch.equal(done.scale.float(), array(case, "scale"))
    assert torch.equal(dequantize(done).float(), array(case, "dequantized"))


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("einsum")])
def test_einsum(case: str) -> None:
    """A third of the numbers was one unit off: the second operand's scale comes first."""
    _, text, tile = case.split("|")
    rule = QuantizationRule(module_path=".*", act_qtype="int8", tile_size=int(tile) or None)
    done = einsum(text, array(case, "a"), array(case, "b"), Site(rule=rule, name="einsum0"))
    assert done is not None and torch.equal(done, array(case, "product"))
