"""How well balanced offload hides the reading of weights behind the computation, on the CPU with a slow disk.

    python -m bench.offload               every row, about ten minutes, on two cores: one computes, the other reads
    python -m bench.offload --rounds 2    a quick look
    python -m bench.offload --card        to a card that is none (tests/card): a stream beside the computing one

A Flux transformer with random weights (hidden 1024, 3 double and 18 single blocks, bfloat16) makes steps with one
thread; blocks that do not fit the budget wait in files that are read at a limited rate. In one process and turn by
turn: steps of the model that is all in memory, then steps of the one that is offloaded.
    compute   seconds of a step in memory, median    transfer  bytes read in a step / bytes a second
    floor     the larger of the two                  ratio     seconds of a step offloaded / floor
The card is computed by the CPU as well, and its copies from pinned memory come at the limited rate: it shows whether
they are on their way while blocks run, and not how fast any card is.
The first step of each turn is left out: what was read while the other model ran is no merit. Where all fits and nothing
is read, turns are of one step, four times as many of them, and `ratio` is the median over them of one step by the
other: two per cent are less than what the machine does from one minute to the next.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._results import write

RESULTS = Path(__file__).parent / "results"
HIDDEN, DOUBLE, SINGLE = 1024, 3, 18
IMAGE, TEXT = 256, 64  # tokens

# Share of the weights that the budget is, and transfer of a step / its computation; None: the disk as it is.
ROWS: tuple[tuple[float, float | None], ...] = (
    (0.25, 0.5),
    (0.25, 1.0),
    (0.25, 2.0),
    (0.5, 0.5),
    (0.5, 1.0),
    (0.5, 2.0),
    (0.75, 0.8),
    (0.75, 1.5),
    (0.5, None),
    (1.1, None),
)
# To the card, of memory that is not pinned: the same, and bytes that the system pins. The first are enough for the two
# pieces that it then goes through, the second for none.
PAGEABLE: tuple[tuple[float, float | None, int], ...] = ((0.25, 0.5, 40 << 20), (0.25, 0.5, 0))


def build(hidden: int = HIDDEN, layers: tuple[int, int] = (DOUBLE, SINGLE), meta: bool = False) -> Any:
    """The transformer, the same at each call; `meta`: without weights.

    Weights are made in bfloat16 where they stay, as a load has them: what float32 ones would leave in the heap is none
    of a model's.
    """
    import torch
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        net = FluxTransformer2DModel(
            patch_size=1, in_channels=64, num_layers=layers[0], num_single_layers=layers[1], attention_head_dim=64,
            num_attention_heads=hidden // 64, joint_attention_dim=512, pooled_projection_dim=256,
            axes_dims_rope=(8, 28, 28),
        )  # fmt: skip
    net = net.to(torch.bfloat16).eval().requires_grad_(False)
    if meta:
        return net
    net = net.to_empty(device="cpu")
    random = torch.Generator().manual_seed(0)
    for name, weight in net.named_parameters():
        if name.endswith("bias"):
            weight.zero_()
        elif weight.ndim == 1:
            weight.fill_(1)
        else:
            weight.normal_(std=weight.shape[1] ** -0.5, generator=random)
    return net


def step(
    net: Any, device: str = "cpu", tokens: int = IMAGE, through: Callable[..., Any] | None = None
) -> Callable[[], Any]:
    """What makes one step.

    Args:
        tokens: of the image. through: called with the network and its arguments, instead of the network.
    """
    import torch

    torch.manual_seed(1)
    text = torch.randn(1, TEXT, 512).bfloat16()
    given = {
        "hidden_states": torch.randn(1, tokens, 64).bfloat16(),
        "encoder_hidden_states": text,
        "pooled_projections": torch.randn(1, 256).bfloat16(),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }

    given = {name: value.to(device) for name, value in given.items()}

    def call() -> Any:
        with torch.no_grad():
            if through is not None:
                return through(net, **given, return_dict=False)
            return net(**given, return_dict=False)[0]

    return call


@contextmanager
def slow_disk(rate: float | None) -> Iterator[None]:
    """Files of offloaded weights are read at `rate` bytes a second at the most; None for as fast as they can be."""
    from sdquant.offload.host_store import _DiskRegion

    read = _DiskRegion.read

    def slowly(self: Any, into: Any) -> None:
        begin = time.perf_counter()
        read(self, into)
        if rate is not None:
            time.sleep(max(0.0, self.nbytes / rate - (time.perf_counter() - begin)))

    _DiskRegion.read = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        _DiskRegion.read = read  # type: ignore[method-assign]


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextmanager
def slow_card(card: Any, rate: float | None) -> Iterator[None]:
    """The card's copies take as long."""
    card.rate(rate or 0)
    try:
        yield
    finally:
        card.rate(0)


def row(
    net: Any,
    other: Any,
    share: float,
    transfer: float | None,
    pinned: int | None = None,
    *,
    rounds: int,
    steps: int,
    card: Any = None,
) -> dict[str, Any]:
    """One row: `net` stays in memory, `other` is offloaded; both on the card, if that is given."""
    from sdquant import offload

    device = "cpu" if card is None else "card"
    resident, away = step(net, device), step(other, device)
    resident()
    compute = statistics.median(seconds(resident) for _ in range(3))
    size = offload.weight_bytes(other)
    budget = int(share * size)
    if card is not None:
        card.pin_limit(pinned)
    with tempfile.TemporaryDirectory() as folder:
        handle = offload.apply(other, "balanced", device=device, budget=budget, folder=folder)
        facts = handle.components["model"]
        try:
            read = streamed(handle, away)
            rate = None if transfer is None else read / (transfer * compute)
            with slow_disk(rate) if card is None else slow_card(card, rate):
                if read:
                    in_memory, offloaded = in_turns(resident, away, rounds, steps)
                else:
                    in_memory, offloaded = one_by_one(resident, away, 4 * rounds * steps)
        finally:
            report = handle.report()
            handle.remove()
    compute = statistics.median(in_memory)
    floor = max(compute, read / rate if rate else 0.0)
    taken = statistics.median(offloaded)
    reading = "as fast as the disk is" if transfer is None else f"for {transfer:g} of the computation"
    how = "" if pinned is None else f", {pinned} bytes pinned"
    return {
        "name": "balanced",
        "case": f"budget {share:.0%}, read {reading}{how}",
        "pinned": report.get("pinned"),
        "budget_share": share,
        "transfer": transfer,
        "weights": size,
        "budget": budget,
        "peak": report["peak"],
        "blocks": facts.get("blocks", 0),
        "streamed_blocks": facts.get("streamed", 0),
        "read_per_step": read,
        "rate": rate,
        "compute_s": compute,
        "transfer_s": read / rate if rate else None,
        "step_s": taken,
        "ratio": taken / floor if read else statistics.median(b / a for a, b in zip(in_memory, offloaded, strict=True)),
        "ratio_of_best": min(offloaded) / max(min(in_memory), read / rate if rate else 0.0),
    }


def in_turns(
    resident: Callable[[], Any], away: Callable[[], Any], rounds: int, steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of steps of both, `steps` of one after the other's; the first of each turn is not among them."""
    in_memory: list[float] = []
    offloaded: list[float] = []
    for _ in range(rounds):
        for call, taken in ((resident, in_memory), (away, offloaded)):
            call()
            taken += [seconds(call) for _ in range(steps)]
    return in_memory, offloaded


def one_by_one(resident: Callable[[], Any], away: Callable[[], Any], count: int) -> tuple[list[float], list[float]]:
    """Seconds of steps of both, one of each in a pair, which of them first by turns."""
    in_memory: list[float] = []
    offloaded: list[float] = []
    for index in range(count):
        pair = ((resident, in_memory), (away, offloaded))
        for call, taken in pair if index % 2 else pair[::-1]:
            taken.append(seconds(call))
    return in_memory, offloaded


def streamed(handle: Any, away: Callable[[], Any]) -> int:
    """Bytes that a step reads, when the first is over."""
    away()
    before = handle.counters.fetched
    away()
    return int(handle.counters.fetched - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="timed in each round")
    parser.add_argument("--card", action="store_true", help="to a card that is none; needs g++")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    card, hidden = None, HIDDEN
    if args.card:
        hidden //= 2  # it copies the arguments of every kernel
        from sdquant import offload
        from tests import card as cards

        with tempfile.TemporaryDirectory() as folder:
            card = cards.Card(cards.build(Path(folder)))
    net, other = build(hidden), build(hidden)
    if card is not None:
        offload.apply(net, "none", device="card")
    rows = []
    for given in (*ROWS, *(PAGEABLE if card is not None else ())):
        rows.append(row(net, other, *given, rounds=args.rounds, steps=args.steps, card=card))
        last = rows[-1]
        print(
            f"budget {given[0]:4.0%}  streamed {last['streamed_blocks']:2} of {last['blocks']:2}  compute"
            f" {last['compute_s']:.3f} s  transfer {last['transfer_s'] or 0:.3f} s  step {last['step_s']:.3f} s"
            f"  ratio {last['ratio']:.3f}  best {last['ratio_of_best']:.3f}",
            flush=True,
        )
    name = "offload-card" if args.card else "offload"
    write(args.out or RESULTS / f"{name}.json", name, rows, threads=1, rounds=args.rounds)


if __name__ == "__main__":
    main()
