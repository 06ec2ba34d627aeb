"""The folders whose models the page may open, and the only way from a text in the page to a path on the disk.

No text from the page is ever passed to the file system. Each part of it is compared with the names that the parent
folder lists, so `..`, drives, shares, devices, other spellings of letters and control characters are simply names that
no folder contains. The target of a link must be below the same folders.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .. import demo
from ..errors import SdquantError, SettingsError
from ..formats import folders, refused_files
from ..models import BUNDLED_MODELS

MAX_TEXT = 1024  # characters of a name that is looked up
MAX_DEPTH = 6  # folders below a root: <cache>/models--a--b/snapshots/<revision>/unet/file is 5
MAX_ENTRIES = 500  # in a list
MAX_LOOKED_AT = 20_000  # files and folders, for one list
SHOWN = 40  # characters of a refused name that an error repeats

_FILES = {".safetensors": "safetensors", ".gguf": "gguf"}
_CONFIGS = {".json": "config"}
_LARGEST_CONFIG = 1 << 20  # bytes
_OF_MODELS = {"_class_name", "architectures", "quantization_config", "quant_method"}
_DRIVE = r"[A-Za-z]:[\\/]|\\\\"
# An absolute path in a sentence: not within a word, a URL or a tag, up to white space or a closing mark.
_ABSOLUTE = re.compile(rf"(?:file:///?|(?<![\w.:/<*])/(?=[^\s/])|(?<!\w)(?:{_DRIVE}))[^\s'\"`<>|,;)\]]*")
_WORDS = 12  # words behind a path that may still belong to it


@dataclass(frozen=True)
class Entry:
    """A model or file that can be picked in the page.

    Attributes:
        name: shown by the page, and sent back by it. path: its real path.
        kind: "pipeline", "component", "safetensors" or "gguf".
    """

    name: str
    path: Path
    kind: str


@dataclass(frozen=True)
class _Root:
    """A folder that may be read. `name` is the first part of its entries' names; "" for the bundled models."""

    name: str
    folder: Path

    @property
    def places(self) -> tuple[Path, ...]:
        """Return the folders that links may point into. In the hub's cache, snapshots/... are links to blobs/<hash>."""
        return (self.folder, *(one.parent / "blobs" for one in self.folder.parents if one.name == "snapshots"))

    def called(self, path: Path) -> str:
        """Return the name of a path below the folder."""
        return "/".join(part for part in (self.name, *path.relative_to(self.folder).parts) if part)


class Roots:
    """The folder of bundled models, and further model folders.

    Args:
        folders: paths as on the command line.

    Raises:
        SettingsError: one of them is not a folder, or is the root of a disk.
    """

    def __init__(self, folders: Iterable[str | Path] = ()) -> None:
        shipped = Path(os.path.realpath(demo.__file__)).parent / "models"
        self._roots = [_Root("", shipped)] if shipped.is_dir() else []
        taken = set(BUNDLED_MODELS)
        for folder in folders:
            place = _checked(folder)
            if all(root.folder != place for root in self._roots):
                self._roots.append(_Root(_free(place.name, taken), place))

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the real paths of all folders, that of the bundled models first."""
        return tuple(root.folder for root in self._roots)

    def models(self) -> tuple[Entry, ...]:
        """List what can be loaded: pipeline folders, component folders, and single files; bundled ones first."""
        return tuple(one for one in self._listed(inner=False) if not _is_lora(one))

    def files(self) -> tuple[Entry, ...]:
        """List what can be inspected: `models`, and the components and files inside the folders."""
        return self._listed(inner=True)

    def configs(self) -> tuple[Entry, ...]:
        """List the JSON files below the folders that say what a model is, or how it is quantized."""
        return tuple(
            one for one in self._listed(inner=False, suffixes=_CONFIGS) if one.path.is_file() and _is_config(one)
        )

    def loras(self) -> tuple[Entry, ...]:
        """List the LoRA files below the folders."""
        return tuple(one for one in self._listed(inner=False) if _is_lora(one))

    def lora_folders(self) -> list[str]:
        """List the folders that have LoRA files in them, by name."""
        return sorted({one.name.rpartition("/")[0] for one in self.loras()} - {""})

    def resolve(self, text: object) -> Path:
        """Return the path for an entry's name, a path relative to one of the folders, or an absolute path in one.

        Raises:
            SettingsError: for anything else, with the same text whether or not it exists.
        """
        if isinstance(text, str) and 0 < len(text) <= MAX_TEXT:
            for root, parts in self._readings(text):
                path = self._walk(root, parts)
                if path is not None:
                    return path
        raise _refused(text)

    def shown(self, path: str | Path) -> str:
        """Return the name of a path; only its last part if it is outside the folders."""
        return self._name_of(Path(path)) or Path(path).name

    def clean(self, text: str) -> str:
        """Replace absolute paths in a sentence: by names below the folders, by their last part elsewhere."""
        out, at = [], 0
        for match in _ABSOLUTE.finditer(text):
            if match.start() < at:
                continue  # within the path before, which has a space in it
            whole_path = _whole(text, match)
            path = whole_path.removeprefix("file://").rstrip(".:")
            out += [text[at : match.start()], self._name_of(Path(path)) or re.split(r"[\\/]", path.rstrip("\\/"))[-1]]
            out.append(whole_path[len(whole_path.rstrip(".:")) :])
            at = match.start() + len(whole_path)
        return "".join((*out, text[at:]))

    def _readings(self, text: str) -> Iterator[tuple[_Root, list[str]]]:
        """Yield the possible readings of a text: a root, and the parts of the path below it."""
        for root in self._roots:
            place = str(root.folder)
            if text == place or text.startswith(place + os.sep):
                yield root, _parts(text[len(place) + 1 :].replace(os.sep, "/"))
        parts = _parts(text)
        yield from ((root, parts[1:]) for root in self._roots if parts[:1] == [root.name])
        yield from ((root, parts) for root in self._roots if parts)

    def _name_of(self, path: Path) -> str | None:
        """Return the name of a path as written or, failing that, of its target."""
        for tried in (Path(os.path.normpath(path)), Path(os.path.realpath(path))):
            for root in sorted(self._roots, key=lambda root: len(root.folder.parts), reverse=True):
                if tried.is_relative_to(root.folder):
                    return root.called(tried) or tried.name
        return None

    def _listed(self, *, inner: bool, suffixes: Mapping[str, str] = _FILES) -> tuple[Entry, ...]:
        real_paths: set[str] = set()
        looked_at = _Count(MAX_LOOKED_AT)
        entries: dict[str, Entry] = {}
        for root in self._roots:
            for path, kind in self._models(root.folder, MAX_DEPTH, looked_at, real_paths, inner, suffixes):
                entry = Entry(root.called(path), path, kind)
                if self._found(entry.name) == path:  # not hidden behind another root's name
                    entries.setdefault(entry.name, entry)
                if len(entries) == MAX_ENTRIES:
                    return tuple(entries.values())
        return tuple(entries.values())

    def _found(self, name: str) -> Path | None:
        readings = self._readings(name)
        return next((path for root, parts in readings if (path := self._walk(root, parts)) is not None), None)

    def _models(
        self,
        at: Path,
        depth: int,
        looked_at: _Count,
        real_paths: set[str],
        inner: bool,
        suffixes: Mapping[str, str],
    ) -> Iterator[tuple[Path, str]]:
        """Yield path and kind of a folder and of the models in it, folders before their contents."""
        real = os.path.realpath(at)
        if real in real_paths:
            return
        real_paths.add(real)
        names = _names(at)
        kind = _kind(names)
        if kind is not None:
            yield at, kind
        if kind is not None and not inner:
            return
        for name in names:
            path = at / name
            if not looked_at.one():
                return
            if not self._holds(path) or not _is_plain(path):
                continue
            if path.is_dir():
                if depth:
                    yield from self._models(path, depth - 1, looked_at, real_paths, inner, suffixes)
            elif path.suffix.lower() in suffixes:
                yield path, suffixes[path.suffix.lower()]

    def _walk(self, root: _Root, parts: list[str]) -> Path | None:
        """Return the file or folder below a root, by names that the folders themselves list; None if there is none."""
        if len(parts) > MAX_DEPTH + 1:
            return None
        at = root.folder
        for part in parts:
            if part not in _names(at) or not self._holds(at / part):
                return None
            at = at / part
        return at if _is_plain(at) else None

    def _holds(self, path: Path) -> bool:
        """Return whether the target of `path` is below one of the roots."""
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(place) for root in self._roots for place in root.places)


def _is_lora(entry: Entry) -> bool:
    if entry.kind != "safetensors":
        return False
    try:
        stat = entry.path.stat()
    except OSError:
        return False
    return _looked_up(entry.path, stat.st_mtime_ns, stat.st_size)


def _is_config(entry: Entry) -> bool:
    try:
        stat = entry.path.stat()
    except OSError:
        return False
    return stat.st_size <= _LARGEST_CONFIG and _says_what(entry.path, stat.st_mtime_ns, stat.st_size)


@lru_cache(MAX_LOOKED_AT)
def _says_what(path: Path, changed: int, size: int) -> bool:
    try:
        table = folders.read_json(path)
    except SdquantError:
        return False
    return bool(table.keys() & _OF_MODELS)


@lru_cache(MAX_LOOKED_AT)
def _looked_up(path: Path, changed: int, size: int) -> bool:
    return refused_files.is_lora_file(path)


class _Count:
    """Counter of the files and folders that may still be visited."""

    def __init__(self, left: int) -> None:
        self.left = left

    def one(self) -> bool:
        self.left -= 1
        return self.left >= 0


def _checked(folder: str | Path) -> Path:
    """Return the real path of a folder from the command line."""
    place = Path(os.path.realpath(os.path.expanduser(folder)))
    what, fix = f"Cannot use {folder} as a folder of models", "Name an existing folder that contains models"
    if not place.is_dir():
        raise SettingsError(what, "there is no folder of that name", fix)
    if place.parent == place:
        raise SettingsError(what, "it would include everything on the disk", fix)
    return place


def _free(name: str, taken: set[str]) -> str:
    """Return the name, with a number if it is taken, and add it to `taken`."""
    free = next(tried for n in range(1, len(taken) + 2) if (tried := name if n == 1 else f"{name} {n}") not in taken)
    taken.add(free)
    return free


def _refused(text: object) -> SettingsError:
    name = re.split(r"[\\/]", text.rstrip("\\/"))[-1] if isinstance(text, str) else type(text).__name__
    short = name if len(name) <= SHOWN else name[: SHOWN - 3] + "..."
    return SettingsError(
        f"Cannot open {short!r}",
        "it is not the name of a file or folder below the folders of models",
        "Pick a name from the list; `sdquant ui --models FOLDER` adds a folder",
    )


def _parts(text: str) -> list[str]:
    text = text.removesuffix("/")
    return text.split("/") if text else []


def _names(folder: Path) -> list[str]:
    """List a folder without hidden and unprintable names. Return an empty list if it cannot be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith(".") and _sayable(name))
    except OSError:
        return []


def _sayable(name: str) -> bool:
    """Return whether a name is printable: without control characters and undecodable bytes."""
    return all(unicodedata.category(letter) not in ("Cc", "Cs") for letter in name)


def _is_plain(path: Path) -> bool:
    """Return whether a path is a file or a folder: opening a pipe or device may block forever."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _kind(names: list[str]) -> str | None:
    """Return the kind of a model folder from the names in it; None for any other folder."""
    if "model_index.json" in names:
        return "pipeline"
    if "config.json" in names and any(name.lower().endswith(folders.WEIGHTS) for name in names):
        return "component"
    return None


def _whole(text: str, match: re.Match[str]) -> str:
    """Return the path that begins at the match, with the following words that belong to it: names may have spaces.

    The longest text that exists is the path; if none does, following words that contain a separator belong to it.
    """
    start = match.start() + (len("file://") if match[0].startswith("file://") else 0)
    ends = [end.start() for end in re.finditer(r"(?=[\s'\"`,;)\]]|$)", text[match.end() :])][: _WORDS + 1]
    for end in sorted((match.end() + end for end in ends), reverse=True):
        if end > match.end() and os.path.lexists(text[start:end].rstrip(".:")):
            return text[match.start() : end]
    if text[match.end() - 1 : match.end()] == "/":
        return match[0]
    further = re.compile(r"(?: [^\s/\\'\"`<>|,;)\]]+[/\\][^\s'\"`<>|,;)\]]+)+").match(text, match.end())
    return match[0] + (further[0] if further else "")
