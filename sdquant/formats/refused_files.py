"""Files that cannot be loaded by themselves: one of several shards, and a LoRA, which changes a model. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import UnsupportedFileError

# As peft, diffusers, kohya's scripts and LyCORIS (LoHa, LoKr) name the two sides of a change.
LORA_NAMES = r"\.(lora_(A|B|up|down|mid)|lora\.(up|down))\.|\.(hada_w[12]_[ab]|lokr_w[12](_[ab])?)$"

_LORA_KEY = re.compile("(?:" + LORA_NAMES.replace("$", '(?=")') + r""")[^"\\]*"\s*:\s*\{""")  # of a header's JSON
_LONGEST = 32 << 20  # bytes of a header


def lora_sign(names: Iterable[str]) -> str | None:
    """Return the first tensor name that only LoRA files have; None if there is none."""
    return min((name for name in names if re.search(LORA_NAMES, name)), default=None)


def is_lora_file(path: Path) -> bool:
    """Return whether a safetensors file has tensors that only LoRA files have. Reads its header as text alone."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, _LONGEST)).decode("latin-1")
    except OSError:
        return False
    return _LORA_KEY.search(header) is not None


def refuse_lora(path: object, names: Iterable[str]) -> None:
    """Raise UnsupportedFileError for a LoRA's file, by its tensor names."""
    name = lora_sign(names)
    if name is not None:
        raise UnsupportedFileError(
            f"Cannot load {path}",
            f"it contains LoRA weights ({name!r}), not a model",
            "Load the base model, then call pipe.load_lora_weights on this file",
        )


_SHARD_NAME = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<end>(?:\.[\w-]+)*\.(?:gguf|safetensors))", re.I
)
MERGE_SHARDS = "Merge the parts with `llama-gguf-split --merge FIRST_PART WHOLE.gguf`, and load the result"


def refuse_shard(path: Path, *, is_known: bool) -> None:
    """Raise UnsupportedFileError if a lone file is one of several shards.

    A name alone is no proof: it counts if other shards are beside the file, or if its tensors are not recognised.

    Args:
        is_known: whether its tensors are those of a known model family.
    """
    name = _SHARD_NAME.fullmatch(path.name)
    if name is None or int(name["total"]) < 2 or path.is_dir():
        return
    if is_known and not _others(path, name):
        return
    gguf = name["end"].lower().endswith(".gguf")
    raise UnsupportedFileError(
        f"Cannot load {path} by itself",
        f"its name says that it is part {int(name['number'])} of {int(name['total'])}",
        MERGE_SHARDS
        if gguf
        else "Put all of them into one folder, with their index and config.json, and pass that folder, "
        f"such as {path.parent}",
    )


def _others(path: Path, name: re.Match[str]) -> bool:
    """Return whether any of the other shards is beside this one."""
    for number in range(1, min(int(name["total"]), 1000) + 1):
        other = path.with_name(f"{name['stem']}-{number:05}-of-{name['total']}{name['end']}")
        if other != path and other.exists():
            return True
    return False
