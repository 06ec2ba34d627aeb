"""`quant="auto"`, `offload="auto"`: the fastest way to run a model that fits the device's free memory.

A function of the machine, what was detected and the request, so that it can be asked about a machine that is not here.
What is faster, in this order:
1. fewer bytes that come to the device with every step: nothing is, where every component fits;
2. everything on the device all the time, before components that take turns once an image;
3. the mode that moves less for the same (ORDER), and what the matrix does not call slow;
4. what computes faster, as far as that can be foreseen (`foreseeing`: on CPUs whose kernels were measured); what is
   nearly as fast as the fastest counts as fast;
5. what is not quantized, else what is more precise.
A scheme so coarse that images suffer (`precision.USABLE`) comes after all others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..compat import hardware as machines
from ..compat.row import OFFLOADS
from ..errors import BudgetError, SdquantError
from ..nn import openvino
from ..offload import budget as memory_budget
from ..utils.byte_sizes import size
from . import planner
from . import resolve as preparation_resolve
from .candidates import GOOD, Candidate, Opened, candidates, worst_of
from .component_sources import whole_of
from .estimate import meta_models, peak_memory, step_time
from .estimate.activation_allowance import allowance
from .estimate.scheme_snr import USABLE
from .request import AUTO, Request
from .settings_fields import fields
from .settings_values import Settings

if TYPE_CHECKING:
    from ..compat.hardware import Machine
    from ..models.activation_memory import Trace

# Where two modes are equal else: none has no hooks, balanced streams ahead, the others wait for what they move.
ORDER = ("none", "balanced", "model", "group", "sequential")


@dataclass(frozen=True)
class Resolved:
    """A request in which nothing is automatic any more, and a sentence (with no period) about what was chosen.

    Attributes:
        foreseen: a step's computing time over that of the unquantized model; None where nobody can tell.
    """

    request: Request
    why: str
    foreseen: float | None = None


@dataclass(frozen=True)
class _Way:
    """A candidate with an offload mode.

    Attributes:
        room: bytes of weights that may be on the device, buffers for decoding included.
        foreseen: a step's computing time over that of the unquantized model; None where nobody can tell.
    """

    candidate: Candidate
    offload: str
    room: int
    foreseen: float | None = None

    @property
    def decoded(self) -> int:
        """Bytes for the largest quantized weight, decoded."""
        weights = [weight.bytes_bf16 for part in self.candidate.plan.components for weight in part.weights]
        return max(weights, default=0)

    @property
    def left(self) -> int:
        """Bytes for the weights alone."""
        return max(0, self.room - self.decoded)

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        needed = {"none": self.candidate.plan.bytes, "model": self.candidate.largest, "balanced": self.candidate.least}
        return needed.get(self.offload, 0) <= self.left

    @property
    def each_step(self) -> int:
        """Bytes that come to the device with every step."""
        if self.offload in ("group", "sequential"):
            return self.candidate.largest
        return max(0, self.candidate.largest - self.left)

    @property
    def time(self) -> float:
        """What counts as its computing time: what nobody can tell is no faster than floats."""
        return 1.0 if self.foreseen is None else self.foreseen

    def key(self) -> tuple[Any, ...]:
        """The smaller the faster, before computing is looked at."""
        one = self.candidate
        return (
            one.worst is not None and one.worst < USABLE,
            self.each_step,
            self.offload == "model" or one.plan.bytes > self.left,
            ORDER.index(self.offload),
            one.verdicts[self.offload] == "slow",
        )


def _ordered(ways: Iterable[_Way]) -> Iterator[_Way]:
    """The best first."""
    for _, group in groupby(sorted(ways, key=_Way.key), key=_Way.key):
        same = list(group)
        fastest = min(way.time for way in same)
        yield from sorted(same, key=lambda way: (step_time.counted(way.time, fastest), way.candidate.noise))


def resolve(asked: Request, here: Machine) -> Resolved:
    """Choose what the request leaves to be chosen. Headers are read, and shapes are traced for the activations.

    Raises:
        BudgetError: nothing fits. SdquantError: what loading the model as found would raise before reading weights.
    """
    device = preparation_resolve.device_of(asked, here)
    asked = preparation_resolve.located(asked)
    asked = preparation_resolve.with_dtype(asked, whole_of(asked, complete=False))
    opened = Opened(
        settings=_settings(asked), asked=asked, detected=whole_of(asked, complete=True), device=device,
        kind=machines.device_kind(device, here), machine=here,
    )  # fmt: skip
    modes = OFFLOADS if asked.offload == AUTO else (asked.offload,)
    rows = candidates(opened, modes) if asked.quant == AUTO else [_as_asked(opened, modes)]
    traced = meta_models.trace_if_sound(rows[0].plan)
    free, rest, room = _room(opened, rows, traced)
    times = [step_time.step(row.plan, traced, here.native) for row in rows]
    ways = [_Way(row, mode, room, time) for row, time in zip(rows, times, strict=True) for mode in row.verdicts]
    fitting = _ordered(way for way in ways if way.fits)
    best = None if rest > free else next((way for way in fitting if _holds_no_more(way, traced)), None)
    if best is None:
        raise BudgetError(
            f"{_asked(asked)} was asked for",
            f"no way to run the model fits {size(free)} of free memory on {device}, {size(rest)} of it for activations"
            + (f", with {size(asked.budget_bytes)} for weights" if asked.budget_bytes is not None else ""),
            ("Raise the budget, free" if asked.budget_bytes is not None else "Free")
            + " memory, draw smaller images, or take a smaller model",
        )
    changes: dict[str, Any] = {"offload": best.offload, "quant": asked.quant}
    if asked.quant == AUTO:
        schemes = best.candidate.schemes
        changes["quant"] = {name: scheme for role, scheme in schemes.items() for name in opened.playing(role)} or None
    if best.offload == "balanced":
        changes["budget"] = best.left
    elif asked.offload == AUTO:
        changes["budget"] = None
    return Resolved(dataclasses.replace(asked, **changes), _why(best, rows, opened, free, rest), best.foreseen)


def _settings(asked: Request) -> Settings:
    """What the request says, for `Opened`, which plans without offload."""
    names = {row.name for row in fields()} & {row.name for row in dataclasses.fields(Request)}
    fixed = {"offload": "none", "budget": None, "mode": "auto"}
    return Settings({name: getattr(asked, name) for name in names} | fixed)


def _as_asked(opened: Opened, modes: tuple[str, ...]) -> Candidate:
    """The one candidate where the quantization was named."""
    asked = dataclasses.replace(opened.asked, offload="none", budget=None)
    made = planner.make(asked, opened.detected, device=opened.device, versions=opened.machine.versions)
    used = {(part.scheme, part.action == "found", part.runtime) for part in made.components if part.scheme is not None}
    verdicts: dict[str, str] = {}
    for mode in modes:
        said = worst_of(opened.verdict(s, mode, found=f, plain_only=r == "plain") for s, f, r in used)
        if said in GOOD or (said == "untested" and any(found for _, found, _ in used)):
            verdicts[mode] = said
    return Candidate(schemes={}, plan=made, noise=0.0, worst=None, verdicts=verdicts)


def _room(opened: Opened, rows: list[Candidate], traced: Mapping[str, Trace | None]) -> tuple[int, int, int]:
    """Bytes that are free, those of them for activations, and those that weights may take."""
    device = next(
        (row for row in opened.machine.devices if row.torch_name == opened.device),
        next(row for row in opened.machine.devices if row.kind == opened.kind),
    )
    free = device.memory_total if device.memory_free is None else device.memory_free
    if free is None or device.memory_total is None:
        raise BudgetError(
            f"{_asked(opened.asked)} was asked for",
            f"{device.torch_name} does not tell how much memory it has",
            "Name the quantization and the offload mode",
        )
    told = [one.peak for one in traced.values() if one is not None]
    parts = rows[0].plan.components
    if not told or [part.name for part in parts] == ["model"]:  # alone: the rest of its pipeline will want room, too
        told.append(allowance(sum(part.bytes_bf16 for part in parts)))
    rest = max(told)
    room = memory_budget.room(free, device.memory_total, rest)
    budget = opened.asked.budget_bytes
    return free, rest, room if budget is None else min(room, budget)


def _holds_no_more(way: _Way, traced: Mapping[str, Trace | None]) -> bool:
    """Whether the weights that are on the device at once fit. By group and by leaf that is known only from the modules:
    on the CPU some stay in memory, as they cannot be read from a file; and so it is with what OpenVINO holds twice."""
    compiled = any(part.runtime == openvino.NAME for part in way.candidate.plan.components)
    if way.offload not in ("group", "sequential") and not compiled:
        return True
    try:
        plan = dataclasses.replace(way.candidate.plan, offload=way.offload)
        peak = peak_memory.predict(plan, traced=traced or None)
    except SdquantError:  # which loading will raise again, with better words than these
        return True
    return peak.weights + peak.copied <= way.left


def _asked(asked: Request) -> str:
    words = [f"{name}='auto'" for name in ("quant", "offload") if getattr(asked, name) == AUTO]
    return " with ".join(words)


def _why(way: _Way, rows: list[Candidate], opened: Opened, free: int, rest: int) -> str:
    one = way.candidate
    schemes: Mapping[str, str] = one.schemes
    what = ", ".join(f"{scheme} for the {role.replace('_', ' ')}" for role, scheme in schemes.items())
    held = f"{what or ('as asked' if opened.asked.quant != AUTO else 'not quantized further')}, offload {way.offload}"
    text = f"{held}: {size(one.plan.bytes)} of weights, {size(rest)} for activations, {size(free)} free"
    if way.each_step:
        text += f"; {size(way.each_step)} come to the device with every step"
    elif one.plan.bytes <= way.left and way.offload == "none":
        text += "; everything stays on the device"
    else:
        text += "; components take turns, none is read again between steps"
    found = rows[0]
    if schemes and found is not one:
        text += f"; as it is found it has {size(found.plan.bytes)}"
    if way.foreseen is not None and any(part.weights for part in one.plan.components):
        text += f"; {step_time.said(way.foreseen)}"
    if math.isfinite(one.worst or math.inf) and (one.worst or 0) < USABLE:
        text += "; so few bits show in the images"
    return text
