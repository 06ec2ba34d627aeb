"""Pinned memory of the size that was asked for. CUDA's part of it is a double here: see `test_gpu.py` for its own."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from sdquant.offload import group_hooks, pinned_memory
from sdquant.offload.host_store import PinnedStore
from sdquant.offload.pinned_memory import ByTorch, Registered

CPU = torch.device("cpu")


class Runtime:
    """As much of CUDA's as is asked: it pins up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.pinned, self.read = limit, dict[int, int](), 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if sum(self.pinned.values()) + nbytes > self.limit:
            return 2  # cudaErrorMemoryAllocation
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, self.pinned.pop(address))  # it has to be there still
        self.read += 1
        return 0


@pytest.mark.parametrize(("nbytes", "taken"), [(1, 1), (4096, 4096), (4097, 8192), (3 << 30, 4 << 30)])
def test_what_torch_takes_for_it(nbytes: int, taken: int) -> None:
    assert ByTorch(rounds=True).takes(nbytes) == taken
    assert ByTorch(rounds=False).takes(nbytes) == Registered(None, CPU).takes(nbytes) == nbytes


def test_registered_memory_is_let_go_before_it_goes() -> None:
    runtime = Runtime(1 << 20)
    flat = Registered(runtime, CPU).make(5000)
    assert runtime.pinned == {flat.data_ptr(): 5000}
    part = flat[1000:2000]
    del flat
    gc.collect()
    assert runtime.pinned
    del part
    gc.collect()
    assert not runtime.pinned and runtime.read == 1


def test_what_the_system_does_not_pin_is_kept_unpinned(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(10_000)
    store = PinnedStore(Registered(runtime, CPU), limit=1 << 20)
    regions = [store.add([torch.full([1000], float(i))]) for i in range(4)]
    assert (store.pinned, store.pageable) == (2 * 4032, 2 * 4032)
    assert [one.getMessage() for one in caplog.records] == [
        "Only 8064 bytes of the RAM for offloaded weights are pinned, no more can be: "
        "cudaHostRegister of 4032 bytes: error 2"
    ]
    for i, region in enumerate(regions):
        into = torch.empty(region.nbytes, dtype=torch.uint8)
        region.read(into)
        assert torch.equal(region.views(into)[0], torch.full([1000], float(i)))
    del region, regions
    gc.collect()
    assert store.pinned == 0 and not runtime.pinned


def test_memory_that_torch_does_not_take_for_pinned_is_not_used() -> None:
    assert not pinned_memory.proves(Registered(Runtime(1 << 30), CPU), CPU)


def test_other_devices_pin_as_torch_does() -> None:
    assert pinned_memory.pinning(torch.device("xpu")).takes(4097) == 8192
    assert pinned_memory.pinning(torch.device("privateuseone")).takes(4097) == 4097


@pytest.mark.parametrize(("free", "pins"), [(3 << 20, True), (2 << 20, False)])
def test_group_offload_pins_no_more_than_may_be(free: int, pins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.1 MB of weights, of which torch makes 2: diffusers pins all before the first call, or each for its own."""
    monkeypatch.setattr(group_hooks.hardware, "ram", lambda: (1 << 40, free))
    assert group_hooks.can_pin(torch.nn.Linear(512, 540, bias=False)) == pins
