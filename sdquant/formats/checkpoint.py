"""One component's weights on disk: which files, which tensors, which of them are quantized. Headers only, no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import COMPUTE_DTYPES, registry
from ..errors import BadFileError, UnsupportedFileError
from ..utils.special_files import not_regular
from . import comfy_metadata, folders, nunchaku_names, quantization_methods, safetensors, shifted_biases
from .component_configs import Given, configs_in, with_given
from .gguf.file import GGUFFile, GGUFHeader
from .gguf.file import read_header as read_gguf
from .pickle import PickleFile, refused
from .pickle import read_header as read_pickle
from .sdquant_metadata import FORMAT_VERSION, METADATA_KEY, found_in, merged_own, rule_rows, specs_in

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import PackedSpec, PrequantizedWeight, TensorInfo
    from .tensor_file import Header, Recipe, TensorFile

__all__ = ["FORMAT_VERSION", "METADATA_KEY", "Checkpoint", "component_folder", "is_gguf", "open_file", "single_file"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A component on disk.

    Attributes:
        path: the folder or file that stands for the component.
        files: the weight files.
        tensors: infos by file key, over all files.
        home: the file of each key.
        prequantized: the quantized weights, by weight name. Their `name` attributes are the names in the file.
        specs: full descriptions of quantized weights, where sdquant wrote the file.
        config: the component's config.json (or what sdquant put into the file), {} if there is none.
        library, class_name: "diffusers" or "transformers" and the class, if known.
        metadata: the metadata of the first file.
        container: "safetensors", "gguf", or "pickle".
        recipes: how to make the plain tensors that the file holds under other names or in other shapes; see `foreign`.
        variant, variants: which of the variants in a folder it is, and the others; see `folders.weights`.
        rules: by which it was quantized, where sdquant wrote the file; `rules.file_rules` reads them.
        keys: what the file calls tensors and quantized weights that the model calls otherwise; see `models.fitting`,
            which the fields below are of, too.
        strays: keys of tensors that the model has no place for. They are not among `tensors`.
        layers: by weight name, the type of the model's layer, or None and the reason why that layer cannot run it
            quantized; {} if this was not determined.
        conversions: with which transformers has renamed the tensors.
        headers: of the files.
        origins: the schemes that float weights are dequantized from, by name; see `models.float_weights`.
        warnings: contradictions in the files that have an answer, in sentences.
    """

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    home: Mapping[str, Path]
    prequantized: Mapping[str, PrequantizedWeight]
    specs: Mapping[str, PackedSpec] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    library: str | None = None
    class_name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    container: str = "safetensors"
    recipes: Mapping[str, Recipe] = field(default_factory=dict, repr=False)
    variant: str = ""
    variants: tuple[str, ...] = ()
    rules: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    strays: tuple[str, ...] = field(default=(), repr=False)
    layers: Mapping[str, tuple[str | None, str]] = field(default_factory=dict, repr=False)
    conversions: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    headers: Mapping[Path, Header] = field(default_factory=dict, repr=False, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def plain(self) -> dict[str, TensorInfo]:
        """Return the tensors that belong to no quantized weight, by key."""
        used = {key for weight in self.prequantized.values() for key in (*weight.keys.values(), *weight.extra)}
        return {key: info for key, info in self.tensors.items() if key not in used}

    @property
    def schemes(self) -> dict[str, str]:
        """Return the scheme of each weight, "" for an unquantized one, by key or by the quantized weight's name. Of
        weights that are dequantized while they are read, that of the file."""
        quantized = {name: weight.scheme for name, weight in self.prequantized.items()}
        return dict.fromkeys(self.plain, "") | dict(self.origins) | quantized

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights: plain tensors and packed parts, without code tables and descriptions."""
        return safetensors.total(self.plain.values()) + sum(self.prequantized_bytes(name) for name in self.prequantized)

    def prequantized_bytes(self, name: str) -> int:
        """Return the bytes of a quantized weight's parts in memory."""
        weight = self.prequantized[name]
        if weight.cut is None and weight.nbytes is not None:
            return weight.nbytes
        return (
            sum(self.tensors[key].nbytes for key in weight.keys.values()) if weight.cut is None else weight.cut.nbytes
        )

    @property
    def names(self) -> frozenset[str]:
        """Return the names that the model uses: plain keys and the names of quantized weights."""
        return frozenset(self.plain) | frozenset(self.prequantized)

    @property
    def recorded_quant(self) -> str | None:
        """Return the scheme recorded in a GGUF file that sdquant wrote: types alone do not identify a mix."""
        name = self.metadata.get(f"{METADATA_KEY}.quant")
        return name if name in {row.name for row in registry.get("gguf").schemes} else None

    @property
    def recorded_dtype(self) -> str | None:
        """Return the source dtype recorded in a GGUF file that sdquant wrote: its small tensors are always in F32."""
        name = self.metadata.get(f"{METADATA_KEY}.dtype")
        return name if name in COMPUTE_DTYPES else None

    @property
    def plain_only(self) -> bool:
        """Return whether some quantized weights can run only in sdquant's own (plain) layers."""
        return any(weight.plain_only for weight in self.prequantized.values())

    @property
    def is_empty(self) -> bool:
        """Return whether there is a config but no weights."""
        return not self.tensors

    def open(self) -> dict[Path, TensorFile]:
        """Open all files; the caller closes them."""
        try:
            return {path: open_file(path, self.headers.get(path)) for path in self.files}
        except OSError as error:  # removed, or on a disk that is gone, since the header was read
            raise BadFileError(f"Cannot read {self.path}", str(error), "Check the path") from error

    def refuse_other_lengths(self) -> None:
        """Raise BadFileError unless the files are as long as their headers say."""
        for header in self.headers.values():
            header.refuse_other_length()

    def read(self, files: Mapping[Path, TensorFile], key: str, *, exact: bool = False) -> Tensor:
        """Read a tensor from the opened files: a plain one, or a part of a quantized weight.

        Args:
            exact: in float32, if it is dequantized while it is read, and rounded to its dtype then.
        """
        recipe = self.recipes.get(key)
        if recipe is not None:
            return recipe.compute(key, self.home[key], lambda source: self._find(files, source), exact=exact)
        return files[self.home[key]].get(self.keys.get(key, key))

    def _find(self, files: Mapping[Path, TensorFile], key: str) -> Tensor:
        """Read a tensor by the file's own name for it."""
        return next(file for file in files.values() if key in file.tensors).get(key)


def main_dtype(*sources: Checkpoint, dtypes: Sequence[str] = COMPUTE_DTYPES, recorded: bool = False) -> str | None:
    """Return the dtype that most bytes of the unquantized tensors have; None if they have none of `dtypes`.

    Args:
        recorded: count the tensors of a GGUF file that sdquant wrote as the dtype that it records.
    """
    sizes: Counter[str] = Counter()
    for src in sources:
        named = src.recorded_dtype if recorded else None
        for info in src.plain.values():
            if info.dtype in dtypes:
                sizes[named or info.dtype] += info.nbytes
    return max(sizes, key=sizes.__getitem__, default=None)


def open_file(path: Path, header: Header | None = None) -> TensorFile:
    """Open a weights file as the TensorFile of its format, with its header if that has been read."""
    if isinstance(header, safetensors.SafetensorsHeader):
        return safetensors.SafetensorsFile(path, header)
    if isinstance(header, GGUFHeader) or is_gguf(path):
        return GGUFFile(path, header if isinstance(header, GGUFHeader) else None)
    if is_pickle(path):  # in no Checkpoint unless that was allowed
        return PickleFile(path)
    return safetensors.SafetensorsFile(path)


def is_gguf(path: Path) -> bool:
    """Return whether the file starts with GGUF's magic bytes; False if it is empty or missing."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def is_pickle(path: Path) -> bool:
    """Return whether the file's suffix is that of a torch checkpoint (a pickle)."""
    return path.suffix.lower() in folders.PICKLES


def component_folder(
    folder: Path,
    *,
    complete: bool = True,
    allow_pickle: bool = False,
    variant: str | None = None,
    given: Given | None = None,
) -> Checkpoint:
    """Return the component in a folder with a config.json and weights.

    Args:
        variant: see `folders.weights`. given: see `component_configs.with_given`.

    Raises:
        MissingComponentError: no weights there. BadFileError: they are damaged. UnsupportedFileError: pickles only.
    """
    config, side = configs_in(folder) if given is None else with_given(configs_in(folder), given, folder)
    quantization_methods.refuse_pickles(folder, side.get("files", {}))
    weight_files = folders.weights(folder, allow_pickle=allow_pickle, variant=variant)
    src = _source(folder, weight_files.files, config=config, side=side, complete=complete, index=weight_files.index)
    return replace(src, variant=weight_files.variant, variants=weight_files.others)


def as_named(src: Checkpoint, row: Sequence[str]) -> Checkpoint:
    """Return the component with the class from a pipeline's model_index.json, [library, class], as diffusers does: the
    config.json of a text encoder may name the larger model that it was extracted from."""
    library, class_name = row
    config = {key: value for key, value in src.config.items() if key != "_class_name" or isinstance(value, str)}
    return replace(src, library=str(library), class_name=str(class_name), config=config) if src.config else src


def without_weights(folder: Path) -> Checkpoint:
    """Return the component that a folder's config.json describes, without its weights, which come from elsewhere."""
    config, _ = configs_in(folder)
    library, class_name = _class(config)
    return Checkpoint(
        path=folder,
        files=(),
        tensors={},
        home={},
        prequantized={},
        config=config,
        library=library,
        class_name=class_name,
    )


def single_file(
    path: Path, *, complete: bool = True, allow_pickle: bool = False, given: Given | None = None
) -> Checkpoint:
    """Return the component in one weights file, with the config.json in its folder if no other weights are there.

    Args:
        given: see `component_configs.with_given`.
    """
    if is_pickle(path) and not allow_pickle:
        raise refused(path)
    beside = folders.visible_weights(path.parent, folders.WEIGHTS + (folders.PICKLES if is_pickle(path) else ()))
    config, side = configs_in(path.parent) if beside == [path] or folders.is_usual(path) else ({}, {})
    if not _class(config)[0]:  # of something else, or only about the quantization
        config, side = ({}, side) if config.keys() == {"quantization_config"} else ({}, {})
    if given is not None:
        config, side = with_given((config, side), given, path)
        config = config if _class(config)[0] else {}  # that of the model comes from elsewhere
    return _source(path, (path,), config=config, side=side, complete=complete)


def _source(
    path: Path,
    files: tuple[Path, ...],
    *,
    config: Mapping[str, Any],
    side: Mapping[str, Any],
    complete: bool,
    index: Mapping[str, Path] | None = None,
) -> Checkpoint:
    tensors: dict[str, TensorInfo] = {}
    home: dict[str, Path] = {}
    headers = {file: _header(file, complete=complete) for file in files}
    for file, header in headers.items():
        for key, info in header.tensors.items():
            if key in home:
                raise BadFileError(
                    f"Cannot load {path}",
                    f"tensor {key!r} is both in {home[key].name} and {file.name}",
                    "Check which of the two files belongs to the model, and remove the other",
                )
            tensors[key], home[key] = info, file
    metadata_of = {file: header.metadata for file, header in headers.items()}
    metadata = next((meta for meta in metadata_of.values() if meta), {})
    said = {key: value for meta in reversed(metadata_of.values()) for key, value in meta.items()}  # of all shards
    if not tensors and metadata.get("split.count", 0) < 2:  # the first part of a split file: refused as what it is
        raise BadFileError(f"Cannot load {path}", "it contains no tensors", "Download the file again from its source")
    _check_index(path, index or {}, home)
    own = merged_own(metadata_of)
    specs = specs_in(files[0], own)
    comfy = comfy_metadata.Declarations()
    methods: tuple[tuple[str, str], ...] = ()
    if specs:
        quantized = found_in(files[0], own, specs, tensors)
    else:
        methods = tuple(quantization_methods.named(path, side.get("files", {}), said))
        tables = tuple(quantization_methods.tables(side.get("files", {}), said))
        comfy = comfy_metadata.declarations(tensors, home, headers, metadata, tables)
        told = {**side, "comfy": comfy.weights, "methods": methods, "tables": tables, "metadata": said}
        quantized = _foreign(path, tensors, told)
    quantization_methods.refuse_unread(path, tensors, quantized, side.get("files", {}), said, home)
    contradictions = quantization_methods.contradictions(path, quantized, side.get("files", {}), said)
    config = config or own.get("config", {}) or nunchaku_names.config_in(metadata)
    library, class_name = _class(config)
    named = nunchaku_names.Tensors(path=path, tensors=tensors, home=home, prequantized=quantized)
    named = shifted_biases.with_shifts(nunchaku_names.under_diffusers_names(named, methods, config))
    return Checkpoint(
        path=path,
        files=files,
        tensors=named.tensors,
        home=named.home,
        prequantized=named.prequantized,
        recipes=named.recipes,
        keys=named.keys,
        specs=specs,
        config=config,
        library=library,
        class_name=class_name,
        metadata=metadata,
        container=headers[files[0]].container,
        headers=headers,
        rules=rule_rows(files[0], own),
        warnings=(*comfy.warnings, *contradictions),
    )


def _check_index(path: Path, index: Mapping[str, Path], home: Mapping[str, Path]) -> None:
    """Raise BadFileError unless the index, if there is one, lists every tensor, each in the file that has it."""
    for key, file in index.items():
        if home.get(key) != file:
            raise BadFileError(
                f"Cannot load {path}",
                f"its index lists tensor {key!r} in {file.name}, but that tensor is "
                + (f"in {home[key].name}" if key in home else "in no shard"),
                "Download the index and the shards again",
            )
    left = sorted(home.keys() - index.keys()) if index else []
    if left:
        raise BadFileError(
            f"Cannot load {path}",
            f"tensor {left[0]!r} is in {home[left[0]].name}, but not in the index",
            "Download the index and the shards again",
        )


def _header(file: Path, *, complete: bool) -> Header:
    if not file.is_file():
        raise not_regular(f"Cannot read {file}", file)
    if is_gguf(file):
        return read_gguf(file, complete=complete)
    if is_pickle(file):
        return read_pickle(file)
    if file.suffix.lower() == ".gguf":
        raise BadFileError(f"Cannot read {file} as GGUF", "it does not start with the letters GGUF", "Check the file")
    return safetensors.read_header(file, complete=complete)


def _foreign(path: Path, tensors: Mapping[str, TensorInfo], side: Mapping[str, Any]) -> dict[str, PrequantizedWeight]:
    quantized: dict[str, PrequantizedWeight] = {}
    side = quantization_methods.with_stated(side)
    for backend in registry.backends():
        try:
            rows = backend.find(tensors, side)
        except (UnsupportedFileError, BadFileError) as error:
            raise type(error)(f"{error.what} (in {path})", error.why, error.fix) from error
        except (AttributeError, TypeError, ValueError, LookupError, re.error) as error:
            raise BadFileError(
                f"Cannot read {path}",
                f"the tensors or settings of its quantization are invalid ({backend.name}): {error!r}",
                "Download the file again, with the config.json that belongs to the weights",
            ) from error
        for row in rows:
            if row.name in quantized:
                raise BadFileError(
                    f"Cannot read {path}",
                    f"the tensors of weight {row.name!r} match both {quantized[row.name].scheme} and {row.scheme}",
                    "Download the file again from its source",
                )
            quantized[row.name] = row
    return quantized


def _class(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    if isinstance(config.get("_class_name"), str):
        return "diffusers", config["_class_name"]
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return "transformers", names[0]
    return None, None
