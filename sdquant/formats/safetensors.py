"""safetensors: a strict header reader, the open file, and an atomic writer.

The header is read here so that detection needs neither torch nor the weights; the tensors themselves come through the
safetensors library, which parses the header once more with its own checks.
Format: https://github.com/huggingface/safetensors (8 bytes length, JSON, data).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..backends.base import DTYPE_BITS, TensorInfo
from ..errors import BadFileError
from .base import TensorFile

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER = 100_000_000  # bytes; the library's own limit
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


def read_header(path: Path, *, complete: bool = True) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensor infos by key, and the metadata, of a safetensors file. Reads the header only.

    Args:
        complete: also hold the header against the size of the file. The matrix is asked before that.

    Raises:
        BadFileError: it is not a sound safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > MAX_HEADER or length + 8 > size:
                raise BadFileError(
                    f"{path} was to be read as safetensors",
                    f"its {size} bytes are too few for its header"
                    if len(start) < 8 or length <= MAX_HEADER
                    else "it does not begin as a safetensors file does",
                    AGAIN,
                )
            raw = file.read(length)
    except OSError as error:
        raise BadFileError(f"{path} was to be read", str(error.strerror or error), "Check the path") from error
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{path} was to be read as safetensors", f"its header is damaged: {error}", AGAIN) from error
    if not isinstance(header, dict):
        raise BadFileError(f"{path} was to be read as safetensors", "its header is not a table", AGAIN)
    metadata = header.pop("__metadata__", {})
    infos: dict[str, TensorInfo] = {}
    end = 0
    for key, row in sorted(header.items(), key=lambda item: _begin(path, *item)):
        infos[key], end = _info(path, key, row, end)
    short = 8 + length + end - size
    if complete and short != 0:
        raise BadFileError(
            f"{path} was to be read as safetensors",
            f"it is {short} bytes short of what its header announces"
            if short > 0
            else f"{-short} bytes follow its last tensor",
            AGAIN,
        )
    return infos, metadata if isinstance(metadata, dict) else {}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands there twice")
    return table


def _begin(path: Path, key: str, row: Any) -> int:
    try:
        begin = row["data_offsets"][0]
        if isinstance(begin, int) and begin >= 0:
            return begin
    except (TypeError, KeyError, IndexError):
        row = None
    raise BadFileError(f"{path} was to be read as safetensors", f"tensor {key!r} has no place in the file", AGAIN)


def _info(path: Path, key: str, row: Mapping[str, Any], previous: int) -> tuple[TensorInfo, int]:
    """The tensor's info and its end; tensors must follow each other without gap or overlap, as the format wants."""
    try:
        begin, end = row["data_offsets"]
        dtype, shape = DTYPES[row["dtype"]], tuple(row["shape"])
        sound = all(isinstance(n, int) and n >= 0 for n in shape)
        sound = sound and begin == previous and (end - begin) * 8 == math.prod(shape) * DTYPE_BITS[dtype]
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise BadFileError(
            f"{path} was to be read as safetensors", f"the header's entry for tensor {key!r} is not sound: {row}", AGAIN
        )
    return TensorInfo(dtype=dtype, shape=shape, nbytes=end - begin), end


class SafetensorsFile(TensorFile):
    """An open safetensors file."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        self.tensors, self.metadata = read_header(path)
        try:
            self._file: Any = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise BadFileError(f"{path} was to be read as safetensors", str(error), AGAIN) from error

    def get(self, key: str) -> Tensor:
        """See `TensorFile.get`. The tensor is a view of the mapped file."""
        from safetensors import SafetensorError

        try:
            tensor: Tensor = self._file.get_tensor(key)
        except SafetensorError as error:
            raise BadFileError(f"Tensor {key!r} of {self.path} was to be read", str(error), AGAIN) from error
        return tensor

    def close(self) -> None:
        """See `TensorFile.close`."""
        self._file = None


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file beside `path`, bring it to the disk, then rename: `path` is old or new, never half."""
    from safetensors.torch import save_file

    beside = path.with_name(f".sdquant-{os.getpid()}-{path.name}.tmp")
    try:
        save_file(_plain(tensors), beside, metadata=dict(metadata))
        os.chmod(beside, 0o666 & ~_umask())
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and none sharing memory with another: what the format can hold."""
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        if flat.numel() and flat.untyped_storage().data_ptr() in seen:
            flat = flat.clone()
        seen.add(flat.untyped_storage().data_ptr())
        plain[key] = flat
    return plain


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def total(infos: Iterable[TensorInfo]) -> int:
    """Bytes of the given tensors."""
    return sum(info.nbytes for info in infos)
