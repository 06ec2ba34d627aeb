"""Presets: settings that the planner computes for the model at hand, on this machine or for a card of some size.

    choose("fits-8gb", "flux").settings

What fits is judged by the packed bytes on the fast device at once and an allowance for activations (allowance.py); what
is precise by the scheme's own codec (precision.py); what is fast by what layers were measured to take (foreseeing). No
list of schemes is here: a new one takes its place by itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..compat import hardware as machines
from ..errors import BudgetError, SettingsError
from ..utils.byte_sizes import parse_size
from .candidates import Candidate, Opened, candidates, open_model
from .estimate import meta_models, step_time
from .estimate.activation_allowance import allowance
from .estimate.scheme_snr import USABLE
from .settings_values import Settings

if TYPE_CHECKING:
    from ..compat.hardware import Machine
    from .plan import Plan

# How much of the largest component may come anew with every step before fewer bits are the better choice: a third of it
# arrives while the rest computes.
STREAMED = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A row of presets.

    Attributes:
        memory: the size of the fast memory that it is for; None for this machine's own.
        order: what it prefers: "precise" (what fits whole before what streams), "best" (the precise before what fits
            whole) or "fast". None of them streams more than STREAMED if it can be helped.
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
    """What a preset has chosen: the settings, their plan, and a sentence for the page (with no period)."""

    settings: Settings
    plan: Plan
    why: str


@dataclass(frozen=True)
class _Way:
    """A candidate with an offload mode, and the bytes of weights that may be on the device.

    Attributes:
        foreseen: a step's computing time over that of the unquantized model; None where nobody can tell.
        counted: the same, as it counts beside the fastest.
    """

    candidate: Candidate
    offload: str
    room: int
    foreseen: float | None = None
    counted: float = 1.0

    @property
    def bytes(self) -> int:
        return self.candidate.plan.bytes

    @property
    def streams(self) -> bool:
        return self.bytes > self.room

    @property
    def share(self) -> float:
        """How much of the largest component comes anew with every step."""
        return max(0.0, 1 - self.room / max(self.candidate.largest, 1))

    @property
    def usable(self) -> bool:
        return self.precision >= USABLE

    @property
    def precision(self) -> float:
        """Decibels of the least precise scheme in it."""
        return math.inf if self.candidate.worst is None else self.candidate.worst

    @property
    def slow(self) -> bool:
        return self.candidate.verdicts[self.offload] == "slow"


def _precise(way: _Way) -> tuple[Any, ...]:
    if way.usable and not way.streams:
        return 0, way.slow, way.candidate.noise, way.bytes
    return 1 + _tier(way), way.slow, *_by_scheme(way)


def _best(way: _Way) -> tuple[Any, ...]:
    return _tier(way), *_by_scheme(way), way.slow


def _fast(way: _Way) -> tuple[Any, ...]:
    """What streams waits for its bytes; else, of those that are equally fast, what is most like the model as found.
    Where nobody can tell what is fast, what is quantized is faster the smaller it is."""
    if way.streams or way.foreseen is None:
        return not way.usable, way.streams, way.slow, 1.0, bool(way.candidate.schemes) and not way.streams, way.bytes
    return not way.usable, way.streams, way.slow, way.counted, bool(way.candidate.schemes), way.candidate.noise


def _tier(way: _Way) -> int:
    """0: runs well. 1: streams too much for that. 2: images suffer."""
    return 2 if not way.usable else int(way.share > STREAMED)


def _by_scheme(way: _Way) -> tuple[Any, ...]:
    """The most precise scheme first; with the same one, parts that are left as they are must not cost streaming. What
    streams too much is better the smaller it is."""
    if _tier(way) == 1:
        return (way.bytes,)
    return -way.precision, way.streams, way.bytes if way.streams else way.candidate.noise


ORDERS: dict[str, Callable[[_Way], tuple[Any, ...]]] = {"precise": _precise, "best": _best, "fast": _fast}


def choose(
    name: str,
    path: Any,
    *,
    settings: Settings | None = None,
    machine: Machine | None = None,
    held: int = 0,
    **call: Any,
) -> Chosen:
    """The settings of a preset for a model; headers are all that is read.

    Args:
        name: of a row of PRESETS.
        settings: what the preset does not choose is kept (skip, cache, dtype, device, runtime): it chooses the schemes,
            the mode, offload and budget.
        machine: None for this one.
        held: bytes of the fast memory that are taken now and will be free: those of the model that is loaded.
        call: what belongs to this call alone (base, parts, variant, progress).

    Raises:
        SettingsError: there is no such preset. BudgetError: nothing fits. SdquantError: the model cannot be loaded.
    """
    row = next((row for row in PRESETS if row.name == name), None)
    if row is None:
        raise SettingsError(
            f"Preset {name!r} was asked for", f"the presets are {', '.join(row.name for row in PRESETS)}", "Use one"
        )
    opened = open_model(path, settings or Settings(), machine or machines.probe(), call)
    return _chosen(row, opened, candidates(opened), held)


def _chosen(preset: Preset, opened: Opened, rows: list[Candidate], held: int) -> Chosen:
    limit = _limit(preset, opened, held)
    rest = allowance(max(sum(part.bytes_bf16 for part in row.plan.components) for row in rows))
    room = max(limit - rest, 0)
    ways = [way for row in rows for offload in row.verdicts if _fits(way := _Way(row, offload, room), opened)]
    if not ways:
        raise _nothing(preset, opened, rows, limit, rest)
    best = min(_timed(ways, opened) if preset.order == "fast" else ways, key=ORDERS[preset.order])
    changes = best.candidate.changes | {"offload": best.offload}
    if best.offload == "balanced":
        changes["budget"] = _budget(room)
    settings = opened.settings.but(changes)
    return Chosen(
        settings=settings, plan=opened.plan(settings), why=_why(best, rows, opened, limit, rest, preset.order)
    )


def _timed(ways: list[_Way], opened: Opened) -> list[_Way]:
    """The same with the times that are foreseen."""
    if opened.kind != "cpu" or not step_time.knows(opened.machine.native):
        return ways
    traced = meta_models.trace_if_sound(ways[0].candidate.plan)
    times = [step_time.step(way.candidate.plan, traced, opened.machine.native) for way in ways]
    whole = [time for way, time in zip(ways, times, strict=True) if time and way.usable and not way.streams]
    fastest = min(whole, default=1.0)
    return [
        way if time is None else dataclasses.replace(way, foreseen=time, counted=step_time.counted(time, fastest))
        for way, time in zip(ways, times, strict=True)
    ]


def _limit(preset: Preset, opened: Opened, held: int) -> int:
    """Bytes of fast memory that the preset may fill."""
    if preset.memory is not None:
        return parse_size(preset.memory, "A preset")
    names = {row.torch_name: row for row in opened.machine.devices}
    same = [row for row in opened.machine.devices if row.kind == opened.kind]
    device = names.get(opened.device) or same[0]
    memory = device.memory_total if device.memory_free is None else device.memory_free
    if memory is None:
        raise BudgetError(
            f"{preset.label} was asked for",
            f"{device.torch_name} does not tell how much memory it has",
            "Use a preset for a size, such as fits-8gb",
        )
    return memory + held


def _fits(way: _Way, opened: Opened) -> bool:
    if way.offload == "none":
        return not way.streams
    # Weights that are not on a card wait in RAM; below a CPU they wait on disk.
    ram = math.inf if opened.kind in ("cpu", "mps") else opened.machine.ram_available + way.room
    return way.candidate.least <= way.room and way.bytes <= ram


def _nothing(preset: Preset, opened: Opened, rows: list[Candidate], limit: int, rest: int) -> BudgetError:
    streamed = [row for row in rows if "balanced" in row.verdicts]
    best = min(streamed or rows, key=lambda row: row.least)
    needed = f"the smallest way to run this model ({_named(best, opened)}) needs {_size(best.least + rest)}" + (
        f" with balanced offload, {_size(rest)} of it for activations" if streamed else " or more"
    )
    ram = ""
    if opened.kind not in ("cpu", "mps") and best.least + rest <= limit:
        ram = f", and {_size(best.plan.bytes)} of RAM, of which {_size(opened.machine.ram_available)} are free"
    return BudgetError(
        f"{preset.label} was asked for: {_size(limit)}", needed + ram, "Free memory, or take a smaller model"
    )


def _why(way: _Way, rows: list[Candidate], opened: Opened, limit: int, rest: int, order: str) -> str:
    taken = min(way.bytes, way.room) + rest
    text = f"{_named(way.candidate, opened)}: {_size(taken)} of {_size(limit)}, {_size(rest)} of it for activations"
    if way.streams:
        text += f"; {_size(way.bytes)} of weights take turns on the device"
        if way.share > 0:
            text += f", {way.share:.0%} of the largest part with every step"
    if way.foreseen is not None and way.candidate.schemes:
        text += f"; {step_time.said(way.foreseen)}"
    if not way.usable:
        text += "; so few bits show in the images"
    larger = _next(way, rows, order)
    if larger is not None:
        text += f"; {_named(larger, opened)} would take {_size(larger.plan.bytes + rest)}"
    return text


def _next(way: _Way, rows: list[Candidate], order: str) -> Candidate | None:
    """What would be better if there were more memory: for speed the model as found, else the next in precision, for the
    same parts if there is one."""
    larger = [row for row in rows if row.noise < way.candidate.noise and row.verdicts and row.plan.bytes > way.bytes]
    if not larger or order == "fast":
        return next((row for row in larger if not row.schemes), None)
    alike = [row for row in larger if row.schemes.keys() == way.candidate.schemes.keys()]
    return max(alike or larger, key=lambda row: row.noise)


def _named(candidate: Candidate, opened: Opened) -> str:
    """A candidate in words: "nf4 for the transformer and the text encoders"."""
    if not candidate.schemes:
        held = opened.detected.quant
        return f"as found ({held})" if held else "not quantized"
    words = [_role(role, opened.playing(role)) for role in candidate.schemes]
    return f"{next(iter(candidate.schemes.values()))} for {' and '.join(words)}"


def _role(role: str, components: tuple[str, ...]) -> str:
    if role == "model" and len(components) == 1:
        return f"the {components[0]}"
    return f"the {role.replace('_', ' ')}{'s' if len(components) > 1 else ''}"


_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


def _size(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1, "bytes"))
    return f"{size / unit:.1f} {name}" if unit > 1 else f"{size} bytes"


def _budget(room: int) -> str:
    """A budget as a user would write it, never more than `room`."""
    for unit, name in _UNITS:
        if room >= unit:
            hundredths = room * 100 // unit
            return f"{hundredths // 100}.{hundredths % 100:02d}".rstrip("0").rstrip(".") + name
    return str(room)
