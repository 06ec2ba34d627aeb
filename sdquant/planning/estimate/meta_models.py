"""The networks of a plan, without weights: modules on the meta device, and what one drawing does with their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...core import registry
from ...errors import SdquantError
from ...models import activation_memory, classes, components, pipeline_folders
from ...nn import openvino
from ...nn.openvino import memory_model
from ...offload.host_store import aligned
from .. import plan as loader_plan

if TYPE_CHECKING:
    from ...formats.checkpoint import Source
    from ...models.activation_memory import Trace
    from ..plan import ComponentPlan, Plan


@dataclass(frozen=True)
class Network:
    """A component without weights: its module on the meta device, and the bytes that each tensor of it will have."""

    plan: ComponentPlan
    module: nn.Module
    sizes: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all, as they lie in a store."""
        return sum(self.sizes.values())

    @property
    def scratch(self) -> int:
        """Bytes of its largest quantized weight, decoded. Plain layers keep the buffer, libraries give theirs back."""
        if self._compiled:
            return 0  # it decodes in what `copied` counts
        return max((weight.bytes_bf16 // 2 * self._itemsize for weight in self.plan.weights), default=0)

    @property
    def copied(self) -> int:
        """Bytes of a compiled model's own copy of the weights."""
        if not self._compiled:
            return 0
        shapes = {name: tuple(one.shape) for name, one in self.module.named_parameters(remove_duplicate=False)}
        known = frozenset(shapes)
        held = [
            memory_model.Held(
                w.bytes, registry.scheme(w.scheme).bits, shapes[components.model_name(w.name, known) or w.name]
            )
            for w in self.plan.weights
        ]
        return memory_model.copied(held, self._itemsize)

    @property
    def _compiled(self) -> bool:
        return self.plan.runtime == openvino.NAME

    @property
    def _itemsize(self) -> int:
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.bfloat16)
        return dtype.itemsize

    @property
    def wrapped(self) -> bool:
        """Whether its quantized weights are wrapper tensors, as optimum-quanto's modules have them."""
        scheme = self.plan.scheme
        return self.plan.runtime == "library" and scheme is not None and registry.scheme(scheme).backend == "quanto"

    @property
    def keeps(self) -> bool:
        """Whether its scratch stays when it has run; see `kernels.scratch`."""
        return self.plan.runtime != "library"


def of_plan(made: Plan) -> dict[str, Network]:
    """By component. Raises SdquantError: what loading would raise for a config that cannot be used."""
    return {part.name: _network(part, loader_plan.source_of(made, part), made.dtype) for part in made.components}


def trace(
    made: Plan, networks: Mapping[str, Network] | None = None, *, width: int | None = None, height: int | None = None
) -> dict[str, Trace | None]:
    """What the calls of each component take and compute when one image is drawn, in the order in which they run. How
    weights are quantized has no part in it.

    Args:
        networks: of the plan, where they are at hand.
        width, height: of the image in pixels; None for what the model was made for.

    Returns:
        None for components whose shapes do not tell, and for one that is alone and of a class whose inputs nobody has
        written down (`inputs`).

    Raises:
        SdquantError: what loading would raise for a config or a pipeline's folder that cannot be used; an image of that
            size cannot be.
    """
    networks = of_plan(made) if networks is None else networks
    if set(networks) == {"model"}:
        return {"model": activation_memory.of_component(networks["model"].module, width=width, height=height)}
    folder = loader_plan.folder_of(made)
    pipeline_folders.check_pipeline(folder)
    pipe = pipeline_folders.pipeline(folder, {name: one.module for name, one in networks.items()})
    return activation_memory.of_pipeline(pipe, width=width, height=height)


def trace_if_sound(made: Plan) -> dict[str, Trace | None]:
    """`trace`; nothing of a model that cannot be used, for which loading has better words."""
    try:
        return trace(made)
    except SdquantError:
        return {}


def _network(part: ComponentPlan, src: Source, dtype: str | None) -> Network:
    module = classes.meta_model(src)
    stored = {key: info.dtype for key, info in src.plain.items()}
    usual = dtype or _most(stored, src) or "bfloat16"
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            said = stored.get(name, usual)
            kept = dtype is None and said in ("float32", "float16", "bfloat16")
            parameter.data = parameter.data.to(components.dtype_named(said if kept else usual))
    return Network(part, module, _sizes(part, module))


def _most(stored: Mapping[str, str], src: Source) -> str | None:
    sizes: dict[str, int] = {}
    for key, dtype in stored.items():
        if dtype in ("float32", "float16", "bfloat16"):
            sizes[dtype] = sizes.get(dtype, 0) + src.plain[key].nbytes
    return max(sizes, key=lambda name: sizes[name], default=None)


def _sizes(part: ComponentPlan, module: nn.Module) -> dict[str, int]:
    """By the model's names; the tensors that are tied count under one."""
    known = frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))
    sizes = {components.model_name(w.name, known) or w.name: w.bytes for w in part.weights}
    floats = {
        name: tensor.numel() * tensor.element_size()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name not in sizes
    }
    return {name: aligned(size) for name, size in (sizes | floats).items()}
