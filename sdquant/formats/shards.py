"""Files that are one of several shards: recognised by name if their contents do not say so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UnsupportedFileError

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

_NAME = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<end>(?:\.[\w-]+)*\.(?:gguf|safetensors))", re.I
)
MERGE = "Merge the parts with `llama-gguf-split --merge FIRST_PART WHOLE.gguf`, and load the result"


def refuse_shard(src: Checkpoint, *, is_known: bool) -> None:
    """Raise UnsupportedFileError if a lone file is one of several shards.

    A name alone is no proof: it counts if other shards are beside the file, or if its tensors are not recognised.

    Args:
        is_known: whether its tensors are those of a known model family.
    """
    name = _NAME.fullmatch(src.path.name)
    if name is None or int(name["total"]) < 2 or src.path.is_dir():
        return
    if is_known and not _others(src.path, name):
        return
    gguf = name["end"].lower().endswith(".gguf")
    raise UnsupportedFileError(
        f"Cannot load {src.path} by itself",
        f"its name says that it is part {int(name['number'])} of {int(name['total'])}",
        MERGE if gguf else f"Put all of them into one folder, with their index and config.json, and pass that folder, "
        f"such as {src.path.parent}",
    )  # fmt: skip


def _others(path: Path, name: re.Match[str]) -> bool:
    """Return whether any of the other shards is beside this one."""
    for number in range(1, min(int(name["total"]), 1000) + 1):
        other = path.with_name(f"{name['stem']}-{number:05}-of-{name['total']}{name['end']}")
        if other != path and other.exists():
            return True
    return False
