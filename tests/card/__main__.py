"""What the card does with models: `python -m tests.card [LIBRARY]` prints it as JSON."""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench import offload as bench
from sdquant import backends, offload
from sdquant.kernels import workspace
from sdquant.models import pipelines
from sdquant.nn import quantized_layer
from sdquant.offload import pinned_memory, residency
from sdquant.offload.async_copy import StreamTransfer, _StreamTicket
from sdquant.offload.pinned_memory import Registered, proves

from ..offload.conftest import draw, hooked, made
from ..offload.test_balanced import Pipe
from ..offload.test_modes import quantize
from . import Card, build
from .timeline import timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sdquant.offload.blocks import Unit

MODES = ("none", "model", "sequential", "balanced")  # and see `group`
SCHEMES = (None, "nf4", "q8_0")
PINNED = {"all": None, "in part": 300_000, "none": 0}  # of the net below, bytes that the system pins
PIECE = 40_000  # bytes of a pinned piece: less than some of its blocks
_NOTHING = nullcontext()
SLOW = 3e8  # bytes a second: copies that are on their way for long


def drawn(card: Card) -> Iterator[dict[str, Any]]:
    """Every mode draws what the card draws with everything on it, and leaves no weights on it."""
    for model in ("sd", "flux"):
        for scheme in SCHEMES:
            pipe = made(model)
            if scheme:
                quantize(pipe, scheme)
            parts = pipelines.components_of(pipe).values()
            expected: Any = None
            for mode in MODES:
                budget = int(0.85 * max(map(offload.weight_bytes, parts))) if mode == "balanced" else None
                copies, pinned = card.async_copies, card.pinned
                handle = offload.apply(pipe, mode, device="card", budget=budget)
                images = [draw(pipe) for _ in range(2)]
                expected = images[0] if expected is None else expected
                held = card.pinned - pinned
                handle.remove()
                for part in parts:
                    part.to("cpu")
                workspace.release()
                gc.collect()
                yield {
                    "model": model,
                    "scheme": scheme,
                    "mode": mode,
                    "same": all(bool((image == expected).all()) for image in images),
                    "races": card.races(),
                    "beside": card.async_copies - copies,
                    "pinned": held,
                    "bytes": handle.total,
                    "left": [hooked(pipe), card.allocated, card.pinned],
                }


class Net(nn.Module):
    """Linear layers of several sizes in one list, called in the order that is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, n), nn.Linear(n, 64)) for n in (64, 512, 128, 256, 64))
        self.order: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def shuffled(card: Card) -> dict[str, Any]:
    """Blocks in orders that nobody can foresee, with slow copies: what is fetched in vain is in nobody's way."""
    found = {name: streamed(card, limit) for name, limit in PINNED.items()}
    device, before = torch.device("card"), card.pinned
    by_itself = Registered(card, device)
    proved = proves(by_itself, device)
    with mock.patch.object(residency, "pinning", lambda device: by_itself):
        row = streamed(card, None)
    return found | {"by itself": row | {"proved": proved, "left": card.pinned - before}}


def streamed(card: Card, pin_limit: int | None) -> dict[str, Any]:
    """`Net` in twelve orders, with so much memory pinned."""
    net, order, x = Net().requires_grad_(False), random.Random(0), torch.ones(4, 64)
    orders = [order.choices(range(len(net.blocks)), k=order.randint(1, 8)) for _ in range(12)]
    expected, got = [], []
    for net.order in orders:
        expected.append(net(x))
    card.rate(SLOW)
    card.pin_limit(pin_limit)
    with mock.patch.object(pinned_memory, "PIECE", PIECE):
        handle = offload.apply(net, "balanced", device="card", budget=int(0.7 * offload.weight_bytes(net)))
        copies = card.async_copies
        for net.order in orders:
            got.append(net(x.to("card")))
    report = handle.report()
    handle.remove()
    torch.accelerator.synchronize()
    card.rate(0)
    card.pin_limit(None)
    return {
        "wrong": sum(not torch.equal(one.cpu(), other) for one, other in zip(got, expected, strict=True)),
        "races": card.races(),
        "calls": len(orders),
        "beside": card.async_copies - copies,
        **{key: report[key] for key in ("mispredicted", "pinned", "pageable", "fetches")},
    }


def copies_at_once(
    self: StreamTransfer, unit: Unit, buffer: Tensor, computed: Any, stream: Any, copy: Any = StreamTransfer._copy
) -> Any:
    return copy(self, unit, buffer, self._api.Event(), stream)


def fills_at_once(self: pinned_memory.Staging, *given: Any, init: Any = pinned_memory.Staging.__init__) -> None:
    init(self, *given)
    self._copied = [mock.Mock() for _ in self._pieces]


# What offloading must not leave out, and how it is left out.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the computing waits for the copy": (_StreamTicket, "wait", lambda self: self._future.result()[0]),
    "the copy waits for the computing": (StreamTransfer, "_copy", copies_at_once),
    "the pinned piece waits for its copy": (pinned_memory.Staging, "__init__", fills_at_once),
}


def faults(card: Card) -> dict[str, Any]:
    """Whether each of them would be seen."""
    found = {}
    for name, fault in FAULTS.items():
        with mock.patch.object(*fault):
            found[name] = streamed(card, PINNED["in part"])
    return found


def kept(card: Card) -> Iterator[dict[str, Any]]:
    """The card's own account of its memory, while a model draws within a budget."""
    for share in (0.6, 0.8, 1.1):
        pipe = made("flux")
        size = offload.weight_bytes(*pipelines.components_of(pipe).values())
        handle = offload.apply(pipe, "none", device="card")
        card.reset_peak()
        draw(pipe)
        activations = card.peak - size
        handle.remove()
        for part in pipelines.components_of(pipe).values():
            part.to("cpu")
        gc.collect()
        before = card.allocated
        handle = offload.apply(pipe, "balanced", device="card", budget=int(share * size))
        draw(pipe)
        card.reset_peak()
        draw(pipe)
        report = handle.report()
        handle.remove()
        yield {
            "budget": int(share * size),
            "weights": size,
            "activations": activations,
            "peak": card.peak - before,
            "reported": report["peak"],
            "fetches": report["fetches"],
        }
        del pipe
        gc.collect()


def larger(card: Card) -> dict[str, Any]:
    """A model that the card has no room for, with the budget that sdquant takes for it."""
    net, total = bench.build(), card.total
    size, step = offload.weight_bytes(net), bench.step(net, "card")
    expected = on_card(net, step)
    card.limit(int(0.9 * size) + card.allocated)
    whole = ""
    try:
        on_card(net, step)
    except torch.OutOfMemoryError as error:
        whole = str(error)
        net.to("cpu")
        gc.collect()
    with mock.patch("sdquant.offload.budget.LEAST_RESERVE", 128 << 20):  # of a card as small as this one
        handle = offload.apply(net, "balanced", device="card")
    card.reset_peak()
    same = [torch.equal(step().cpu(), expected) for _ in range(2)]
    limit, peak, report = card.total, card.peak, handle.report()
    handle.remove()
    card.limit(total)
    return {
        "whole": whole,
        "weights": size,
        "limit": limit,
        "budget": report["budget"],
        "peak": peak,
        "same": same,
        "prefetched": report["prefetched"],
        "races": card.races(),
    }


def on_card(net: nn.Module, step: Callable[[], Tensor]) -> Tensor:
    """A step with everything on the card."""
    handle = offload.apply(net, "none", device="card")
    found = step().cpu()
    handle.remove()
    net.to("cpu")
    gc.collect()
    return found


def layers(card: Card) -> Iterator[dict[str, Any]]:
    """Layers of every scheme, on a device for which there are no kernels: torch's, with the same result."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 128).to(torch.bfloat16)  # of fewer rows a branch would be no smaller
    x = torch.randn(3, 256).bfloat16()
    for row in backends.schemes():
        if not row.on_the_fly and row.backend != "gguf":  # only files have it
            continue
        spec, backend = backends.parse(row.name), backends.of_scheme(row.name)
        packed = backend.encode(linear.weight.data, spec)
        there = backend.encode(linear.weight.data.to("card"), spec)
        codes = all(torch.equal(part, there.parts[name].cpu()) for name, part in packed.parts.items())
        expected = nn.functional.linear(x, backend.decode(packed, torch.bfloat16), linear.bias)
        got = quantized_layer(linear, packed).eval().to("card")(x.to("card")).cpu()
        away = float((got - expected).norm() / expected.norm())
        # Rotated activations, and products with a branch, are rounded once more.
        twice = packed.spec.rotation or backend.low_rank(packed) is not None or backend.integers(packed) is not None
        same = away < 0.01 if twice else torch.equal(got, expected)
        yield {"scheme": row.name, "codes": codes, "same": same, "away": away, "races": card.races()}


def streams(card: Card) -> dict[str, Any]:
    """Two layers, each on a stream of its own, with nothing that orders the one after the other."""
    spec, backend = backends.parse("int8_sym"), backends.of_scheme("int8_sym")

    def layer(rows: int) -> nn.Module:
        linear = nn.Linear(256, rows).to(torch.bfloat16)
        return quantized_layer(linear, backend.encode(linear.weight.data, spec)).eval().to("card")

    api, x = torch.get_device_module("card"), torch.ones(100, 256, dtype=torch.bfloat16)
    found = {}
    for name, both in {"alike": (layer(64), layer(64)), "growing": (layer(64), layer(512))}.items():
        workspace.release()
        expected = [one(x.to("card")).cpu() for one in both]
        side, inputs = [api.Stream(), api.Stream()], [x.to("card"), x.to("card")]
        begin = api.Event()
        begin.record(api.current_stream())
        card.races()
        got: list[Tensor] = []
        for index in (0, 1, 0):
            side[index].wait_event(begin)
            with api.stream(side[index]):
                got.append(both[index](inputs[index]))
        races = card.races()
        torch.accelerator.synchronize()
        same = all(torch.equal(y.cpu(), expected[index]) for y, index in zip(got, (0, 1, 0), strict=True))
        found[name] = {"same": same, "races": races}
    return found


def resident(what: str) -> int:
    """Bytes of RAM that this process has now (VmRSS), or had at the most since it was last asked to forget (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def grown(call: Callable[[], Any]) -> int:
    """Bytes of RAM that a call takes for a while, beside what there is before it or afterwards."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the most
    call()
    return resident("VmHWM") - max(before, resident("VmRSS"))


def ram(card: Card) -> list[dict[str, Any]]:
    """What putting a mode on and off takes of RAM beside the weights."""
    return [ram_of(mode) for mode in ("model", "sequential", "balanced")]


def ram_of(mode: str) -> dict[str, Any]:
    net, handles = bench.build(), list[offload.OffloadHandle]()
    size = offload.weight_bytes(net)
    budget = size // 4 if mode == "balanced" else None
    on = grown(lambda: handles.append(offload.apply(net, mode, device="card", budget=budget)))
    off = grown(lambda: handles[0].remove())
    return {"mode": mode, "weights": size, "on": on, "off": off}


class Inner(nn.Module):
    """A block of which a part is run once more in backward, or all of it, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(64), nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU())
        self.out = nn.Linear(128, 64)

    def forward(self, x: Tensor, kind: bool | None) -> Tensor:
        y = self.norm(x)
        y = self.inner(y) if kind is None else checkpoint(self.inner, y, use_reentrant=kind)
        return x + self.out(y)


class Checkpointed(nn.Module):
    """Blocks like that; `kind` is `use_reentrant` of the checkpoints, None for none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head, self.blocks = nn.LayerNorm(64), nn.ModuleList(Inner() for _ in range(6))
        self.kind: bool | None = None
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x, self.kind)
        return x


def trained(card: Card) -> Iterator[dict[str, Any]]:
    """Gradients of inputs through two components that take turns, with blocks that backward runs once more."""
    for kind in (None, False, True):
        for mode in ("model", "balanced"):
            one, two = Checkpointed(1), Checkpointed(2)
            one.kind = two.kind = kind
            pipe = Pipe(one=one, two=two)
            x = torch.linspace(-1, 1, 64)[None]
            with torch.enable_grad():
                wanted = _gradient(one, two, x)
                size = offload.weight_bytes(one)
                room = {"budget": int(0.7 * size)} if mode == "balanced" else {}
                handle = offload.apply(pipe, mode, device="card", **room)
                found = [_gradient(one, two, x.to("card"), lock).cpu() for lock in (nullcontext(), handle.lock)]
            report = handle.report()
            handle.remove()
            yield {
                "kind": kind,
                "mode": mode,
                "away": max(float((each - wanted).abs().max() / wanted.abs().max()) for each in found),
                "evictions": report["evictions"],
                "races": card.races(),
            }


def _gradient(one: nn.Module, two: nn.Module, x: Tensor, lock: AbstractContextManager[object] = _NOTHING) -> Tensor:
    x = x.clone().requires_grad_()
    with lock:  # as in a callback of a pipeline; the card's gradients are computed in another thread
        two(one(x)).square().sum().backward()
    assert x.grad is not None
    return x.grad


def group(card: Card) -> str:
    """What torch says of group offload by diffusers to such devices."""
    pipe = made("flux")
    handle = offload.apply(pipe, "group", device="card")
    try:
        draw(pipe)
    except RuntimeError as error:
        return str(error)
    handle.remove()
    return ""


CASES: dict[str, Callable[[Card], Any]] = {
    "drawn": lambda card: list(drawn(card)),
    "shuffled": shuffled,
    "faults": faults,
    "kept": lambda card: list(kept(card)),
    "larger": larger,
    "ram": ram,
    "group": group,
    "layers": lambda card: list(layers(card)),
    "streams": streams,
    "trained": lambda card: list(trained(card)),
    "timeline": timeline,
}


def main(library: Path, names: list[str]) -> None:
    card = Card(library)
    with torch.no_grad():
        print(json.dumps({name: CASES[name](card) for name in names or CASES}, indent=1))


if __name__ == "__main__":
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # of libraries, at their import
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else build(Path(folder)), sys.argv[2:])
