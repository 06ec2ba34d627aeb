"""Balanced offload: what moves, when, and how much memory it takes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sdquant import offload
from sdquant.errors import BadFileError, BudgetError
from sdquant.models import pipelines
from sdquant.offload import host_store, streaming_plan
from sdquant.offload.blocks import Component, cut, find_blocks
from sdquant.offload.handle import Counters
from sdquant.offload.streaming_plan import least, plan

from .conftest import draw, hooked, made

BLOCK = 4 * 64 * 64  # bytes of one block: a Linear without bias
REST = 2 * BLOCK


class Net(nn.Module):
    """`head`, `count` blocks, `tail`, all of the same size."""

    def __init__(self, count: int = 8, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(64, 64, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(count)])
        self.tail = nn.Linear(64, 64, bias=False)
        self.order = list(range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for index in self.order:
            x = self.blocks[index](x)
        out: torch.Tensor = self.tail(x)
        return out


class Pipe:
    """As much of a pipeline as offloading looks at."""

    def __init__(self, **components: nn.Module) -> None:
        self.components = components


X = torch.ones(1, 64)


def run(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = module(X)
    return out


def component(module: nn.Module) -> Component:
    return cut({"model": module}, Counters(), blocks=True)[0][0]


def test_nothing_moves_when_all_fits(tmp_path: Path) -> None:
    pipe = made("sd")
    pointers = [p.data_ptr() for part in pipelines.components_of(pipe).values() for p in part.parameters()]
    total = offload.weight_bytes(*pipelines.components_of(pipe).values())
    for budget in (total, None):
        handle = offload.apply(pipe, "balanced", device="cpu", budget=budget, folder=tmp_path)
        draw(pipe)
        assert pointers == [p.data_ptr() for part in pipelines.components_of(pipe).values() for p in part.parameters()]
        left = {one.partition(": ")[2] for one in hooked(pipe)}
        assert "_sdquant_offload" in left and not left & {"_hf_hook", "_old_forward"}  # nothing that moves
        assert not list(tmp_path.iterdir())
        report = handle.report()
        assert report["fetches"] == report["evictions"] == report["stored"] == 0
        assert report["resident"] == report["peak"] == report["bytes"] == total
        handle.remove()


def test_the_least_recently_used_goes_first_and_only_as_much_as_needed(tmp_path: Path) -> None:
    pipe: Any = Pipe(a=Net(2, 1), b=Net(2, 2), c=Net(2, 3))  # four blocks' worth each
    nets = pipe.components
    expected = {name: run(net) for name, net in nets.items()}
    handle = offload.apply(pipe, "balanced", device="cpu", budget=10 * BLOCK, folder=tmp_path)
    mapped = {name: net.blocks[1].weight.data_ptr() for name, net in nets.items()}

    run(nets["a"])
    run(nets["b"])
    assert handle.counters.resident == 8 * BLOCK and handle.counters.evictions == 0
    run(nets["a"])  # now b is the one used longest ago
    assert handle.counters.fetches == 6
    run(nets["c"])  # needs four, two are free
    assert handle.counters.resident == 10 * BLOCK and handle.counters.evictions == 2
    assert nets["b"].blocks[1].weight.data_ptr() == mapped["b"]  # its blocks went
    assert nets["a"].blocks[1].weight.data_ptr() != mapped["a"]  # a kept everything
    run(nets["b"])  # only the two blocks that went come back, and a gives up two
    assert handle.counters.fetches == 6 + 3 + 2 and handle.counters.evictions == 4
    for name, net in nets.items():
        assert torch.equal(run(net), expected[name])
    assert handle.counters.peak <= 10 * BLOCK
    handle.remove()


def test_a_component_larger_than_the_budget_is_streamed_with_the_next_block_on_its_way(tmp_path: Path) -> None:
    net = Net(8)
    expected = run(net)
    handle = offload.apply(net, "balanced", device="cpu", budget=REST + 5 * BLOCK, folder=tmp_path)
    row = handle.report()["components"]["model"]
    assert (row["blocks"], row["streamed"], row["buffers"]) == (8, 5, 2)  # three blocks stay, two buffers
    for _ in range(4):
        assert torch.equal(run(net), expected)
    report = handle.report()
    # Every streamed block was on its way before it was called, the very first one while `head` ran.
    assert report["prefetched"] == 4 * 5 and report["mispredicted"] == 0
    assert report["peak"] <= REST + 5 * BLOCK
    assert report["fetched"] == REST + 3 * BLOCK + 4 * 5 * BLOCK
    handle.remove()
    assert handle.report()["resident"] == 0 and torch.equal(run(net), expected)


def test_the_order_of_blocks_is_learned(tmp_path: Path) -> None:
    net = Net(6)
    net.order = [5, 0, 3, 1, 4, 2]
    expected = run(net)
    handle = offload.apply(net, "balanced", device="cpu", budget=REST + 2 * BLOCK, folder=tmp_path)
    for _ in range(3):
        assert torch.equal(run(net), expected)
    first = handle.report()
    assert first["mispredicted"] <= 7  # of six blocks, and the guess at what the first step begins with
    assert torch.equal(run(net), expected)
    assert handle.report()["mispredicted"] == first["mispredicted"]
    assert handle.report()["prefetched"] == first["prefetched"] + 6
    handle.remove()


class Events:
    """What a streamed model does, in order, with a disk whose reads wait for the block that runs (no clock)."""

    def __init__(self, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.bytes = 0
        files: dict[Path, int] = {}
        read = host_store._DiskRegion.read

        def reads(region: Any, into: torch.Tensor) -> None:
            number = files.setdefault(region._path, int(region._path.name))
            self.bytes += region.nbytes
            self.log.append(f"read {number - 1}")  # the first file is what is outside blocks
            read(region, into)

        monkeypatch.setattr(host_store._DiskRegion, "read", reads)
        for number, block in enumerate(net.blocks):
            block.register_forward_pre_hook(lambda *_, n=number: self._begin(n))
            block.register_forward_hook(lambda *_, n=number: self.log.append(f"end {n}"))
        self.wanted: dict[int, str] = {}

    def _begin(self, number: int) -> None:
        """The block's forward goes on only when the read that is to hide behind it has begun."""
        self.log.append(f"begin {number}")
        late = time.monotonic() + 10
        while number in self.wanted and self.wanted[number] not in self.log and time.monotonic() < late:
            time.sleep(0.001)


def test_the_next_block_is_read_while_this_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(6)
    events = Events(net, monkeypatch)
    handle = offload.apply(net, "balanced", device="cpu", budget=REST + 2 * BLOCK, folder=tmp_path)
    run(net)
    events.log.clear()
    events.bytes = 0
    events.wanted = {number: f"read {(number + 1) % 6}" for number in range(1, 6)}
    run(net)
    for number in range(1, 6):
        read, end = events.log.index(f"read {(number + 1) % 6}"), events.log.index(f"end {number}")
        assert read < end, events.log
    handle.undo.close()  # waits for the last read ahead
    # All six blocks were streamed, and no byte was read twice: of what was read, one block was for the next step, and
    # one may have been on its way already when this step began.
    assert events.log.count("read 3") == 1 and events.bytes <= 8 * BLOCK
    assert handle.counters.mispredicted == 0


def test_bytes_read_in_a_step_are_those_that_are_streamed(tmp_path: Path) -> None:
    net = Net(9)
    handle = offload.apply(net, "balanced", device="cpu", budget=REST + 5 * BLOCK, folder=tmp_path)
    run(net)
    before = handle.counters.fetched, handle.counters.evictions
    for _ in range(3):
        run(net)
    assert handle.report()["components"]["model"]["streamed"] == 6
    assert handle.counters.fetched - before[0] == 3 * 6 * BLOCK
    assert handle.counters.evictions - before[1] == 3 * 6  # the streamed blocks' own, and nothing else
    handle.remove()


def test_the_smallest_budget_is_named_and_works(pipeline: Any, tmp_path: Path) -> None:
    expected = draw(pipeline)
    with pytest.raises(BudgetError) as error:
        offload.apply(pipeline, "balanced", device="cpu", budget=1000, folder=tmp_path)
    assert not hooked(pipeline) and not list(tmp_path.iterdir())
    smallest = int(error.value.fix.split("at least ")[1].split()[0])
    with pytest.raises(BudgetError):
        offload.apply(pipeline, "balanced", device="cpu", budget=smallest - 1, folder=tmp_path)
    handle = offload.apply(pipeline, "balanced", device="cpu", budget=smallest, folder=tmp_path)
    assert (draw(pipeline) == expected).all()
    assert handle.report()["peak"] <= smallest
    handle.remove()


def test_a_component_without_blocks_has_to_fit() -> None:
    layer = nn.Linear(64, 64, bias=False)
    with pytest.raises(BudgetError, match=f"model needs {BLOCK}"):
        offload.apply(layer, "balanced", device="cpu", budget=BLOCK - 1)


def test_what_a_component_calls_counts_too(tmp_path: Path) -> None:
    """One component that runs inside another cannot push it out."""
    outer, inner = Net(2, 1), Net(2, 2)
    outer.blocks[0].register_forward_hook(lambda *_: run(inner) and None)
    handle = offload.apply(Pipe(outer=outer, inner=inner), "balanced", device="cpu", budget=6 * BLOCK, folder=tmp_path)
    with pytest.raises(BudgetError, match="by outer, which called it") as error:
        run(outer)
    assert f"{8 * BLOCK} bytes" in error.value.fix
    handle.remove()


def test_a_fault_in_the_background_is_raised_in_front(tmp_path: Path) -> None:
    net = Net(4)
    handle = offload.apply(net, "balanced", device="cpu", budget=REST + 2 * BLOCK, folder=tmp_path)
    (folder,) = tmp_path.iterdir()
    for file in sorted(folder.iterdir())[2:]:  # the first one is what is outside blocks, the second block 0
        file.unlink()
    with pytest.raises(BadFileError, match="cannot be read any more"):
        run(net)
    handle.remove()


@pytest.mark.parametrize("room", range(1, 9))
def test_as_many_blocks_stay_as_fit(room: int) -> None:
    net = component(Net(8))
    made = plan(net, REST + room * BLOCK)
    assert made.nbytes <= REST + room * BLOCK
    assert made.buffers == min(room, 2, len(made.streamed))
    # All, or all but the two that are streaming.
    assert len(made.resident) - 1 == (8 if room == 8 else max(0, room - 2))
    assert {unit.name for unit in made.resident} | {unit.name for unit in made.streamed} == {u.name for u in net.units}


def test_resident_blocks_are_spread() -> None:
    streamed = [unit.name for unit in plan(component(Net(8)), REST + 6 * BLOCK).streamed]
    assert streamed == ["blocks.0", "blocks.2", "blocks.4", "blocks.6"]


def of_sizes(*sizes: int) -> Component:
    net = Net(0)
    net.blocks.extend(nn.Linear(64, size, bias=False) for size in sizes)
    return component(net)


def test_blocks_of_different_sizes_are_kept_so_that_steps_wait_little() -> None:
    """As in a Flux transformer of few blocks, whose double ones come first and are more than twice as large."""
    net = of_sizes(*[152] * 3, *[64] * 18)
    budget = REST + sum(unit.nbytes for unit in net.blocks) // 2
    made, plainly = plan(net, budget), next(streaming_plan._candidates(net, budget))
    assert made.nbytes <= budget and plainly.nbytes <= budget
    assert made.read <= plainly.read and made.buffers > plainly.buffers == 2
    assert {unit.name for unit in net.blocks[:3]} <= {unit.name for unit in made.resident}
    worst, before = (max(streaming_plan.foreseen(net, one, at / 10) for at in range(5, 21)) for one in (made, plainly))
    assert worst <= 1.1 < before


@pytest.mark.parametrize(
    "sizes",
    [(64,) * 30, (152,) * 19 + (64,) * 38, (10,) * 3 + (30,) * 4 + (60,) * 60 + (30,) * 6 + (10,) * 3],
    ids=["even", "flux", "unet"],
)
def test_steps_of_many_blocks_take_what_the_longer_of_computing_and_reading_takes(sizes: tuple[int, ...]) -> None:
    """What tests/card measures of some, for every budget and ratio of the two."""
    net = of_sizes(*sizes)
    total = sum(unit.nbytes for unit in net.blocks)
    for share in range(2, 9):
        made = plan(net, REST + share * total // 10)
        assert made.nbytes <= REST + share * total // 10
        assert max(streaming_plan.foreseen(net, made, at / 10) for at in range(4, 25)) <= 1.05, share


def test_small_blocks_come_beside_the_largest_where_it_has_no_room_twice() -> None:
    net = of_sizes(40, 40, 90, 90, 200, 200, 300, 200, 200, 200, 90, 90, 40, 40)
    budget = REST + 3 * sum(unit.nbytes for unit in net.blocks) // 10
    made, alone = plan(net, budget), next(streaming_plan._candidates(net, budget))
    assert made.nbytes <= budget and made.buffers == alone.buffers == 1
    assert made.buffer_bytes > alone.buffer_bytes == max(unit.nbytes for unit in net.blocks)
    least = min(made.read, alone.read)
    one, other = (streaming_plan.foreseen(net, each, 1.0, least) for each in (made, alone))
    assert one < 0.9 * other


def test_the_last_block_is_kept_where_the_first_ones_are_the_large_ones() -> None:
    """While it runs, the first one of the next step comes."""
    net = of_sizes(*[152] * 3, *[64] * 18)
    budget = REST + sum(unit.nbytes for unit in net.blocks) // 4
    made, plainly = plan(net, budget), next(streaming_plan._candidates(net, budget))
    assert made.resident == (net.rest, net.blocks[-1])
    assert made.read == plainly.read
    assert streaming_plan.foreseen(net, made, 1.0) < 1.02 < 1.05 < streaming_plan.foreseen(net, plainly, 1.0)


def test_what_is_foreseen() -> None:
    """Of blocks of one size, as many computed as read: with one place each waits for its own reading; with two the next
    one is read meanwhile."""
    net = of_sizes(*[64] * 8)
    one, two = (plan(net, REST + places * BLOCK) for places in (1, 2))
    assert (one.buffers, two.buffers) == (1, 2)
    assert streaming_plan.foreseen(net, one, 1.0) == pytest.approx(2.0)
    assert streaming_plan.foreseen(net, one, 0.5) == pytest.approx(1.5)
    assert streaming_plan.foreseen(net, two, 1.0) == streaming_plan.foreseen(net, two, 0.5) == pytest.approx(1.0)


def test_least_is_the_rest_and_the_largest_block() -> None:
    net = Net(3)
    net.blocks.append(nn.Linear(64, 128, bias=False))
    assert least(component(net)) == REST + 2 * BLOCK


def test_blocks_of_the_real_networks() -> None:
    sd, flux = made("sd"), made("flux")
    assert [n for n, _ in find_blocks(sd.unet)] == [
        "down_blocks.0", "down_blocks.1", "up_blocks.0", "up_blocks.1", "mid_block",
    ]  # fmt: skip
    assert [n for n, _ in find_blocks(flux.transformer)] == ["transformer_blocks.0", "single_transformer_blocks.0"]
    assert "decoder.mid_block" in dict(find_blocks(sd.vae))
    assert [n.split(".")[-2] for n, _ in find_blocks(flux.text_encoder_2)] == ["block", "block"]


def test_weights_that_two_blocks_share_stay_outside() -> None:
    net = Net(3)
    net.blocks[2].weight = net.blocks[0].weight
    made = component(net)
    assert [unit.name for unit in made.blocks] == ["blocks.1"] and made.rest.nbytes == REST + BLOCK


def test_weights_that_two_components_share_stay_on_the_device(tmp_path: Path) -> None:
    a, b = Net(2, 1), Net(2, 2)
    b.head.weight = a.head.weight
    expected = run(a), run(b)
    handle = offload.apply(Pipe(a=a, b=b), "balanced", device="cpu", budget=4 * BLOCK, folder=tmp_path)
    assert all(torch.equal(x, y) for x, y in zip((run(a), run(b)), expected, strict=True))
    handle.remove()
    assert a.head.weight is b.head.weight
    assert all(torch.equal(x, y) for x, y in zip((run(a), run(b)), expected, strict=True))


MEMORY = """
import sys, threading, time, torch
from diffusers import FluxTransformer2DModel
from sdquant import offload

def anonymous():  # bytes that only this process holds and that no file backs
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))

class Watch(threading.Thread):
    peak, on = 0, True
    def run(self):
        while self.on:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.002)

def build():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    net = FluxTransformer2DModel(patch_size=1, in_channels=16, num_layers=4, num_single_layers=12,
        attention_head_dim=64, num_attention_heads=10,
        joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(8, 28, 28))
    return net.eval().requires_grad_(False)

def call(net):
    x = torch.zeros(1, 16, 16, dtype=torch.bfloat16)
    text = torch.zeros(1, 8, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        return net(hidden_states=x, encoder_hidden_states=text, pooled_projections=text[:, 0], timestep=torch.ones(1),
            img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(8, 3), return_dict=False)[0]

# The libraries' own buffers, before anything is measured.
small = FluxTransformer2DModel(patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=64,
    num_attention_heads=1, joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(8, 28, 28)).bfloat16()
call(small)
del small
floor = anonymous()
net = build()
size = offload.weight_bytes(net)
share = float(sys.argv[1])
mode = "balanced" if share else "none"
handle = offload.apply(net, mode, device="cpu", budget=int(share * size) if share else None, folder=sys.argv[2])
watch = Watch()
watch.start()
total = sum(call(net).float().abs().sum().item() for _ in range(3))
watch.on = False
watch.join()
print(size, watch.peak - floor, total, handle.report()["prefetched"], handle.report()["peak"])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_balanced_offload_keeps_weights_out_of_memory(tmp_path: Path) -> None:
    """A model of 250 MB with a budget of a quarter: memory that is this process's alone grows by far less."""
    found = {}
    for share in (0.0, 0.25):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(share), str(tmp_path)],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[share] = [float(word) for word in done.stdout.split()]
    size, held, result, _, _ = found[0.0]
    assert size > 200e6 and held > 0.95 * size
    _, streamed, same, prefetched, peak = found[0.25]
    assert same == result
    assert peak <= 0.25 * size
    assert streamed < 0.45 * size  # the budget, and what the computation itself needs
    assert prefetched > 10
