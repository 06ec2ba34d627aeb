"""One component's weights on disk: which files, which tensors, which of them are quantized. Headers only, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import backends
from ..backends.base import Found, PackedSpec, TensorInfo
from ..errors import BadFileError, MissingComponentError, SdquantError, UnsupportedFileError
from . import safetensors
from .base import TensorFile

METADATA_KEY = "sdquant"  # of a file's metadata: JSON, see `save.py`
FORMAT_VERSION = 1
MAX_JSON = 64 << 20  # bytes of a config or index file
BASES = ("diffusion_pytorch_model", "model")  # what diffusers and transformers call a component's weights
VARIANTS = ("", "fp16", "bf16")
PICKLES = (".bin", ".ckpt", ".pt", ".pth")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A component on disk.

    Attributes:
        path: the folder or file that stands for the component.
        files: the weight files.
        tensors: infos by file key, over all files.
        home: the file of each key.
        found: the quantized weights, by weight name.
        specs: full descriptions of quantized weights, where sdquant wrote the file.
        config: the component's config.json (or what sdquant put into the file), {} if there is none.
        library, class_name: "diffusers" or "transformers" and the class, if known.
        metadata: the metadata of the first file.
    """

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    home: Mapping[str, Path]
    found: Mapping[str, Found]
    specs: Mapping[str, PackedSpec] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    library: str | None = None
    class_name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> dict[str, TensorInfo]:
        """The tensors that belong to no quantized weight, by key."""
        used = {key for found in self.found.values() for key in (*found.keys.values(), *found.extra)}
        return {key: info for key, info in self.tensors.items() if key not in used}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights: plain tensors and packed parts, without code tables and descriptions."""
        parts = (self.tensors[key] for found in self.found.values() for key in found.keys.values())
        return safetensors.total(self.plain.values()) + safetensors.total(parts)

    @property
    def names(self) -> frozenset[str]:
        """Names as the model knows them: plain keys and the names of quantized weights."""
        return frozenset(self.plain) | frozenset(self.found)

    @property
    def named_quant(self) -> str | None:
        """The scheme that a GGUF file of ours is named after: a mix cannot be told from its types alone."""
        name = self.metadata.get(f"{METADATA_KEY}.quant")
        return name if isinstance(name, str) and name in {row.name for row in backends.schemes()} else None

    def open(self) -> dict[Path, TensorFile]:
        """All files, opened; close them when done."""
        return {path: open_file(path) for path in self.files}


def open_file(path: Path) -> TensorFile:
    """The weights file as a TensorFile, by its first bytes."""
    if is_gguf(path):
        from .gguf import GGUFFile

        return GGUFFile(path)
    return safetensors.SafetensorsFile(path)


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does; an empty or missing one does not."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        BadFileError: it is too large, not JSON, or not an object.
    """
    try:
        if path.stat().st_size > MAX_JSON:
            raise BadFileError(f"{path} was to be read", f"it is larger than {MAX_JSON >> 20} MiB", "Check the file")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadFileError(f"{path} was to be read as JSON", str(error), "Check the file") from error
    if not isinstance(value, dict):
        raise BadFileError(f"{path} was to be read as JSON", "it does not hold a table", "Check the file")
    return value


def component_folder(folder: Path, *, complete: bool = True) -> Source:
    """The component in a folder with a config.json and weights.

    Raises:
        MissingComponentError: no weights there. BadFileError: they are damaged. UnsupportedFileError: pickles only.
    """
    config_path = folder / "config.json"
    config = read_json(config_path) if config_path.exists() else {}
    side = {"quantization_config": config.get("quantization_config") or {}}
    for name in ("quantization_map", "quantization_config"):
        if (folder / f"{name}.json").exists():
            side[name] = read_json(folder / f"{name}.json")
    return _source(folder, _weights(folder), config=config, side=side, complete=complete)


def single_file(path: Path, *, complete: bool = True) -> Source:
    """The component in one `.safetensors` or `.gguf` file; a config.json beside it is used if it describes a model."""
    if path.suffix in PICKLES:
        raise _pickle(path)
    return _source(path, (path,), config={}, side={}, complete=complete)


def _weights(folder: Path) -> tuple[Path, ...]:
    """The weight files of a component folder: the usual names first, else the only file of a known kind."""
    for variant in VARIANTS:
        dot = f".{variant}" if variant else ""
        for base in BASES:
            index = folder / f"{base}.safetensors.index{dot}.json"
            if index.exists():
                return _shards(folder, index)
            file = folder / f"{base}{dot}.safetensors"
            if file.exists():
                return (file,)
    others = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".gguf") and not p.name.startswith("."))
    if len(others) == 1:
        return (others[0],)
    if others:
        raise UnsupportedFileError(
            f"{folder} was to be loaded",
            f"it has several weight files: {', '.join(p.name for p in others)}",
            "Give the path of one of them",
        )
    pickles = sorted(p for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise _pickle(pickles[0])
    raise MissingComponentError(
        f"{folder} was to be loaded", "there are no weights in it", "Give a folder with .safetensors or .gguf weights"
    )


def _pickle(path: Path) -> UnsupportedFileError:
    return UnsupportedFileError(
        f"{path} was to be loaded",
        "it is a pickle, which can run any program when it is opened",
        "Convert it to .safetensors",
    )


def _shards(folder: Path, index: Path) -> tuple[Path, ...]:
    """The shards an index names. Only plain names of files in the folder count: an index must not lead outside."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadFileError(f"{index} was to be read", "it has no weight_map", "Check the file")
    shards = []
    for name in sorted({str(value) for value in weight_map.values()}):
        path = folder / name
        if Path(name).name != name or name in (".", ".."):
            raise BadFileError(f"{index} was to be read", f"shard {name!r} is not in its folder", "Check the file")
        if not path.is_file():
            raise BadFileError(
                f"{folder} was to be loaded", f"shard {name} is missing", "Download the missing file into the folder"
            )
        shards.append(path)
    return tuple(shards)


def _source(
    path: Path,
    files: tuple[Path, ...],
    *,
    config: Mapping[str, Any],
    side: Mapping[str, Any],
    complete: bool,
) -> Source:
    tensors: dict[str, TensorInfo] = {}
    home: dict[str, Path] = {}
    metadata: Mapping[str, Any] = {}
    for file in files:
        infos, meta = _header(file, complete=complete)
        metadata = metadata or meta
        for key, info in infos.items():
            if key in home:
                raise BadFileError(
                    f"{path} was to be loaded",
                    f"tensor {key!r} is both in {home[key].name} and {file.name}",
                    "Check it",
                )
            tensors[key], home[key] = info, file
    own = _own(files[0], metadata)
    found = _ours(files[0], own, tensors) if own.get("weights") else _foreign(tensors, side)
    config = config or own.get("config", {})
    library, class_name = _class(config)
    return Source(
        path=path,
        files=files,
        tensors=tensors,
        home=home,
        found=found,
        specs={name: PackedSpec.from_dict(row) for name, row in own.get("weights", {}).items()},
        config=config,
        library=library,
        class_name=class_name,
        metadata=metadata,
    )


def _header(file: Path, *, complete: bool) -> tuple[Mapping[str, TensorInfo], Mapping[str, Any]]:
    if not file.is_file():
        raise BadFileError(f"{file} was to be read", "it is not a regular file", "Check the path")
    if is_gguf(file):
        from .gguf import read_header

        header = read_header(file)
        return header.tensors, header.metadata
    if file.suffix == ".gguf":
        raise BadFileError(
            f"{file} was to be read as GGUF", "it does not begin with the letters GGUF", "Check the file"
        )
    return safetensors.read_header(file, complete=complete)


def _own(file: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What sdquant wrote into a file's metadata, {} for files of others."""
    text = metadata.get(METADATA_KEY)
    if not isinstance(text, str):
        return {}
    try:
        own = json.loads(text)
        version = own["format"]
        for row in own["weights"].values():
            PackedSpec.from_dict(row)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFileError(
            f"{file} was to be read", f"its sdquant metadata is damaged: {error!r}", "Quantize it again"
        ) from (error)
    if version != FORMAT_VERSION:
        raise UnsupportedFileError(
            f"{file} was to be read",
            f"it is of sdquant format {version}, this is format {FORMAT_VERSION}",
            "Update sdquant",
        )
    return dict(own)


def _ours(file: Path, own: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Found]:
    found = {}
    for name, row in own["weights"].items():
        spec = PackedSpec.from_dict(row)
        backend = backends.of_scheme(spec.scheme)
        keys = {part: backend.key(name, part, spec) for part in row["parts"]}
        extra = tuple(row["extra"])
        missing = [key for key in (*keys.values(), *extra) if key not in tensors]
        if missing:
            raise BadFileError(
                f"{file} was to be read", f"tensor {missing[0]!r} is missing", "Quantize the model again"
            )
        found[name] = Found(
            name=name,
            scheme=spec.scheme,
            keys=keys,
            extra=extra,
            evidence=f"sdquant's own metadata says {spec.scheme}",
            details=spec.details,
        )
    return found


def _foreign(tensors: Mapping[str, TensorInfo], side: Mapping[str, Any]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for name in backends.names():
        for row in backends.get(name).find(tensors, side):
            found.setdefault(row.name, row)
    return found


def _class(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    if isinstance(config.get("_class_name"), str):
        return "diffusers", config["_class_name"]
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return "transformers", names[0]
    return None, None


def pipeline_parts(folder: Path, index: Mapping[str, Any]) -> dict[str, Path]:
    """The components of a pipeline folder that have weights: name -> subfolder.

    Raises:
        MissingComponentError: the index names a model whose folder is not there.
    """
    parts = {}
    for name, row in index.items():
        if name.startswith("_") or not isinstance(row, list) or len(row) != 2 or row[0] is None:
            continue
        sub = folder / name
        if Path(name).name != name:
            raise BadFileError(
                f"{folder}/model_index.json was to be read", f"{name!r} is no component", "Check the file"
            )
        if not sub.is_dir():
            raise MissingComponentError(
                f"{folder} was to be loaded",
                f"its model_index.json names a {name}, and there is no folder of that name",
                f"Put the {name} ({row[1]}) into {sub}",
            )
        if (sub / "config.json").exists() and "Tokenizer" not in str(row[1]):
            parts[name] = sub
    return parts


def no_such_path(path: Path) -> SdquantError:
    """The error for a path that does not exist."""
    return MissingComponentError(f"{path} was to be loaded", "there is no such file or folder", "Check the path")
