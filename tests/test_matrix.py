"""Every cell of the compatibility matrix, on both shipped models: it runs and draws the right bits, or it is refused.

A cell is scheme × mode × offload × runtime. What runs must draw, bit for bit, what the same scheme and runtime draw
without offload. Cells whose plans differ in the offload mode alone share a loaded pipeline, on which each puts its mode
as the last step of a load does: loading takes most of a cell's time. What is refused must raise before anything is
read, and where the refusal is about a library's modules, the real break is seen with the guard lifted. Cells of a GPU
are marked `gpu`.
"""

from __future__ import annotations

import gc
import importlib
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import sdquant
from sdquant import backends, compat, offload
from sdquant.compat.runtimes import default_runtime
from sdquant.demo import path
from sdquant.errors import IncompatibleError, SdquantError
from sdquant.kernels import cpu
from sdquant.loading import load
from sdquant.nn.weights import quantized
from sdquant.planning import make_request, prepare
from sdquant.saving import export_gguf
from sdquant.training import digits

from .alternating_models import by_turns
from .file_only import quantized_folder

if TYPE_CHECKING:
    from sdquant.compat import Cell
    from sdquant.offload import OffloadHandle
    from sdquant.planning import Request

STEPS = 1
# To a mover, packed weights are tensors of some dtypes and shapes: these schemes stand for those that run in the same
# modules, packed as they are or as one of another backend here. The others' cells are in the slow run.
STANDING = frozenset({"nf4", "bnb-int8", "q4_k_m", "int8", "qint8", "rules"})
BY_LIBRARIES = frozenset({"bnb-int8", "qint8"})  # of those, what stand for the library's layers and not for plain ones
# A mover meets the same layers, whenever they were quantized: one other mode stands for those after loading, one for
# those found on disk.
OTHERWISE = {"post": "none", "found": "balanced"}
BUDGET = 0.6  # of the model's bytes: small enough that weights have to move
_SAVED: dict[tuple[str, str], Path] = {}
_LOADED: dict[tuple[str, ...], Any] = {}  # without offload, of one scheme at a time


def _cells(device: str) -> list[Any]:
    made = []
    for cell in compat.matrix(device=device):
        name = f"{cell.scheme}-{cell.mode}-{cell.offload}-{cell.runtime}"
        # One worker takes all cells of a scheme, so that what they share is made once.
        marks = [pytest.mark.xdist_group(cell.scheme)]
        marks += [pytest.mark.gpu] if device != "cpu" else []
        # OpenVINO takes seconds to compile; tests/openvino_runtime has one of each model in the default run.
        stands = cell.scheme in STANDING and (cell.verdict == "breaks" or _stands(cell))
        marks += [] if stands else [pytest.mark.slow]
        made.append(pytest.param(cell, id=name if device == "cpu" else f"{name}-{device}", marks=marks))
    return made


def _stands(cell: Cell) -> bool:
    """Whether a cell that runs is in the default run."""
    if cell.runtime == "openvino" or (cell.runtime == "plain" and cell.scheme in BY_LIBRARIES):
        return False
    return cell.mode == "pre" or (cell.scheme != "bnb-int8" and cell.offload == OTHERWISE[cell.mode])


def _turns(device: str) -> list[Any]:
    """Cells and models: neighbours along any axis are drawn by different models."""
    params = _cells(device)
    turns = [0] * len(params)
    for axis in ("scheme", "mode", "offload", "runtime"):
        along = [getattr(param.values[0], axis) for param in params]
        places = {value: place for place, value in enumerate(dict.fromkeys(along))}
        turns = [turn + places[value] for turn, value in zip(turns, along, strict=True)]
    return by_turns(params, turns)


def _source(model: str, cell: Cell, work: Path) -> tuple[Path, str | None]:
    """What to load, and which scheme to ask for: the shipped folder, or one that is quantized already."""
    if cell.mode != "found":
        return path(model), cell.scheme
    key = model, cell.scheme
    if key not in _SAVED:
        target = work / f"{model}-{cell.scheme}"
        if backends.scheme(cell.scheme).on_the_fly:
            sdquant.save(sdquant.load_model(path(model), cell.scheme, progress=False), target)
        elif cell.backend != "gguf":
            quantized_folder(model, cell.scheme, target)
        else:
            export_gguf.quantize_file(path(model), cell.scheme, target, progress=False)
        _SAVED[key] = target
    return _SAVED[key], None


def _request(model: str, cell: Cell, work: Path, *, allow: bool = False, runtime: str | None = None) -> Request:
    source, quant = _source(model, cell, work)
    return make_request(
        source,
        quant=quant,
        offload=cell.offload,
        mode="auto" if cell.mode == "found" else cell.mode,
        runtime=runtime or (None if cell.runtime == "default" else cell.runtime),
        device=cell.device,
        budget=int(BUDGET * _bytes(source, quant)) if cell.offload == "balanced" else None,
        allow_incompatible=allow,
        progress=False,
    )


@contextmanager
def _offloaded(model: str, cell: Cell, work: Path) -> Iterator[tuple[Any, OffloadHandle]]:
    """The cell's pipeline, offloaded as the cell says, and the handle."""
    plan = prepare(_request(model, cell, work))
    key = model, cell.scheme, cell.mode, cell.runtime, cell.device
    if key not in _LOADED:
        if any(scheme != cell.scheme for _, scheme, *_ in _LOADED):
            _LOADED.clear()
        _LOADED[key] = load(_request(model, _other(cell, offload="none"), work))
        _LOADED[key].sdquant.offload.remove()
    pipe = _LOADED[key]
    assert replace(plan, offload_mode=pipe.sdquant.plan.offload_mode, budget=None, warnings=()) == replace(
        pipe.sdquant.plan, warnings=()
    )
    handle = offload.apply(pipe, plan.offload_mode, device=plan.device, budget=plan.budget)
    try:
        yield pipe, handle
    finally:
        handle.remove()


@cache
def _bytes(source: Path, quant: str | None) -> int:
    return int(sdquant.plan(source, quant).bytes)


def _draw(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    values = {"max_sequence_length": 16} if hasattr(pipe, "tokenizer_2") else {}
    out = pipe(
        [digits.prompt(3), digits.prompt(7)],
        num_inference_steps=STEPS,
        height=digits.SIZE,
        width=digits.SIZE,
        generator=[torch.Generator().manual_seed(seed) for seed in (1, 2)],
        output_type="np",
        **values,
    )
    return np.asarray(out.images)


_RUNS: dict[tuple[str, ...], Run] = {}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a load and a drawing gave: the image, the schemes inside, and what offload says it did."""

    image: Any
    schemes: frozenset[str]
    report: dict[str, Any]


def _run(model: str, cell: Cell, work: Path) -> Run:
    """Load and draw. "default" and the runtime it stands for are the same load, which is made once."""
    runtime = cell.runtime
    if runtime == "default":
        scheme = backends.scheme(cell.scheme)
        default = default_runtime(scheme, cell.device, isa=cpu.isa(), triton=find_spec("triton") is not None)
        # By default convolutions stay floats where the library has no module for them; the Flux has none.
        as_many = default == scheme.runtimes[0] or cell.mode == "found" or model == "digits-flux"
        runtime = default if as_many and _same_refusals(cell, default) else runtime
    key = model, cell.scheme, cell.mode, cell.offload, runtime, cell.device
    if key not in _RUNS:
        with _offloaded(model, cell, work) as (pipe, handle):
            parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
            schemes = frozenset(packed.spec.scheme.name for part in parts for _, packed in quantized(part))
            _RUNS[key] = Run(image=_draw(pipe), schemes=schemes, report=handle.report())
    return _RUNS[key]


def _same_refusals(cell: Cell, runtime: str) -> bool:
    return _other(cell, runtime=runtime).verdict == cell.verdict


def _other(cell: Cell, **axes: str) -> Cell:
    """The cell that differs in the given axes."""
    wanted = {name: getattr(cell, name) for name in ("mode", "offload", "runtime")} | axes
    cells = _of_scheme(cell.device, cell.scheme)
    return next(other for other in cells if all(getattr(other, name) == value for name, value in wanted.items()))


@cache
def _of_scheme(device: str, scheme: str) -> tuple[Cell, ...]:
    return tuple(compat.matrix(device=device, schemes=[scheme]))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("matrix")
    # Offload collects garbage, which takes a second in a process with this many libraries: leave those out of it.
    for library in ("bitsandbytes", "optimum.quanto", "nncf", "sdnq", "diffusers", "transformers", "sklearn.svm"):
        importlib.import_module(library)
    gc.collect()
    gc.freeze()
    yield folder
    gc.unfreeze()
    for kept in (_SAVED, _LOADED, _RUNS):
        kept.clear()
    shutil.rmtree(folder)


@pytest.mark.parametrize(("cell", "model"), [*_turns("cpu"), *_turns("cuda")])
def test_cell(cell: Cell, model: str, work: Path) -> None:
    if cell.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if cell.verdict == "breaks":
        _refused(cell, model, work)
        return
    with warnings.catch_warnings():
        if cell.verdict == "untested":
            warnings.simplefilter("ignore", compat.UntestedWarning)
        run = _run(model, cell, work)
        reference = _run(model, _other(cell, offload="none"), work)
    assert run.report["mode"] == cell.offload
    if cell.backend == "gguf":
        assert run.schemes or backends.scheme(cell.scheme).bits >= 16
    else:
        assert run.schemes == {cell.scheme}  # quantized, and to nothing else
    assert np.isfinite(run.image).all()
    assert np.array_equal(run.image, reference.image)
    if cell.offload == "balanced":
        assert run.report["evictions"] > 0  # the budget made weights move


def _refused(cell: Cell, model: str, work: Path) -> None:
    with pytest.raises(IncompatibleError) as caught:
        load(_request(model, cell, work))
    assert caught.value.what and caught.value.why and caught.value.fix
    # The same by `check` alone, which has no path to read.
    with pytest.raises(IncompatibleError):
        sdquant.check(
            cell.scheme,
            cell.offload,
            mode=cell.mode,
            runtime=None if cell.runtime == "default" else cell.runtime,
            device=cell.device,
        )
    if cell.device == "cpu" and backends.scheme(cell.scheme).runtimes[0] == "library":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", compat.IncompatibleWarning)
            with pytest.raises(Exception) as broken:  # each library breaks in words of its own
                _draw(load(_request(model, cell, work, allow=True, runtime="library")))  # which the row is about
        assert not isinstance(broken.value, SdquantError)
