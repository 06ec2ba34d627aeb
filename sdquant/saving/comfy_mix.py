"""Write a mix as one safetensors file for ComfyUI: `sdquant quantize MODEL x.safetensors -q auto,size=4GB`.

Each layer has one of the formats that ComfyUI reads by the layer. Left out are those whose products ComfyUI computes
with activations in 4 bits on every card (w4a4), which is not what their weights' errors say, and float8, which has the
bytes of 8-bit integers and several times their noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import GPTQ, LONE, QuantSpec, TensorSpec, registry
from ..errors import SettingsError
from ..formats import METADATA_KEY
from ..models import detect
from ..planning import make_request
from ..rules import with_statistics
from . import export_single_file, file_mix, original_layout

if TYPE_CHECKING:
    from ..formats import Checkpoint, Given
    from ..planning import Request
    from .export_single_file import FileTensor

FORMATS = ("comfy:nvfp4", "w4a8", "w6a8", "mxfp8", "int8_row", "int8_convrot")
Rows = Mapping[str, "FileTensor"]
_HEAD = 2048  # bytes of the header beside its tensors and layers


def write_comfy_mix(
    path: str | Path,
    quant: str,
    target: str | Path,
    *,
    components: tuple[str, ...] | list[str] | None = None,
    skip: tuple[str, ...] = (),
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: bool = True,
    size: int | str | None = None,
    quality: float | str | None = None,
    quant_stats: str | Path | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
    on_weights: Callable[[int, int], object] | None = None,
    config: Given | None = None,
) -> Path:
    """Choose a format for each layer of a component, for so many bytes of the file or such a quality, and write it.

    Args:
        quant: "auto".
        on_weights: called with the number of weights that were read to measure their errors, and of all.
        size, quality, quant_stats, config: see `load_model`; the others: see `export_single_file.quantize_file`.

    Returns:
        The target.

    Raises:
        BudgetError: the file cannot be so small. DiskSpaceError: the disk is full. SdquantError: see `detect`.
    """
    from .model_files import refuse_existing

    goal = Path(target)
    refuse_existing(goal, overwrite)
    request = make_request(
        path, quant=quant, components=components, skip=skip, size=size, quality=quality, quant_stats=quant_stats,
        progress=progress, config=config,
    )  # fmt: skip
    if not request.mixed:
        raise SettingsError(f"Cannot write {goal} with quant='auto'", "it needs a size or quality", "Add size='4GB'")
    detected = detect(path, allow_pickle=allow_pickle, config=config)
    sources = original_layout.floats_to_quantize(detected, request, single=True, floats=export_single_file.floats_of)
    file, by_format, floats = _opened(sources, request)
    rows = _rows(file, by_format, floats, request, on_weights)
    src = file.src
    return export_single_file.write_rows(goal, src, rows, f"a mix for {goal.name}", skip, progress, on_bytes)


def smallest_comfy_mix(path: str | Path, config: Given | None = None) -> int:
    """Return the bytes of the smallest file that `write_comfy_mix` can write of a model."""
    request = make_request(path, quant="auto", size=1)
    return _opened(original_layout.chosen(detect(path, config=config), None, single=True), request)[0].fewest


def _opened(sources: Mapping[str, Checkpoint], request: Request) -> tuple[file_mix.MixedFile, Mapping[str, Rows], Rows]:
    """Return a file of the one component, with its tensors in each format, and as floats."""
    ((name, src),) = sources.items()
    src = export_single_file.floats_of(src)
    by_format = {
        word: {row.part.name: row for row in export_single_file.rows_of(src, registry.parse(word), request.skip)}
        for word in FORMATS
    }
    floats = {row.part.name: row for row in export_single_file.float_rows(src)}
    tensors = [
        file_mix.MixedTensor(
            name=name, sources=tuple(row.part.sources),
            bytes={word: _bytes(rows[name]) for word, rows in by_format.items() if rows[name].spec is not None}
            | {row.made[name].dtype: _bytes(row)},
        )
        for name, row in floats.items()
    ]  # fmt: skip
    rest = _HEAD + 2 * len(json.dumps(dict(src.config))) + len(METADATA_KEY)
    component = "" if name == LONE else name
    file = file_mix.MixedFile(src=src, name=component, rows=tensors, rest=rest, kind="ComfyUI")
    return file, by_format, floats


def _rows(
    file: file_mix.MixedFile,
    by_format: Mapping[str, Rows],
    floats: Rows,
    request: Request,
    on_weights: Callable[[int, int], object] | None,
) -> list[FileTensor]:
    """Return the tensors of the file with the chosen formats."""
    component, picks = file.name, file_mix.formats_of(file, request, on_weights)
    known = file_mix.statistics_of(request, component)

    def chosen(name: str) -> FileTensor:
        word = picks.get(name, "")
        if word not in by_format:
            return floats[name]
        row = by_format[word][name]
        assert row.spec is not None
        layer = row.part.sources[0].removesuffix(".weight")
        if known is None or layer not in known or GPTQ not in row.spec.scheme.options:
            return row
        better = QuantSpec(row.spec.scheme, options=((GPTQ, True),))
        return replace(row, spec=with_statistics(better, str(request.quant_stats), component))

    return [chosen(name) for name in floats]


def _bytes(row: FileTensor) -> int:
    """Return the bytes of a tensor in the file at most: its data, and what the header says of it and its layer."""
    data = sum(part.nbytes for part in row.made.values())
    return data + sum(map(_header_bytes, row.made.items())) + _entry_bytes(row.part.name, row.entry)


def _header_bytes(item: tuple[str, TensorSpec]) -> int:
    key, part = item
    return len(json.dumps(key)) + len(str(list(part.shape))) + 80  # with offsets of 15 digits


def _entry_bytes(name: str, entry: Mapping[str, object]) -> int:
    return 2 * (len(json.dumps(entry)) + len(name) + 8) if entry else 0  # quotes are escaped there
