"""torch.compile of offloaded models: the right numbers, with graph breaks at the mode's hooks; one graph is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sdquant import offload

from .test_balanced import REST, Net, Pipe, run
from .test_threads import MOVING, offloaded


def compiled(net: nn.Module, how: str, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    if how == "method":
        net.compile(backend="aot_eager", **options)
        return net
    if how == "blocks":
        for block in net.get_submodule("blocks"):  # type: ignore[union-attr]
            block.compile(backend="aot_eager", **options)
        return net
    made: nn.Module = torch.compile(net, backend="aot_eager", **options)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        pytest.param(mode, how, marks=() if how == "function" and mode in ("model", "balanced") else pytest.mark.slow)
        for mode in MOVING
        for how in ("function", "method", "blocks")
    ],
)
def test_compiled(mode: str, how: str, tmp_path: Path) -> None:
    net, other = Net(), Net(seed=3)
    wanted = run(net)
    handle = offloaded(mode, Pipe(net=net, other=other), tmp_path, 4 * REST)
    fast = compiled(net, how)
    for _ in range(3):
        assert torch.equal(run(fast), wanted)
        run(other)
    handle.remove()


def test_one_graph_of_a_component_that_is_fetched_whole(tmp_path: Path) -> None:
    net = Net()
    wanted = run(net)
    handle = offload.apply(net, "model", device="cpu", folder=tmp_path)
    fast = compiled(net, "function", fullgraph=True)
    assert torch.equal(run(fast), wanted) and torch.equal(run(fast), wanted)
    handle.remove()


def test_one_graph_of_blocks_that_take_turns_is_refused_with_the_reason(tmp_path: Path) -> None:
    net = Net()
    handle = offloaded("balanced", net, tmp_path, 4 * REST)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Cannot compile an offloaded model as one graph"):
        run(compiled(net, "function", fullgraph=True))
    handle.remove()
