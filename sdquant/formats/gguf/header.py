"""The header of a GGUF file, read strictly: 1 to 5 dimensions, little-endian, versions 2 and 3.

The layout is that of ggml's docs/gguf.md. Nothing is believed: every count, length and offset is checked in Python
integers against the size of the file before it is used. Only the header is read, and no numpy or torch is needed.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...core import TensorInfo, gguf_types
from ...errors import BadFileError, UnsupportedFileError
from ..tensor_file import Header
from ._cursor import AGAIN, SOURCE, Cursor
from ._values import Skipped, Value, read_name, read_values

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ORIG_SHAPE", "GGUFHeader", "GGUFTensor", "Skipped", "read_header"]

MAGIC = b"GGUF"
ORIG_SHAPE = "comfy.gguf.orig_shape."  # + tensor name: the logical shape, where it had to be reshaped to be quantized
MAX_COUNT = 65_536
MAX_NAME = 127  # bytes; 63 in stock llama.cpp, 127 in the builds that write diffusion models
MAX_DIMS = 5  # ggml has 4; files of video models have 5-D convolutions, never quantized
FIVE_DIMS = ("f32", "f16", "bf16")
MAX_DIM, MAX_NUMEL = 1 << 40, 1 << 42
MIN_PAIR, MIN_TENSOR = 13, 32  # bytes of the shortest key-value pair and tensor row

# What else has been found under the name of a GGUF file.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "it is a Git LFS pointer, not the file itself"),
    (b"<", "it is a web page, not the file itself"),
    (b"PK", "it is a zip archive (a torch checkpoint?)"),
    (b"lmgg", "it is a GGML file from before GGUF"),
    (b"tjgg", "it is a GGJT file from before GGUF"),
)


@dataclass(frozen=True, kw_only=True)
class GGUFTensor(TensorInfo):
    """A tensor of the header.

    Attributes:
        type: GGUF type name in lower case; `dtype` is the torch name for plain numbers and this name for block types.
        stored: shape in the file in torch order; `shape` is the logical one.
        offset: of its first byte in the file.
    """

    type: str
    stored: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True)
class GGUFHeader(Header):
    """The contents of a GGUF header.

    Attributes:
        version: 2 or 3.
        metadata: values by key; long arrays and strings are `Skipped`.
        tensors: by name, in file order.
        alignment: bytes; every tensor's offset is a multiple of it.
        data_offset: where the tensors' data begins.
        notes: what is odd but harmless.
    """

    container: ClassVar[str] = "gguf"
    version: int
    tensors: Mapping[str, GGUFTensor]
    alignment: int
    data_offset: int
    notes: tuple[str, ...] = ()

    def refuse_other_length(self) -> None:
        """See `Header.refuse_other_length`: bytes after the last tensor do no harm."""
        end = max((row.offset + row.nbytes for row in self.tensors.values()), default=0)
        if end > self.size:
            raise BadFileError(
                f"Cannot read GGUF file {self.path}",
                f"the file is {end - self.size} bytes short: its tensors end at {end}, the file at {self.size}",
                AGAIN,
            )


def read_header(path: str | os.PathLike[str], *, complete: bool = True) -> GGUFHeader:
    """Read the header of the GGUF file at `path`.

    Args:
        complete: also check that the file is as long as its header says.

    Raises:
        BadFileError: the file is damaged, cut off, or contradicts itself.
        UnsupportedFileError: an unsupported version, byte order or tensor type.
    """
    path = Path(path)
    with path.open("rb") as file:
        cursor = Cursor(path, file)
        version = _version(cursor)
        tensor_count, value_count = _counts(cursor)
        values = read_values(cursor, value_count)
        _check_types(cursor, values)
        alignment = _alignment(cursor, values)
        rows = _tensors(cursor, tensor_count, values)
        data_offset = -(-cursor.position // alignment) * alignment
        tensors = {name: replace(row, offset=data_offset + row.offset) for name, row in rows.items()}
        notes = _check_places(cursor, tensors, alignment, data_offset)
        if not tensors and int(_number(values, "split.count")) < 2:
            raise cursor.bad("it holds no tensors", SOURCE)
        header = GGUFHeader(
            path=path,
            size=cursor.size,
            modified=os.fstat(file.fileno()).st_mtime_ns,
            version=version,
            metadata={name: value.value for name, value in values.items()},
            tensors=tensors,
            alignment=alignment,
            data_offset=data_offset,
            notes=notes,
        )
    if complete:
        header.refuse_other_length()
    return header


def _version(cursor: Cursor) -> int:
    head = cursor.peek(32)
    if not head.startswith(MAGIC[: len(head)]) or not head:
        what = next((words for start, words in _OTHERS if head.startswith(start)), f"its first bytes are {head[:4]!r}")
        raise cursor.bad(f"it does not start with 'GGUF': {what if head else 'it is empty'}", AGAIN)
    cursor.take(len(MAGIC), "the magic number")
    version = cursor.uint("I", "the version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        why, fix = "it is written for big-endian machines", "Use a little-endian file"
    else:
        why, fix = f"it is GGUF version {version}; only 2 and 3 are supported", "Convert it with a current gguf package"
    raise UnsupportedFileError(f"Cannot read GGUF file {cursor.path}", why, fix)


def _counts(cursor: Cursor) -> tuple[int, int]:
    tensors, values = cursor.uint("Q", "the number of tensors"), cursor.uint("Q", "the number of metadata values")
    for count, of in ((tensors, "tensors"), (values, "metadata values")):
        if count > MAX_COUNT:
            raise cursor.bad(f"it claims {count} {of}; {MAX_COUNT} is the limit", SOURCE)
    cursor.need(tensors * MIN_TENSOR + values * MIN_PAIR, f"a header of {tensors} tensors and {values} metadata values")
    return tensors, values


# Keys that mean something here, and the types they may have.
_EXPECTED: Mapping[str, tuple[str, ...]] = {
    "general.architecture": ("string",),
    "general.type": ("string",),
    "general.alignment": ("uint32",),
    "general.file_type": ("uint32",),
    "split.count": ("uint16", "uint32"),
}


def _check_types(cursor: Cursor, values: Mapping[str, Value]) -> None:
    for name, types in _EXPECTED.items():
        if name in values and values[name].type not in types:
            raise cursor.bad(f"{name!r} is of type {values[name].type}, but must be {' or '.join(types)}", SOURCE)


def _number(values: Mapping[str, Value], name: str) -> Any:
    return values[name].value if name in values else 0


def _alignment(cursor: Cursor, values: Mapping[str, Value]) -> int:
    alignment = int(_number(values, "general.alignment")) if "general.alignment" in values else 32
    if alignment & (alignment - 1) or not 8 <= alignment <= 65_536:
        raise cursor.bad(f"its alignment is {alignment}, which must be a power of 2 from 8 to 65536", SOURCE)
    return alignment


def _tensors(cursor: Cursor, count: int, values: Mapping[str, Value]) -> dict[str, GGUFTensor]:
    """Return the tensor rows; their offsets are still relative to the start of the data."""
    tensors: dict[str, GGUFTensor] = {}
    for index in range(count):
        name = read_name(cursor, f"tensor {index}", MAX_NAME)
        if name in tensors:
            raise cursor.bad(f"two tensors are called {name!r}", SOURCE)
        dims = cursor.uint("I", f"the dimensions of {name!r}")
        if not 1 <= dims <= MAX_DIMS:
            raise cursor.bad(f"tensor {name!r} has {dims} dimensions, which must be 1 to {MAX_DIMS}", SOURCE)
        *sizes, number, offset = cursor.uints(f"{dims}QIQ", f"the shape of {name!r}")
        stored = _stored(cursor, name, sizes)
        kind = _type(cursor, name, stored, number)
        tensors[name] = GGUFTensor(
            dtype=kind.dtype or kind.name,
            shape=_logical(cursor, name, stored, values),
            nbytes=kind.size(math.prod(stored)),
            type=kind.name,
            stored=stored,
            offset=offset,
        )
    return tensors


def _stored(cursor: Cursor, name: str, sizes: list[int]) -> tuple[int, ...]:
    shape = tuple(sizes[::-1])  # innermost first in the file
    if not all(1 <= n <= MAX_DIM for n in shape) or math.prod(shape) > MAX_NUMEL:
        raise cursor.bad(f"tensor {name!r} has the impossible shape {list(shape)}", SOURCE)
    return shape


def _type(cursor: Cursor, name: str, stored: tuple[int, ...], number: int) -> gguf_types.GGMLType:
    kind = gguf_types.BY_ID.get(number)
    if kind is None:
        raise UnsupportedFileError(
            f"Cannot read tensor {name!r} in GGUF file {cursor.path}",
            gguf_types.REFUSED.get(number, f"this version of sdquant does not know type number {number}"),
            f"Use a file that has only the types {', '.join(gguf_types.TYPES)}",
        )
    if stored[-1] % kind.block:
        why = f"tensor {name!r} has rows of {stored[-1]} weights, not a multiple of {kind.name}'s block of {kind.block}"
        raise cursor.bad(why, SOURCE)
    if len(stored) > 4 and kind.name not in FIVE_DIMS:
        raise cursor.bad(
            f"tensor {name!r} has 5 dimensions and type {kind.name}; only {', '.join(FIVE_DIMS)} may", SOURCE
        )
    return kind


def _logical(cursor: Cursor, name: str, stored: tuple[int, ...], values: Mapping[str, Value]) -> tuple[int, ...]:
    """Return the shape before a writer reshaped the tensor into rows that are a multiple of the block."""
    key = ORIG_SHAPE + name
    if key not in values:
        return stored
    shape = values[key]
    if shape.type not in ("array[int32]", "array[int64]") or not isinstance(shape.value, list):
        raise cursor.bad(f"{key!r} is of type {shape.type}, which must be an array of int32 or int64", SOURCE)
    dims = tuple(shape.value)
    if not 1 <= len(dims) <= MAX_DIMS or min(dims) < 1 or math.prod(dims) != math.prod(stored):
        raise cursor.bad(f"{key!r} is {list(dims)}, which is not {math.prod(stored)} weights as stored", SOURCE)
    return dims


def _check_places(
    cursor: Cursor, tensors: Mapping[str, GGUFTensor], alignment: int, data_offset: int
) -> tuple[str, ...]:
    """Check that tensors lie inside the file and do not overlap. Return notes on what is odd but harmless."""
    notes = [f"the name {name!r} is longer than 63 bytes" for name in tensors if len(name.encode()) > 63]
    placed = sorted(tensors.items(), key=lambda item: item[1].offset)
    end = data_offset
    for name, row in placed:
        if row.offset % alignment:
            where = row.offset - data_offset
            raise cursor.bad(
                f"tensor {name!r} is at offset {where}, not a multiple of the alignment {alignment}", SOURCE
            )
    for (name, row), (after, next_row) in pairwise(placed):
        if row.offset + row.nbytes > next_row.offset:
            raise cursor.bad(f"tensors {name!r} and {after!r} overlap", SOURCE)
    for _, row in placed:
        if row.offset - end >= alignment:
            notes.append(f"{row.offset - end} unused bytes at {end}")
        end = row.offset + row.nbytes
    if cursor.size - end >= alignment:
        notes.append(f"{cursor.size - end} bytes after the last tensor")
    return tuple(notes)
