"""Predict the peak use of fast memory of a plan: weights on the device at once, activations and workspace.

Nothing is loaded: weights are sizes by name, and each component's activations come from a trace of its shapes
(`activation_memory`). What is on the device at once each offload mode knows (`OffloadMode.peak`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ...offload import ComponentSizes, budget_on
from ...utils import malloc_trim
from ..plan import Peak
from .meta_models import Network, of_plan, trace_plan

if TYPE_CHECKING:
    from ...compat import Machine
    from ...models import Trace
    from ..plan import Plan


def predict(
    plan: Plan,
    machine: Machine,
    *,
    width: int | None = None,
    height: int | None = None,
    traced: Mapping[str, Trace | None] | None = None,
) -> Peak:
    """Predict the peak memory of a plan while one image is generated.

    Args:
        machine: the one that the plan is for: what is free on its device is the default budget.
        width, height: of the image in pixels; None for the model's default.
        traced: result of `meta_models.trace_plan` for that size, for this plan or one with other schemes.

    Raises:
        BudgetError: the model cannot run within its budget. SettingsError: it has none, and the device does not report
            how much of its memory is free.
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
    mode, budget = plan.offload_mode, plan.budget
    if mode.takes_budget and budget is None:
        budget = budget_on(machine.device(plan.device), None if most is None else most + scratch)
    moments = mode.peak({name: _sizes_of(nets[name]) for name in parts}, device, budget)
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


def _sizes_of(one: Network) -> ComponentSizes:
    quantized = sum(weight.bytes for weight in one.plan.weights)
    from_library = one.plan.runtime == "library" and quantized > 0
    return ComponentSizes(
        module=one.module, tensors=one.sizes, opaque=quantized if one.wrapped else 0, from_library=from_library
    )
