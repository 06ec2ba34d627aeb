"""Evaluates a choice of settings before anything is loaded: the verdict on every choice, the plan, and fixes.

All of this comes from the matrix and the planner; the page only shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..compat import hardware
from ..errors import SdquantError
from ..planning import VERDICTS, Verdict, fields, prepare, verdict_on
from ..settings import Fix, Settings, fixes, role_of
from .html_components import is_too_large

if TYPE_CHECKING:
    from ..compat import Machine
    from ..planning import Plan, Request

# The fields whose choices the matrix speaks of.
AXES = ("offload", "mode", "runtime")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to load: its path, and the base pipeline and further parts of a single component or checkpoint.

    Attributes:
        config: what a lone file does not say itself, as the path of a file or as JSON.
    """

    path: str
    base: str | None = None
    parts: tuple[str, ...] = ()
    config: str | None = None

    @property
    def companions(self) -> dict[str, Any]:
        """Return what goes with the path, as keyword arguments of a load."""
        return {"base": self.base, "parts": self.parts, "config": self.config}

    def components(self, settings: Settings) -> dict[str, str | None]:
        """Return component names, as `Settings.request` takes them, each with the scheme of its weights on disk.

        Raises:
            SdquantError: the model cannot be loaded, with any scheme.
        """
        as_found = Settings({"allow_pickle": settings["allow_pickle"]})
        plan = prepare(as_found.request(self.path, (), **self.companions, progress=False))
        return {part.name: part.scheme if part.action == "found" else None for part in plan.components}

    def components_as_found(self, values: Mapping[str, Any]) -> dict[str, str | None]:
        """Return `components` for values that may contradict each other."""
        return self.components(Settings({"allow_pickle": values["allow_pickle"]}))

    def request(self, settings: Settings, on_disk: Mapping[str, str | None] | None = None) -> Request:
        """Return the Request for these settings.

        Args:
            on_disk: result of `components` for these settings, which takes as long as a plan; None to ask it.

        Raises:
            SdquantError: those of `components`.
        """
        known = self.components(settings) if on_disk is None else on_disk
        return settings.request(self.path, known, **self.companions, progress=False)

    def shared(self, settings: Settings) -> dict[str, Any]:
        """Return the settings other than schemes, as keyword arguments of `request` without the path."""
        values = {name: value for name, value in settings.values.items() if not name.startswith("quant.")}
        return values | self.companions


@dataclass(frozen=True, kw_only=True)
class Review:
    """The evaluation of a choice of settings for a model.

    Attributes:
        marks: field name to choice to the verdict on it.
        plan: the plan of the load; None if it is refused.
        error: why it is refused; None if it is not.
        fixes: the nearest settings that are not refused; of a plan that is too large, another offload that fits.
    """

    marks: Mapping[str, Mapping[str, Verdict]]
    plan: Plan | None = None
    error: SdquantError | None = None
    fixes: tuple[Fix, ...] = ()


def review(target: Target, values: Mapping[str, Any]) -> Review:
    """Evaluate a choice of settings for a model. Reads headers only.

    Args:
        values: a value for each field; they may contradict each other.
    """
    here = hardware.probe()
    try:
        on_disk = target.components_as_found(values)
    except SdquantError as error:
        return Review(marks={}, error=error)
    verdicts = marks(values, on_disk, here)
    try:
        plan = prepare(target.request(Settings(values), on_disk), read=False)
        ways = _that_fit(target, values, on_disk, here) if is_too_large(plan, capacity_for(plan, here)) else ()
        return Review(marks=verdicts, plan=plan, fixes=ways)
    except SdquantError as error:
        return Review(marks=verdicts, error=error, fixes=fixes(values, lambda near: _loads(target, near, on_disk)))


def capacity_for(plan: Plan, here: Machine) -> int | None:
    """Return the bytes available for weights on the plan's device: the budget, or the free memory."""
    if plan.budget is not None:
        return plan.budget
    device = next((row for row in here.devices if row.torch_name == plan.device), here.best)
    return device.memory_free


def _that_fit(
    target: Target, values: Mapping[str, Any], on_disk: Mapping[str, str | None], here: Machine
) -> tuple[Fix, ...]:
    def accepts(near: Settings) -> bool:
        if near["offload"] == values["offload"]:  # to try other schemes would take too long
            return False
        plan = prepare(target.request(near, on_disk), read=False)
        return not is_too_large(plan, capacity_for(plan, here))

    return fixes(values, accepts, most=1)


def _loads(target: Target, settings: Settings, on_disk: Mapping[str, str | None]) -> bool:
    try:
        prepare(target.request(settings, on_disk), read=False)
    except SdquantError:
        return False
    return True


def marks(values: Mapping[str, Any], on_disk: Mapping[str, str | None], here: Machine) -> dict[str, dict[str, Verdict]]:
    """Return the verdict on every choice of every field that the matrix covers.

    Args:
        values: a value for each field. on_disk: component to the scheme it has on disk, or None.
    """
    roles = {role.name: scheme for name, scheme in on_disk.items() if (role := role_of(name)) is not None}
    kind = _kind(values, here)
    result: dict[str, dict[str, Verdict]] = {}
    for row in fields():
        if row.kind != "scheme" and row.name not in AXES:
            continue
        result[row.name] = {}
        for shown in row.choices:
            near = {**values, row.name: row.parse(shown)}
            only = {row.name.removeprefix("quant.")} if row.kind == "scheme" else set(roles)
            result[row.name][shown] = _worst(
                verdict_on(near, near[f"quant.{role}"], roles.get(role), kind, here) for role in only
            )
    return result


def _kind(values: Mapping[str, Any], here: Machine) -> str:
    try:
        return hardware.device_kind(values["device"] or hardware.default_device(here), here)
    except SdquantError:
        return here.best.kind


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=lambda mark: VERDICTS.index(mark.verdict), default=Verdict(verdict="works"))
