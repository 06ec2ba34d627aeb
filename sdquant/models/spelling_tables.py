"""Check sentencepiece's tables of spellings in tokenizers, of which a broken one ends a program amid a text.

A table is a trie (darts-clone's double array) of little-endian words of 32 bits, after their number of bytes, and then
the texts that its leaves point into. The package tokenizers follows both without a look at their ends.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import BadFileError

_KEY = "precompiled_charsmap"


def check_tables(tokenizer: Any) -> None:
    """Raise BadFileError, which says what is wrong alone, if a fast tokenizer has a broken table."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = None if backend is None else backend.normalizer
    if normalizer is None:
        return
    for table in _tables(json.loads(normalizer.__getstate__())):
        reason = _reason(table)
        if reason is not None:
            raise BadFileError(
                "Cannot use its table of spellings (precompiled_charsmap)", reason, "Download the file again"
            )


def _tables(state: Any) -> Iterator[bytes]:
    if isinstance(state, dict):
        for key, value in state.items():
            if key == _KEY and isinstance(value, str):
                yield base64.b64decode(value)
            else:
                yield from _tables(value)
    elif isinstance(state, list):
        for value in state:
            yield from _tables(value)


def _reason(table: bytes) -> str | None:
    """Return what is wrong with a table; None if nothing is."""
    count = int.from_bytes(table[:4], "little") // 4
    if not count or len(table) < 4 + 4 * count:
        return f"its trie should have {count} places, and the table has {len(table)} bytes"
    words = torch.frombuffer(bytearray(table[4 : 4 + 4 * count]), dtype=torch.int32).long() & 0xFFFFFFFF
    texts = table[4 + 4 * count :]
    at, label = torch.arange(count, device="cpu"), words & 0x800000FF
    reachable = ((label > 0) & (label < 256)) | (at == 0)
    # Where the words for each next byte are: this place, with one of the lower eight bits changed.
    base = at ^ ((words >> 10) << ((words & 0x200) >> 6))
    if bool((reachable & ((base | 0xFF) >= count)).any()):
        return f"its trie has {count} places, and points behind them"
    leaf = reachable & (((words >> 8) & 1) == 1)
    starts = (words[base[leaf]] & 0x7FFFFFFF).tolist()
    # The second and later bytes of a character have 10 at their front.
    if any(one > len(texts) or (one < len(texts) and texts[one] & 0xC0 == 0x80) for one in starts):
        return "its trie points behind the texts that it has, or into a character"
    return None
