"""Cache of quantized weights, so that a model is not quantized again at every start.

One file per component, as `save` writes it, named by a digest of all that its bits depend on: the bytes of the
source files, the scheme with its options, which weights, the dtype, the class and config, and the versions of the
packages that encode. The digests of the source files are stored with their size and times, so that a file is hashed
only once. The least recently used files are removed when the limit is reached. No failure of the cache fails a load.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compat import hardware
from ..errors import ConflictError, SdquantError
from ..formats import Checkpoint, safetensors_writer, single_file
from ..rules import MixSpec
from ..utils.atomic_write import whole_file
from ..utils.progress import byte_bar
from ..utils.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from ..planning import ComponentPlan, Request

log = logging.getLogger(__name__)

VARIABLE = "SDQUANT_CACHE"  # the default for calls without cache=: on, off, or a folder
_FORMAT = 2  # of the files and their names; another number begins an empty cache
_MEMO = "digests.json"
_CHUNK = 1 << 22
_SETTLED = 2_000_000_000  # nanoseconds; the coarsest steps of a file system's times


@dataclass(frozen=True)
class Cache:
    """A folder of quantized components.

    Attributes:
        folder: the location; it is created when it is needed.
        limit: maximum bytes of all files in it.
        config: what the request says of the files that they do not; {} for nothing.
    """

    folder: Path
    limit: int
    config: Mapping[str, Any] = field(default_factory=dict)

    def place(
        self, component: ComponentPlan, src: Checkpoint, dtype: str | None, device: str, *, progress: bool
    ) -> Path:
        """Return the path of a component's cached weights. Hashes the source files if their digests are not known."""
        assert component.spec is not None
        schemes = component.spec.schemes if isinstance(component.spec, MixSpec) else (component.spec.scheme,)
        packages = {row.codec.requires.package for row in schemes if row.codec.requires is not None}
        named = {name: hardware.versions().get(name) for name in sorted(packages)}
        inputs = {
            "format": _FORMAT,
            "versions": {"sdquant": __version__, **named},
            "files": [self._digest(file, progress=progress) for file in src.files],
            "quant": component.spec.described(),
            "weights": sorted(weight.name for weight in component.weights),
            "dtype": dtype,
            "device": hardware.device_kind(device),  # kernels of a GPU may round otherwise
            "class": [src.library, src.class_name],
            "config": src.config,
            **({"said": self.config} if self.config else {}),
        }
        digest = sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
        return self.folder / f"{digest}.safetensors"

    def found(self, place: Path, src: Checkpoint) -> Checkpoint | None:
        """Return the cached file `place` as the source of the component, or None if there is no intact file."""
        if not place.exists():
            return None
        try:
            cached = single_file(place)
            os.utime(place)  # used now
        except (SdquantError, OSError) as error:
            self.drop(place, str(error))
            return None
        return replace(
            cached, config=src.config, library=src.library, class_name=src.class_name, conversions=src.conversions
        )  # it has the model's names

    def keep(self, place: Path, model: nn.Module, used: Iterable[Path]) -> None:
        """Write a component to `place`, evicting older files to make room; those `used` in this load stay."""
        from ..saving import model_files

        try:
            tensors, metadata = model_files.contents(model, own_names=True)
            size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
            if size > self.limit:
                log.warning("Not cached: %d quantized bytes are more than the limit of %d", size, self.limit)
                return
            self._make_room(size, {place, *used})
            self.folder.mkdir(parents=True, exist_ok=True)
            safetensors_writer.write(place, tensors, {"format": "pt", **metadata})
            self._make_room(0, {place, *used})  # the header counts, too
        except ConflictError as error:  # another process keeps the same just now
            log.info("The quantized weights were not cached: %s", error)
        except (SdquantError, OSError) as error:
            log.warning("The quantized weights were not cached: %s", error)

    def drop(self, place: Path, why: str) -> None:
        """Remove a file that cannot be used, and log the reason."""
        log.warning("Removing %s from the cache: %s", place.name, why)
        try:
            place.unlink(missing_ok=True)
        except OSError as error:  # open elsewhere, where the system minds that
            log.warning("Could not remove %s: %s", place, error)

    def _make_room(self, size: int, stay: set[Path]) -> None:
        """Evict the least recently used files until `size` more bytes are within the limit."""
        rows = sorted((path.stat().st_mtime, path) for path in self.folder.glob("*.safetensors"))
        total = size + sum(path.stat().st_size for _, path in rows)
        for _, path in rows:
            if total > self.limit and path not in stay:
                total -= path.stat().st_size
                self.drop(path, f"the cache is limited to {self.limit} bytes")

    def _digest(self, file: Path, *, progress: bool) -> str:
        """Return the sha256 of a file's bytes, from the memo or by reading the file."""
        status = file.stat()
        # ctime cannot be set, unlike mtime, which tools that preserve times copy along with a file.
        mark = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        memo = self._memo()
        name = str(file.resolve())
        known = memo.get(name)
        if isinstance(known, list) and known[:-1] == mark:
            return str(known[-1])
        digest = _sha256(file, status.st_size, progress=progress)
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED:
            return digest  # whatever writes it now would leave it with the same times
        memo = {path: row for path, row in self._memo().items() if os.path.exists(path)} | {name: [*mark, digest]}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self.folder / _MEMO) as out:
                out.write(json.dumps(memo, indent=1).encode())
        except ConflictError as error:
            log.info("The digest of %s was not cached: %s", file, error)
        except (SdquantError, OSError) as error:
            log.warning("The digest of %s was not cached: %s", file, error)
        return digest

    def _memo(self) -> Mapping[str, Any]:
        try:
            memo = json.loads((self.folder / _MEMO).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}  # none yet, or damaged: files are read through again
        return memo if isinstance(memo, dict) else {}


def cache_of(request: Request) -> Cache | None:
    """Return the cache of a request, or None if it uses none."""
    setting = request.cache if request.cache is not None else os.environ.get(VARIABLE, "")
    word = setting.strip().lower()
    if word in ("", "off", "0", "false", "no"):
        return None
    folder = default_folder() if word in ("on", "1", "true", "yes") else Path(os.path.expanduser(setting))
    return Cache(folder=folder, limit=request.cache_bytes, config=request.config_table)


def default_folder() -> Path:
    """Return the default cache folder: `sdquant` in $XDG_CACHE_HOME, or in `.cache` of the home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "sdquant"


def _sha256(file: Path, size: int, *, progress: bool) -> str:
    digest, buffer = sha256(), memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as raw, byte_bar(f"Reading {file.name}", size, progress) as tick:
        while count := raw.readinto(buffer):
            digest.update(buffer[:count])
            tick(count)
    return digest.hexdigest()
