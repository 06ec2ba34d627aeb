"""Every cell of the compatibility matrix, on both shipped models: it runs and draws the right bits, or it is refused.

A cell is scheme × mode × offload × runtime. What runs must draw, bit for bit, what the same scheme and runtime draw
without offload. What is refused must raise before anything is read, and where the refusal is about a library's modules,
the real break is seen with the guard lifted. Cells of a GPU are marked `gpu`.
"""

from __future__ import annotations

import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sdquant
from sdquant import backends, compat, gguf_files
from sdquant.compat import Cell
from sdquant.demo import MODELS, digits, path
from sdquant.errors import IncompatibleError, SdquantError
from sdquant.weights import quantized

STEPS = 1
BUDGET = 0.6  # of the model's bytes: small enough that weights have to move
_SAVED: dict[tuple[str, str], Path] = {}


def _cells(device: str) -> list[Any]:
    made = []
    for cell in compat.matrix(device=device):
        name = f"{cell.scheme}-{cell.mode}-{cell.offload}-{cell.runtime}"
        marks = [pytest.mark.gpu] if device != "cpu" else []
        # One worker takes all cells of a scheme, so that what they share is made once.
        made.append(pytest.param(cell, id=name if device == "cpu" else f"{name}-{device}", marks=marks))
    return made


def _source(model: str, cell: Cell, work: Path) -> tuple[Path, str | None]:
    """What to load, and which scheme to ask for: the shipped folder, or one that is quantized already."""
    if cell.mode != "found":
        return path(model), cell.scheme
    key = model, cell.scheme
    if key not in _SAVED:
        target = work / f"{model}-{cell.scheme}"
        if backends.scheme(cell.scheme).on_the_fly:
            # The plain runtime quantizes every kind of layer, the library's only its own: each reads what it would write.
            sdquant.save(sdquant.load_model(path(model), cell.scheme, progress=False), target)
        else:
            gguf_files.quantize_file(path(model), cell.scheme, target, progress=False)
        _SAVED[key] = target
    return _SAVED[key], None


def _load(model: str, cell: Cell, work: Path, *, allow: bool = False) -> Any:
    source, quant = _source(model, cell, work)
    budget = int(BUDGET * _bytes(source, quant)) if cell.offload == "balanced" else None
    return sdquant.load_model(
        source,
        quant,
        cell.offload,
        mode="auto" if cell.mode == "found" else cell.mode,
        runtime=None if cell.runtime == "default" else cell.runtime,
        device=cell.device,
        budget=budget,
        allow_incompatible=allow,
        progress=False,
    )


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


_DRAWN: dict[tuple[str, ...], Any] = {}


def _reference(model: str, cell: Cell, work: Path) -> Any:
    """What the scheme and runtime draw without offload, from the same source."""
    default = backends.scheme(cell.scheme).runtimes[0]
    runtime = default if cell.runtime == "default" else cell.runtime
    key = model, cell.scheme, runtime, "found" if cell.mode == "found" else "fly", cell.device
    if key not in _DRAWN:
        values = {name: getattr(cell, name) for name in ("scheme", "backend", "mode", "device")}
        plain = Cell(**values, offload="none", runtime=runtime, verdict="works", why="", fix="", seen="")
        _DRAWN[key] = _draw(_load(model, plain, work))
    return _DRAWN[key]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("matrix")
    yield folder
    _SAVED.clear()
    _DRAWN.clear()
    shutil.rmtree(folder)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cell", [*_cells("cpu"), *_cells("cuda")])
def test_cell(cell: Cell, model: str, work: Path) -> None:
    if cell.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if cell.verdict == "breaks":
        _refused(cell, model, work)
        return
    with warnings.catch_warnings():
        if cell.verdict == "untested":
            warnings.simplefilter("ignore", compat.UntestedWarning)
        pipe = _load(model, cell, work)
    assert pipe.sdquant.offload.mode == cell.offload
    schemes = {packed.spec.scheme for part in _networks(pipe) for _, packed in quantized(part)}
    base = backends.scheme(cell.scheme)
    if base.backend != "gguf":
        assert schemes == {cell.scheme}  # quantized, and to nothing else
    else:
        assert schemes or base.bits >= 16
    image = _draw(pipe)
    report = pipe.sdquant.offload.report()
    pipe.sdquant.offload.remove()
    assert np.isfinite(image).all()
    assert np.array_equal(image, _reference(model, cell, work))
    if cell.offload == "balanced":
        assert report["evictions"] > 0  # the budget made weights move


def _networks(pipe: Any) -> list[Any]:
    return [part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)]


def _refused(cell: Cell, model: str, work: Path) -> None:
    source, quant = (path(model), cell.scheme) if cell.mode != "found" else _source(model, cell, work)
    with pytest.raises(IncompatibleError) as caught:
        _load(model, cell, work)
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
    if cell.device == "cpu" and "library" in backends.scheme(cell.scheme).runtimes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", compat.IncompatibleWarning)
            with pytest.raises(Exception) as broken:  # noqa: PT011 - each library breaks in words of its own
                _draw(_load(model, cell, work, allow=True))
        assert not isinstance(broken.value, SdquantError)
