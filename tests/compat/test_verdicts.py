"""The verdicts for the CPU, seen to be true: the guard lifted, a small network run in every offload mode.

`tests/test_matrix.py` does the same with whole pipelines. This one also knows what today's libraries say where the rows
quote older words or those of a GPU.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from sdquant import backends, offload
from sdquant.compat import Query, look_up
from sdquant.compat.row import OFFLOADS
from sdquant.nn import quantized_layer

from .machines import VERSIONS

# What breaks on a CPU with the libraries of today: (backend, offload) -> the error.
TODAY: dict[tuple[str, str], tuple[type[Exception], str]] = {
    ("bnb", "sequential"): (NotImplementedError, "Cannot copy out of meta tensor"),
    ("quanto", "balanced"): (RuntimeError, "invalid python storage"),
    ("quanto", "sequential"): (TypeError, "missing . required positional arguments"),
}

LIBRARY = [row.name for row in backends.schemes() if row.runtimes[0] == "library"]
PLAIN = ["nf4", "bnb-int8", "qint3", "q4_0", "int4_sym", "sdnq-uint4"]  # every layout of parts, each backend


class Blocks(nn.Module):
    """Three blocks of two layers, as wide as every scheme's groups."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block() for _ in range(3))

    def _block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 256] -> [rows, 256]."""
        for block in self.blocks:
            x = block(x)
        return x


def _network(scheme: str, runtime: str) -> nn.Module:
    torch.manual_seed(0)
    network = Blocks().bfloat16().eval()
    backend, spec = backends.of_scheme(scheme), backends.parse(scheme)
    for block, index in itertools.product(network.blocks, (0, 2)):
        assert isinstance(block, nn.Sequential)
        layer = block[index]
        assert isinstance(layer, nn.Linear)
        packed = backend.encode(layer.weight.data, spec)
        block[index] = (
            backend.to_library(layer, packed, spec) if runtime == "library" else quantized_layer(layer, packed)
        )
    return network


def _inputs() -> Tensor:
    return torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).bfloat16()


def _run(network: nn.Module, mode: str) -> list[Tensor]:
    """Two calls, as the second one finds what the first one left."""
    # Two of the three blocks fit, so that blocks do move.
    budget = offload.weight_bytes(network) * 7 // 10 if mode == "balanced" else None
    handle = offload.apply(network, mode, device="cpu", budget=budget)
    try:
        with torch.no_grad():
            return [network(_inputs()), network(_inputs())]
    finally:
        handle.remove()


def _verdict(scheme: str, mode: str, runtime: str) -> str:
    backend = backends.scheme(scheme).backend
    return look_up(
        Query(
            backend=backend,
            scheme=scheme,
            mode="found",
            offload=mode,
            runtime=runtime,
            device="cpu",
            versions=VERSIONS,
        )
    ).verdict


@pytest.mark.parametrize("mode", OFFLOADS)
@pytest.mark.parametrize(
    ("scheme", "runtime"),
    [
        *((name, "library") for name in LIBRARY),
        # tests/test_matrix.py has plain layers in every mode
        *(pytest.param(name, "plain", marks=pytest.mark.slow) for name in PLAIN),
    ],
)
def test_what_the_row_says_is_what_happens(scheme: str, runtime: str, mode: str) -> None:
    if _verdict(scheme, mode, runtime) == "breaks":
        error, words = TODAY[backends.scheme(scheme).backend, mode]
        with pytest.raises(error, match=words):
            _run(_network(scheme, runtime), mode)
        return
    network = _network(scheme, runtime)
    with torch.no_grad():
        wanted = network(_inputs())
    for out in _run(network, mode):
        assert torch.equal(out, wanted)
