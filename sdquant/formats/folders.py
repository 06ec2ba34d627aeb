"""Folders: which files in them count, and none that lies outside. JSON is read here, within limits; no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadFileError, MissingComponentError, UnsupportedFileError
from ..utils import strict_json
from ..utils.special_files import not_regular
from .other_runtimes import converted, converted_in, runtime_of
from .pickle import refused

MAX_JSON = 64 << 20  # bytes of a config or index file
BASES = ("diffusion_pytorch_model", "model")  # what diffusers and transformers call a component's weights
PICKLE_BASES = ("diffusion_pytorch_model", "pytorch_model")  # and what they called them before safetensors
VARIANTS = ("", "fp16", "bf16")  # those that are preferred to others, in this order
WEIGHTS = (".safetensors", ".gguf")
MODULAR = "modular_model_index.json"  # diffusers' index of a pipeline that is made of blocks
# The two files of one model that Nunchaku's folders have, of before it had single files.
OLD_NUNCHAKU = frozenset({"transformer_blocks.safetensors", "unquantized_layers.safetensors"})
PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")

# What they call the files: diffusers has put the variant before and behind the number of a shard.
_NAME = re.compile(
    rf"(?P<base>{'|'.join(BASES)})(\.(?P<variant>[\w-]+?))?"
    r"((-(?P<shard>\d{5})-of-(?P<total>\d{5}))?(\.(?P<late>(?!index\b)[\w-]+))?\.safetensors"
    r"|\.safetensors\.(?P<index>index)(\.(?P<late_index>[\w-]+))?\.json)"
)

Named = Mapping[str, list[re.Match[str]]]  # the files of each variant


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        BadFileError: it is no regular file, too large, not JSON, or not an object.
    """
    what = f"Cannot read {path} as JSON"
    try:
        if not path.is_file():  # opening a pipe would wait for its other end
            raise not_regular(what, path)
        if path.stat().st_size > MAX_JSON:
            raise BadFileError(what, f"it is larger than {MAX_JSON >> 20} MiB", "Check the file")
        value = strict_json.parse(strict_json.text(path.read_bytes()), duplicates=True)
    except (OSError, ValueError) as error:
        raise BadFileError(what, str(error), "Check the file") from error
    if not isinstance(value, dict):
        raise BadFileError(what, "it does not contain a JSON object (a table)", "Check the file")
    return value


def inside(path: Path, folder: Path) -> Path:
    """Return `path`, which a file in `folder` names or which lies in it.

    Raises:
        BadFileError: it is a link that leads out of the folder, other than the hub cache's own.
    """
    real, home = (Path(os.path.realpath(one)) for one in (path, folder))  # which does not mind circles
    # The hub's cache: <repository>/snapshots/<revision>/... are links to <repository>/blobs/<hash>.
    blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    if any(real.is_relative_to(place) for place in (home, *blobs)):
        return path
    raise BadFileError(
        f"Cannot read {path}",
        f"it is a link to {real}, outside its folder",
        "Replace the link with a copy of the file",
    )


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a component folder.

    Attributes:
        files: the files. index: the file of each tensor, where there is an index.
        variant: what was put into their names ("fp16", "ema"), "" if nothing was.
        others: the other variants in the folder, which are passed over.
    """

    files: tuple[Path, ...]
    index: Mapping[str, Path]
    variant: str = ""
    others: tuple[str, ...] = ()


def weights(folder: Path, *, allow_pickle: bool = False, variant: str | None = None) -> WeightFiles:
    """Return the weights of a component folder: those with the usual names, else the only file of a known type.

    Of several variants `variant` is taken; if it is None or not there, the variant without a name, as in diffusers,
    then fp16, bf16, and the others by name. Pickles are used only if there is nothing else and they are allowed.
    """
    mine = usual(os.listdir(folder))
    if mine:
        names = order(mine, variant)
        files, index = _files(folder, mine[names[0]])
        return WeightFiles(files, index, names[0], tuple(names[1:]))
    others = visible_weights(folder)
    if {path.name for path in others} == OLD_NUNCHAKU:
        return WeightFiles(tuple(inside(path, folder) for path in others), {})
    if len(others) > 1:  # the vision of a language model is found from that
        others = [path for path in others if not is_named_vision(path)] or others
    if len(others) == 1:
        return WeightFiles((inside(others[0], folder),), {})
    if others:
        raise UnsupportedFileError(
            f"Cannot load {folder}",
            f"it contains several weight files: {', '.join(p.name for p in others)}",
            "Pass the path of one of them",
        )
    pickles = [path for path in visible_weights(folder, PICKLES) if runtime_of(path) is None]
    if pickles and allow_pickle:
        return _pickled(folder, pickles)
    if pickles:
        raise refused(pickles[0])
    if (folder / MODULAR).is_file():
        raise modular_pipeline(str(folder))
    other = converted_in(folder)
    if other is not None:
        raise converted(other)
    raise MissingComponentError(
        f"Cannot load {folder}", "it contains no weights", "Pass a folder with .safetensors or .gguf weights"
    )


def modular_pipeline(place: str) -> UnsupportedFileError:
    """Return the error for a modular pipeline of diffusers, whose index says where each component comes from."""
    return UnsupportedFileError(
        f"Cannot load {place}",
        f"it is a modular pipeline of diffusers ({MODULAR}), which only diffusers puts together",
        "Load one of its components by its folder; or load all with ModularPipeline.from_pretrained, and give its "
        "load_components a sdquant.Config(scheme) for each as quantization_config",
    )


def is_named_vision(path: Path) -> bool:
    """Return whether a GGUF file's name says that it is the vision of a language model in another one."""
    return path.suffix.lower() == ".gguf" and "mmproj" in path.name.lower()


def _pickled(folder: Path, pickles: list[Path]) -> WeightFiles:
    """Return the weights of a folder that has only torch's own files: an index, a usual name, or the only file."""
    for base in PICKLE_BASES:
        index, file = folder / f"{base}.bin.index.json", folder / f"{base}.bin"
        if index.exists():
            rows = _weight_map(folder, index)
            return WeightFiles(tuple(sorted(set(rows.values()))), rows)
        if file in pickles:
            pickles = [file]
    if len(pickles) > 1:
        raise UnsupportedFileError(
            f"Cannot load {folder}",
            f"it contains several files: {', '.join(path.name for path in pickles)}",
            "Pass the path of one of them",
        )
    return WeightFiles((inside(pickles[0], folder),), {})


def usual(names: Iterable[str]) -> Named:
    """Return the file names that are usual in diffusers and transformers, by variant."""
    by_variant: dict[str, list[re.Match[str]]] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match:
            by_variant.setdefault(match["variant"] or match["late"] or match["late_index"] or "", []).append(match)
    return by_variant


def order(variants: Iterable[str], preferred: str | None = None) -> list[str]:
    """Return the variants in order of preference."""
    return sorted(variants, key=lambda name: (name != preferred, (*VARIANTS, name).index(name), name))


def no_variant(place: str, variant: str, there: Iterable[str]) -> MissingComponentError:
    """Return the error for a model none of whose components has weights of the requested variant."""
    names = [name or "no variant" for name in order(there)]
    return MissingComponentError(
        f"Cannot load variant={variant!r} of {place}",
        f"it only has weights of {' and '.join(names)}" if names else "its weight files have no variant names",
        "Use a variant that exists, or leave variant= out",
    )


def of_variant(names: list[re.Match[str]]) -> list[str]:
    """Return the names of the files that make up one variant's weights: an index and its shards, the only file, or all
    shards if there is no index."""
    base = min((match["base"] for match in names), key=BASES.index)
    mine = [match for match in names if match["base"] == base]
    shards = [match.string for match in mine if match["total"]]
    index = [match.string for match in mine if match["index"]]
    one = [match.string for match in mine if not match["index"] and not match["total"]]
    return [*index[:1], *shards] if index else one[:1] or shards


def _files(folder: Path, names: list[re.Match[str]]) -> tuple[tuple[Path, ...], Mapping[str, Path]]:
    """Return one variant's weight files (the shards of its index, the only file, or all shards if the index is missing)
    and the file of each tensor ({} without an index)."""
    first, *more = of_variant(names)
    match = next(match for match in names if match.string == first)
    if match["index"]:
        rows = _weight_map(folder, folder / first)
        return tuple(sorted(set(rows.values()))), rows
    if not match["total"]:
        return (inside(folder / first, folder),), {}
    shards = [one for one in names if one.string in (first, *more)]
    total, there = int(match["total"]), sorted(int(one["shard"]) for one in shards)
    if there != list(range(1, total + 1)):
        raise BadFileError(
            f"Cannot load {folder}",
            f"it has no index, and only {len(shards)} of {total} shards, the first of which is {first}",
            "Download the missing files into the folder",
        )
    return tuple(inside(folder / one.string, folder) for one in shards), {}


def is_usual(path: Path) -> bool:
    """Return whether a file has a usual name and is a complete set of weights, and all beside it are its variants."""
    match = _NAME.fullmatch(path.name)
    beside = [_NAME.fullmatch(other.name) for other in visible_weights(path.parent)]
    return match is not None and not match["total"] and all(m and m["base"] == match["base"] for m in beside)


def visible_weights(folder: Path, suffixes: tuple[str, ...] = WEIGHTS) -> list[Path]:
    """Return the files in a folder with such a suffix, sorted by name, without hidden ones."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in suffixes and not p.name.startswith("."))


def _weight_map(folder: Path, index: Path) -> dict[str, Path]:
    """Return the shard of each tensor by an index, which may only name files in its own folder."""
    rows = read_json(inside(index, folder)).get("weight_map")
    if not isinstance(rows, dict) or not rows:
        raise BadFileError(f"Cannot read {index}", "it has no weight_map", "Check the file")
    places: dict[Any, Path] = {}
    for name in rows.values():
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\:\0"):
            raise BadFileError(
                f"Cannot read {index}", f"shard {name!r} is not the name of a file in its folder", "Check the file"
            )
        if name not in places and not (folder / name).is_file():
            raise BadFileError(
                f"Cannot load {folder}", f"shard {name} is missing", "Download the missing file into the folder"
            )
        places.setdefault(name, inside(folder / name, folder))
    return {key: places[name] for key, name in rows.items()}


def named_parts(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the components that a model_index.json names, weights or not: name -> class."""
    return {name: str(row[1]) for name, row in index.items() if not name.startswith("_") and is_named(row)}


def is_named(row: Any) -> bool:
    """Return whether an entry of a model_index.json names a component, [library, class]. Others are values of the
    pipeline's own config (such as lists of numbers) or mark a component as absent."""
    return isinstance(row, list) and len(row) == 2 and all(isinstance(word, str) for word in row)


def is_tokenizer(class_name: str) -> bool:
    """Return whether a class of transformers is a tokenizer, by its name."""
    return "Tokenizer" in class_name


def no_folder(folder: Path, name: str, class_name: Any) -> MissingComponentError:
    """Return the error for a component that a pipeline's index names but whose folder is missing."""
    return MissingComponentError(
        f"Cannot load {folder}",
        f"its model_index.json names a {name}, but there is no folder of that name",
        f"Put the {name} ({class_name}) into {folder / name}",
    )


def pipeline_parts(folder: Path, index: Mapping[str, Any]) -> dict[str, Path]:
    """Return the components of a pipeline folder that have weights: name -> subfolder.

    Raises:
        BadFileError: a name in the index cannot be a folder's, or the folder, or a file in a folder without weights (a
            tokenizer), is a link that leads out.
        MissingComponentError: the index names a component whose folder, or whose config, is not there.
    """
    parts = {}
    for name, class_name in named_parts(index).items():
        if not name or set(name) & set("./\\:\0"):
            raise BadFileError(
                f"Cannot read {folder / 'model_index.json'}",
                f"{name!r} is not the name of a component",
                "Check the file",
            )
        sub = folder / name
        if not sub.is_dir() and (class_name.endswith("Scheduler") or is_tokenizer(class_name)):
            # diffusers does not save a scheduler that a pipeline makes itself (LongCat-AudioDiT); a tokenizer may be in
            # the file of its text encoder.
            continue
        if not sub.is_dir():
            raise no_folder(folder, name, class_name)
        inside(sub, folder)
        weights = (sub / "config.json").exists() or visible_weights(sub, WEIGHTS + PICKLES)
        if weights and not is_tokenizer(class_name):  # which may have a config.json as well
            parts[name] = sub
            continue
        for path in sub.iterdir():  # diffusers and transformers open these
            inside(path, folder)
    return parts
