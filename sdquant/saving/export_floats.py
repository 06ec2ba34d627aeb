"""Write the float weights of a quantized model: `sdquant dequantize MODEL OUT`.

A file or a component's folder becomes one .safetensors, a folder a folder like it: with the same names, configs without
what they say about quantization, and weights in files of at most `safetensors_writer.MAX_SHARD` bytes.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import LONE, TensorSpec
from ..errors import SettingsError
from ..formats import FORMAT_VERSION, METADATA_KEY, folders, safetensors_writer
from ..models import stored_components, with_float_weights
from ..utils.atomic_write import part_file, whole_folder
from ..utils.home_paths import with_home
from ..utils.malloc_trim import Trimmer
from ..utils.progress import byte_bar
from .export_gguf import files_in
from .float_configs import is_of_weights, write_config
from .model_files import refuse_existing, refuse_nested

if TYPE_CHECKING:
    from torch import Tensor

    from ..formats import Checkpoint, Given, TensorFile
    from ..utils.progress import Tick

_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class DequantizationReport:
    """What `dequantize_to` wrote.

    Attributes:
        path: the file or folder. dtype: of its floats; "" if each has its own.
        schemes: how many weights were quantized to each scheme.
        tensors, bytes: of all tensors.
    """

    path: Path
    dtype: str
    schemes: Mapping[str, int]
    tensors: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "path": str(self.path), "dtype": self.dtype or None, "schemes": dict(self.schemes),
            "tensors": self.tensors, "bytes": self.bytes,
        }  # fmt: skip


def dequantize_to(
    path: str | Path,
    target: str | Path,
    *,
    config: Given | None = None,
    dtype: str | None = "float32",
    overwrite: bool = False,
    allow_pickle: bool = False,
    variant: str | None = None,
    progress: bool = True,
    max_shard: int = safetensors_writer.MAX_SHARD,
) -> DequantizationReport:
    """Dequantize a file or folder and write it, one weight at a time.

    Args:
        path, config, allow_pickle, variant: see `loading.dequantize`. dtype: the same, by name.
        target: ends in .safetensors, or is a folder; a folder is for a folder, and of a pipeline there is no file.
        overwrite: replace what is at `target`, unless that is the source.
        max_shard: bytes of a file in a folder, unless one weight has more.

    Raises:
        SettingsError: the target exists, is the source, or does not suit it. DiskSpaceError: there is no room for it.
            Else as `loading.dequantize`.
    """
    place, goal = Path(with_home(path)), Path(target)
    refuse_existing(goal, overwrite)
    refuse_nested(place, goal)
    stored = stored_components(place, config=config, allow_pickle=allow_pickle, variant=variant)
    _refuse_target(place, goal, stored)
    sources = {name: with_float_weights(src, dtype) for name, src in stored.items()}
    infos = [info for src in sources.values() for info in src.tensors.values()]
    total = sum(info.nbytes for info in infos)
    with byte_bar("Dequantizing", total, progress) as tick:
        if goal.suffix == _SUFFIX:
            _write_file(goal, next(iter(sources.values())), tick)
        else:
            _write_folder(place, goal, sources, dtype, max_shard, tick)
    schemes = Counter(scheme for src in sources.values() for scheme in src.origins.values())
    return DequantizationReport(path=goal, dtype=dtype or "", schemes=schemes, tensors=len(infos), bytes=total)


def _refuse_target(place: Path, goal: Path, stored: Mapping[str, Checkpoint]) -> None:
    """Raise SettingsError for a target that is a source, or that cannot hold the model."""
    what = f"Cannot write {goal}"
    for one in (place, *(file for src in stored.values() for file in src.files)):
        if goal.exists() and goal.samefile(one):
            raise SettingsError(what, "the weights are read from it while they are written", "Choose another path")
    if goal.suffix == _SUFFIX and LONE not in stored:
        names = ", ".join(stored)
        why = f"{place} is a pipeline of several components ({names}), and one file holds one"
        raise SettingsError(what, why, "Name a folder, or pass the folder of one component")
    if goal.suffix != _SUFFIX and goal.suffix.lower() in (*folders.WEIGHTS, *folders.PICKLES):
        raise SettingsError(what, "float weights are written as safetensors", f"Name it {goal.with_suffix(_SUFFIX)}")
    if goal.suffix != _SUFFIX and not place.is_dir():
        why = f"{place} is a single file, which becomes a single file"
        raise SettingsError(what, why, f"Name it {goal}{_SUFFIX}")


def _write_file(goal: Path, src: Checkpoint, tick: Tick) -> None:
    own = {"format": FORMAT_VERSION, "config": dict(src.config), "weights": {}}
    metadata = {METADATA_KEY: json.dumps(own, sort_keys=True)} if src.config else {}
    files = src.open()
    try:
        keys = list(src.tensors)
        tensors = _tensors(src, keys, files, tick)
        safetensors_writer.write_parts(goal, _parts(src, keys), tensors, {"format": "pt", **metadata})
    finally:
        for file in files.values():
            file.close()


def _write_folder(
    place: Path,
    goal: Path,
    sources: Mapping[str, Checkpoint],
    dtype: str | None,
    max_shard: int,
    tick: Tick,
) -> None:
    homes = {name: place if name == LONE else place / name for name in sources}
    rest = [path for path in files_in(place) if not is_of_weights(place / path, {place, *homes.values()})]
    needed = sum(info.nbytes for src in sources.values() for info in src.tensors.values())
    with whole_folder(goal, needed + sum((place / path).stat().st_size for path in rest)) as folder:
        for path in rest:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(place / path, folder / path)
        for name, src in sources.items():
            home = folder if name == LONE else folder / name
            home.mkdir(exist_ok=True)
            write_config(home, src, dtype)
            _write_shards(home, src, max_shard, tick)


def _write_shards(home: Path, src: Checkpoint, max_shard: int, tick: Tick) -> None:
    """Write the weights of a component, in several files with an index if they are large."""
    is_of_diffusers = src.library == "diffusers" or src.files[0].name.startswith(folders.BASES[0])
    stem = folders.BASES[0] if is_of_diffusers else folders.BASES[1]
    shards = _shards(src, max_shard)
    names = [f"{stem}-{number:05}-of-{len(shards):05}{_SUFFIX}" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [f"{stem}{_SUFFIX}"]
    files = src.open()
    try:
        for name, keys in zip(names, shards, strict=True):
            tensors = _tensors(src, keys, files, tick)
            safetensors_writer.write_parts(home / name, _parts(src, keys), tensors, {"format": "pt"}, opened=part_file)
    finally:
        for file in files.values():
            file.close()
    if len(shards) > 1:
        places = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        total = sum(info.nbytes for info in src.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (home / f"{stem}{_SUFFIX}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(src: Checkpoint, max_shard: int) -> list[list[str]]:
    """Split the tensors, in order, into lists of at most `max_shard` bytes, or of one tensor."""
    shards: list[list[str]] = [[]]
    nbytes = 0
    for key, info in src.tensors.items():
        if shards[-1] and nbytes + info.nbytes > max_shard:
            shards.append([])
            nbytes = 0
        shards[-1].append(key)
        nbytes += info.nbytes
    return shards


def _parts(src: Checkpoint, keys: list[str]) -> dict[str, TensorSpec]:
    return {key: TensorSpec(dtype=src.tensors[key].dtype, shape=src.tensors[key].shape) for key in keys}


def _tensors(
    src: Checkpoint, keys: list[str], files: Mapping[Path, TensorFile], tick: Tick
) -> Iterator[Mapping[str, Tensor]]:
    """Yield the tensors, one at a time."""
    trimmer = Trimmer()
    for key in keys:
        yield {key: src.read(files, key)}
        trimmer.add(src.tensors[key].nbytes)
        tick(src.tensors[key].nbytes)
