"""The key-value part of a GGUF header: small values are kept, long ones are skipped and only their length is kept."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._cursor import SOURCE, Cursor

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT_ITEMS = 1024  # longer arrays are skipped
KEPT_STRING = 1 << 20  # bytes; longer strings are skipped
KEPT_TEXT = 8 << 20  # bytes of strings in all; what comes after is skipped: a letter may take four bytes in memory
ODD_TEXT = 1024  # bytes; in longer strings stray bytes are not spelled out
KEPT_TOTAL = 1 << 20  # array items in all: each costs some 30 bytes of memory for as little as one byte of file
MAX_TEXTS = 2 << 20  # strings in arrays, those that are skipped too; a language model's words are 256k, three times
KEPT_TEXTS = 1 << 18  # strings in arrays that are kept: each is decoded by itself
MAX_KEY = 65_535

BOOL, STRING, ARRAY = 7, 8, 9
NAMES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string", "array", "uint64", "int64",
    "float64",
)  # fmt: skip
# The format characters of `struct` for the types that are numbers.
FORMS: Mapping[int, str] = dict(zip((0, 1, 2, 3, 4, 5, 6, BOOL, 10, 11, 12), "BbHhIifBQqd", strict=True))


@dataclass(frozen=True)
class Skipped:
    """A value that was passed over: the type of its items (or "string"), how many there are (or bytes), and the offset
    of numbers in the file."""

    type: str
    length: int
    offset: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class Value:
    """A value with its type as the file spells it: "uint32", "string", "array[int32]"."""

    type: str
    value: Any


def read_values(cursor: Cursor, count: int) -> dict[str, Value]:
    """Read `count` key-value pairs, in file order."""
    values: dict[str, Value] = {}
    items = 0
    for index in range(count):
        name = read_name(cursor, f"key {index}", MAX_KEY)
        if name in values:
            raise cursor.bad(f"its metadata has the key {name!r} twice", SOURCE)
        value = _value(cursor, name)
        items += len(value.value) if isinstance(value.value, list) else 0
        if items > KEPT_TOTAL:
            raise cursor.bad(f"its metadata holds more than {KEPT_TOTAL} array items", SOURCE)
        values[name] = value
    return values


def read_name(cursor: Cursor, of: str, limit: int) -> str:
    """Read a key or tensor name: 1 to `limit` bytes of UTF-8 without control characters."""
    length = cursor.uint("Q", f"the length of {of}")
    if not 1 <= length <= limit:
        raise cursor.bad(f"the name of {of} has {length} bytes, which must be 1 to {limit}", SOURCE)
    raw = cursor.take(length, f"the name of {of}")
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise cursor.bad(f"the name of {of} is not UTF-8: {raw!r}", SOURCE) from None
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        raise cursor.bad(f"the name of {of} has control characters: {name!r}", SOURCE)
    return name


def _value(cursor: Cursor, name: str) -> Value:
    kind = cursor.uint("I", f"the type of {name!r}")
    if kind == ARRAY:
        return _array(cursor, name)
    if kind == STRING:
        return Value("string", _string(cursor, name))
    return Value(_type_name(cursor, name, kind), _plain(cursor, name, kind, 1)[0])


def _type_name(cursor: Cursor, name: str, kind: int) -> str:
    if kind not in FORMS and kind != STRING:
        why = "arrays inside arrays" if kind == ARRAY else f"type number {kind}, which GGUF does not have"
        raise cursor.bad(f"the metadata value {name!r} has {why}", SOURCE)
    return NAMES[kind]


def _array(cursor: Cursor, name: str) -> Value:
    kind = cursor.uint("I", f"the item type of {name!r}")
    count = cursor.uint("Q", f"the length of {name!r}")
    inner = _type_name(cursor, name, kind)
    cursor.need(count * (8 if kind == STRING else struct.calcsize(FORMS[kind])), f"the array {name!r}")
    if kind == STRING:
        cursor.texts += count
        cursor.kept_texts += count if count <= KEPT_ITEMS else 0
        if cursor.texts > MAX_TEXTS or cursor.kept_texts > KEPT_TEXTS:
            raise cursor.bad(f"its metadata has too many strings at {name!r}", SOURCE)
    value: Any
    if count > KEPT_ITEMS:
        value = Skipped(inner, count, cursor.position)
        if kind == STRING:
            cursor.skip_strings(count, f"the array {name!r}")
        else:
            cursor.skip(count * struct.calcsize(FORMS[kind]), f"the array {name!r}")
    elif kind == STRING:
        value = [_string(cursor, name) for _ in range(count)]
    else:
        value = _plain(cursor, name, kind, count)
    return Value(f"array[{inner}]", value)


def _string(cursor: Cursor, name: str) -> str | Skipped:
    length = cursor.uint("Q", f"the length of {name!r}")
    if length > KEPT_STRING or cursor.kept + length > KEPT_TEXT:
        cursor.skip(length, f"the string {name!r}")
        return Skipped("string", length)
    cursor.kept += length
    # Values are shown, never used as names: a stray byte in one is no reason to refuse the file.
    errors = "backslashreplace" if length <= ODD_TEXT else "replace"
    return cursor.take(length, f"the string {name!r}").decode(errors=errors)


def _plain(cursor: Cursor, name: str, kind: int, count: int) -> list[Any]:
    form = f"<{count}{FORMS[kind]}"
    values = list(struct.unpack(form, cursor.take(struct.calcsize(form), f"the value {name!r}")))
    if kind != BOOL:
        return values
    if any(value > 1 for value in values):
        raise cursor.bad(f"the metadata value {name!r} is a bool that is neither 0 nor 1", SOURCE)
    return [bool(value) for value in values]
