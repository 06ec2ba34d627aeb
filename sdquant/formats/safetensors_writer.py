"""Writing safetensors: aligned, whole or not at all, and one tensor at a time where the caller has no more.

The library would do, but for two things. It wants all tensors at once. And it puts them anywhere, so that kernels that
need aligned weights would have to copy them out of the mapped file: here every tensor whose size is a multiple of 64
bytes begins at such a multiple, which is as far as a format without gaps allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..core import TensorSpec, dtype_name
from ..utils.atomic_write import part_file, whole_file
from .safetensors import NAMES

if TYPE_CHECKING:
    from torch import Tensor

ALIGN = 64  # bytes
MAX_SHARD = 5 * 10**9  # bytes of a file of several: what diffusers and transformers write at most


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, part: bool = False) -> None:
    """Write a safetensors file.

    Args:
        part: of a folder that becomes whole later; see `part_file`.

    Raises:
        DiskSpaceError, ConflictError, SettingsError: see `whole_file`.
    """
    parts = {key: part_of(tensor) for key, tensor in tensors.items()}
    write_parts(path, parts, [tensors], metadata, opened=part_file if part else whole_file)


def write_parts(
    path: Path,
    parts: Mapping[str, TensorSpec],
    tensors: Iterable[Mapping[str, Tensor]],
    metadata: Mapping[str, str],
    *,
    opened: Callable[[Path, int], AbstractContextManager[BinaryIO]] = whole_file,
) -> None:
    """Write a safetensors file whose tensors come a few at a time, in any order.

    Args:
        parts: the file's tensors by key, before there are any; tensors: each of them once.
        opened: makes the file.

    Raises:
        ValueError: a tensor is not one of `parts`, or one of those was not provided. Else as `write`.
    """
    from ..utils.buffers import raw_bytes

    header, places, end = _header(parts, metadata)
    with opened(path, len(header) + end) as file:
        file.write(header)
        for some in tensors:
            for key in sorted(some, key=lambda key: places.get(key, -1)):
                if parts.get(key) != part_of(some[key]) or key not in places:
                    raise ValueError(f"tensor {key!r} is {part_of(some[key])}, expected {parts.get(key)}")
                file.seek(len(header) + places.pop(key))
                file.write(raw_bytes(some[key]))
            del some  # before the next are made
        if places:
            raise ValueError(f"tensor {min(places)!r} was announced but not written")


def part_of(tensor: Tensor) -> TensorSpec:
    """Return a tensor's header entry (dtype and shape). The tensor may be on the meta device."""
    return TensorSpec(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def _header(parts: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return the encoded header, each tensor's offset in the data after it, and the end of the data (bytes)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places: dict[str, int] = {}
    end = 0
    for key in sorted(parts, key=lambda key: _order(key, parts[key])):
        part = parts[key]
        places[key], end = end, end + part.nbytes
        header[key] = {"dtype": NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [places[key], end]}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGN)
    return len(raw).to_bytes(8, "little") + raw, places, end


def _order(key: str, part: TensorSpec) -> tuple[bool, int, str]:
    """Sort key: sizes that are a multiple of the alignment first; then dtypes by descending item size."""
    return part.nbytes % ALIGN > 0, -_itemsize(part), key


def _itemsize(part: TensorSpec) -> int:
    return TensorSpec(dtype=part.dtype, shape=(1,)).nbytes
