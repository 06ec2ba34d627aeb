"""Write a model's float weights as GGUF: `sdquant quantize MODEL model.gguf -q q4_k`.

GGUF schemes are not available while loading: a file is written once, and loaded as it is after that. A standalone file
is for other tools: it uses the original authors' tensor names without a prefix, with layers fused as in their
checkpoints. A file inside a diffusers folder uses diffusers' names. Both follow `formats.gguf.conventions`. The
component's config, if any, is stored in the file under "sdquant", so that it loads without `base`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import encode
from ..core import AUTO, FLOATS, GPTQ, LONE, QuantSpec, Unfit, gguf_mixes, gguf_types, registry
from ..errors import BadFileError, SettingsError, UnsupportedFileError
from ..formats import FORMAT_VERSION, METADATA_KEY, Checkpoint, folders, gguf_conventions, gguf_header, main_dtype
from ..models import RoundingLoss, detect, original_names
from ..planning import make_request, mix, planner
from ..rules import CalibratedSpec, ComponentStatistics, require_magnitudes, unweighed, with_statistics
from ..utils.home_paths import with_home
from ..utils.progress import byte_bar
from . import file_mix, original_layout
from .float_configs import is_of_weights, write_config

if TYPE_CHECKING:
    from torch import Tensor

    from ..formats import Family, Given
    from ..models import OutputTensor
    from ..planning import Request

log = logging.getLogger(__name__)

_FLOAT_TYPES = {row.dtype: name for name, row in gguf_types.TYPES.items() if row.dtype}
_HEAD = 55  # bytes of a tensor's entry in the header beside name and sizes, and at most of its alignment
FALLBACK = "q8_0"  # for weights that are not a whole number of blocks of the requested type


def quantize_file(
    path: str | Path,
    quant: str,
    target: str | Path,
    *,
    components: tuple[str, ...] | list[str] | None = None,
    skip: tuple[str, ...] = (),
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: bool = True,
    on_bytes: Callable[[int, int], None] | None = None,
    size: int | str | None = None,
    quality: float | str | None = None,
    quant_stats: str | Path | None = None,
    on_weights: Callable[[int, int], object] | None = None,
    config: Given | None = None,
) -> Path:
    """Quantize a model to GGUF, one weight at a time.

    Args:
        path: pipeline folder, component folder or file. Weights that are quantized already are dequantized, with a
            warning.
        quant: a GGUF type or mix, with its options; or "auto", with the size of the file or the quality, as for
            `load_model`. quant_stats: likewise.
        target: ends in `.gguf`: one file with the one component named, or the UNet/transformer. Otherwise a folder like
            the original, with a GGUF file in each quantized component.
        on_bytes: called with the bytes read and the total; what it raises ends the writing, and nothing is left.
        on_weights: called with the number of weights that were read to choose types, and of all.
        config: see `load_model`.

    Returns:
        The target.
    """
    from ..utils.atomic_write import whole_folder
    from .model_files import refuse_existing, refuse_nested

    place, goal = Path(with_home(path)), Path(target)
    automatic = quant.strip().lower() == AUTO
    if automatic and goal.suffix != ".gguf":
        raise SettingsError(
            f"Cannot write {goal} with quant='auto'", "GGUF's types are chosen for one file", "Name a file x.gguf"
        )
    spec = registry.parse(FALLBACK if automatic else quant)
    if goal.suffix == ".safetensors":
        others = "".join(f", or use {other.name!r}" for other in registry.namesakes(spec.scheme))
        raise SettingsError(
            f"Cannot write {goal}",
            f"{spec.scheme.name} is a GGUF type, which safetensors files cannot hold",
            f"Name the file {goal.with_suffix('.gguf')}{others}",
        )
    refuse_existing(goal, overwrite)
    refuse_nested(place, goal)
    options = make_request(
        place, quant=AUTO if automatic else quant, components=components, skip=skip, size=size, quality=quality,
        quant_stats=quant_stats, progress=progress, config=config,
    )  # fmt: skip
    if automatic and not options.mixed:
        raise SettingsError("Cannot write GGUF with quant='auto'", "it needs a size or quality", "Add size='4GB'")
    detected = detect(place, allow_pickle=allow_pickle, config=config)
    sources = original_layout.floats_to_quantize(
        detected, options, single=goal.suffix == ".gguf", floats=original_layout.as_floats
    )
    types = file_mix.formats_of(_mixed(sources, options), options, on_weights) if automatic else {}
    choice = _spec_of_mix(types, options.quant_stats) if automatic else options.specs["*"]
    assert choice is not None
    specs = {name: choice.of_component("" if name == LONE else name) for name in sources}
    for name, src in sources.items() if not automatic else ():  # before anything is written
        _require_statistics(src, original_layout.names(src, goal.suffix == ".gguf"), specs[name], skip)
    loss = RoundingLoss()
    total = sum(info.nbytes for src in sources.values() for info in src.tensors.values())
    with byte_bar(f"Writing {choice}", total, progress, on_bytes) as tick:
        if goal.suffix == ".gguf":
            ((name, src),) = sources.items()
            write_component(src, specs[name], skip, goal, tick, loss, alone=True, types=types)
            original_layout.warn_of(loss)
            return goal
        old = {file for src in sources.values() for file in (*src.files, *src.path.glob("*.safetensors.index*.json"))}
        homes = {place if name == LONE else place / name for name, src in sources.items() if src.origins}
        rest = [path for path in files_in(place, old) if not is_of_weights(place / path, homes)]
        rows = [
            row
            for name, src in sources.items()
            for row in gguf_rows(src, original_layout.names(src, False), specs[name], skip, {}, loss)
        ]
        needed = sum(gguf_types.TYPES[kind].size(math.prod(shape)) for _, shape, kind, _ in rows)
        with whole_folder(goal, needed + sum((place / path).stat().st_size for path in rest)) as folder:
            for path in rest:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(place / path, folder / path)
            for name, src in sources.items():
                home = folder if name == LONE else folder / name
                if src.origins:
                    home.mkdir(exist_ok=True)
                    write_config(home, src)
                write_component(src, specs[name], skip, home / "model.gguf", tick, loss, alone=False)
    original_layout.warn_of(loss)
    return goal


def files_in(place: Path, without: Container[Path] = ()) -> list[Path]:
    """Return the files of a folder and its subfolders, relative to it.

    Raises:
        BadFileError: a link leads out of the folder, or an entry is not a regular file.
    """
    paths = []
    for home, subfolders, names in os.walk(place):
        for name in (*(name for name in subfolders if Path(home, name).is_symlink()), *names):
            path = Path(home, name)
            if path in without:
                continue
            if not folders.inside(path, place).is_file():
                raise BadFileError(f"Cannot copy {path}", "it is not a regular file", "Replace it with the file itself")
            paths.append(path.relative_to(place))
    return sorted(paths)


def write_component(
    src: Checkpoint,
    spec: QuantSpec,
    skip: tuple[str, ...],
    target: Path,
    tick: Callable[[int], Any],
    loss: RoundingLoss,
    *,
    alone: bool,
    types: Mapping[str, str] | None = None,
) -> None:
    """Write one component's weights; those that fit no block type keep their float type.

    Args:
        loss: gets the weights that are quantized a second time.
        alone: write a standalone file for other tools, not one inside a diffusers folder.
        types: of a mix, by the file's names.
    """
    from ..formats import closing_files, write_gguf

    own = {"format": FORMAT_VERSION, "config": dict(src.config), "weights": {}}
    named = original_layout.names(src, alone)
    row = named[1]
    kind = gguf_conventions.architecture(row)
    # What readers of the authors' layouts go by; with diffusers' names they would be wrong to.
    foreign = row.family if row is not None and row.foreign else None
    name = (kind.name if kind else foreign) if foreign else src.class_name
    values: dict[str, Any] = {
        "general.architecture": name or "diffusion",
        "general.name": src.path.name,
        "general.quantization_version": 2,
        METADATA_KEY: json.dumps(own, sort_keys=True),
        f"{METADATA_KEY}.quant": spec.scheme.name,
        f"{METADATA_KEY}.dtype": main_dtype(src, dtypes=FLOATS) or "float32",  # small tensors are written as F32
    }
    number = next((number for number, scheme in gguf_mixes.FILE_TYPES.items() if scheme == spec.scheme.name), None)
    if number is not None:
        values["general.file_type"] = number
    with closing_files(src.open()) as files:
        rows = list(gguf_rows(src, named, spec, skip, files, loss, types))
        if not gguf_types.TYPES[gguf_mixes.BASES.get(spec.scheme.name, spec.scheme.name)].dtype and not skip:
            original_layout.refuse_unchanged(src, spec, any(not gguf_types.TYPES[kind].dtype for _, _, kind, _ in rows))
        write_gguf(target, rows, values, progress=tick)


def gguf_rows(
    src: Checkpoint,
    named: tuple[list[OutputTensor], Family | None],
    spec: QuantSpec,
    skip: tuple[str, ...],
    files: Any,
    loss: RoundingLoss,
    types: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, tuple[int, ...], str, Any]]:
    """Yield name, shape, GGUF type and a function that returns the data of each tensor; one is in memory at a time."""
    parts, kind = named[0], gguf_conventions.architecture(named[1])
    shapes = {key: info.shape for key, info in src.tensors.items()}
    fallback = QuantSpec(registry.scheme(FALLBACK), embeddings=spec.embeddings)
    typed = {key: (info.shape, info.dtype) for key, info in src.tensors.items()}
    fit = {weight.name for weight in planner.select(typed, fallback, "plain", skip)[0]}
    for part in parts:
        shape, dtype = original_names.shape_of(part, shapes), src.tensors[part.sources[0]].dtype
        if dtype not in _FLOAT_TYPES:
            raise UnsupportedFileError(
                f"Cannot write {src.path} as GGUF",
                f"its tensor {part.sources[0]!r} is {dtype}, for which GGUF has no type",
                "Start from float weights",
            )
        if (
            0 in shape or len(shape) > gguf_header.MAX_DIMS or len(part.name.encode()) > gguf_header.MAX_NAME
        ):  # before all others are encoded
            raise UnsupportedFileError(
                f"Cannot write {src.path} as GGUF",
                f"its tensor {part.sources[0]!r} has shape {list(shape)}, and GGUF allows only sizes of at least 1, "
                f"at most {gguf_header.MAX_DIMS} dimensions and names of at most {gguf_header.MAX_NAME} bytes",
                "Write safetensors instead",
            )
        type_ = _float_type(part.name, shape, dtype)
        if all(source in fit for source in part.sources):
            type_ = _type_of(part.name, shape, dtype, spec, kind)
        type_ = (types or {}).get(part.name, type_)

        def data(part: OutputTensor = part, type_: str = type_) -> Tensor:
            mine = _without_unknown(spec, part.sources[0]) if types else spec
            return _data(part, type_, src, files, mine, skip, loss)

        yield part.name, shape, type_, data


def _data(
    part: OutputTensor,
    type_: str,
    src: Checkpoint,
    files: Any,
    spec: QuantSpec,
    skip: tuple[str, ...],
    loss: RoundingLoss,
) -> Tensor:
    """Return the values or quantized blocks of a tensor as the file holds them.

    Raises:
        BadFileError: it has values that are not finite, or that the type cannot represent.
    """
    import torch

    from ..models import refuse_not_finite

    tensor, name = original_layout.read(part, src, files), original_layout.describe_component(part)
    if gguf_types.TYPES[type_].dtype:
        tensor = tensor.to(getattr(torch, str(gguf_types.TYPES[type_].dtype)))
        refuse_not_finite(name, tensor, spec, skip)
        return tensor
    try:
        packed = encode(tensor, _spec_of(spec, type_).of(part.sources[0], tuple(tensor.shape)))
    except Unfit as error:
        raise BadFileError(
            f"Cannot quantize weight {name!r} to {type_}",
            str(error),
            f"Get the model from its source again, or do not quantize the layer: skip={name.rpartition('.')[0]!r}",
        ) from error
    if src.origins.keys() & set(part.sources):
        loss.add(original_layout.read(part, src, files, exact=True), packed)
    return packed.parts["blocks"]


def _spec_of_mix(types: Mapping[str, str], stats: str | None) -> QuantSpec:
    """Return the spec of a mix: the type of most tensors, with codes chosen by the statistics, if there are any."""
    most = registry.scheme(Counter(sorted(types.values())).most_common(1)[0][0] if types else FALLBACK)
    spec = QuantSpec(most)
    return spec if stats is None else with_statistics(replace(spec, options=((GPTQ, True),)), stats)


def _without_unknown(spec: QuantSpec, source: str) -> QuantSpec:
    """Return the spec of a mix for one weight: without its statistics if they know nothing about the layer."""
    if not isinstance(spec, CalibratedSpec):
        return spec
    is_known = source.removesuffix(".weight") in ComponentStatistics(spec.statistics, spec.component)
    return spec if is_known else replace(spec, options=())


def _require_statistics(
    src: Checkpoint, named: tuple[list[OutputTensor], Family | None], spec: QuantSpec, skip: tuple[str, ...]
) -> None:
    """Raise SettingsError if the statistics of a spec, if it has any, lack a layer; log where they change nothing."""
    if not isinstance(spec, CalibratedSpec):
        return
    sources = {part.name: part.sources[0] for part in named[0]}
    weights: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape, type_, _ in gguf_rows(src, named, spec, skip, {}, RoundingLoss()):
        if not gguf_types.TYPES[type_].dtype:
            weights.setdefault(type_, []).append((sources[name], shape))
    for type_, some in weights.items():
        one = _spec_of(spec, type_)
        if one.takes_statistics:
            require_magnitudes(one, some)
            original_layout.warn_of(*unweighed(one, some, type_))


def _spec_of(spec: QuantSpec, type_: str) -> QuantSpec:
    """Return the spec for a weight that gets this type, with the options that the type has.

    Layers that are one in the file get the same inputs, so that the statistics of the first are those of all.
    """
    row = registry.scheme(type_)
    return replace(spec, scheme=row, options=tuple(one for one in spec.options if one[0] in row.options))


def smallest_gguf_mix(path: str | Path, config: Given | None = None) -> int:
    """Return the bytes of the smallest file of a model with types of its own for each weight."""
    sources = original_layout.chosen(detect(path, config=config), None, single=True)
    floats = {name: original_layout.as_floats(src) for name, src in sources.items()}
    return _mixed(floats, make_request(path, quant=AUTO, size=1)).fewest


def _mixed(sources: Mapping[str, Checkpoint], options: Request) -> file_mix.MixedFile:
    """Return the file of one component with the types that each tensor can have."""
    ((component, src),) = sources.items()
    parts, row = original_layout.names(src, True)
    kind, loss = gguf_conventions.architecture(row), RoundingLoss()
    by_name = {part.name: part for part in parts}
    fallback = QuantSpec(registry.scheme(FALLBACK))
    candidates = []
    for name, shape, type_, _ in gguf_rows(src, (parts, row), fallback, options.skip, {}, loss):
        dtype, block = src.tensors[by_name[name].sources[0]].dtype, not gguf_types.TYPES[type_].dtype

        def suits(word: str, name: str = name, shape: tuple[int, ...] = shape, dtype: str = dtype) -> bool:
            return _type_of(name, shape, dtype, QuantSpec(registry.scheme(word)), kind) == word

        words = [word for word in mix.FAMILIES[mix.GGUF] if block and 0 not in shape and suits(word)]
        sizes = {
            word: gguf_types.TYPES[word].size(math.prod(shape)) + _HEAD + 8 * len(shape) + len(name.encode())
            for word in (*words, _float_type(name, shape, dtype))
        }
        candidates.append(file_mix.MixedTensor(name=name, sources=tuple(by_name[name].sources), bytes=sizes))
    rest = 4096 + 2 * len(str(src.config))
    name = "" if component == LONE else component
    return file_mix.MixedFile(src=src, name=name, rows=candidates, rest=rest, kind="GGUF")


def _float_type(name: str, shape: tuple[int, ...], dtype: str) -> str:
    if dtype in FLOATS and gguf_conventions.stays_single(name, shape):
        return "f32"
    return _FLOAT_TYPES[dtype]


def _type_of(
    name: str, shape: tuple[int, ...], dtype: str, spec: QuantSpec, kind: gguf_conventions.Architecture | None
) -> str:
    """Return the GGUF type of a weight that may be quantized."""
    preferred = gguf_mixes.mix_type(spec.scheme.name, name)
    plain = _float_type(name, shape, dtype)
    if gguf_types.TYPES[preferred].dtype:
        return plain if plain == "f32" else preferred
    if gguf_conventions.stays_float(name, shape, kind):
        return plain
    for candidate in (preferred, FALLBACK):
        if shape[-1] % gguf_types.TYPES[candidate].block == 0:
            return candidate
        folds = kind is None or (kind.folds and candidate in gguf_conventions.FOLDED)
        if folds and math.prod(shape) % gguf_types.TYPES[candidate].block == 0:
            return candidate
    return plain
