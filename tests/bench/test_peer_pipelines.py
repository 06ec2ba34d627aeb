"""What other libraries make of a network: its bits, and how it computes between components of another dtype."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from bench import _peer_pipelines, fidelity
from bench._calibrated import quantized_components
from bench._calibrating_peers import Compressed
from sdquant.demo import MODELS


def test_bits_count_what_is_left_as_floats() -> None:
    half = Compressed(model=nn.Identity(), nbytes=50, values=100, layers=1, total=200)
    assert half.bits == 8 * (50 + 2 * 100) / 200


def test_a_network_in_float32_tells_the_dtype_of_its_neighbours() -> None:
    seen: list[torch.dtype] = []

    class Network(nn.Linear):
        config = "kept"

        def forward(self, input: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, None]:
            seen.extend((input.dtype, scale.dtype))
            return super().forward(input) * scale, None

    wrapped = _peer_pipelines._InFloat32(Network(4, 4), torch.bfloat16)
    result, rest = wrapped(torch.ones(2, 4, dtype=torch.bfloat16), scale=torch.ones((), dtype=torch.float16))
    assert seen == [torch.float32, torch.float32] and result.dtype is torch.bfloat16 and rest is None
    assert wrapped.dtype is torch.bfloat16 and wrapped.config == "kept" and wrapped.in_features == 4


def test_autoround_gets_no_unet() -> None:
    assert not _peer_pipelines.can_quantize(_peer_pipelines.AUTOROUND, "digits-sd")
    assert all(_peer_pipelines.can_quantize(peer, "digits-sd") for peer in _peer_pipelines.PEERS[:2])


@pytest.mark.parametrize("model", MODELS)
def test_recorded_lines_quantize_the_same_components(model: str) -> None:
    """But AutoRound's, of which the heading of the table says so."""
    rows = [row for row in json.loads(fidelity.RESULTS.read_text(encoding="utf-8"))["rows"] if row["model"] == model]
    parts = {row["scheme"]: row["components"] for row in rows if row["scheme"] is not None}
    fewer = {scheme for scheme, names in parts.items() if names != sorted(quantized_components(model))}
    assert set(fidelity.row_names()) - set(parts) <= {_peer_pipelines.AUTOROUND}
    assert fewer <= {_peer_pipelines.AUTOROUND} and all(names for names in parts.values())
