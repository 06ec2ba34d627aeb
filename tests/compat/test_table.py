"""The rows: what must be refused, what must work, which row wins, and that none of them is dead."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from sdquant import backends, offload
from sdquant.compat import ROWS, Query, Row, check, look_up, matrix
from sdquant.compat.row import (
    COMPUTES,
    DEVICES,
    MODES,
    OFFLOADS,
    ORIGINS,
    RUNTIMES,
    SOURCES,
    Pattern,
    any_of,
    in_range,
)
from sdquant.errors import IncompatibleError

from .machines import EVERYTHING, OWNER, PROMISED, VERSIONS, machine

FOUR_BIT = ("nf4", "fp4")
# Every scheme that the design names, and every one that has been registered since.
OWNERS = OWNER | {row.name: row.backend for row in backends.schemes()}
GGUF = tuple(name for name, backend in OWNERS.items() if backend == "gguf")
FROM_FILES = {row.name for row in backends.schemes() if not row.on_the_fly}
SDNQ = tuple(name for name, backend in OWNERS.items() if backend == "sdnq")

# Schemes, offload mode, the library's own words: the refusals of the design's table.
REQUIRED = [
    (FOUR_BIT, "sequential", "Blockwise quantization only supports 16/32-bit floats"),
    (PROMISED["quanto"], "balanced", "QBytesTensor.new() missing 5 required positional arguments"),
    (PROMISED["quanto"], "sequential", "Expected all tensors to be on the same device"),
    (GGUF, "model", "moving the model would trigger de-quantization"),
]
REFUSED = [(scheme, mode, why) for schemes, mode, why in REQUIRED for scheme in schemes]
REFUSED_PAIRS = {(scheme, mode) for scheme, mode, _ in REFUSED}


def ask(scheme: str, offload: str = "none", **axes: object) -> Row:
    """The row for a scheme on a CPU, in its default runtime; quantized while loading, or found if it is GGUF."""
    mode = "found" if OWNERS[scheme] == "gguf" else "pre"
    values: dict[str, object] = {"mode": mode, "runtime": "default", "device": "cpu", "versions": VERSIONS}
    query = Query(backend=OWNERS[scheme], scheme=scheme, offload=offload, **(values | axes))  # type: ignore[arg-type]
    return look_up(query)


def test_the_offload_modes_are_those_of_the_offload_package() -> None:
    assert (
        {mode.name for mode in offload.MODES} == set(OFFLOADS) == {"none", "model", "sequential", "balanced", "group"}
    )


@pytest.mark.parametrize("backend", PROMISED)
def test_every_promised_scheme_is_registered(backend: str) -> None:
    assert set(PROMISED[backend]) <= {row.name for row in backends.get(backend).schemes}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("scheme", "mode", "why"), REFUSED)
def test_required_refusals_hold_on_every_device_and_in_every_version(
    scheme: str, mode: str, why: str, device: str
) -> None:
    ways = ["found"] if OWNERS[scheme] == "gguf" else MODES
    for way, versions in itertools.product(ways, ({}, VERSIONS, dict.fromkeys(VERSIONS, "99.0"))):
        for runtime in ("default", "library"):
            row = ask(scheme, mode, mode=way, device=device, versions=versions, runtime=runtime)
            assert row.verdict == "breaks" and row.refuses == "combination"
            assert why in row.why


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["pre", "post"])
@pytest.mark.parametrize("scheme", GGUF)
def test_gguf_is_not_quantized_to_at_load_time(scheme: str, mode: str, device: str) -> None:
    for place, runtime in itertools.product(OFFLOADS, ("default", "plain")):
        row = ask(scheme, place, mode=mode, device=device, runtime=runtime)
        assert row.verdict == "breaks"
        assert "models cannot be quantized to GGUF at load time; `sdquant quantize` writes one" in row.why


@pytest.mark.parametrize("mode", ["pre", "post"])
@pytest.mark.parametrize("scheme", sorted(FROM_FILES - set(GGUF)))
def test_no_model_is_quantized_to_what_is_only_read(scheme: str, mode: str) -> None:
    cells = [cell for cell in matrix("cpu", schemes=[scheme], machine=machine()) if cell.mode == mode]
    assert {cell.verdict for cell in cells} == {"breaks"}
    assert all("cannot quantize a model to it" in cell.why for cell in cells)
    with pytest.raises(IncompatibleError, match="cannot quantize a model to it"):
        check(scheme, mode=mode, device="cpu")
    check(scheme, device="cpu")  # a file of it


@pytest.mark.parametrize("scheme", GGUF)
def test_an_all_in_one_gguf_breaks_as_a_file(scheme: str) -> None:
    for place, mode, device in itertools.product(OFFLOADS, MODES, DEVICES):
        row = ask(scheme, place, mode=mode, device=device, source="all-in-one")
        assert (row.verdict, row.refuses) == ("breaks", "file")
        assert "only the UNet/transformer is supported in GGUF" in row.why


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("scheme", "mode"), sorted(REFUSED_PAIRS))
def test_plain_layers_by_name_are_the_way_past_the_refusals(scheme: str, mode: str, device: str) -> None:
    assert ask(scheme, mode, device=device, runtime="plain").verdict == "works"
    assert 'runtime="plain"' in ask(scheme, mode, device=device).fix


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("scheme", OWNERS)
def test_plain_layers_work_in_every_offload_mode(scheme: str, device: str) -> None:
    for mode in OFFLOADS:
        assert ask(scheme, mode, device=device, runtime="plain").verdict == "works", mode


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("schemes", "modes"),
    [
        (PROMISED["bnb"], ("none", "model", "balanced")),
        (PROMISED["quanto"], ("none", "model")),
        (GGUF, ("none", "balanced", "sequential", "group")),
        ((*PROMISED["nncf"], "fp8", *SDNQ), OFFLOADS),
    ],
)
def test_required_works(schemes: tuple[str, ...], modes: tuple[str, ...], device: str) -> None:
    for scheme, mode in itertools.product(schemes, modes):
        for way in ("found",) if scheme in GGUF else MODES:
            row = ask(scheme, mode, mode=way, device=device)
            assert row.verdict == "works", (scheme, mode, way, row)


def test_on_a_cpu_nothing_is_left_untested() -> None:
    assert {cell.verdict for cell in matrix("cpu", machine=machine())} <= {"works", "slow", "breaks"}


FOR_CARDS = {("svdquant_nvfp4", "library")}


def test_on_a_cpu_only_the_required_refusals_break() -> None:
    cells = [cell for cell in matrix("cpu", machine=machine()) if cell.verdict == "breaks"]
    unexpected = {
        (cell.scheme, cell.offload)
        for cell in cells
        if not (cell.scheme in FROM_FILES and cell.mode in ("pre", "post"))
        and cell.runtime not in ("plain", "openvino")
        and (cell.scheme, cell.runtime) not in FOR_CARDS
    }
    assert unexpected == REFUSED_PAIRS
    for_cards = {(cell.scheme, cell.runtime, cell.mode, cell.offload) for cell in cells} & {
        (*pair, mode, offload) for pair in FOR_CARDS for mode in MODES for offload in OFFLOADS
    }
    assert len(for_cards) == len(FOR_CARDS) * len(MODES) * len(OFFLOADS)
    assert {cell.scheme for cell in cells if cell.runtime == "plain"} == FROM_FILES
    assert {(cell.backend, cell.offload != "none") for cell in cells if cell.runtime == "openvino"} == {("nncf", True)}


def test_group_offload_of_library_modules_is_judged_by_device() -> None:
    assert ask("nf4", "group").verdict == "works"
    assert ask("nf4", "group", device="cuda").verdict == "breaks"
    assert ask("qint8", "group").verdict == "works"
    assert ask("qint8", "group", device="cuda").verdict == "breaks"
    assert ask("qint3", "group", device="cuda").verdict == "works"  # its layers are sdquant's own


def test_devices_that_a_library_does_not_support() -> None:
    for scheme in ("nf4", "fp4", "bnb-int8", "qint8"):
        row = ask(scheme, device="directml")
        assert (row.verdict, row.refuses) == ("breaks", "backend")
        assert "nncf" in row.fix
    assert ask("qfloat8", device="mps").refuses == "backend"
    for scheme, device in itertools.product((*PROMISED["nncf"], "fp8", "q8_0"), DEVICES):
        assert ask(scheme, device=device).verdict in ("works", "untested")


def test_version_ranges_narrow_a_row() -> None:
    old = VERSIONS | {"transformers": "4.57.3"}
    library = {"runtime": "library"}
    assert ask("bnb-int8", "model", versions=old, **library).verdict == "untested"
    assert "transformers" in ask("bnb-int8", "model", versions=old, **library).fix
    assert ask("bnb-int8", "model", versions=VERSIONS | {"accelerate": "1.12.0"}, **library).verdict == "untested"
    assert ask("bnb-int8", "model", versions=VERSIONS | {"transformers": "4.58.0"}, **library).verdict == "works"
    assert (
        ask("bnb-int8", "model", versions={}, **library).verdict == "works"
    )  # a range says nothing of what is not there
    assert ask("bnb-int8", "none", versions=old, **library).verdict == "works"
    assert ask("bnb-int8", "model", versions=old, runtime="plain").verdict == "works"
    assert ask("bnb-int8", "model", versions=old).verdict == "works"  # plain layers too, on a CPU
    assert ask("bnb-int8", "model", versions=old, device="cuda").verdict == "untested"


@pytest.mark.parametrize(
    ("version", "wanted", "inside"),
    [
        ("0.48.0", ">=0.48", True),
        ("0.47.9", ">=0.48", False),
        ("0.50.0.dev0", ">=0.48", True),
        ("2.13.0+cpu", ">=2.6,<3", True),
        ("3.0", ">=2.6,<3", False),
        ("unknown", ">=0", False),
    ],
)
def test_ranges(version: str, wanted: str, inside: bool) -> None:
    assert in_range(version, wanted) is inside


def test_the_first_match_wins_and_the_last_row_matches_everything() -> None:
    everything = Query(
        backend="x", scheme="y", mode="pre", offload="none", runtime="library", device="xpu", source="weights"
    )
    last = ROWS[-1]
    assert last.verdict == "untested" and last.matches(everything)
    assert all(getattr(last, axis) == "*" for axis in ("backend", "scheme", "mode", "offload", "runtime", "device"))
    assert look_up(everything) is last
    # The file refusal stands above the mode's, the mode's above the combination's.
    assert "only the UNet" in ask("q8_0", "model", mode="pre", source="all-in-one").why
    assert "cannot be quantized to GGUF" in ask("q8_0", "model", mode="pre").why


def _queries(row: Row) -> Iterator[Query]:
    """Yield every query that the row matches, of the schemes that there are and of one that nobody knows."""
    schemes = [*OWNERS.items(), ("new", "fifth")]
    known = {
        "mode": MODES, "offload": OFFLOADS, "runtime": RUNTIMES, "device": DEVICES, "source": SOURCES,
        "compute": COMPUTES, "origin": ORIGINS,
    }  # fmt: skip
    axes = [[value for value in values if _names(getattr(row, axis), value)] for axis, values in known.items()]
    versions = (VERSIONS, VERSIONS | {"transformers": "4.57.3"}, VERSIONS | {"accelerate": "1.12.0"})
    for values, (scheme, backend), there in itertools.product(itertools.product(*axes), schemes, versions):
        if _names(row.scheme, scheme) and _names(row.backend, backend):
            fields = dict(zip(known, values, strict=True))
            yield Query(scheme=scheme, backend=backend, versions=there, **fields)  # type: ignore[arg-type]


def _names(pattern: Pattern, value: str) -> bool:
    return pattern == "*" or value in ((pattern,) if isinstance(pattern, str) else pattern)


@pytest.mark.parametrize("row", ROWS, ids=ROWS.index)
def test_no_row_is_dead(row: Row) -> None:
    assert any(look_up(query) is row for query in _queries(row))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{ROWS.index(row)}-{row.verdict}")
def test_every_row_says_why_and_how_it_is_known(row: Row) -> None:
    assert row.why and row.seen
    if row.verdict == "breaks":
        assert row.fix
        assert "tests/" in row.seen or "documented" in row.seen
    if row.verdict == "works":
        assert "tests/test_matrix.py" in row.seen


def test_schemes_named_in_rows_exist() -> None:
    named = {name for row in ROWS for name in ((row.scheme,) if isinstance(row.scheme, str) else row.scheme)}
    assert named - {"*"} <= set(OWNERS)
    owners = {name for row in ROWS for name in ((row.backend,) if isinstance(row.backend, str) else row.backend)}
    assert owners - {"*"} <= {*OWNERS.values(), "sdnq"}


def test_a_misspelt_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="balancd"):
        Row(offload="balancd", verdict="works", why="x", seen="x")
    with pytest.raises(ValueError, match="tpu"):
        Row(device=any_of("cuda", "tpu"), verdict="works", why="x", seen="x")
    with pytest.raises(ValueError, match="has no fix"):
        Row(verdict="breaks", why="x", seen="x")


def test_the_matrix_is_the_whole_product() -> None:
    cells = matrix(machine=EVERYTHING)
    kinds = EVERYTHING.kinds
    assert len(cells) == sum(
        len(MODES) * len(OFFLOADS) * (1 + len(row.runtimes)) * len(kinds) for row in backends.schemes()
    )
    keys = [(c.scheme, c.mode, c.offload, c.runtime, c.device) for c in cells]
    assert len(set(keys)) == len(keys)
    assert {cell.device for cell in cells} == set(kinds)
    only = matrix(["cuda:1", "cpu"], schemes=["NF4"], machine=EVERYTHING)
    assert {(cell.scheme, cell.device) for cell in only} == {("nf4", "cuda"), ("nf4", "cpu")}
    assert set(cells[0].to_dict()) == {field.name for field in dataclasses.fields(cells[0])}
