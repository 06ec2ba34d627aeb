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
from .component_sources import detect_request, lender, with_base

if TYPE_CHECKING:
    from ..models import detection
    from .request import Request


def device_of(request: Request, here: hardware.Machine) -> str:
    """Return the compute device of a request.

    Raises:
        BackendUnavailableError: this machine has no device of that kind.
    """
    device = request.device or hardware.default_device(here)
    if hardware.device_kind(device, here) not in here.kinds:
        raise BackendUnavailableError(
            f"Cannot use device {device!r}",
            f"torch finds only {', '.join(here.kinds)} on this machine",
            "Remove device, or run `sdquant doctor` to see what is missing",
        )
    return device


def located(request: Request) -> Request:
    """Return the request with local paths, and with a base if it needs one."""
    from . import fetching

    request = with_base(fetching.fetched(request))
    return dataclasses.replace(request, revision=None, subfolder=None, token=None)  # no longer needed


def prequantized_schemes(detected: detection.Detected) -> list[tuple[str, bool]]:
    """Return the schemes of the weights quantized on disk, each with whether only plain layers can run it.

    A file has several if two libraries have quantized its layers. GGUF files mix types; only the main one counts.
    """
    rows: set[tuple[str, bool]] = set()
    for part in (detected.parts or {choices.LONE: detected}).values():
        for src in part.sources.values():
            main = {part.quant} if part.quant else set()
            mixed = set() if src.container == "gguf" else {weight.scheme for weight in src.found.values()}
            rows |= {(scheme, src.plain_only) for scheme in mixed or main}
    return sorted(rows)


def with_dtype(request: Request, detected: detection.Detected) -> Request:
    """Return the request with `dtype` set if it names none and all floats have to be cast to one dtype."""
    return dataclasses.replace(request, dtype=request.dtype or _one_dtype(request, detected))


def _one_dtype(request: Request, detected: detection.Detected) -> str | None:
    """Return the dtype to cast all floats to if the files mix dtypes; None to leave them unchanged.

    Dtypes mix when a single component joins those of its base, in all-in-one checkpoints (whose VAE is often float32),
    and in GGUF files, which keep small tensors in float32. The dtype with the most bytes decides: for a single
    component that of the base, else that of the file. GGUF files written by sdquant record their original dtype.
    """
    lone = detect_request(request, complete=False)
    base = lender(request, lone, complete=False)
    if base is None:
        packed = any(src.container == "gguf" for src in detected.sources.values())
        return _most(detected) if packed else None
    if lone.component == CHECKPOINT:
        return _most(lone)
    sources = {name: src for name, src in base.sources.items() if not name.startswith("vae")}  # which is often in F32
    return _most(dataclasses.replace(base, sources=sources)) or _most_of_lone(detected)


def _most_of_lone(detected: detection.Detected) -> str:
    """Return the main component's dtype, for a base that provides only configs.

    The dtype for packed weights if there is no other: float32 in a GGUF file tells nothing, since small tensors are
    always stored in it.
    """
    main = next((detected.sources[name] for name in choices.MAIN if name in detected.sources), None)
    dtype = _most(dataclasses.replace(detected, sources={} if main is None else {"main": main}))
    foreign = main is not None and main.container == "gguf" and main.named_dtype is None
    return READ_DTYPE if dtype is None or (foreign and dtype == "float32") else dtype


def _most(detected: detection.Detected) -> str | None:
    """Return the float dtype with the most bytes; None if there are no floats."""
    sizes: Counter[str] = Counter()
    for src in detected.sources.values():
        for info in src.plain.values():
            if info.dtype in ("float32", "float16", "bfloat16"):
                sizes[src.named_dtype or info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else None
