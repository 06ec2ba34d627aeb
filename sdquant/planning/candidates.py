"""Plans for every way to quantize a model that this machine can run; presets choose from them.

Headers are read once; then one plan is made for each scheme, and one for the unchanged model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..compat import Query, hardware, look_up, meant, requirements
from ..core import NO_OFFLOAD, registry
from ..errors import BackendUnavailableError, SdquantError
from ..offload import MODES
from . import planner, resolve
from .component_types import ROLES, role_of
from .estimate.scheme_snr import snr

if TYPE_CHECKING:
    from ..core import QuantSpec
    from ..offload import OffloadMode
    from .plan import ComponentPlan, Plan
    from .resolve import Resolved
    from .settings_values import Settings

# The roles that presets choose a scheme for; the VAE is small and sensitive.
CHOSEN = ("model", "text_encoder")

# The offload modes that presets choose from: everything on the device, or what a budget allows.
WHOLE_OR_BUDGET = tuple(mode.name for mode in MODES if mode.name == NO_OFFLOAD or mode.takes_budget)

GOOD = ("works", "slow")
_BLOCK = re.compile(r"(?:.*?\.)??(?:[^.]+\.\d+|mid_block)(?=\.)")


@dataclass(frozen=True)
class Opened:
    """A model whose headers have been read, and the machine that is to run it.

    Attributes:
        resolved: with the schemes that the request names, and without offload.
        plans: those made so far, if they are to be kept: they are large, and depend on neither offload nor memory.
    """

    resolved: Resolved
    machine: hardware.Machine
    plans: dict[object, Plan] | None = field(default=None, repr=False, compare=False)

    @property
    def kind(self) -> str:
        """The kind of the compute device."""
        return hardware.device_kind(self.resolved.device, self.machine)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Component names."""
        return tuple(self.resolved.detected.sources)

    def specs(self, schemes: Mapping[str, str]) -> dict[str, QuantSpec | None]:
        """Return the scheme of each component, for schemes by role."""
        return {name: registry.parse(scheme) for role, scheme in schemes.items() for name in self.playing(role)}

    def plan(self, schemes: Mapping[str, str], *, convert: bool = False) -> Plan:
        """Return the plan with these schemes by role. Raises like the planner; does not consult the matrix.

        Args:
            convert: quantize again what is quantized on disk; see `prepare`.
        """
        key = (tuple(sorted(schemes.items())), convert)
        if self.plans is not None and key in self.plans:
            return self.plans[key]
        plan = self._planned(schemes, convert)
        if self.plans is not None:
            self.plans[key] = plan
        return plan

    def _planned(self, schemes: Mapping[str, str], convert: bool) -> Plan:
        resolved = dataclasses.replace(self.resolved, specs=self.specs(schemes))
        if convert:
            resolved = resolve.completed(resolved, planner.to_quantize_again(resolved))
        return planner.build_plan(resolved, self.machine)

    def playing(self, role: str) -> tuple[str, ...]:
        """Return the names of the components that have this role."""
        return tuple(name for name in self.names if (row := role_of(name)) is not None and row.name == role)

    def verdict(self, scheme: str, offload: str, *, prequantized: bool, plain_only: bool = False) -> str | None:
        """Return the matrix's verdict on a scheme with this offload mode; None if its packages are missing."""
        row = registry.scheme(scheme)
        compute = self.resolved.request.compute or "float"
        runtime = "plain" if plain_only else meant(self.resolved.request.runtime, compute) or "default"
        if runtime != "default" and runtime not in row.runtimes:
            return None
        query = Query.of(
            row, mode="found" if prequantized else "pre", offload=offload,
            runtime=runtime, device=self.kind, compute=compute, versions=self.machine.versions,
        )  # fmt: skip
        try:
            requirements.require(row, query.mode, runtime, query.versions)
        except BackendUnavailableError:
            return None
        return look_up(query).verdict


@dataclass(frozen=True)
class Candidate:
    """One way to quantize the model.

    Attributes:
        schemes: role to scheme; () roles are as found.
        plan: without offload.
        noise: quantization noise power relative to the power of all weights of the model; 0 if unchanged.
        worst: signal-to-noise ratio of the least precise scheme in it, in dB; None if unchanged.
        verdicts: offload mode to "works" or "slow"; modes that cannot be used are absent.
    """

    schemes: Mapping[str, str]
    plan: Plan
    noise: float
    worst: float | None
    verdicts: Mapping[str, str]

    @property
    def changes(self) -> dict[str, Any]:
        """Settings that select this candidate."""
        return {f"quant.{role.name}": self.schemes.get(role.name) for role in ROLES}

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest component."""
        return max(component.bytes for component in self.plan.components)

    @cached_property
    def least(self) -> int:
        """Smallest comfortable budget for balanced offload in bytes, estimated from tensor names.

        Each component needs the weights outside its blocks plus two blocks, so that one is prefetched while the other
        runs; or all of its weights, if that is less.
        """
        sources = self.plan.detected.sources
        return max(min(component.bytes, _least(component, sources)) for component in self.plan.components)

    def needed(self, mode: OffloadMode) -> int | None:
        """Return the bytes of weights that the device must have room for in a mode; None if the modules tell."""
        return mode.needed(total=self.plan.bytes, largest=self.largest, least=self.least)


def needed_bytes(plan: Plan) -> int | None:
    """Return the bytes of weights that the device must have room for in the plan's mode; None if the modules tell."""
    way = Candidate(schemes={}, plan=plan, noise=0.0, worst=None, verdicts={})
    return way.needed(plan.offload_mode)


def open_model(path: Any, settings: Settings, here: hardware.Machine, call: Mapping[str, Any]) -> Opened:
    """Read the headers of a model.

    Raises:
        SdquantError: what loading it as found would raise before reading weights.
    """
    none = dict.fromkeys((*(f"quant.{row.name}" for row in ROLES), "budget", "size", "quality"))
    fixed = settings.but({**none, "offload": NO_OFFLOAD})
    request = fixed.request(path, (), **call)
    resolved = resolve.resolve(request, resolve.device_of(request, here))
    planner.refuse_conflicts(resolved)
    return Opened(resolve.completed(resolved), here)


def candidates(opened: Opened, offloads: Iterable[str] = WHOLE_OR_BUDGET) -> list[Candidate]:
    """Return the unchanged model and every scheme that works here, for the UNet or transformer, for the text encoders
    and for both. Components that are quantized on disk stay as they are."""
    plan = opened.plan({})
    on_disk = resolve.prequantized_schemes(opened.resolved.detected)
    whole = {
        name: worst_of(opened.verdict(s, name, prequantized=True, plain_only=p) for s, p in on_disk)
        for name in offloads
    }
    # "untested" is accepted for weights quantized on disk: there is no other way to load this file.
    base = {name: verdict for name, verdict in whole.items() if verdict in (*GOOD, "untested")}
    result = [Candidate(schemes={}, plan=plan, noise=0.0, worst=None, verdicts=base)]
    floats = {component.name for component in plan.components if component.action == "keep"}
    roles = [role for role in CHOSEN if (names := opened.playing(role)) and floats.issuperset(names)]
    for row in registry.schemes():
        if row.on_the_fly and roles:
            result += _of_scheme(opened, row.name, roles, result[0])
    return result


def _of_scheme(opened: Opened, scheme: str, roles: list[str], base: Candidate) -> list[Candidate]:
    all_verdicts = {name: opened.verdict(scheme, name, prequantized=False) for name in base.verdicts}
    verdicts = {
        name: str(worst_of((verdict, base.verdicts[name]))) for name, verdict in all_verdicts.items() if verdict in GOOD
    }
    if not verdicts:
        return []
    try:
        every = opened.plan(dict.fromkeys(roles, scheme))
    except SdquantError:  # the scheme fits no weight of this model
        return []
    ratio = snr(scheme)
    if ratio is None:
        return []
    touched = [role for role in roles if any(component.weights for component in _parts(every, opened.playing(role)))]
    groups = [touched, *([role] for role in touched if len(touched) > 1)] if touched else []
    result = []
    for group in groups:
        names = {name for role in group for name in opened.playing(role)}
        pairs = zip(every.components, base.plan.components, strict=True)
        plan = dataclasses.replace(every, components=tuple(a if a.name in names else b for a, b in pairs))
        lossy = sum(weight.bytes_bf16 for component in _parts(plan, names) for weight in component.weights)
        total = sum(component.bytes_bf16 for component in plan.components)
        result.append(
            Candidate(
                schemes=dict.fromkeys(group, scheme),
                plan=plan,
                noise=lossy / total * 10 ** (-ratio / 10),
                worst=ratio,
                verdicts=verdicts,
            )
        )
    return result


def _parts(plan: Plan, names: Iterable[str]) -> list[ComponentPlan]:
    return [component for component in plan.components if component.name in names]


def worst_of(verdicts: Iterable[str | None]) -> str | None:
    """Return the worst of several verdicts; "works" if there are none."""
    order = ("works", "slow", "untested", "breaks", None)
    return max(verdicts, key=order.index, default="works")


def _least(component: ComponentPlan, sources: Mapping[str, Any]) -> int:
    src = sources[component.name]
    sizes = {weight.name: float(weight.bytes) for weight in component.weights}
    floats = {name: info.nbytes for name, info in src.plain.items() if name not in sizes}
    # They may be cast to another dtype: the plan knows what they take together.
    scale = (component.bytes - sum(sizes.values())) / max(sum(floats.values()), 1)
    sizes |= {name: size * scale for name, size in floats.items()}
    blocks: dict[str, float] = {}
    for name, size in sizes.items():
        match = _BLOCK.match(name)
        block = match[0] if match else ""
        blocks[block] = blocks.get(block, 0) + size
    rest = blocks.pop("", 0)
    return math.ceil(rest + 2 * max(blocks.values(), default=0))
