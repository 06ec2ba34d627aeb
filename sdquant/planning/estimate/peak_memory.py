"""How much fast memory a plan will take at the most: weights on the device at once, and what computing with them takes.

Nothing is loaded: weights are sizes by name, and each component's activations come from a trace of its shapes
(`activations`). How an offload mode shares the device is worked out by the mode's own book, with units of paper.
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
from .meta_models import Network, of_plan, trace

if TYPE_CHECKING:
    from ...models.activation_memory import Trace
    from ..plan import Plan

log = logging.getLogger(__name__)

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def predict(
    made: Plan, *, width: int | None = None, height: int | None = None, traced: Mapping[str, Trace | None] | None = None
) -> Peak:
    """The peak of a plan when one image is drawn.

    Args:
        width, height: of the image in pixels; None for what the model was made for.
        traced: what `networks.trace` gave for that size, of this plan or of one that quantizes otherwise.

    Raises:
        BudgetError: the model cannot run within its budget.
        SdquantError: what loading would raise for a config or a pipeline's folder that cannot be used.
    """
    nets = of_plan(made)
    found = trace(made, nets, width=width, height=height) if traced is None else traced
    parts = {name: None if one is None else one.peak for name, one in found.items()}
    known = [size for size in parts.values() if size is not None]
    most = max(known) if known else None
    kept = max((one.scratch for one in nets.values() if one.keeps), default=0)
    scratch = max((one.scratch for one in nets.values()), default=0)
    copied = sum(one.copied for one in nets.values())  # the matrix allows no offload beside it
    device = torch.device(made.device)
    kernels = sum(one.kernels for one in found.values() if one is not None) if device.type == "cpu" else 0
    ordered = {name: nets[name] for name in parts}
    budget = None
    if made.offload == "balanced":
        budget = made.budget
        if budget is None:
            budget = default_budget(device, 0, None if most is None else most + scratch)
        moments = _balanced(ordered, device, budget)
    else:
        moments = _MODES[made.offload](ordered, device)
    used = copied + kernels
    used += max(weights + (parts[name] or 0) + max(kept, nets[name].scratch) for name, weights in moments.items())
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
    """A unit of a size, as `Residency` and `plans.plan` see units: it moves by being counted."""

    def __init__(self, name: str, nbytes: int, handle: OffloadHandle) -> None:
        self.name, self.nbytes, self._counters = name, nbytes, handle.counters
        self.resident = False

    def read(self, buffer: None, device: torch.device) -> None:
        """Nothing to bring."""

    def place(self, flat: None, *, held: bool) -> None:
        """On the device."""
        self.resident = True
        self._counters.hold(self.nbytes)

    def drop(self, store: None) -> None:
        """Off it."""
        self.resident = False
        self._counters.hold(-self.nbytes)


def _none(networks: Mapping[str, Network], device: torch.device) -> dict[str, int]:
    return dict.fromkeys(networks, sum(one.nbytes for one in networks.values()))


def _model(networks: Mapping[str, Network], device: torch.device) -> dict[str, int]:
    """Wrapper tensors, which cannot be in a file, stay in RAM if the device is the CPU."""
    opaque = dict.fromkeys(networks, 0)
    if device.type == "cpu":
        opaque |= {name: sum(w.bytes for w in one.plan.weights) for name, one in networks.items() if one.wrapped}
    stays = sum(opaque.values())
    return {name: stays + one.nbytes - opaque[name] for name, one in networks.items()}


def _sequential(networks: Mapping[str, Network], device: torch.device) -> dict[str, int]:
    """On the CPU leaves compute from the mapped file."""
    if device.type == "cpu":
        return dict.fromkeys(networks, 0)
    return {name: max(_by(one, _leaves(one)).values()) for name, one in networks.items()}


def _group(networks: Mapping[str, Network], device: torch.device) -> dict[str, int]:
    """What is in no group, and one group; on a GPU the next one as well. On the CPU, what stays in RAM is there too."""
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
    made: list[Any] = []
    for name, one in networks.items():
        sizes = _by(one, [block for block, _ in find_blocks(one.module)])
        rest: Any = _Paper("", sizes.pop("", 0), handle)
        blocks: list[Any] = [_Paper(block, size, handle) for block, size in sizes.items() if size]
        made.append(Component(name, one.module, rest, blocks))
    refuse_too_small(made, 0, budget)
    residency = Residency(made, (), None, device, handle, budget)  # type: ignore[arg-type]
    moments: dict[str, int] = {}
    for component in (*made, *made):  # from the second image on, what an earlier one has left is there
        _run(component, residency, budget)
        moments[component.name] = max(moments.get(component.name, 0), handle.counters.resident)
    return moments


def _run(component: Component, residency: Residency, budget: int) -> None:
    """What happens on the device when the component is called; see `balanced`."""
    units, buffers = component.units, 0
    if component.nbytes > budget:
        made = streaming_plan.plan(component, budget)
        units, buffers = list(made.resident), 0 if component.release else made.buffers * made.buffer_bytes
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
    """Bytes by owner, the modules of these dotted names; "" for what is in none."""
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
    """The members of the lists of blocks that are its own children, as diffusers cuts it."""
    return list(_members(one.module))


def _members(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield from (f"{name}.{index}" for index in range(len(child)))
