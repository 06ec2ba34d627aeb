"""Stored tensors come back as they were, from either store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdquant.errors import BadFileError
from sdquant.offload.host_store import DiskStore, PinnedStore, Store, pinned_limit
from sdquant.offload.pinned_memory import ByTorch
from sdquant.utils.buffers import flat_buffer

CPU = torch.device("cpu")


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 4, 5, 6, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(7, generator=generator).bfloat16(),
        torch.tensor(3.0),
        torch.arange(9, dtype=torch.int8),
        torch.empty(0, 4),
        torch.randn(4, 6, generator=generator).T,
        torch.randn(4, 6, generator=generator)[:, 1:3],
        torch.randn(1000, generator=generator).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
    ]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(params=["disk", "pinned"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    # Pinning itself needs a GPU; everything else about the store does not.
    return DiskStore(tmp_path) if request.param == "disk" else PinnedStore()


def test_tensors_come_back_bit_for_bit(store: Store) -> None:
    given = samples()
    region = store.add(given)
    flat = flat_buffer(region.nbytes + 100, CPU)
    region.read(flat)
    for got in (region.waiting, region.views(flat)):
        for a, b in zip(given, got, strict=True):
            assert (b.shape, b.dtype, bits(b)) == (a.shape, a.dtype, bits(a))
            assert b.numel() == 0 or b.data_ptr() % 64 == 0
    assert region.waiting[0].is_contiguous(memory_format=torch.channels_last)
    assert region.waiting[5].stride() == given[5].stride()


def test_stored_tensors_are_copies(store: Store) -> None:
    given = torch.ones(10)
    region = store.add([given])
    given.zero_()
    assert region.waiting[0].sum() == 10


def test_writing_to_a_waiting_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    region = store.add([torch.ones(10)])
    region.waiting[0].zero_()
    flat = flat_buffer(region.nbytes, CPU)
    region.read(flat)
    assert region.views(flat)[0].sum() == 10


def test_files_go_when_the_store_is_closed_and_mapped_tensors_stay_readable(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    region = store.add([torch.arange(5)])
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(".sdquant-") and len(list(folder.iterdir())) == 1
    store.close()
    assert not list(tmp_path.iterdir())
    if os.name == "posix":
        assert region.waiting[0].tolist() == [0, 1, 2, 3, 4]


def test_files_go_when_the_interpreter_ends(tmp_path: Path) -> None:
    code = """
import sys, torch
from sdquant import offload
layer = torch.nn.Linear(8, 8)
handle = offload.apply(layer, "model", device="cpu", folder=sys.argv[1])
import os
assert os.listdir(sys.argv[1])
raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 7
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_cut_is_said(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    region = store.add([torch.ones(1000)])
    os.truncate(next(store.folder.iterdir()), 100)
    with pytest.raises(BadFileError, match="ends after 100 of 4032 bytes"):
        region.read(flat_buffer(region.nbytes, CPU))


def test_a_file_that_was_deleted_is_said(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    region = store.add([torch.ones(1000)])
    store.close()
    with pytest.raises(BadFileError, match="cannot be read any more"):
        region.read(flat_buffer(region.nbytes, CPU))


def test_wrapper_tensors_cannot_go_to_disk(tmp_path: Path) -> None:
    """What the matrix refuses beforehand; the library's own words, as they come."""
    from .test_tensor_refs import library, linear

    module = library("qint8", linear())
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    with pytest.raises(RuntimeError, match="Attempted to access the data pointer on an invalid python storage"):
        DiskStore(tmp_path).add([weight])
    assert type(PinnedStore().add([weight]).waiting[0]) is type(weight)


def test_pinned_memory_has_a_limit() -> None:
    """Half of the RAM, and no more than three quarters of what is free; the first regions are pinned, the rest is not.
    (Pinning itself needs a GPU.)"""
    gigabyte = 10**9
    assert pinned_limit(64 * gigabyte, 60 * gigabyte) == 32 * gigabyte
    assert pinned_limit(64 * gigabyte, 8 * gigabyte) == 6 * gigabyte
    store = PinnedStore(limit=gigabyte)
    store.add([torch.zeros(1000)])
    assert (store.pinned, store.pageable) == (0, 4032)  # 4000, up to the next 64
    none_left = PinnedStore(ByTorch(rounds=False), limit=4000)
    region = none_left.add([torch.ones(1000)])
    assert (none_left.pinned, none_left.pageable) == (0, 4032)
    into = torch.zeros(region.nbytes, dtype=torch.uint8)
    region.read(into)
    assert torch.equal(region.views(into)[0], torch.ones(1000))
