"""torch's own checkpoints (.ckpt, .pt, .bin): pickles, which can run any program when they are opened.

They are opened only where the caller allows it, and then with torch's `weights_only=True` alone, which looks every name
up in a table of harmless ones; what it refuses is refused here. Before that the archive is held against what torch
writes: stored members, not compressed ones, a small pickle, nothing larger than the file. The tensors are mapped.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import DTYPE_BITS, TensorInfo, dtype_name
from ..errors import BadFileError, UnsupportedFileError
from ..utils.special_files import not_regular
from .other_runtimes import converted, runtime_of
from .tensor_file import Header, TensorFile, refuse_shortened

if TYPE_CHECKING:
    from torch import Tensor

MAX_PICKLE = 64 << 20  # bytes: names, shapes and what training left; the numbers are beside it
_INSIDE = ("state_dict", "model", "module", "params")  # where training programs put the weights
_CONVERT = "Convert it to .safetensors with the program that made it"

# What torch raises on archives that are damaged.
_DAMAGE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, OSError, RecursionError)


def refused(path: Path) -> UnsupportedFileError:
    """Return the error for a pickle without `allow_pickle`, or for a file that has the suffix of one and is none."""
    if runtime_of(path) is not None:
        return converted(path)
    return UnsupportedFileError(
        f"Cannot load {path}",
        "it is a pickle, which can run arbitrary code when it is opened",
        "Use a .safetensors file, or, if you trust its source, pass allow_pickle=True (--allow-pickle), "
        "which opens it with torch's weights_only=True",
    )


@dataclass(frozen=True, kw_only=True)
class PickleHeader(Header):
    """The names and shapes of the tensors in a checkpoint of torch's."""

    container: ClassVar[str] = "pickle"


def read_header(path: Path) -> PickleHeader:
    """Read names and shapes from a checkpoint, whose tensors are mapped for that."""
    if runtime_of(path) is not None:
        raise converted(path)
    with PickleFile(path) as opened:
        status = path.stat()
        return PickleHeader(
            path=path, size=status.st_size, modified=status.st_mtime_ns, tensors=opened.tensors, metadata={}
        )


class PickleFile(TensorFile):
    """An open checkpoint of torch's, its tensors mapped from the file."""

    def __init__(self, path: Path) -> None:
        self.path, self.metadata = path, {}
        self._tensors = _opened(path)
        self._size, self._inode = path.stat().st_size, path.stat().st_ino
        self.tensors = {key: _info(path, key, tensor) for key, tensor in self._tensors.items()}

    def get(self, key: str) -> Tensor:
        """See `TensorFile.get`."""
        refuse_shortened(self.path, self._size, self._inode)
        return self._tensors[key]

    def close(self) -> None:
        """See `TensorFile.close`."""
        self._tensors = {}


def _opened(path: Path) -> dict[str, Tensor]:
    import torch

    sizes = _check_archive(path)
    what = f"Cannot load {path}"
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        why = f"it contains more than weights, which torch's weights_only=True rejects: {_first_line(error)}"
        raise UnsupportedFileError(what, why, _CONVERT) from error
    except _DAMAGE as error:
        raise BadFileError(what, f"torch cannot open it: {_first_line(error)}", _CONVERT) from error
    # torch maps as many bytes as the pickle says, whatever the archive has for them.
    short = Counter(_storages(loaded).values()) - sizes
    if short:
        raise BadFileError(what, f"it has no part of {max(short)} bytes, which one of its tensors needs", _CONVERT)
    return _weights(path, loaded)


def _storages(loaded: Any) -> dict[int, int]:
    """Return the size in bytes of each storage that a tensor uses, by its address."""
    import torch

    nbytes: dict[int, int] = {}
    waiting: list[Any] = [loaded]
    visited: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in visited:  # a table may hold itself
            continue
        visited.add(id(one))
        if isinstance(one, torch.Tensor) and one.layout == torch.strided:
            storage = one.untyped_storage()
            if storage.nbytes():
                nbytes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
    return nbytes


def _check_archive(path: Path) -> Counter[int]:
    """Return the sizes in bytes of the archive's parts. Raise unless it is an archive as torch writes since 1.6."""
    if not path.is_file():
        raise not_regular(f"Cannot load {path}", path)
    what = f"Cannot load {path}"
    try:
        with zipfile.ZipFile(path) as archive:
            rows = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise BadFileError(
            what, f"it is not a torch archive ({_first_line(error)}): damaged, or from before torch 1.6", _CONVERT
        ) from error
    if any(row.compress_type != zipfile.ZIP_STORED or row.file_size != row.compress_size for row in rows):
        raise BadFileError(what, "parts of it are compressed, which torch never does", _CONVERT)
    pickles = [row for row in rows if row.filename.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1 or sum(row.file_size for row in rows) > path.stat().st_size:
        raise BadFileError(what, "its parts are not those of a torch archive", _CONVERT)
    if pickles[0].file_size > MAX_PICKLE:
        raise BadFileError(what, f"its pickle has {pickles[0].file_size} bytes; {MAX_PICKLE} is the limit", _CONVERT)
    return Counter(row.file_size for row in rows)


def _weights(path: Path, loaded: Any) -> dict[str, Tensor]:
    """Return the tensors by name, without the other state that training programs save."""
    import torch

    for name in _INSIDE:
        inner = loaded.get(name) if isinstance(loaded, dict) else None
        if isinstance(inner, dict) and any(isinstance(value, torch.Tensor) for value in inner.values()):
            loaded = inner
            break
    rows = loaded.items() if isinstance(loaded, dict) else ()
    tensors = {key: value for key, value in rows if isinstance(key, str) and isinstance(value, torch.Tensor)}
    if not tensors:
        raise UnsupportedFileError(f"Cannot load {path}", "it contains no dictionary of tensors by name", _CONVERT)
    return tensors


def _info(path: Path, key: str, tensor: Tensor) -> TensorInfo:
    import torch

    what, dtype = f"Cannot load {path}", dtype_name(tensor.dtype)
    nbytes = tensor.numel() * tensor.itemsize
    if dtype not in DTYPE_BITS or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise UnsupportedFileError(
            what, f"its tensor {key!r} is {tensor.layout} {dtype}, which is not supported", _CONVERT
        )
    if nbytes > tensor.untyped_storage().nbytes():  # the same numbers over and over
        raise BadFileError(what, f"its tensor {key!r} stores fewer values than its shape needs", _CONVERT)
    return TensorInfo(dtype=dtype, shape=tuple(tensor.shape), nbytes=nbytes)


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).strip().splitlines()[0].rstrip(".")[:200]
