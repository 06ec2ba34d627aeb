"""Presets of a mix: the best picture that a card of a facts size holds, with a scheme for each weight.

    mix_presets.choose_mix_settings("mix-8gb", "flux").settings

Reads headers only: the mix itself is chosen when the settings are applied, which reads the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..compat import hardware
from ..core import NO_OFFLOAD
from ..errors import BudgetError, SettingsError
from ..offload import MODES
from ..utils.byte_sizes import budget_text, parse_size, size
from .candidates import GOOD, open_model
from .component_types import ROLES, is_quantized_by_default
from .estimate.activation_allowance import allowance
from .settings_values import Settings

if TYPE_CHECKING:
    from ..compat import Machine
    from .candidates import Opened

# Shares of bf16: of a mix whose images are good, so that nothing need take turns for more, and of one beyond which more
# bytes are not seen.
ENOUGH, MOST = 0.28, 0.53
_LEAST = 0.17  # a little more than the coarsest schemes take


@dataclass(frozen=True, kw_only=True)
class MixPreset:
    """A row of MIXES. memory: of the card."""

    name: str
    label: str
    memory: str


MIXES = (
    MixPreset(name="mix-6gb", label="Best mix in 6 GB", memory="6GB"),
    MixPreset(name="mix-8gb", label="Best mix in 8 GB", memory="8GB"),
    MixPreset(name="mix-12gb", label="Best mix in 12 GB", memory="12GB"),
)


def choose_mix_settings(
    name: str, path: Any, *, settings: Settings | None = None, machine: Machine | None = None, **call: Any
) -> tuple[Settings, str]:
    """Return the settings of a mix for a model, and the reason as words without a period.

    If all weights fit with ENOUGH bytes each, they stay on the device. Otherwise components take turns, with a budget
    and as many bytes as let the largest one stay there while it runs.

    Args:
        name: of a row of MIXES. settings: to start from; schemes, mode, runtime, offload and budget are replaced.
        call: arguments of this call only (base, parts, ...).

    Raises:
        SettingsError: there is no such preset. BudgetError: nothing fits.
    """
    row = next((row for row in MIXES if row.name == name), None)
    if row is None:
        why = f"the mixes are {', '.join(row.name for row in MIXES)}"
        raise SettingsError(f"Unknown preset {name!r}", why, "Use one of them")
    start = (settings or Settings()).but(
        {f"quant.{role.name}": None for role in ROLES}
        | {"mode": "auto", "runtime": None, "budget": None, "offload": NO_OFFLOAD, "size": None, "quality": None}
    )
    opened = open_model(path, start, machine or hardware.probe(), call)
    return _chosen(row, start, opened)


def _chosen(row: MixPreset, start: Settings, opened: Opened) -> tuple[Settings, str]:
    parts = opened.plan({}).components
    limit = parse_size(row.memory, "A preset")
    rest = allowance(sum(part.bytes_bf16 for part in parts))
    room = max(limit - rest, 0)
    sizes = [part.bytes for part in parts if part.action == "keep" and is_quantized_by_default(part.name)]
    whole = sum(part.bytes for part in parts)
    facts = f"of {size(limit)}, {size(rest)} for activations"
    if not sizes or whole <= room:
        return start, f"the model fits as it is: {size(whole)} {facts}"
    others = whole - sum(sizes)
    share = (room - others) / sum(sizes)
    turns = next((mode.name for mode in MODES if mode.takes_budget and _runs(opened, mode.name)), None)
    if share >= ENOUGH or turns is None:
        if share < _LEAST:
            raise BudgetError(
                f"Cannot apply the preset {row.label}", f"the coarsest mix takes more than the {size(room)} {facts}",
                "Use a smaller model, or another preset",
            )  # fmt: skip
        text = f"a mix of {size(room)}, all on the device: {facts}"
        return start.but({"size": budget_text(room)}), text
    # The largest takes the room alone while it runs.
    share = max(_LEAST, share, min(MOST, room / max(sizes)))
    total = others + int(share * sum(sizes))
    text = f"a mix of {size(total)} in turns, in {size(room)} {facts}"
    return start.but({"size": budget_text(total), "offload": turns, "budget": budget_text(room)}), text


def _runs(opened: Opened, mode: str) -> bool:
    """Return whether a usual scheme of a mix works in an offload mode that has a budget."""
    return opened.verdict("q4_k", mode, prequantized=True, plain_only=True) in GOOD
