"""The same on a CUDA device: pinned memory below it, a stream beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdquant import offload
from sdquant.models import pipelines
from sdquant.offload.host_store import PinnedStore
from sdquant.offload.pinned_memory import ByTorch, Registered, pinning

from .conftest import draw, hooked, made, same_state, state_of
from .test_modes import quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODES = [row.name for row in offload.MODES]


def settings(mode: str, pipe: Any) -> dict[str, Any]:
    largest = max(offload.weight_bytes(part) for part in pipelines.components_of(pipe).values())
    return {"device": "cuda", "budget": int(0.85 * largest) if mode == "balanced" else None}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", [None, "int8", "q8_0"])
def test_same_image_as_everything_on_the_gpu(mode: str, scheme: str | None, pipeline: Any) -> None:
    if scheme:
        quantize(pipeline, scheme)
    handle = offload.apply(pipeline, "none", device="cuda")
    expected = draw(pipeline)
    handle.remove()
    for part in pipelines.components_of(pipeline).values():
        part.to("cpu")
    handle = offload.apply(pipeline, mode, **settings(mode, pipeline))
    assert pipeline._execution_device.type == "cuda"
    for _ in range(3):
        assert (draw(pipeline) == expected).all()
    handle.remove()
    assert not hooked(pipeline)


@pytest.mark.parametrize("mode", ["none", "model", "balanced"])
@pytest.mark.parametrize("scheme", ["nf4", "nf4,double_quant", "bnb-int8"])
def test_bitsandbytes_modules_move(mode: str, scheme: str) -> None:
    first = quantize(made("flux"), scheme, library=True)
    offload.apply(first, "none", device="cuda")
    expected = draw(first)
    pipe = quantize(made("flux"), scheme, library=True)
    handle = offload.apply(pipe, mode, **settings(mode, pipe))
    for _ in range(2):
        assert (draw(pipe) == expected).all()
    handle.remove()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", [None, "int8", "nf4"])
def test_what_a_mode_leaves_is_what_was_there(mode: str, scheme: str | None, pipeline: Any) -> None:
    """At once after a drawing, with copies on their way."""
    if scheme:
        quantize(pipeline, scheme)
    before = state_of(pipeline)
    handle = offload.apply(pipeline, mode, **settings(mode, pipeline))
    expected = draw(pipeline)
    with handle.suspended():
        assert mode == "none" or same_state(pipeline, before)
    assert (draw(pipeline) == expected).all()
    handle.remove()
    for part in pipelines.components_of(pipeline).values():
        part.to("cpu")
    assert same_state(pipeline, before)
    parts = pipelines.components_of(pipeline).values()
    assert not any(tensor.is_pinned() for part in parts for tensor in part.state_dict().values())


def test_balanced_keeps_to_its_budget_on_the_device() -> None:
    pipe = made("flux")
    size = offload.weight_bytes(*pipelines.components_of(pipe).values())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    handle = offload.apply(pipe, "balanced", device="cuda", budget=int(0.6 * size))
    draw(pipe)
    assert torch.cuda.memory_allocated() - before <= 0.6 * size + 2**20
    assert handle.report()["prefetched"] > 0
    handle.remove()


@pytest.mark.parametrize("registered", [True, False])
def test_pinned_memory_keeps_to_its_limit(registered: bool) -> None:
    device = torch.device("cuda")
    how = pinning(device) if registered else ByTorch(rounds=True)
    assert isinstance(how, Registered if registered else ByTorch)
    store = PinnedStore(how, limit=1 << 20)
    first, second = (store.add([torch.ones(1 << 17)]) for _ in range(2))
    third = store.add([torch.ones(1 << 17)])
    assert (store.pinned, store.pageable) == (1 << 20, 1 << 19)
    assert first.waiting[0].is_pinned() and second.waiting[0].is_pinned() and not third.waiting[0].is_pinned()
    del first
    assert store.pinned == 1 << 19


def test_torch_rounds_what_it_pins_up_and_sdquant_does_not() -> None:
    def pinned() -> int:
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])

    nbytes, before = (1 << 24) + 1, pinned()
    kept = ByTorch(rounds=True).make(nbytes)
    assert pinned() - before == ByTorch(rounds=True).takes(nbytes) == 1 << 25
    exact = pinning(torch.device("cuda")).make(nbytes)
    assert pinned() - before == 1 << 25 and exact.is_pinned() and kept.is_pinned()


def test_an_error_of_pinning_is_no_later_kernels() -> None:
    device, runtime = torch.device("cuda"), torch.cuda.cudart()

    class Twice:
        """Pins memory that is pinned already."""

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            assert int(runtime.cudaHostRegister(address, nbytes, flags)) == 0
            return int(runtime.cudaHostRegister(address, nbytes, flags))

    with pytest.raises(RuntimeError, match="cudaHostRegister of 1048576 bytes: error"):
        Registered(Twice(), device).make(1 << 20)
    assert float(torch.ones(3, device=device).sum()) == 3
