"""Parts of one piece of memory, and streamed blocks in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from sdquant import offload
from sdquant.offload import block_streamer, streaming_plan
from sdquant.offload.block_streamer import Streamer
from sdquant.offload.suballocator import ALIGN, Arena

if TYPE_CHECKING:
    from pathlib import Path


def offset(part: Tensor | None, flat: Tensor) -> int:
    assert part is not None
    return part.data_ptr() - flat.data_ptr()


def test_parts_are_apart_and_come_back() -> None:
    flat = torch.empty(8 * ALIGN, dtype=torch.uint8)
    arena = Arena(flat, 4 * ALIGN)
    one, two = (arena.take(size) for size in (ALIGN + 1, ALIGN))
    assert [offset(part, flat) for part in (one, two)] == [0, 2 * ALIGN]
    assert one is not None and one.numel() == ALIGN + 1 and two is not None
    large = arena.take(4 * ALIGN)  # the other slot was left whole
    assert large is not None and offset(large, flat) == 4 * ALIGN
    assert offset(arena.take(ALIGN), flat) == 3 * ALIGN
    assert arena.take(1) is None
    arena.give(large)
    arena.give(one)
    assert offset(arena.take(ALIGN), flat) == 0  # in a slot that is in use
    assert offset(arena.take(3 * ALIGN), flat) == 4 * ALIGN
    assert arena.take(5 * ALIGN) is None


class Net(nn.Module):
    """One large block and small ones."""

    def __init__(self, blocks: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256 if i else 1024, bias=False) for i in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[..., :256]
        return x


def test_small_blocks_share_the_room_of_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x = Net().requires_grad_(False), torch.randn(2, 256)
    wanted = net(x)
    ahead, beyond = [], []
    arrive = Streamer._arrive

    def counted(self: Streamer, *args: object) -> None:
        arrive(self, *args)  # type: ignore[arg-type]
        ahead.append(len(self._coming))
        beyond.append(max(more for _, more in self._in.values()))

    monkeypatch.setattr(Streamer, "_arrive", counted)
    room = 2 * 4 * 256 * 1024  # two of the large one, which would else stay
    monkeypatch.setattr(
        block_streamer, "plan", lambda component, budget: streaming_plan._spread(component, budget // 2, 2, 0)
    )
    handle = offload.apply(net, "balanced", device="cpu", budget=room, folder=tmp_path)
    try:
        for _ in range(3):
            assert torch.equal(net(x), wanted)
        assert handle.report()["peak"] <= room
    finally:
        handle.remove()
    assert max(ahead) >= 4 and not any(beyond)


class Growing(nn.Linear):
    """What a library does that repacks weights when they first run: another tensor, and more bytes."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "more"):
            self.register_buffer("more", torch.zeros(100_000))
            self.weight.data = self.weight.data.clone()
        return super().forward(x)


@pytest.mark.parametrize("room", [2 * 4 * 256 * 1024 + 1_200_000, 4 * 256 * 1024 + 1000], ids=["fits", "does not fit"])
def test_a_block_that_grows_is_planned_again(tmp_path: Path, room: int) -> None:
    torch.manual_seed(0)
    net, x = Net(17), torch.randn(2, 256)
    net.blocks[0] = Growing(256, 1024, bias=False)
    wanted = net.requires_grad_(False)(x)
    del net.blocks[0].more
    handle = offload.apply(net, "balanced", device="cpu", budget=room, folder=tmp_path)
    try:
        outside = handle.report()["components"]["model"]["streamed"]
        for _ in range(3):
            assert torch.equal(net(x), wanted)
        before = handle.report()
        for _ in range(2):
            assert torch.equal(net(x), wanted)
        after = handle.report()
        assert after["mispredicted"] == before["mispredicted"]
        ahead, fetched = (after[name] - before[name] for name in ("prefetched", "fetches"))
        streamed = after["components"]["model"]["streamed"]
        if room < 2 * 4 * 256 * 1024:  # one slot, which the large one has outgrown
            assert streamed == outside == 17 and fetched == 34
        else:
            assert streamed > outside and after["components"]["model"]["buffers"] > 1
            assert ahead == fetched == 2 * streamed
            assert after["resident"] <= room
    finally:
        handle.remove()


class Shrinking(nn.Linear):
    """A library that needs less after its first forward."""

    def __init__(self) -> None:
        super().__init__(256, 256, bias=False)
        self.register_buffer("once", torch.zeros(300_000))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "once"):
            del self.once
            self.weight.data = self.weight.data.clone()
        return super().forward(x)


def test_what_shrinks_until_it_fits_is_streamed_no_more(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Net(5).requires_grad_(False), torch.randn(2, 256)
    net.blocks[4] = Shrinking().requires_grad_(False)
    wanted = x
    for block in net.blocks:
        wanted = nn.functional.linear(wanted, block.weight)[..., :256]
    room = sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values()) - 800_000
    handle = offload.apply(net, "balanced", device="cpu", budget=room, folder=tmp_path)
    try:
        assert handle.report()["components"]["model"]["streamed"] > 0
        for _ in range(3):
            assert torch.equal(net(x), wanted)
        before = handle.report()
        assert torch.equal(net(x), wanted)
        after = handle.report()
        assert after["components"]["model"]["streamed"] == after["fetches"] - before["fetches"] == 0
        assert after["resident"] <= room
    finally:
        handle.remove()
    assert torch.equal(net(x), wanted)
