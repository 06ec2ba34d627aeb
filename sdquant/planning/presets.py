"""Presets: settings computed for a model, on this machine or for a graphics card of a given size.

    choose("fits-8gb", "flux").settings

Whether a model fits depends on the packed bytes on the fast device and an allowance for activations
(activation_allowance.py), precision on the scheme's own codec (scheme_snr.py), speed on measured layer times
(step_time.py). No list of schemes is needed: new schemes are ranked automatically.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..compat import hardware
from ..errors import BudgetError, SettingsError
from ..offload import mode_named
from ..utils.byte_sizes import budget_text, parse_budget, parse_size, size
from . import ranking
from .candidates import Candidate, Opened, candidates, open_model
from .estimate import step_time
from .estimate.activation_allowance import allowance
from .ranking import OBJECTIVES, Way
from .settings_values import Settings

if TYPE_CHECKING:
    from ..compat import Machine
    from .plan import Plan


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A row of presets.

    Attributes:
        memory: size of the fast memory that it targets; None for this machine's own.
        order: what it prefers: a key of `ranking.OBJECTIVES`.
    """

    name: str
    label: str
    help: str
    memory: str | None
    order: str


PRESETS = (
    Preset(
        name="fits-6gb", label="Fits 6 GB", memory="6GB", order="precise",
        help="the most precise that a graphics card with 6 GB runs well",
    ),
    Preset(
        name="fits-8gb", label="Fits 8 GB", memory="8GB", order="precise",
        help="the most precise that a graphics card with 8 GB runs well",
    ),
    Preset(
        name="best-quality", label="Best quality", memory=None, order="best",
        help="the most precise that this machine runs well",
    ),
    Preset(
        name="fastest", label="Fastest", memory=None, order="fast",
        help="without streaming if it fits; then what computes fastest, where that was measured, else unquantized if "
        "that fits, or as small as keeps its quality",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Result of a preset: the settings, their plan, and an explanation for the page (without a period)."""

    settings: Settings
    plan: Plan
    why: str


def choose(
    name: str,
    path: Any,
    *,
    settings: Settings | None = None,
    machine: Machine | None = None,
    held: int = 0,
    opened_with: Callable[[Settings], Opened] | None = None,
    **call: Any,
) -> Chosen:
    """Compute the settings of a preset for a model. Reads only headers.

    Args:
        name: of a row of PRESETS.
        settings: settings to start from; the preset replaces the schemes, mode, offload and budget.
        machine: None for this one.
        held: bytes of fast memory that are in use now but will be free, such as those of the loaded model.
        opened_with: opens the model for these settings; None to read its headers here.
        call: arguments of this call only (base, parts, variant, progress).

    Raises:
        SettingsError: there is no such preset. BudgetError: nothing fits. SdquantError: the model cannot be loaded.
    """
    row = next((row for row in PRESETS if row.name == name), None)
    if row is None:
        raise SettingsError(
            f"Unknown preset {name!r}", f"the presets are {', '.join(row.name for row in PRESETS)}", "Use one of them"
        )
    fixed = (settings or Settings()).but({"budget": None, "mode": "auto", "size": None, "quality": None})
    opened = opened_with(fixed) if opened_with else open_model(path, fixed, machine or hardware.probe(), call)
    return _chosen(row, fixed, opened, candidates(opened), held)


def _chosen(preset: Preset, fixed: Settings, opened: Opened, rows: list[Candidate], in_use: int) -> Chosen:
    limit = _limit(preset, opened, in_use)
    rest = allowance(max(sum(part.bytes_bf16 for part in row.plan.components) for row in rows))
    room = max(limit - rest, 0)
    ways = [way for row in rows for name in row.verdicts if _fits(way := Way(row, mode_named(name), room), opened)]
    if not ways:
        raise _nothing(preset, opened, rows, limit, rest)
    best = min(_timed(ways, opened) if preset.order == "fast" else ways, key=OBJECTIVES[preset.order])
    changes = best.candidate.changes | {"offload": best.offload.name}
    if best.offload.takes_budget:
        changes["budget"] = budget_text(room)
    settings = fixed.but(changes)
    plan = dataclasses.replace(
        opened.plan(best.candidate.schemes), offload_mode=best.offload, budget=parse_budget(settings["budget"])
    )
    return Chosen(settings=settings, plan=plan, why=_why(best, rows, opened, limit, rest, preset.order))


def _timed(ways: list[Way], opened: Opened) -> list[Way]:
    """Return the candidates with predicted step times, if these are known."""
    times = ranking.step_times(opened, [way.candidate for way in ways])
    foreseen = [dataclasses.replace(way, foreseen=time) for way, time in zip(ways, times, strict=True)]
    return ranking.counted(foreseen, lambda way: bool(way.foreseen) and way.usable and not way.streams)


def _limit(preset: Preset, opened: Opened, in_use: int) -> int:
    """Return how many bytes of fast memory the preset may use."""
    if preset.memory is not None:
        return parse_size(preset.memory, "A preset")
    device = opened.machine.device(opened.resolved.device)
    memory = device.memory_total if device.memory_free is None else device.memory_free
    if memory is None:
        raise BudgetError(
            f"Cannot apply the preset {preset.label}",
            f"{device.torch_name} does not report how much memory it has",
            "Use a preset for a fixed size, such as fits-8gb",
        )
    return memory + in_use


def _fits(way: Way, opened: Opened) -> bool:
    needed = way.candidate.needed(way.offload)
    # Offloaded weights are in RAM for graphics cards, and on disk for CPUs.
    ram = math.inf if opened.kind in ("cpu", "mps") else opened.machine.ram_available + way.room
    return needed is not None and needed <= way.room and way.bytes <= ram


def _nothing(preset: Preset, opened: Opened, rows: list[Candidate], limit: int, rest: int) -> BudgetError:
    streamed = [row for row in rows if any(mode_named(name).takes_budget for name in row.verdicts)]
    best = min(streamed or rows, key=lambda row: row.least)
    needed = f"the smallest way to run this model ({_named(best, opened)}) needs {size(best.least + rest)}" + (
        f" with balanced offload, {size(rest)} of it for activations" if streamed else " or more"
    )
    ram = ""
    if opened.kind not in ("cpu", "mps") and best.least + rest <= limit:
        ram = f", and {size(best.plan.bytes)} of RAM, of which {size(opened.machine.ram_available)} are free"
    return BudgetError(
        f"Cannot apply the preset {preset.label} with {size(limit)} of memory",
        needed + ram,
        "Free memory, or use a smaller model",
    )


def _why(way: Way, rows: list[Candidate], opened: Opened, limit: int, rest: int, order: str) -> str:
    taken = min(way.bytes, way.room) + rest
    text = f"{_named(way.candidate, opened)}: {size(taken)} of {size(limit)}, {size(rest)} of it for activations"
    if way.streams:
        text += f"; {size(way.bytes)} of weights take turns on the device"
        if way.share > 0:
            text += f", {way.share:.0%} of the largest part with every step"
    if way.foreseen is not None and way.candidate.schemes:
        text += f"; {step_time.said(way.foreseen)}"
    if not way.usable:
        text += "; so few bits visibly degrade the images"
    larger = _next(way, rows, order)
    if larger is not None:
        text += f"; {_named(larger, opened)} would take {size(larger.plan.bytes + rest)}"
    return text


def _next(way: Way, rows: list[Candidate], order: str) -> Candidate | None:
    """Return the candidate to suggest for more memory: the unchanged model for speed, else the next in precision, for
    the same components if possible."""
    larger = [row for row in rows if row.noise < way.candidate.noise and row.verdicts and row.plan.bytes > way.bytes]
    if not larger or order == "fast":
        return next((row for row in larger if not row.schemes), None)
    alike = [row for row in larger if row.schemes.keys() == way.candidate.schemes.keys()]
    return max(alike or larger, key=lambda row: row.noise)


def _named(candidate: Candidate, opened: Opened) -> str:
    """Describe a candidate, such as "nf4 for the transformer and the text encoders"."""
    if not candidate.schemes:
        scheme = opened.resolved.detected.quant
        return f"as found ({scheme})" if scheme else "not quantized"
    words = [_role(role, opened.playing(role)) for role in candidate.schemes]
    return f"{next(iter(candidate.schemes.values()))} for {' and '.join(words)}"


def _role(role: str, components: tuple[str, ...]) -> str:
    if role == "model" and len(components) == 1:
        return f"the {components[0]}"
    return f"the {role.replace('_', ' ')}{'s' if len(components) > 1 else ''}"
