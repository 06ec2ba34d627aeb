"""safetensors: a strict header reader, and the open file.

The header is read here so that detection needs neither torch nor the weights; the tensors themselves come through the
safetensors library, which parses the header once more with its own checks.
Format: https://github.com/huggingface/safetensors (8 bytes length, JSON, data).
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import DTYPE_BITS, TensorInfo, dtype_named
from ..errors import BadFileError
from ..utils import strict_json
from ..utils.special_files import not_regular
from .other_runtimes import converted, runtime_of
from .tensor_file import Header, TensorFile, refuse_shortened

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER = 100_000_000  # bytes; the library's own limit
MAX_DIMS = 64
MAX_NAME = 65_535  # letters
AGAIN = "Download or copy the file again"

# safetensors' names for dtypes -> torch's.
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
        "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    }
)  # fmt: skip

_HALF = re.compile("[\ud800-\udfff]")  # of the two that UTF-16 has for letters outside the first 65536
NAMES: Mapping[str, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})

# What else has been found under the name of a safetensors file.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "it is a Git LFS pointer, not the file itself"),
    (b"<", "it is a web page, not the file itself"),
    (b"PK\x03\x04", "it is a zip archive (a torch checkpoint?), not a safetensors file"),
    (b"\x80", "it is a pickle, not a safetensors file"),
)


@dataclass(frozen=True, kw_only=True)
class SafetensorsHeader(Header):
    """The contents of a safetensors header; `metadata` are the texts of `__metadata__`.

    Attributes:
        start: where the data begins. ends: where each tensor's data ends. Both in bytes from the start of the file.
    """

    container: ClassVar[str] = "safetensors"
    start: int
    ends: Mapping[str, int] = field(repr=False)

    def refuse_other_length(self) -> None:
        """See `Header.refuse_other_length`: the file must end where its last tensor does."""
        short = max(self.ends.values(), default=self.start) - self.size
        if short > 0:
            raise _bad(self.path, f"it is {short} bytes shorter than its header says")
        if short < 0:
            raise _bad(self.path, f"{-short} bytes follow its last tensor")


def read_header(path: Path, *, complete: bool = True) -> SafetensorsHeader:
    """Read the header of a safetensors file.

    Args:
        complete: also check the header against the size of the file; the matrix is consulted before that.

    Raises:
        BadFileError: it is not a sound safetensors file.
    """
    status, length, text = _raw_header(path)
    try:
        header = strict_json.parse(text, constants=False)
    except ValueError as error:
        raise _bad(path, f"its header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise _bad(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(path, "its metadata is not a table of strings")
    if "\\u" in text and any(_HALF.search(word) for word in (*header, *metadata, *metadata.values())):
        raise _bad(path, "a name in it has a lone surrogate, which JSON allows but the safetensors library does not")
    infos: dict[str, TensorInfo] = {}
    ends: dict[str, int] = {}
    end = 0
    for key, row in sorted(header.items(), key=lambda item: _place(path, *item)):
        infos[key], end = _info(path, key, row, end)
        ends[key] = 8 + length + end
    read = SafetensorsHeader(
        path=path, size=status.st_size, modified=status.st_mtime_ns, tensors=infos, metadata=metadata,
        start=8 + length, ends=ends,
    )  # fmt: skip
    if complete:
        read.refuse_other_length()
    return read


def peek(header: SafetensorsHeader, keys: Iterable[str]) -> dict[str, bytes]:
    """Return the bytes of a few small tensors of a file, by key. Tensors beyond the end of a truncated file are left
    out."""
    contents = {}
    with header.path.open("rb", buffering=0) as file:  # whose buffer would be larger than all of them
        for key in keys:
            nbytes = header.tensors[key].nbytes
            file.seek(header.ends[key] - nbytes)
            data = file.read(nbytes)
            if len(data) == nbytes:
                contents[key] = data
    return contents


def _raw_header(path: Path) -> tuple[os.stat_result, int, str]:
    """Return the status of the file, and the size in bytes and the text of its JSON header."""
    if _HALF.search(str(path)):
        why = "its path is not valid UTF-8, and the safetensors library opens no other"
        raise BadFileError(f"Cannot read {path}", why, "Rename the file, or the folder that has such a name")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
            raise not_regular(f"Cannot read {path} as safetensors", path)
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) == 8 and length <= min(MAX_HEADER, status.st_size - 8):
                raw = file.read(length)
                if len(raw) == length:
                    return status, length, strict_json.text(raw)
            file.seek(0)
            head = file.read(32)
        if runtime_of(path) is not None:
            raise converted(path)
    except ValueError as error:
        raise _bad(path, f"its header is damaged: {error}") from error
    except OSError as error:
        raise BadFileError(f"Cannot read {path}", str(error.strerror or error), "Check the path") from error
    if len(start) < 8:
        raise _bad(path, f"it has {status.st_size} bytes, but a safetensors file starts with 8 for its header's length")
    if length > MAX_HEADER:
        known = (words for beginning, words in _OTHERS if head.startswith(beginning))
        raise _bad(path, next(known, "it does not start like a safetensors file"))
    raise _bad(path, f"it is {8 + length - status.st_size} bytes short of the end of its own header")


def _bad(path: Path, why: str) -> BadFileError:
    return BadFileError(f"Cannot read {path} as safetensors", why, AGAIN)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _place(path: Path, key: str, row: Any) -> tuple[int, int]:
    """Return the offsets in the data, in bytes, at which a tensor begins and ends."""
    if len(key) > MAX_NAME:
        raise _bad(path, f"tensor {key[:40]!r}... has a name of {len(key)} characters; {MAX_NAME} is the limit")
    place = row.get("data_offsets") if isinstance(row, dict) else None
    if not isinstance(place, list) or len(place) != 2 or not all(_is_size(n) for n in place):
        raise _bad(path, f"the data_offsets of tensor {key!r} are not two byte offsets")
    return place[0], place[1]


def _info(path: Path, key: str, row: Mapping[str, Any], previous: int) -> tuple[TensorInfo, int]:
    """Return the tensor's info and its end. The format requires tensors without gaps or overlaps."""
    begin, end = row["data_offsets"]
    name, shape = row.get("dtype"), row.get("shape")
    if not isinstance(name, str) or name not in DTYPES:
        raise _bad(path, f"tensor {key!r} has the dtype {name!r:.40}, which is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_size(n) for n in shape):
        raise _bad(path, f"tensor {key!r} has a shape that is not a list of at most {MAX_DIMS} sizes")
    if begin != previous:
        what = "overlaps the one before it" if begin < previous else f"leaves {begin - previous} bytes before it unused"
        raise _bad(path, f"tensor {key!r} {what}")
    dtype = DTYPES[name]
    nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if end - begin != nbytes:
        raise _bad(path, f"tensor {key!r} has {end - begin} bytes, but {name} {shape} takes {nbytes}")
    return TensorInfo(dtype=dtype, shape=tuple(shape), nbytes=nbytes), end


class SafetensorsFile(TensorFile):
    """An open safetensors file.

    Args:
        header: what `read_header` returned for it; read again if there is none or the file has changed since.
    """

    def __init__(self, path: Path, header: SafetensorsHeader | None = None) -> None:
        self.path = path
        header = header if header is not None and header.is_unchanged() else read_header(path)
        self.tensors, self.metadata = header.tensors, header.metadata
        self._size, self._inode = header.size, path.stat().st_ino
        self._file = _opened(path)
        if set(self._file.keys()) != set(self.tensors):  # the library opens it again, by its name
            raise BadFileError(f"Cannot read {path}", "it was replaced while it was being opened", "Try again")

    def get(self, key: str) -> Tensor:
        """See `TensorFile.get`. The tensor is a view of the mapped file."""
        from safetensors import SafetensorError

        refuse_shortened(self.path, self._size, self._inode)
        dtype_named(self.tensors[key].dtype)  # which an old torch may not have
        try:
            tensor: Tensor = self._file.get_tensor(key)
        except SafetensorError as error:
            raise BadFileError(f"Cannot read tensor {key!r} of {self.path}", str(error), AGAIN) from error
        info = self.tensors[key]
        if tuple(tensor.shape) != info.shape or str(tensor.dtype) != f"torch.{info.dtype}":
            raise BadFileError(f"Cannot read {self.path}", "it was replaced while it was being opened", "Try again")
        return tensor

    def close(self) -> None:
        """See `TensorFile.close`."""
        self._file = None


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise _bad(path, str(error)) from error


def total(infos: Iterable[TensorInfo]) -> int:
    """Return the bytes of the given tensors."""
    return sum(info.nbytes for info in infos)
