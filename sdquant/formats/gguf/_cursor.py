"""Reading little-endian values from the start of an untrusted file: every length is checked before it is used."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from ...errors import BadFileError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

WINDOW = 1 << 18  # bytes read at a time
HEADER_LIMIT = 256 << 20  # bytes; the largest real headers (tokenizers of a language model) are under 20 MiB
SOURCE = "Download the file again from its source"
AGAIN = "Download the file again and compare its size with the source's"

_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a file, and a window of bytes around it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self._window, self._start, self._at = b"", 0, 0
        # Counted by the reader of the header: bytes of text kept; strings in arrays, in all and kept.
        self.kept = self.texts = self.kept_texts = 0

    @property
    def position(self) -> int:
        """Return the offset in the file of the next byte."""
        return self._start + self._at

    @property
    def left(self) -> int:
        """Return the number of bytes after the position."""
        return self.size - self.position

    def bad(self, why: str, fix: str = AGAIN) -> BadFileError:
        """Return the error for a fault in this file."""
        return BadFileError(f"Cannot read GGUF file {self.path}", why, fix)

    def need(self, count: int, of: str) -> None:
        """Raise unless `count` more bytes are in the file and within the size limit of a header."""
        if count > self.left:
            raise self.bad(
                f"it ends inside its header: {of} takes {count} bytes, {self.left} are left, "
                f"so the file is at least {count - self.left} bytes short or its lengths are wrong"
            )
        if self.position + count > HEADER_LIMIT:
            raise self.bad(f"its header is longer than {HEADER_LIMIT >> 20} MiB at {of}", SOURCE)

    def peek(self, count: int) -> bytes:
        """Return up to `count` of the next bytes (fewer at the end of the file) without moving the position."""
        self._fill(count)
        return self._window[:count]

    def take(self, count: int, of: str) -> bytes:
        """Read the next `count` bytes; `of` names them in errors."""
        self.need(count, of)
        if self._at + count > len(self._window):
            self._fill(count)
        got = self._window[self._at : self._at + count]
        if len(got) < count:
            raise self.bad("it became shorter while it was being read", "Wait until it is complete, then try again")
        self._at += count
        return got

    def skip(self, count: int, of: str) -> None:
        """Pass over `count` bytes without reading them."""
        self.need(count, of)
        self._at += count  # may lie beyond the window: the next read fills it from there

    def skip_strings(self, count: int, of: str) -> None:
        """Pass over `count` strings. A loop of its own: a tokenizer has 256k of them."""
        done, unpack = 0, _U64.unpack_from
        while done < count:
            if self._at + 8 > len(self._window):
                self.need(8, of)
                self._fill(8)
            window, at, inside = self._window, self._at, len(self._window) - 8
            if inside < at:
                raise self.bad("it became shorter while it was being read", "Wait until it is complete, then try again")
            while done < count and at <= inside:
                at += 8 + unpack(window, at)[0]
                done += 1
            self._at = at
            if self.left < 0:
                raise self.bad(f"it ends inside its header: {of} runs {-self.left} bytes beyond the end of the file")
            self.need(0, of)

    def number(self, form: str, of: str) -> int | float:
        """Read one value of the `struct` format character `form`."""
        value: int | float = struct.unpack("<" + form, self.take(struct.calcsize("<" + form), of))[0]
        return value

    def uints(self, form: str, of: str) -> tuple[int, ...]:
        """Read several integers, by a `struct` format."""
        numbers: tuple[int, ...] = struct.unpack("<" + form, self.take(struct.calcsize("<" + form), of))
        return numbers

    def uint(self, form: str, of: str) -> int:
        """Read one integer."""
        return int(self.number(form, of))

    def _fill(self, count: int) -> None:
        self._start, self._at = self.position, 0
        self._file.seek(self._start)
        self._window = self._file.read(max(count, WINDOW))
