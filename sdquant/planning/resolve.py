"""From what a request names to what is on this machine: its device, its files, one dtype."""

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
    """The compute device of a request.

    Raises:
        BackendUnavailableError: this machine has none of that kind.
    """
    device = asked.device or hardware.default_device(here)
    if hardware.device_kind(device, here) not in here.kinds:
        raise BackendUnavailableError(
            f"Device {device!r} was asked for",
            f"torch sees {', '.join(here.kinds)} on this machine",
            "Leave device out, or see `sdquant doctor` for what is missing",
        )
    return device


def located(asked: Request) -> Request:
    """The request with the place of its files, and with a base where it needs one."""
    from . import fetching

    asked = with_base(fetching.fetched(asked))
    return dataclasses.replace(asked, revision=None, subfolder=None, token=None)  # what they were for is done


def held(seen: detection.Detected) -> list[tuple[str, bool]]:
    """The schemes that the files hold already, each with whether only plain layers run it. One file may hold several,
    as one whose layers two libraries have quantized; of GGUF, whose types mix, the main one stands for all."""
    rows: set[tuple[str, bool]] = set()
    for part in (seen.parts or {".": seen}).values():
        for src in part.sources.values():
            main = {part.quant} if part.quant else set()
            mixed = set() if src.container == "gguf" else {found.scheme for found in src.found.values()}
            rows |= {(scheme, src.plain_only) for scheme in mixed or main}
    return sorted(rows)


def with_dtype(asked: Request, seen: detection.Detected) -> Request:
    """The request with the dtype to bring all floats to, where it names none and one is needed."""
    return dataclasses.replace(asked, dtype=asked.dtype or _one_dtype(asked, seen))


def _one_dtype(asked: Request, seen: detection.Detected) -> str | None:
    """The dtype to bring all floats to where the files hold several that do not compute together; None: as they are.

    That is so where a lone component joins the others of its base, in checkpoints of several (whose VAE is often in
    F32), and in GGUF files, which keep small tensors in F32. The dtype with the most bytes decides: for a lone
    component that in the base, else in the file. A GGUF file of ours says what it was made from.
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
    """The same for a base that lends only configs: the main component's. That of packed weights where it has no other:
    the F32 of a GGUF file, which its small tensors are in whatever they were, says nothing."""
    main = next((seen.sources[name] for name in choices.MAIN if name in seen.sources), None)
    said = _most(dataclasses.replace(seen, sources={} if main is None else {"main": main}))
    foreign = main is not None and main.container == "gguf" and main.named_dtype is None
    return READ_DTYPE if said is None or (foreign and said == "float32") else said


def _most(seen: detection.Detected) -> str | None:
    """The float dtype with the most bytes; None if there are no floats."""
    sizes: Counter[str] = Counter()
    for src in seen.sources.values():
        for info in src.plain.values():
            if info.dtype in ("float32", "float16", "bfloat16"):
                sizes[src.named_dtype or info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else None
