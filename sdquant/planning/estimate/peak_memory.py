"""Predict the peak use of fast memory of a plan: weights on the device at once, activations and workspace.

Nothing is loaded: weights are sizes by name, and each component's activations come from a trace of its shapes
(`activation_memory`). Balanced offload is simulated by its own planner and residency code, with blocks that only count
bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...offload import group, streaming_plan
from ...offload.balanced import refuse_too_small
from ...offload.blocks import Component, find_blocks
from ...offload.budget import default_budget
from ...offload.handle import OffloadHandle
from ...offload.residency import Residency
from ...utils import malloc_trim
from ..plan import Peak
from .meta_models import Network, of_plan, trace_plan

if TYPE_CHECKING:
    from ...models.activation_memory import Trace
    from ..plan import Plan

log = logging.getLogger(__name__)


def predict(
    plan: Plan, *, width: int | None = None, height: int | None = None, traced: Mapping[str, Trace | None] | None = None
) -> Peak:
    """Predict the peak memory of a plan while one image is generated.

    Args:
        width, height: of the image in pixels; None for the model's default.
        traced: result of `meta_models.trace_plan` for that size, for this plan or one with other schemes.

    Raises:
        BudgetError: the model cannot run within its budget.
        SdquantError: an unusable config or pipeline folder, as loading would raise.
    """
    nets = of_plan(plan)
    traces = trace_plan(plan, nets, width=width, height=height) if traced is None else traced
    parts = {name: None if one is None else one.peak for name, one in traces.items()}
    known = [size for size in parts.values() if size is not None]
    most = max(known) if known else None
    kept_scratch = max((one.scratch for one in nets.values() if one.keeps), default=0)
    scratch = max((one.scratch for one in nets.values()), default=0)
    copied = sum(one.copied for one in nets.values())  # the matrix allows it only without offload
    device = torch.device(plan.device)
    kernels = sum(one.kernels for one in traces.values() if one is not None) if device.type == "cpu" else 0
    ordered = {name: nets[name] for name in parts}
    budget = None
    if plan.offload == "balanced":
        budget = plan.budget
        if budget is None:
            budget = default_budget(device, 0, None if most is None else most + scratch)
        moments = _balanced(ordered, device, budget)
    else:
        moments = _MODES[plan.offload](ordered, device)
    used = copied + kernels
    used += max(
        weights + (parts[name] or 0) + max(kept_scratch, nets[name].scratch) for name, weights in moments.items()
    )
    unused = malloc_trim.spare(used) if device.type == "cpu" else 0
    return Peak(
        weights=max(moments.values()),
        activations=most,
        scratch=scratch,
        bytes=used + unused,
        parts=parts,
        budget=budget,
        copied=copied,
        kernels=kernels,
        unused=unused,
    )


class _Paper:
    """Simulated block for `Residency` and `streaming_plan.plan`: tracks bytes only, moves no data."""

    def __init__(self, name: str, nbytes: int, handle: OffloadHandle) -> None:
        self.name, self.nbytes, self._counters = name, nbytes, handle.counters
        self.resident = False

    def read(self, buffer: None, device: torch.device) -> None:
        """Do nothing: there is no data."""

    def place(self, flat: None, *, held: bool) -> None:
        """Count it as resident on the device."""
        self.resident = True
        self._counters.hold(self.nbytes)

    def drop(self, store: None) -> None:
        """Count it as evicted from the device."""
        self.resident = False
        self._counters.hold(-self.nbytes)


def _none(networks: Mapping[str, Network], device: torch.device) -> dict[str, int]:
    return dict.fromkeys(networks, sum(one.nbytes for one in networks.values()))


def _model(networks: Mapping[str, Network], device: torch.device) -> dict[str, int]:
    """Model offload. On the CPU, tensor subclasses stay in RAM, since they cannot be mapped from a file."""
    opaque = dict.fromkeys(networks, 0)
    if device.type == "cpu":
        opaque |= {name: sum(w.bytes for w in one.plan.weights) for name, one in networks.items() if one.wrapped}
    stays = sum(opaque.values())
    return {name: stays + one.nbytes - opaque[name] for name, one in networks.items()}


def _sequential(networks: Mapping[str, Network], device: torch.device) -> dict[str, int]:
    """Sequential offload. On the CPU, leaf modules compute from the mapped file."""
    if device.type == "cpu":
        return dict.fromkeys(networks, 0)
    return {name: max(_by(one, _leaves(one)).values()) for name, one in networks.items()}


def _group(networks: Mapping[str, Network], device: torch.device) -> dict[str, int]:
    """Group offload: weights outside groups plus one group, on GPUs also the prefetched one.

    On the CPU, components that cannot be mapped from disk stay in RAM all the time.
    """
    ahead = 2 if device.type == "cuda" else 1
    away, stays = {}, 0
    for name, one in networks.items():
        blocks = group.level(one.module) == "block_level"
        sizes = _by(one, _children(one) if blocks else _leaves(one))
        rest = sizes.pop("", 0)
        wrapped = one.plan.runtime == "library" and one.plan.weights
        if device.type == "cpu" and (wrapped or group.why_not_disk(one.module)):
            stays += one.nbytes
            away[name] = 0
        else:
            away[name] = rest + sum(sorted(sizes.values())[-ahead:])
    return {name: stays + size for name, size in away.items()}


_MODES = {"none": _none, "model": _model, "sequential": _sequential, "group": _group}


def _balanced(networks: Mapping[str, Network], device: torch.device, budget: int) -> dict[str, int]:
    total = sum(one.nbytes for one in networks.values())
    if total <= budget:
        return _none(networks, device)
    handle = OffloadHandle("balanced", str(device), total)
    components: list[Any] = []
    for name, one in networks.items():
        sizes = _by(one, [block for block, _ in find_blocks(one.module)])
        rest: Any = _Paper("", sizes.pop("", 0), handle)
        blocks: list[Any] = [_Paper(block, size, handle) for block, size in sizes.items() if size]
        components.append(Component(name, one.module, rest, blocks))
    refuse_too_small(components, 0, budget)
    residency = Residency(components, (), None, device, handle, budget)  # type: ignore[arg-type]
    moments: dict[str, int] = {}
    for component in (*components, *components):  # twice: the second image starts with what the first left resident
        _run(component, residency, budget)
        moments[component.name] = max(moments.get(component.name, 0), handle.counters.resident)
    return moments


def _run(component: Component, residency: Residency, budget: int) -> None:
    """Simulate what a call of the component does on the device; see `offload.balanced`."""
    units, buffers = component.units, 0
    if component.nbytes > budget:
        plan = streaming_plan.plan(component, budget)
        units, buffers = list(plan.resident), 0 if component.release else plan.buffers * plan.buffer_bytes
    residency.touch(component)
    residency.make_room(sum(unit.nbytes for unit in units if not unit.resident) + buffers, component)
    residency.fetch(units)
    if buffers:

        def release() -> None:
            residency.counters.hold(-buffers)
            component.release = None

        residency.counters.hold(buffers)
        component.release = release


def _by(one: Network, owners: list[str]) -> dict[str, int]:
    """Sum sizes in bytes by owner, the modules of these dotted names; "" for tensors in none."""
    known = set(owners)
    sizes: dict[str, int] = {}
    for name, size in one.sizes.items():
        words = name.split(".")
        prefixes = (".".join(words[:count]) for count in range(len(words) - 1, 0, -1))
        owner = next((prefix for prefix in prefixes if prefix in known), "")
        sizes[owner] = sizes.get(owner, 0) + size
    return sizes


def _leaves(one: Network) -> list[str]:
    return [name for name, module in one.module.named_modules() if name and not any(module.children())]


def _children(one: Network) -> list[str]:
    """Return the members of its direct `ModuleList` children, the groups that diffusers forms."""
    return list(_members(one.module))


def _members(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield from (f"{name}.{index}" for index in range(len(child)))
