"""Convert a model to a mix: a scheme for each weight, for so many bytes or such a quality. No gradio here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BudgetError, SettingsError
from ..planning import AUTO, Settings, field_named, folder_of, mix_presets, prepare, role_of
from ..utils.byte_sizes import budget_text, parse_size
from ..utils.byte_sizes import size as text_of

if TYPE_CHECKING:
    from ..planning import Beside, Plan
    from .plan_preview import Target

MIX, MIX_NAME = AUTO, "mix"
OnCount = Callable[[int, int], object]
_COMFY_SHARE = 0.4  # of bf16: ComfyUI's coarsest format takes more than a mix needs elsewhere


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What a mix is to have: a size as text, or a quality in dB as text; "" is not set."""

    size: str = ""
    quality: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """Return them as settings.

        Raises:
            SettingsError: neither or both are set, or one cannot be read.
        """
        goals = {name: text.strip() for name, text in (("size", self.size), ("quality", self.quality)) if text.strip()}
        if len(goals) != 1:
            why = "a size and a quality are two goals" if goals else "it needs a size or a quality"
            raise SettingsError("Cannot choose a mix", why, "Write one of them, such as 6GB for the size")
        return {name: field_named(name).parse(text) for name, text in goals.items()}


NO_MIX = Mix()


def usual_size(target: Target, kind: str) -> str:
    """Return a size that gives good images."""
    from ..saving import folder_size, foreseen_size

    plan = _plan(target, {})
    parts = _parts(plan, kind)
    share = _COMFY_SHARE if kind == "file" else mix_presets.ENOUGH
    whole = sum(part.bytes_bf16 for part in parts if _is_mixed(part.name, kind))
    rest = sum(part.bytes for part in parts if not _is_mixed(part.name, kind))
    if kind == "folder":
        mixed = [part.name for part in parts if _is_mixed(part.name, kind)]
        rest += folder_size.most_beside(plan.detected.sources, mixed, folder_of(plan))
    least = (
        0
        if kind == "folder"
        else foreseen_size.fewest_mix_bytes(target.path, gguf=kind == "gguf", config=target.config)
    )
    return budget_text(max(rest + int(share * whole), int(1.1 * least)))


def foreseen_mix(target: Target, kind: str, mix: Mix) -> tuple[int, int]:
    """Return the bytes of the weights before, and of what is written: at most if a size was named; of a quality, of a
    file at least, and of a folder about.

    Raises:
        BudgetError: it cannot be so small. SdquantError: it cannot be planned.
    """
    from ..saving import folder_size, foreseen_size

    values = mix.values
    before = sum(part.bytes for part in _parts(_plan(target, {}), kind))
    if kind != "folder":
        least = foreseen_size.fewest_mix_bytes(target.path, gguf=kind == "gguf", config=target.config)
        size = parse_size(values["size"], "A size") if "size" in values else least
        if size < least:
            raise BudgetError(
                f"Cannot make so small a file of {Path(target.path).name}",
                f"with the coarsest formats, and what is not quantized, it takes {text_of(least)}",
                f"Write {_at_least(least)} or more",
            )
        return before, min(size, before)
    plan = _plan(target, values, folder_size.bytes_beside)
    others = folder_size.foreseen_beside(plan)
    if "size" not in values:
        return before, plan.bytes + others
    return before, min(parse_size(values["size"], "A size"), before + others)


def write_mix(
    target: Target, kind: str, mix: Mix, out: Path, on_bytes: Callable[[int, int], None], on_weights: OnCount | None
) -> None:
    """Write the model as a mix.

    Args:
        on_bytes, on_weights: see `conversion.convert_model`.
    """
    from ..loading import load_planned
    from ..saving import comfy_mix, export_gguf, folder_size, save
    from ..utils.atomic_write import require_space

    values = mix.values
    if kind != "folder":
        write = export_gguf.quantize_file if kind == "gguf" else comfy_mix.write_comfy_mix
        write(
            target.path, AUTO, out, progress=False, on_bytes=on_bytes, on_weights=on_weights, config=target.config,
            **values,
        )  # fmt: skip
        return
    request = target.request(Settings(values))
    plan = prepare(request, convert=True, on_weights=on_weights, beside=folder_size.bytes_beside)
    require_space(out, plan.bytes)
    save(load_planned(request, plan, on_bytes), out)


def _plan(target: Target, values: dict[str, Any], beside: Beside | None = None) -> Plan:
    """Return the plan of a mix in a folder, or with {} of the model as it is. Reads no weights."""
    return prepare(target.request(Settings(values), target.components(Settings())), read=False, beside=beside)


def _parts(plan: Plan, kind: str) -> list[Any]:
    return [part for part in plan.components if kind == "folder" or _is_model(part.name)]


def _is_model(name: str) -> bool:
    role = role_of(name)
    return role is not None and role.name == "model"


def _is_mixed(name: str, kind: str) -> bool:
    from ..planning import is_quantized_by_default

    return is_quantized_by_default(name) if kind == "folder" else _is_model(name)


def _at_least(nbytes: int) -> str:
    """Return a size as people write it, rounded up."""
    unit = next(one for one in (10**9, 10**6, 10**3, 1) if nbytes >= one or one == 1)
    return budget_text(-(-nbytes * 100 // unit) * unit // 100)
