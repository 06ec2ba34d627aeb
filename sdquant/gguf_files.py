"""Write a model's float weights as GGUF: `sdquant quantize MODEL model.gguf -q q4_k`.

A GGUF scheme is not for quantizing while loading; its file is written once, and loaded as found after that.
Names are those of the source without the prefix of checkpoints: diffusers' own from a diffusers folder, the authors'
from a file in their layout, as other tools write them. The component's config, where there is one, goes into the file
under "sdquant", so that it loads without `base`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import backends, planner
from .backends.base import QuantSpec, Unfit
from .detection import MAIN, Detected, detect
from .errors import BadFileError, ConflictError, MissingComponentError, SettingsError
from .foreign import LDM, prefix_of
from .formats import families
from .formats.folder import inside
from .formats.gguf_types import TYPES
from .formats.source import FORMAT_VERSION, METADATA_KEY, Source
from .request import request

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT_TYPES = {row.dtype: name for name, row in TYPES.items() if row.dtype}
FALLBACK = "q8_0"  # for weights that are no whole number of the wanted type's blocks


def quantize_file(
    path: str | Path,
    quant: str,
    target: str | Path,
    *,
    components: tuple[str, ...] | list[str] | None = None,
    skip: tuple[str, ...] = (),
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Quantize to GGUF, one weight at a time.

    Args:
        path: pipeline folder, component folder or file with float weights.
        quant: a GGUF type or mix.
        target: ends in `.gguf`: one file with the one component named, or the UNet/transformer. Otherwise a folder like
            the original, with a GGUF file in each quantized component.

    Returns:
        The target.

    Raises:
        ConflictError: the weights are quantized already.
    """
    from .saving import refuse_existing, refuse_nested
    from .writing import whole_folder

    place, goal = Path(os.path.expanduser(path)), Path(target)
    refuse_existing(goal, overwrite)
    refuse_nested(place, goal)
    spec = backends.parse(quant)
    asked = request(place, quant=quant, components=components, skip=skip)
    seen = detect(place)
    chosen = _chosen(seen, asked.components, single=goal.suffix == ".gguf")
    for src in chosen.values():
        if src.found:
            raise ConflictError(
                f"{src.path} was to be quantized to {spec}",
                "its weights are quantized already",
                "Start from float weights",
            )
    goal.parent.mkdir(parents=True, exist_ok=True)
    total = sum(info.nbytes for src in chosen.values() for info in src.tensors.values())
    with _bar(total, spec, progress) as tick:
        if goal.suffix == ".gguf":
            write_component(next(iter(chosen.values())), spec, skip, goal, tick)
            return goal
        old = {file for src in chosen.values() for file in (*src.files, *src.path.glob("*.safetensors.index*.json"))}
        rest = files_in(place, old)
        rows = [row for src in chosen.values() for row in _rows(src, spec, skip, {})]
        needed = sum(TYPES[kind].size(math.prod(shape)) for _, shape, kind, _ in rows)
        with whole_folder(goal, needed + sum((place / path).stat().st_size for path in rest)) as folder:
            for path in rest:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(place / path, folder / path)
            for name, src in chosen.items():
                home = folder if name == "." else folder / name
                home.mkdir(exist_ok=True)
                write_component(src, spec, skip, home / "model.gguf", tick)
    return goal


def files_in(place: Path, without: Container[Path] = ()) -> list[Path]:
    """The files of a folder and its subfolders, relative to it.

    Raises:
        BadFileError: one is a link that leads out of the folder, or no file at all.
    """
    found = []
    for home, folders, names in os.walk(place):
        for name in (*(name for name in folders if Path(home, name).is_symlink()), *names):
            path = Path(home, name)
            if path in without:
                continue
            if not inside(path, place).is_file():
                raise BadFileError(f"{path} was to be copied", "it is not a regular file", "Put the file itself there")
            found.append(path.relative_to(place))
    return sorted(found)


def _chosen(seen: Detected, named: tuple[str, ...] | None, *, single: bool) -> dict[str, Source]:
    if set(seen.sources) == {"."}:
        return {".": main_only(seen.sources["."])}
    unknown = [name for name in named or () if name not in seen.sources]
    if unknown:
        raise SettingsError(
            f"Component {unknown[0]!r} was named", f"{seen.path} has {', '.join(seen.sources)}", "Name one of them"
        )
    names = named or [name for name in seen.sources if planner.QUANTIZED_BY_DEFAULT.match(name)]
    if single and named is None:
        names = [name for name in MAIN if name in seen.sources][:1]
    if single and len(names) != 1:
        raise SettingsError(
            f"{', '.join(names) or 'No component'} was to go into one file",
            "a GGUF file holds one component",
            "Name one",
        )
    if not names:
        raise MissingComponentError(f"{seen.path} was to be quantized", "it has no component to quantize", "Name one")
    return {name: seen.sources[name] for name in names}


def main_only(src: Source) -> Source:
    """The UNet or transformer of a checkpoint of several models, which GGUF readers do not take; others as they are."""
    row = families.recognise(src.names)
    if row is None or row.component != "checkpoint":
        return src
    tensors = {key: info for key, info in src.tensors.items() if key.startswith(LDM)}
    return replace(src, tensors=tensors, home={key: src.home[key] for key in tensors})


def write_component(
    src: Source, spec: QuantSpec, skip: tuple[str, ...], target: Path, tick: Callable[[int], Any]
) -> None:
    """Write one component's weights; those that fit no block type stay in their float type."""
    from .formats.gguf_write import write_gguf

    own = {"format": FORMAT_VERSION, "config": dict(src.config), "weights": {}}
    row = families.recognise(src.names)
    family = families.sd_version({key: info.shape for key, info in src.tensors.items()})
    # What readers of the reference layouts go by; with diffusers' names they would be wrong to.
    foreign = (family if row.family == "sd" else row.family) if row is not None and row.foreign else None
    files = src.open()
    try:
        write_gguf(
            target,
            list(_rows(src, spec, skip, files)),
            {
                "general.architecture": str(src.class_name or foreign or "diffusion"),
                "general.name": src.path.name,
                "general.quantization_version": 2,
                METADATA_KEY: json.dumps(own, sort_keys=True),
                f"{METADATA_KEY}.quant": spec.scheme.name,
            },
            progress=tick,
        )
    finally:
        for file in files.values():
            file.close()


def _rows(
    src: Source, spec: QuantSpec, skip: tuple[str, ...], files: Any
) -> Iterator[tuple[str, tuple[int, ...], str, Any]]:
    """Name, shape, type and a function for the data of each tensor; one is in memory at a time."""
    import torch

    shapes = {key: (info.shape, info.dtype) for key, info in src.tensors.items()}
    prefix = prefix_of(src.names)
    fallback = QuantSpec(backends.scheme(FALLBACK), embeddings=spec.embeddings)
    weights, _ = planner.select(shapes, fallback, "plain", skip)
    fit = {weight.name for weight in weights}
    for key, info in src.tensors.items():
        kind = _type_of(key, info.shape, info.dtype, spec) if key in fit else _FLOAT_TYPES[info.dtype]

        def data(key: str = key, kind: str = kind) -> Tensor:
            tensor: Tensor = files[src.home[key]].get(key)
            if TYPES[kind].dtype:
                return tensor.to(getattr(torch, str(TYPES[kind].dtype)))
            return backends.get("gguf").encode(tensor, backends.parse(kind)).parts["blocks"]

        yield key.removeprefix(prefix), info.shape, kind, data


def _type_of(name: str, shape: tuple[int, ...], dtype: str, spec: QuantSpec) -> str:
    from .backends.gguf import mix_type

    kind = mix_type(spec.scheme.name, name)
    for candidate in (kind, FALLBACK):
        try:
            backends.get("gguf").layout(backends.parse(candidate), shape, dtype)
        except Unfit:
            continue
        return candidate
    return _FLOAT_TYPES[dtype]


class _bar:
    """A progress bar over bytes written."""

    def __init__(self, total: int, spec: QuantSpec, progress: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total, desc=f"Writing {spec}", unit="B", unit_scale=True, disable=not progress, delay=2, leave=False
        )

    def __enter__(self) -> Callable[[int], Any]:
        tick: Callable[[int], Any] = self._bar.update
        return tick

    def __exit__(self, *error: object) -> None:
        self._bar.close()
