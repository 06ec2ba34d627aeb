"""Writing GGUF version 3: to a temporary file first, then renamed, so that no incomplete file is ever visible."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ...core import gguf_types
from ...utils.atomic_write import whole_file
from ._values import ARRAY, BOOL, FORMS, NAMES, STRING
from .header import FIVE_DIMS, MAGIC, ORIG_SHAPE, read_header

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    Data = bytes | bytearray | memoryview | Tensor
    Row = tuple[str, tuple[int, ...], str, Data | Callable[[], Data]]

ALIGNMENT = 32


@dataclass(frozen=True)
class _Place:
    """A tensor in the file: shape as stored (torch order) and offset in the data."""

    name: str
    type: str
    stored: tuple[int, ...]
    nbytes: int
    offset: int
    data: Data | Callable[[], Data]


def write_gguf(
    path: str | os.PathLike[str],
    tensors: Iterable[Row],
    metadata: Mapping[str, Any],
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a GGUF file.

    Args:
        path: the file; an existing one is replaced once the new one is complete.
        tensors: (name, logical shape, type name, data). Data are the bytes as stored, a tensor holding them (uint8
            blocks, or plain numbers of the type's dtype), or a function that returns either, which is called when its
            turn comes, so that one tensor is held at a time.
        metadata: str, bool, int, float and lists of them, by key.
        progress: called with the number of bytes after each tensor.

    A block-quantized weight whose last dimension is not a multiple of the block (a convolution) is stored reshaped into
    rows that are, with its original shape in `comfy.gguf.orig_shape.<name>`, as city96's tools do.
    """
    path = Path(path)
    values = dict(metadata)
    places = _place(tensors, values)
    header = _header(places, values)
    end = max((place.offset + place.nbytes for place in places), default=0)
    with whole_file(path, len(header) + end) as file:
        file.write(header)
        for place in places:
            _write(file, place)
            if progress:
                progress(place.nbytes)
        file.flush()
        read_header(Path(file.name))  # every file that is written must pass the strict reader


def _place(tensors: Iterable[Row], values: dict[str, Any]) -> list[_Place]:
    places: list[_Place] = []
    offset = 0
    for name, shape, kind, data in tensors:
        stored = _stored(tuple(shape), kind)
        if shape and stored != tuple(shape):
            values[ORIG_SHAPE + name] = list(shape)
        nbytes = gguf_types.TYPES[kind].size(math.prod(stored))
        places.append(_Place(name, kind, stored, nbytes, offset, data))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return places


def _stored(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Return the shape to store: unchanged if rows are whole blocks, else flat rows of 256 (or of one block)."""
    if not shape:
        return (1,)
    block = gguf_types.TYPES[kind].block
    if shape[-1] % block == 0 and (len(shape) <= 4 or kind in FIVE_DIMS):
        return shape
    numel = math.prod(shape)
    row = next((width for width in (256, block) if numel % width == 0 and width % block == 0), None)
    if row is None:
        raise ValueError(f"a weight of shape {list(shape)} is not a whole number of {kind} blocks of {block}")
    return (numel // row, row)


def _header(places: list[_Place], values: Mapping[str, Any]) -> bytes:
    out = [MAGIC, struct.pack("<IQQ", 3, len(places), len(values))]
    out += [_string(name) + _value(name, value) for name, value in values.items()]
    for place in places:
        out.append(_string(place.name) + struct.pack("<I", len(place.stored)))
        out.append(struct.pack(f"<{len(place.stored)}Q", *place.stored[::-1]))
        out.append(struct.pack("<IQ", gguf_types.TYPES[place.type].id, place.offset))
    header = b"".join(out)
    return header + bytes(-len(header) % ALIGNMENT)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(name: str, value: Any) -> bytes:
    if isinstance(value, (list, tuple)):
        # Whole numbers in arrays are shapes by habit: int32, as other readers expect of orig_shape.
        kind = _array_type(name, value)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_plain(kind, item) for item in value)
    kind = _type_of(name, value)
    return struct.pack("<I", kind) + _plain(kind, value)


def _array_type(name: str, items: list[Any] | tuple[Any, ...]) -> int:
    kinds = {_type_of(name, item) for item in items} or {STRING}
    if kinds <= _INTEGERS:
        return NAMES.index("int32" if all(-(2**31) <= item < 2**31 for item in items) else "int64")
    if len(kinds) > 1:
        raise TypeError(f"the metadata value {name!r} mixes types of items: {items!r}")
    return kinds.pop()


_INTEGERS = {NAMES.index(name) for name in ("uint32", "int32", "uint64", "int64")}


def _type_of(name: str, value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, str):
        return STRING
    if isinstance(value, float):
        return NAMES.index("float32")
    if isinstance(value, int):
        fits = (("uint32", 0, 2**32), ("int32", -(2**31), 2**31), ("uint64", 0, 2**64), ("int64", -(2**63), 2**63))
        return NAMES.index(next(kind for kind, low, high in fits if low <= value < high))
    raise TypeError(f"the metadata value {name!r} is a {type(value).__name__}, which GGUF cannot hold")


def _plain(kind: int, value: Any) -> bytes:
    return _string(value) if kind == STRING else struct.pack("<" + FORMS[kind], value)


def _write(file: BinaryIO, place: _Place) -> None:
    data = place.data() if callable(place.data) else place.data
    raw = data if isinstance(data, (bytes, bytearray, memoryview)) else _raw(place, data)
    if len(raw) != place.nbytes:
        raise ValueError(
            f"tensor {place.name!r} has {len(raw)} bytes, but {place.type} {place.stored} takes {place.nbytes}"
        )
    file.write(raw)
    file.write(bytes(-place.nbytes % ALIGNMENT))


def _raw(place: _Place, tensor: Tensor) -> memoryview:
    import torch

    from ...utils.buffers import raw_bytes

    dtype = gguf_types.TYPES[place.type].dtype
    if tensor.dtype not in (torch.uint8, getattr(torch, dtype or "uint8")):
        raise ValueError(f"tensor {place.name!r} is {tensor.dtype}, but {place.type} is not stored in that dtype")
    return raw_bytes(tensor)
