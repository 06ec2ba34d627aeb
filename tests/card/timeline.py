"""How long steps take with balanced offload in the card's own time, for given durations of kernels and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn

from sdquant import offload
from sdquant.offload import block_streamer
from sdquant.offload.async_copy import StreamTransfer, _StreamTicket

if TYPE_CHECKING:
    from . import Card

WIDTH = 64
STEPS, FIRST = 7, 4  # of which the first ones fill memory and learn the order
# Outputs of the blocks: alike; as a Flux transformer's, whose double ones come first; with large ones in the middle.
SHAPES: dict[str, tuple[int, ...]] = {
    "even": (64,) * 24,
    "flux": (152,) * 19 + (64,) * 38,
    "unet": (10,) * 3 + (30,) * 4 + (60,) * 20 + (30,) * 6 + (10,) * 3,
}
# Seconds of copying by seconds of computing, were all that has no room copied once; and the budget, of the weights.
CASES = [(name, balance, share) for name in SHAPES for balance, share in ((0.82, 0.5), (0.85, 0.3), (1.4, 0.7))]
# On two cards: both as fast, and one that copies for longer than it computes.
TWO = [("flux", (0.85, 0.85)), ("flux", (0.85, 1.4)), ("even", (1.4, 0.8))]


class Timed(nn.Module):
    """A block whose product takes so many seconds of the card's."""

    def __init__(self, card: Card, outputs: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, outputs, bias=False)
        self.card, self.seconds = card, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.card.next(self.seconds)
        y: Tensor = self.linear(x)
        return x + y.mean()


class Net(nn.Module):
    """Blocks that compute as long as they are large, in the mean a millisecond each; or those of an odd number three
    times as long as others of their size."""

    def __init__(self, card: Card, shape: Sequence[int], uneven: bool = False) -> None:
        super().__init__()
        mean = sum(shape) / len(shape)
        self.blocks = nn.ModuleList(
            Timed(card, n, 1e-3 * n / mean * ((0.5, 1.5)[i % 2] if uneven else 1)) for i, n in enumerate(shape)
        )
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def step(card: Card, net: nn.Module, budget: int, rate: float) -> dict[str, Any]:
    """Seconds of a step, and of computing and copying in it; the same for the memory held."""
    x = torch.ones(2, WIDTH).to("card")
    handle = offload.apply(net, "balanced", device="card", budget=budget)
    card.own_rate(rate)
    card.races()
    marks = []
    for number in range(STEPS):
        if number == FIRST:
            marks.append(card.times)
        net(x)
    marks.append(card.times)
    races = card.races()
    torch.accelerator.synchronize()
    card.own_rate(0)
    handle.remove()
    net.to("cpu")
    end, computing, copying = ((b - a) / (STEPS - FIRST) for a, b in zip(*marks, strict=True))
    return {"step": end, "computing": computing, "copying": copying, "races": races}


def two(card: Card, shape: str, rates: tuple[float, float], share: float) -> dict[str, Any]:
    """Steps of two models of uneven blocks, each on a card of its own, that one program gives their work by turns: of
    both together, and what each card computes and copies in them. `rates`: of copying, by computing."""
    devices = [torch.device("card", number) for number in range(2)]
    nets = [Net(card, SHAPES[shape], True) for _ in devices]
    size, seconds = offload.weight_bytes(nets[0]), 1e-3 * len(nets[0].blocks)
    inputs = [torch.ones(2, WIDTH).to(device) for device in devices]
    handles = [
        offload.apply(net, "balanced", device=str(device), budget=int(share * size))
        for net, device in zip(nets, devices, strict=True)
    ]
    card.races()
    marks: list[Any] = []
    for number in range(STEPS):
        if number == FIRST:
            marks.append([card.times_of(0), card.times_of(1)])
        for net, x, balance in zip(nets, inputs, rates, strict=True):
            card.own_rate(size * (1 - share) / (balance * seconds))
            net(x)
    marks.append([card.times_of(0), card.times_of(1)])
    races = card.races()
    card.own_rate(0)
    for device in devices:
        torch.accelerator.synchronize(device)
    where = [{p.device.index for p in net.parameters() if p.device.type == "card"} for net in nets]
    for handle in handles:
        handle.remove()
    each = [
        dict(
            zip(
                ("end", "computing", "copying"),
                ((b - a) / (STEPS - FIRST) for a, b in zip(*of, strict=True)),
                strict=True,
            )
        )
        for of in zip(*marks, strict=True)
    ]
    return {
        "step": (max(at[0] for at in marks[1]) - max(at[0] for at in marks[0])) / (STEPS - FIRST),
        "each": each, "races": races, "where": [sorted(some) for some in where],
    }  # fmt: skip


def ratio(row: dict[str, Any]) -> float:
    return float(row["step"] / max(row["computing"], row["copying"]))


def of(card: Card, shape: str, balance: float, share: float, uneven: bool = False) -> dict[str, Any]:
    """A step of one of `SHAPES`."""
    net = Net(card, SHAPES[shape], uneven)
    size = offload.weight_bytes(net)
    rate = size * (1 - share) / (balance * 1e-3 * len(net.blocks))
    return {"shape": shape, "balance": balance, "share": share} | step(card, net, int(share * size), rate)


def timeline(card: Card) -> dict[str, Any]:
    """Steps that compute and copy by turns, with all on the card, and with what must not be left out left out."""
    fits = of(card, "flux", 1.0, 1.01)
    found = {"steps": [of(card, *case) for case in CASES], "fits": fits, "uneven": of(card, "flux", 1.0, 0.5, True)}
    found["two cards"] = [two(card, name, rates, 0.5) for name, rates in TWO]
    for name, fault in FAULTS.items():
        with mock.patch.object(*fault):
            found[name] = of(card, "flux", 1.0, 0.5)
    return found


def copies_at_once(
    self: StreamTransfer, unit: Any, buffer: Tensor, computed: Any, stream: Any, copy: Any = StreamTransfer._copy
) -> Any:
    return copy(self, unit, buffer, self._api.Event(), stream)


def without_prefetch(self: Any) -> None:
    """`Streamer._fetch_ahead` that fetches nothing."""


def waits(self: Any, unit: Any, buffer: Tensor, start: Callable[..., Any] = StreamTransfer.start) -> Any:
    """`StreamTransfer.start` after which the program waits for the copy."""
    ticket = start(self, unit, buffer)
    ticket._future.result()[1].synchronize()
    return ticket


# What a schedule must not leave out, and how it is left out.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the computing waits for the copy": (_StreamTicket, "wait", lambda self: self._future.result()[0]),
    "the copy waits for the computing": (StreamTransfer, "_copy", copies_at_once),
    "copies come before they are needed": (block_streamer.Streamer, "_fetch_ahead", without_prefetch),
    "the program does not wait for copies": (StreamTransfer, "start", waits),
}
