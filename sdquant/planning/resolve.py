"""Resolve the names in a request to what this machine has: its device, its files, one dtype."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from ..backends.gguf import READ_DTYPE
from ..compat import hardware
from ..core import choices
from ..errors import BackendUnavailableError
from .component_places import CHECKPOINT
from .component_sources import lender, look, with_base

if TYPE_CHECKING:
    from ..models import detection
    from .request import Request


def device_of(asked: Request, here: hardware.Machine) -> str:
    """Return the compute device of a request.

    Raises:
        BackendUnavailableError: this machine has no device of that kind.
    """
    device = asked.device or hardware.default_device(here)
    if hardware.device_kind(device, here) not in here.kinds:
        raise BackendUnavailableError(
            f"Cannot use device {device!r}",
            f"torch finds only {', '.join(here.kinds)} on this machine",
            "Remove device, or run `sdquant doctor` to see what is missing",
        )
    return device


def located(asked: Request) -> Request:
    """Return the request with local paths, and with a base if it needs one."""
    from . import fetching

    asked = with_base(fetching.fetched(asked))
    return dataclasses.replace(asked, revision=None, subfolder=None, token=None)  # no longer needed


def held(seen: detection.Detected) -> list[tuple[str, bool]]:
    """Return the schemes of the weights quantized on disk, each with whether only plain layers can run it.

    A file has several if two libraries have quantized its layers. GGUF files mix types; only the main one counts.
    """
    rows: set[tuple[str, bool]] = set()
    for part in (seen.parts or {".": seen}).values():
        for src in part.sources.values():
            main = {part.quant} if part.quant else set()
            mixed = set() if src.container == "gguf" else {found.scheme for found in src.found.values()}
            rows |= {(scheme, src.plain_only) for scheme in mixed or main}
    return sorted(rows)


def with_dtype(asked: Request, seen: detection.Detected) -> Request:
    """Return the request with `dtype` set if it names none and all floats have to be cast to one dtype."""
    return dataclasses.replace(asked, dtype=asked.dtype or _one_dtype(asked, seen))


def _one_dtype(asked: Request, seen: detection.Detected) -> str | None:
    """Return the dtype to cast all floats to if the files mix dtypes; None to leave them unchanged.

    Dtypes mix when a single component joins those of its base, in all-in-one checkpoints (whose VAE is often float32),
    and in GGUF files, which keep small tensors in float32. The dtype with the most bytes decides: for a single
    component that of the base, else that of the file. GGUF files written by sdquant record their original dtype.
    """
    lone = look(asked, complete=False)
    base = lender(asked, lone, complete=False)
    if base is None:
        packed = any(src.container == "gguf" for src in seen.sources.values())
        return _most(seen) if packed else None
    if lone.component == CHECKPOINT:
        return _most(lone)
    lent = {name: src for name, src in base.sources.items() if not name.startswith("vae")}  # which is often in F32
    return _most(dataclasses.replace(base, sources=lent)) or _most_of_lone(seen)


def _most_of_lone(seen: detection.Detected) -> str:
    """Return the main component's dtype, for a base that provides only configs.

    The dtype for packed weights if there is no other: float32 in a GGUF file tells nothing, since small tensors are
    always stored in it.
    """
    main = next((seen.sources[name] for name in choices.MAIN if name in seen.sources), None)
    said = _most(dataclasses.replace(seen, sources={} if main is None else {"main": main}))
    foreign = main is not None and main.container == "gguf" and main.named_dtype is None
    return READ_DTYPE if said is None or (foreign and said == "float32") else said


def _most(seen: detection.Detected) -> str | None:
    """Return the float dtype with the most bytes; None if there are no floats."""
    sizes: Counter[str] = Counter()
    for src in seen.sources.values():
        for info in src.plain.values():
            if info.dtype in ("float32", "float16", "bfloat16"):
                sizes[src.named_dtype or info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else None
