"""The interface between containers and the loader: names and infos first, then one tensor at a time.

A `Recipe` is for a tensor that a file does not contain, computed from those that it does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import BadFileError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from ..core import TensorInfo, packed_rows

Get = Callable[[str], "Tensor"]
_SHOWN = 4  # sources of a tensor that an error names


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a weights file, as it was when it was read.

    Attributes:
        container: "safetensors", "gguf" or "pickle".
        path: the file. size: its bytes. modified: its time of modification in nanoseconds.
        tensors: by key, in file order. metadata: the other entries.
    """

    container: ClassVar[str]
    path: Path
    size: int
    modified: int
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, Any]

    def is_unchanged(self) -> bool:
        """Return whether the file is still as long and as old as when its header was read."""
        status = self.path.stat()
        return (status.st_size, status.st_mtime_ns) == (self.size, self.modified)

    def refuse_other_length(self) -> None:
        """Raise BadFileError if the file is not as long as its header says."""


class TensorFile(ABC):
    """An open weights file. Opening reads the header only; `get` reads one tensor.

    Attributes:
        path: the file.
        tensors: by file key, in file order. A tensor in a block-quantized type (GGUF) has that type's name as dtype.
        metadata: the other entries of the header.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, Any]

    @abstractmethod
    def get(self, key: str) -> Tensor:
        """Return the tensor, mapped from the file if possible (do not write to it). Block-quantized tensors come
        as raw bytes: uint8 [blocks, bytes per block].

        Raises:
            BadFileError: the file does not hold what its header says.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the file. Tensors already read stay valid."""

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def refuse_shortened(path: Path, size: int, inode: int) -> None:
    """Raise BadFileError if a mapped file has lost bytes since it was opened, not if another one has its name now.

    Touching a page that the file no longer has would kill the process.

    Args:
        size: in bytes, and `inode`: of the file, when it was opened.
    """
    try:
        status = path.stat()
    except OSError:  # removed: what is mapped stays
        return
    if status.st_ino == inode and status.st_size < size:
        raise BadFileError(
            f"Cannot read {path}",
            f"it had {size} bytes when it was opened and has {status.st_size} now",
            "Open it again once nothing is writing to it",
        )


@contextmanager
def closing_files(files: Mapping[Path, TensorFile]) -> Iterator[Mapping[Path, TensorFile]]:
    """Close the files at the end of the block, as `contextlib.closing` does for one; see `Checkpoint.open`."""
    try:
        yield files
    finally:
        for file in files.values():
            file.close()


@dataclass(frozen=True)
class Recipe:
    """A tensor computed from other tensors.

    Attributes:
        sources: the names of those.
        rows: ranges of rows of the only source, if the tensor consists of these alone; else None.
        shape, dtype: of the result; the dtype by its name where torch is not imported yet.
        make: computes it; is passed a function that returns a source by name.
        exact: computes it in float32, if `make` rounds it to its dtype.
    """

    sources: tuple[str, ...]
    rows: tuple[packed_rows.Range, ...] | None
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    make: Callable[[Get], Tensor]
    exact: Callable[[Get], Tensor] | None = None

    @property
    def info(self) -> TensorInfo:
        """Return the entry that a header would have for the tensor."""
        from ..core import DTYPE_BITS, TensorInfo, dtype_name

        name = self.dtype if isinstance(self.dtype, str) else dtype_name(self.dtype)
        return TensorInfo(dtype=name, shape=self.shape, nbytes=math.prod(self.shape) * DTYPE_BITS[name] // 8)

    def __call__(self, get: Get) -> Tensor:
        """Return the tensor; `get` returns a source by name."""
        from ..core import packed_rows

        if self.rows is not None:
            return packed_rows.pieces(get(self.sources[0]), self.rows)
        return self.make(get)

    def compute(self, key: str, file: Path, get: Get, *, exact: bool) -> Tensor:
        """Return the tensor as `Checkpoint.read` does.

        Args:
            key, file: what it is called, and where it is read from.

        Raises:
            BadFileError: the sources do not fit together.
        """
        make = self.exact if exact and self.exact is not None else self
        try:
            return make(get)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            sources = ", ".join(map(repr, self.sources[:_SHOWN])) + (", ..." if len(self.sources) > _SHOWN else "")
            raise BadFileError(
                f"Cannot read tensor {key!r} of {file}",
                f"it cannot be made of the file's {sources}: {error}",
                "Download the file again from its source",
            ) from error


def over_files(recipe: Recipe, recipes: Mapping[str, Recipe], keys: Mapping[str, str]) -> Recipe:
    """Turn a recipe over a component's tensors into one over those of its files.

    Args:
        recipes, keys: see `Checkpoint`.
    """
    if not any(key in recipes or key in keys for key in recipe.sources):
        return recipe

    def make(get: Get) -> Tensor:
        return recipe(lambda key: recipes[key](get) if key in recipes else get(keys.get(key, key)))

    sources = (
        name for key in recipe.sources for name in (recipes[key].sources if key in recipes else (keys.get(key, key),))
    )
    return replace(recipe, sources=tuple(dict.fromkeys(sources)), rows=None, make=make)
