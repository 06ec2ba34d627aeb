"""`quant="auto"`, `offload="auto"`: the fastest way to run a model that fits the device's free memory.

The choice depends only on the machine, the detected files and the request, so it can also be made for another machine,
of which no computing time is known.
Candidates are ranked by these criteria, in this order:
1. fewer bytes copied to the device in every step (none if every component fits);
2. everything on the device all the time, before components that take turns once per image;
3. the offload mode that moves less (`OffloadMode.order`), and combinations that the matrix does not call slow;
4. shorter predicted computing time, where it is known (`estimate.step_time`: the CPU of this machine, which is
   measured); times close to the fastest count as equal;
5. not quantized, else more precise.
Schemes so coarse that images suffer (`scheme_snr.USABLE`) come after all others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..core import LONE, NO_OFFLOAD, OFFLOAD_MODES
from ..errors import BudgetError, SdquantError
from ..nn import openvino
from ..offload import budget as memory_budget
from ..offload import mode_named
from ..rules import MixSpec
from ..utils.byte_sizes import size
from . import planner, ranking
from .candidates import GOOD, Candidate, Opened, candidates, worst_of
from .estimate import meta_models, peak_memory, step_time
from .estimate.activation_allowance import allowance
from .estimate.scheme_snr import USABLE
from .ranking import Way
from .request import AUTO, Request
from .resolve import Resolved, completed, device_of
from .resolve import resolve as resolve_request

if TYPE_CHECKING:
    from ..compat import Machine
    from ..models import Trace


def resolve(request: Request, here: Machine) -> Resolved:
    """Resolve a request for a machine and decide every "auto" in it. Traces shapes to estimate the activations.

    Raises:
        BudgetError: nothing fits. SdquantError: what loading the model as found would raise before reading weights.
    """
    found = resolve_request(request, device_of(request, here))
    planner.refuse_conflicts(found)
    return settle(completed(found), here)


def settle(resolved: Resolved, here: Machine) -> Resolved:
    """Decide what is "auto" in a request whose files are known. A mix has been chosen before: then only the mode is."""
    request = resolved.request
    chooses = request.quant == AUTO and not request.mixed
    opened = Opened(dataclasses.replace(resolved, offload_mode=mode_named(NO_OFFLOAD), budget=None), here)
    modes = OFFLOAD_MODES if request.offload_mode is None else (request.offload,)
    rows = candidates(opened, modes) if chooses else [_as_asked(opened, modes)]
    traced = meta_models.trace_if_sound(rows[0].plan)
    free, rest, room = _room(opened, rows, traced)
    times = ranking.step_times(opened, rows, traced)
    ways = [
        Way(row, mode_named(name), max(0, room - ranking.decoded_bytes(row)), time)
        for row, time in zip(rows, times, strict=True)
        for name in row.verdicts
    ]
    fitting = ranking.fastest_first(way for way in ways if (way.candidate.needed(way.offload) or 0) <= way.room)
    best = None if rest > free else next((way for way in fitting if _holds_no_more(way, here, traced)), None)
    if best is None:
        budget = request.budget_bytes
        limit = "" if budget is None else f", with a budget of {size(budget)} for weights"
        raise BudgetError(
            f"Cannot choose settings for {_asked(request)}",
            f"no way to run this model fits in {size(free)} of free memory on {resolved.device}, of which activations "
            f"need {size(rest)}{limit}",
            f"{'Raise the budget, free' if limit else 'Free'} memory, generate smaller images, or use a smaller model",
        )
    return dataclasses.replace(
        resolved,
        specs=opened.specs(best.candidate.schemes) if chooses else resolved.specs,
        offload_mode=best.offload,
        budget=best.room if best.offload.takes_budget else None,
        why="; ".join(filter(None, (resolved.why, _why(best, rows, opened, free, rest)))),
        foreseen=best.foreseen,
    )


def _as_asked(opened: Opened, modes: tuple[str, ...]) -> Candidate:
    """Return the only candidate if the request names the quantization."""
    plan = planner.build_plan(opened.resolved, opened.machine)
    used: set[tuple[str, bool, str]] = set()
    for part in plan.components:
        if isinstance(part.spec, MixSpec):  # GGUF's types count as in a file of them
            used |= {(row.name, not row.on_the_fly, "plain") for row in part.spec.schemes}
        elif part.scheme is not None:
            used.add((part.scheme, part.action == "found", part.runtime))
    verdicts: dict[str, str] = {}
    for mode in modes:
        verdict = worst_of(opened.verdict(s, mode, prequantized=f, plain_only=r == "plain") for s, f, r in used)
        if verdict in GOOD or (verdict == "untested" and any(f for _, f, _ in used)):
            verdicts[mode] = verdict
    return Candidate(schemes={}, plan=plan, noise=0.0, worst=None, verdicts=verdicts)


def _room(opened: Opened, rows: list[Candidate], traced: Mapping[str, Trace | None]) -> tuple[int, int, int]:
    """Return three sizes in bytes: free memory, the share reserved for activations, the most that weights may take."""
    device = opened.machine.device(opened.resolved.device)
    free = device.memory_total if device.memory_free is None else device.memory_free
    if free is None or device.memory_total is None:
        raise BudgetError(
            f"Cannot choose settings for {_asked(opened.resolved.request)}",
            f"{device.torch_name} does not report how much memory it has",
            "Set the quantization scheme and the offload mode explicitly",
        )
    peaks = [one.peak for one in traced.values() if one is not None]
    parts = rows[0].plan.components
    if not peaks or [part.name for part in parts] == [LONE]:  # alone: the rest of its pipeline will want room, too
        peaks.append(allowance(sum(part.bytes_bf16 for part in parts)))
    rest = max(peaks)
    room = memory_budget.room(free, device.memory_total, rest)
    budget = opened.resolved.request.budget_bytes
    return free, rest, room if budget is None else min(room, budget)


def _holds_no_more(way: Way, machine: Machine, traced: Mapping[str, Trace | None]) -> bool:
    """Return whether the weights that are on the device at once fit.

    For some modes the modules have to be known, since on the CPU weights that cannot be mapped from a file stay in
    memory; the same goes for OpenVINO, which keeps a copy of its weights.
    """
    compiled = any(part.runtime == openvino.NAME for part in way.candidate.plan.components)
    if way.candidate.needed(way.offload) is not None and not compiled:
        return True
    try:
        plan = dataclasses.replace(way.candidate.plan, offload_mode=way.offload)
        peak = peak_memory.predict(plan, machine, traced=traced or None)
    except SdquantError:  # loading raises it again, with a better message
        return True
    return peak.weights + peak.copied <= way.room


def _asked(request: Request) -> str:
    words = [f"{name}='auto'" for name in ("quant", "offload") if getattr(request, name) == AUTO]
    return " and ".join(words)


def _why(way: Way, rows: list[Candidate], opened: Opened, free: int, rest: int) -> str:
    one = way.candidate
    schemes: Mapping[str, str] = one.schemes
    what = ", ".join(f"{scheme} for the {role.replace('_', ' ')}" for role, scheme in schemes.items())
    request = opened.resolved.request
    is_named = request.quant != AUTO or request.mixed
    unchanged = "quantized as requested" if is_named else "not quantized further"
    summary = f"{what or unchanged}, offload {way.offload.name}"
    text = f"{summary}: {size(one.plan.bytes)} of weights, {size(rest)} for activations, {size(free)} free"
    if way.each_step:
        text += f"; {size(way.each_step)} are copied to the device in every step"
    elif one.plan.bytes <= way.room and way.offload.name == NO_OFFLOAD:
        text += "; everything stays on the device"
    else:
        text += "; components take turns on the device, none is copied again between steps"
    unchanged_model = rows[0]
    if schemes and unchanged_model is not one:
        text += f"; unchanged, the model takes {size(unchanged_model.plan.bytes)}"
    if way.foreseen is not None and any(part.weights for part in one.plan.components):
        text += f"; {step_time.said(way.foreseen)}"
    if math.isfinite(one.worst or math.inf) and (one.worst or 0) < USABLE:
        text += "; so few bits visibly degrade the images"
    return text
