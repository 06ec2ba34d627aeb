"""README's table of all schemes: a row for each backend, and whose files it reads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tools.tables import markdown

# Whose files load in the schemes of each backend; "" for its own alone.
FILES = {
    "bnb": "bitsandbytes, Forge; float8 of ComfyUI, BFL, transformers, compressed-tensors, ModelOpt, torchao",
    "comfy": "ComfyUI, INT8-Fast, comfy-kitchen, convert_to_quant; Nunchaku, nunchaku_lite; NVFP4 and MXFP8 of BFL, "
    "ModelOpt, torchao, compressed-tensors; INT8 of torchao, compressed-tensors, ModelOpt",
    "gguf": "llama.cpp, stable-diffusion.cpp, ComfyUI-GGUF, diffusers; text encoders, too",
    "hub": "GPTQ, AWQ, AutoRound, HQQ, compressed-tensors, torchao, ModelOpt",
    "nncf": "",
    "quanto": "diffusers, optimum-quanto",
    "sdnq": "SDNQ, SD.Next; with Hadamard, SVD, codebooks, dynamic dtypes",
}


def table(_: Path) -> str:
    """Return every scheme, by backend (rules aside, which no files have): made while loading, or in files alone."""
    from sdquant import backends

    rows = []
    for name in FILES:
        mine = [row for row in backends.schemes() if row.backend == name]
        made = _names(row.name for row in mine if row.on_the_fly)
        read = _names(row.name for row in mine if not row.on_the_fly)
        rows.append((backends.get(name).title, made or "-", read or "-", FILES[name] or "sdquant"))
    return markdown(("backend", "made while loading", "in files only", "reads files of"), rows, left=4)


def _names(names: Iterable[str]) -> str:
    """Return names in their order; of more than four that begin alike, such as GGUF's `q2_k` to `q8_0`, the ends."""
    groups: dict[str, list[str]] = {}
    listed = list(names)
    for name in listed:
        groups.setdefault(re.match(r"[a-z]+", name)[0] if len(listed) > 12 else name, []).append(name)  # type: ignore[index]
    return ", ".join(
        f"`{min(some)}` to `{max(some)}`" if len(some) > 4 else ", ".join(f"`{name}`" for name in some)
        for some in groups.values()
    )
