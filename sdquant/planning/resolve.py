"""Resolve a request to what this machine has: its device, its files, one dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..backends import gguf
from ..compat import hardware
from ..core import choices
from ..errors import BackendUnavailableError
from ..formats import main_dtype
from ..offload import mode_named
from .component_places import CHECKPOINT
from .component_sources import whole_of
from .locate import locate

if TYPE_CHECKING:
    from ..core import QuantSpec
    from ..models import Detected
    from ..offload import OffloadMode
    from .component_files import ModelFiles
    from .mix_curve import MixCurve
    from .request import Request


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A request with everything in it found: what the planner plans.

    Attributes:
        request: as the user made it.
        files: of the model.
        detected: the whole model, made of them.
        device: the compute device, by torch name. dtype: what floats are cast to; None to leave them as stored.
        specs: the scheme of each component, see `Request.specs`; those that `auto` chose, if the request says so.
        offload_mode, budget: the mode, and the bytes that weights may take; likewise.
        why, foreseen, curve: for "auto", see `Plan`.
    """

    request: Request
    files: ModelFiles
    detected: Detected
    device: str
    dtype: str | None
    specs: Mapping[str, QuantSpec | None]
    offload_mode: OffloadMode
    budget: int | None
    why: str | None = None
    foreseen: float | None = None
    curve: MixCurve | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """The components that the request names."""
        quant = self.request.quant
        names = (*(quant if isinstance(quant, Mapping) else ()), *(self.request.components or ()))
        return tuple(name for name in dict.fromkeys(names) if name != "*")


def resolve(request: Request, device: str) -> Resolved:
    """Return the request with its files, not yet compared with their models, and one dtype."""
    files = locate(request)
    detected = whole_of(files, complete=False)
    return Resolved(
        request=request, files=files, detected=detected, device=device, specs=request.specs,
        dtype=request.dtype or _one_dtype(files, detected), budget=request.budget_bytes,
        offload_mode=request.offload_mode or mode_named(choices.NO_OFFLOAD),  # until `auto` has chosen one
    )  # fmt: skip


def completed(resolved: Resolved, as_floats: Collection[str] = ()) -> Resolved:
    """Return it with the files checked against their headers and their models, and under the models' names.

    Args:
        as_floats: see `whole_of`.
    """
    whole = whole_of(resolved.files, complete=True, as_floats=as_floats, dtype=resolved.dtype)
    return dataclasses.replace(resolved, detected=whole)


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


def prequantized_schemes(detected: Detected) -> list[tuple[str, bool]]:
    """Return the schemes of the weights quantized on disk, each with whether only plain layers can run it.

    A file has several if two libraries have quantized its layers. GGUF files mix types; only the main one counts.
    """
    rows: set[tuple[str, bool]] = set()
    for part in (detected.parts or {choices.LONE: detected}).values():
        for src in part.sources.values():
            main = {part.quant} if part.quant else set()
            mixed = set() if src.container == "gguf" else {weight.scheme for weight in src.prequantized.values()}
            rows |= {(scheme, src.plain_only) for scheme in mixed or main}
    return sorted(rows)


def _one_dtype(files: ModelFiles, detected: Detected) -> str | None:
    """Return the dtype to cast all floats to if the files mix dtypes; None to leave them unchanged.

    Dtypes mix when a single component joins those of its base, in all-in-one checkpoints (whose VAE is often float32),
    and in GGUF files, which keep small tensors in float32. The dtype with the most bytes decides: for a single
    component that of the base, else that of the file. GGUF files written by sdquant record their original dtype.
    """
    if files.pipeline is None:
        packed = any(src.container == "gguf" for src in detected.sources.values())
        return main_dtype(*detected.sources.values(), recorded=True) if packed else None
    if files.detected.component == CHECKPOINT:
        return main_dtype(*files.detected.sources.values(), recorded=True)
    kept = [src for name, src in files.pipeline.sources.items() if not name.startswith("vae")]  # which is often in F32
    return main_dtype(*kept, recorded=True) or _most_of_lone(detected)


def _most_of_lone(detected: Detected) -> str:
    """Return the main component's dtype, for a base that provides only configs.

    The dtype for packed weights if there is no other: float32 in a GGUF file tells nothing, since small tensors are
    always stored in it.
    """
    main = next((detected.sources[name] for name in choices.MAIN if name in detected.sources), None)
    dtype = None if main is None else main_dtype(main, recorded=True)
    foreign = main is not None and main.container == "gguf" and main.recorded_dtype is None
    return gguf.READ_DTYPE if dtype is None or (foreign and dtype == "float32") else dtype
