"""Cases of test_malloc_trim.py, which runs them in a process of their own: freed memory goes back once it is much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sdquant
from sdquant import offload
from sdquant.utils import malloc_trim

PIECE = 16 << 10  # float32 values: 64 kB, which glibc takes from the heap and does not map by themselves


@pytest.fixture(autouse=True)
def anew() -> None:
    """Forget what the case before needed."""
    malloc_trim.forget()


def holes(nbytes: int) -> list[torch.Tensor]:
    """Leave freed pieces in the heap; gives what keeps them apart, and so from going back at once."""
    pieces = [torch.ones(PIECE) for _ in range(nbytes // (4 * PIECE))]
    return pieces[::16]


def much() -> int:
    """More bytes than may be held without being used."""
    return 2 * malloc_trim.spare(malloc_trim.anonymous_bytes())


def fallen(call: Callable[[], Any]) -> int:
    """Bytes by which the memory that the process holds is smaller when a call has ended."""
    before = malloc_trim.anonymous_bytes()
    call()
    return before - malloc_trim.anonymous_bytes()


def test_what_is_freed_goes_back_once_it_is_much() -> None:
    malloc_trim.trim_if_worthwhile()
    apart = [holes(much())]
    assert fallen(malloc_trim.trim_if_worthwhile) > much() // 2
    apart.append(holes(malloc_trim.LEAST // 4))
    assert fallen(malloc_trim.trim_if_worthwhile) < 1 << 20
    apart.append(holes(much()))
    assert fallen(malloc_trim.trim_if_worthwhile) > much() // 2


def test_another_model_is_looked_at_anew() -> None:
    malloc_trim.trim_if_worthwhile()
    kept = torch.ones(2 * much() // 4)
    malloc_trim.trim_if_worthwhile()
    del kept
    apart = [holes(much())]
    assert fallen(malloc_trim.trim_if_worthwhile) < 1 << 20  # the process was seen to need as much
    malloc_trim.forget()
    assert fallen(malloc_trim.trim_if_worthwhile) > much() // 2
    del apart


def test_what_was_needed_once_may_be_held_again() -> None:
    once = [torch.ones(PIECE) for _ in range(2 * much() // (4 * PIECE))]
    malloc_trim.trim_if_worthwhile()
    apart = [once[::16], holes(much())]
    del once
    assert fallen(malloc_trim.trim_if_worthwhile) > 2 * much()  # what was there was more than that
    apart.append(holes(much()))
    assert fallen(malloc_trim.trim_if_worthwhile) < 1 << 20


def test_where_the_system_does_not_say_models_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when no more files may be open, in the middle of it all."""
    apart = [holes(much())]
    before = malloc_trim.anonymous_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(malloc_trim, "_STATM", "/nowhere")
        assert malloc_trim.anonymous_bytes() == 0
        malloc_trim.trim_if_worthwhile()
    assert before - malloc_trim.anonymous_bytes() < 1 << 20
    assert fallen(malloc_trim.trim_if_worthwhile) > much() // 2
    del apart


def test_who_has_memory_to_spare_can_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = [holes(much())]
    try:
        monkeypatch.setenv("SDQUANT_TRIM", "0")
        malloc_trim._looks.cache_clear()
        assert fallen(malloc_trim.trim_if_worthwhile) < 1 << 20
        assert malloc_trim.spare(1 << 30) == 0
    finally:
        monkeypatch.undo()
        malloc_trim._looks.cache_clear()
    assert fallen(malloc_trim.trim_if_worthwhile) > much() // 2
    del apart


def test_small_steps_are_counted_together() -> None:
    apart = [holes(much())]
    small, large = torch.ones(malloc_trim.LARGE - 1), torch.ones(malloc_trim.LARGE)
    assert fallen(lambda: malloc_trim.look_beside(small)) < 1 << 20
    for _ in range(malloc_trim.OFTEN // malloc_trim.LARGE - 1):
        assert fallen(lambda: malloc_trim.look_beside(large)) < 1 << 20
    assert fallen(lambda: malloc_trim.look_beside(large)) > much() // 2
    del apart


@pytest.mark.parametrize("compute", [None, "int8"])
@pytest.mark.parametrize("layer", [nn.Linear(64, 64), nn.Conv2d(64, 64, 3, padding=1)], ids=["linear", "conv"])
def test_quantized_layers_look_in_a_model_that_was_offloaded(layer: nn.Module, compute: str | None) -> None:
    net = sdquant.quantize(nn.Sequential(layer), "int8", runtime="plain", compute=compute, progress=False)
    small, large = (
        torch.ones(4, 64, 8, n) if isinstance(layer, nn.Conv2d) else torch.ones(n * 32, 64) for n in (8, 512)
    )
    with torch.no_grad():
        net(large)
        malloc_trim.forget()
        apart = [holes(much())]
        assert fallen(lambda: net(large)) < 1 << 20  # a layer alone is not to pay for what others have freed
        handle = offload.apply(net, "none", device="cpu")
        assert fallen(lambda: net(small)) < 1 << 20
        assert fallen(lambda: net(large)) > much() // 2
        handle.remove()
        del apart


class Blocks(nn.Module):
    """Eight of 1 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("mode", ["none", "balanced", "model"])
def test_layers_of_floats_look_where_a_model_was_loaded_or_offloaded(mode: str) -> None:
    net, x = Blocks(), torch.ones(512, 512)
    handle = offload.apply(net, mode, device="cpu", budget=4 << 20 if mode == "balanced" else None)
    with torch.no_grad():
        net(x)
        malloc_trim.forget()
        apart = [holes(much())]
        assert fallen(lambda: net(x)) > much() // 2
        handle.remove()
        malloc_trim.forget()
        apart = [holes(much())]
        assert fallen(lambda: net(x)) < 1 << 20
        del apart


def test_looking_breaks_no_compiled_graph() -> None:
    net = Blocks()
    handle = offload.apply(net, "none", device="cpu")
    x = torch.ones(512, 512)
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), net(x))
    handle.remove()
