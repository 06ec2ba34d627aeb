"""Offloading to a card that is none, which tells what a CPU cannot: see tests/card."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdquant.compat import check
from sdquant.errors import IncompatibleError

from ..card import COMPILER, build
from ..card.__main__ import FAULTS, MODES, PIECE, PINNED
from ..card.timeline import SHAPES

pytestmark = [
    pytest.mark.xdist_group("card"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it protects its memory as Linux does"),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"it is compiled, and there is no {COMPILER}"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("card"))


def run(library: Path, *cases: str) -> Any:
    """What the card did, by case, in a process of its own: no process is rid of it again."""
    command = [sys.executable, "-m", "tests.card", str(library), *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def found(library: Path, case: str) -> Any:
    return run(library, case)[case]


@pytest.fixture(scope="module")
def daily(library: Path) -> Any:
    """What it did in the cases of the default run: to start a process takes longer than they do."""
    return run(library, "shuffled", "streams", "trained", "faults")


def test_what_is_left_out_is_seen(daily: Any) -> None:
    seen = daily["faults"]
    assert set(seen) == set(FAULTS)
    computing, copying, filling = (seen[name] for name in FAULTS)
    assert any("a read by stream 0 is not ordered after a write" in race for race in computing["races"])
    assert any("is not ordered after a read by stream 0" in race for race in copying["races"])
    assert filling["wrong"] and not filling["races"]  # the memory that it overwrites is not the card's


def test_blocks_in_orders_that_nobody_foresees(daily: Any) -> None:
    seen = daily["shuffled"]
    assert set(seen) == {*PINNED, "by itself"}
    for row in seen.values():
        assert row["wrong"] == 0 and row["races"] == []
        assert row["mispredicted"] > row["calls"]
    assert seen["all"]["pageable"] == seen["none"]["pinned"] == 0
    assert seen["in part"]["pinned"] and seen["in part"]["pageable"]
    # In pieces; whole; not at all.
    assert seen["in part"]["beside"] > seen["all"]["beside"] > seen["none"]["beside"] == 0
    registered = seen["by itself"]  # pinned as CUDA can, not by torch
    assert registered["proved"] and registered["pageable"] == 0 and registered["beside"] == seen["all"]["beside"]
    assert registered["left"] <= 2 * PIECE  # the two pieces may be there still


def test_two_streams_of_a_thread_do_not_decode_into_the_same_memory(daily: Any) -> None:
    assert daily["streams"] == {key: {"same": True, "races": []} for key in ("alike", "growing")}


def test_what_backward_runs_once_more_has_its_weights_on_the_card(daily: Any) -> None:
    rows = daily["trained"]
    assert len(rows) == 6
    for row in rows:
        assert row["away"] < 1e-6 and not row["races"] and row["evictions"] > 0, row


@pytest.mark.slow
def test_a_step_takes_what_the_longer_of_computing_and_copying_takes(library: Path) -> None:
    """In the card's own time, which other work on the machine does not disturb."""
    seen = found(library, "timeline")
    rows = [*seen.pop("steps"), seen.pop("uneven")]
    assert {row["shape"] for row in rows} == {*SHAPES}
    for row in rows:
        longer = max(row["computing"], row["copying"])
        assert 0.999 * longer <= row["step"] <= 1.05 * longer and not row["races"], row
        assert row["copying"] > 0
    fits = seen.pop("fits")  # all of it: as without offload, when nothing is copied
    assert fits["copying"] == 0 and fits["step"] <= 1.02 * fits["computing"]
    for row in seen.pop("two cards"):  # what one waits for is no work of the other's
        slowest = max(max(of["computing"], of["copying"]) for of in row["each"])
        assert 0.999 * slowest <= row["step"] <= 1.05 * slowest and not row["races"], row
        assert row["where"] == [[0], [1]] and all(of["copying"] > 0 for of in row["each"]), row
    early, late = (seen.pop(f"the {first} waits for the {then}") for first, then in (
        ("computing", "copy"), ("copy", "computing"),
    ))  # fmt: skip
    assert early["races"] and early["step"] < 0.95 * early["copying"]  # it does not take the time that it should
    assert late["races"]
    assert len(seen) == 2 and all(row["step"] > 1.5 * row["copying"] for row in seen.values())


@pytest.mark.slow
def test_every_mode_draws_the_same_and_leaves_nothing(library: Path) -> None:
    rows = found(library, "drawn")
    assert {row["mode"] for row in rows} == set(MODES)
    for row in rows:
        assert row["same"] and not row["races"], row
        hooks, allocated, pinned = row["left"]
        assert not hooks and not pinned and allocated <= 4096, row  # the scheduler keeps its time steps there
        assert (row["beside"] > 0) == (row["mode"] == "balanced"), row  # copies that the program did not wait for
        assert row["mode"] == "none" or row["pinned"] >= row["bytes"] - 4096, row


@pytest.mark.slow
def test_balanced_keeps_to_its_budget_by_the_cards_own_account(library: Path) -> None:
    rows = found(library, "kept")
    for row in rows:
        assert row["peak"] <= row["budget"] + row["activations"] + 2**20, row
        assert row["reported"] <= row["budget"], row
    assert rows[0]["peak"] < rows[-1]["peak"] - 0.3 * rows[0]["weights"]


@pytest.mark.slow
def test_a_model_that_has_no_room_draws_within_what_the_card_has(library: Path) -> None:
    seen = found(library, "larger")
    assert "out of memory" in seen["whole"]
    assert seen["peak"] <= seen["limit"] < seen["weights"]
    assert seen["same"] == [True, True] and not seen["races"]
    assert seen["prefetched"] > 0


@pytest.mark.slow
def test_putting_a_mode_on_and_off_takes_no_second_model_of_ram(library: Path) -> None:
    rows = found(library, "ram")
    assert len(rows) == 3
    for row in rows:  # a block, or 64 MB; and afterwards what the C library has not given back yet
        assert row["on"] <= 0.15 * row["weights"] and row["off"] <= 0.4 * row["weights"], row


@pytest.mark.slow
def test_group_offload_is_refused_where_torch_would_raise(library: Path) -> None:
    assert "incompatible tensor type" in found(library, "group")
    with pytest.raises(IncompatibleError, match="incompatible tensor type"):
        check("int8", "group", device="directml")


@pytest.mark.slow
def test_every_scheme_computes_where_there_are_no_kernels(library: Path) -> None:
    rows = found(library, "layers")
    assert len(rows) > 40
    assert not [row for row in rows if not row["same"] or row["races"]]
    # bitsandbytes' fallback for devices that it does not know may take the other of two codes that are as near.
    assert {row["scheme"] for row in rows if not row["codes"]} <= {"fp8"}
