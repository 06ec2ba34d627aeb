"""Models of a plan without weights: modules on the meta device, and a shape trace of generating one image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...core import COMPUTE_DTYPES, LONE, dtype_named, registry
from ...errors import SdquantError
from ...formats import main_dtype
from ...models import activation_memory, classes, components, file_tokenizers, pipeline_folders
from ...nn import openvino, openvino_memory
from ...offload import host_store
from ..plan import folder_of, source_of

if TYPE_CHECKING:
    from ...formats import Checkpoint
    from ...models import Trace
    from ..plan import ComponentPlan, Plan


@dataclass(frozen=True)
class Network:
    """A component without weights: its module on the meta device, and the size in bytes of each loaded tensor."""

    plan: ComponentPlan
    module: nn.Module
    sizes: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, alignment of the host store included."""
        return sum(self.sizes.values())

    @property
    def scratch(self) -> int:
        """Size in bytes of the workspace to dequantize its largest weight. Plain layers keep it, libraries free it."""
        if self._compiled:
            return 0  # `copied` includes its workspace
        return max((weight.bytes_bf16 // 2 * self._itemsize for weight in self.plan.weights), default=0)

    @property
    def copied(self) -> int:
        """Size in bytes of a compiled model's own copy of the weights."""
        if not self._compiled:
            return 0
        shapes = {name: tuple(one.shape) for name, one in self.module.named_parameters(remove_duplicate=False)}
        known = frozenset(shapes)
        weights = [
            openvino_memory.CompiledWeight(
                w.bytes, registry.scheme(w.scheme).bits, shapes[components.model_name(w.name, known) or w.name]
            )
            for w in self.plan.weights
        ]
        return openvino_memory.copied_bytes(weights, self._itemsize)

    @property
    def _compiled(self) -> bool:
        return self.plan.runtime == openvino.NAME

    @property
    def _itemsize(self) -> int:
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.bfloat16)
        return dtype.itemsize

    @property
    def wrapped(self) -> bool:
        """True if its quantized weights are tensor subclasses, as in optimum-quanto's modules."""
        scheme = self.plan.scheme
        return self.plan.runtime == "library" and scheme is not None and registry.scheme(scheme).backend == "quanto"

    @property
    def keeps(self) -> bool:
        """True if its workspace stays allocated after it has run; see `kernels.workspace`."""
        return self.plan.runtime != "library"


def of_plan(plan: Plan) -> dict[str, Network]:
    """Build the network of each component. Raises SdquantError for unusable configs, as loading would."""
    return {part.name: _network(part, source_of(plan, part), plan.dtype) for part in plan.components}


def trace_plan(
    plan: Plan, networks: Mapping[str, Network] | None = None, *, width: int | None = None, height: int | None = None
) -> dict[str, Trace | None]:
    """Trace the memory and operations of each component while one image is generated, in the order in which they run.

    The result does not depend on how weights are quantized.

    Args:
        networks: of the plan, if already built.
        width, height: of the image in pixels; None for the model's default.

    Returns:
        None for components whose shapes cannot be traced, and for a single component of a class whose inputs are
        unknown (`dummy_inputs`).

    Raises:
        SdquantError: an unusable config or pipeline folder, as loading would raise; an impossible image size.
    """
    networks = of_plan(plan) if networks is None else networks
    if set(networks) == {LONE}:
        return {LONE: activation_memory.of_component(networks[LONE].module, width=width, height=height)}
    folder = folder_of(plan)
    pipeline_folders.check_pipeline(folder)
    tokenizers = file_tokenizers.built(folder, plan.detected.sources)
    pipe = pipeline_folders.pipeline(folder, {name: one.module for name, one in networks.items()}, tokenizers)
    return activation_memory.of_pipeline(pipe, width=width, height=height)


def trace_if_sound(plan: Plan) -> dict[str, Trace | None]:
    """Call `trace_plan`; return {} for an unusable model, since loading reports it with a better message."""
    try:
        return trace_plan(plan)
    except SdquantError:
        return {}


def _network(part: ComponentPlan, src: Checkpoint, dtype: str | None) -> Network:
    module = classes.meta_model(src)
    stored = {key: info.dtype for key, info in src.plain.items()}
    usual = dtype or main_dtype(src) or "bfloat16"
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            file_dtype = stored.get(name, usual)
            keeps_dtype = dtype is None and file_dtype in COMPUTE_DTYPES
            parameter.data = parameter.data.to(dtype_named(file_dtype if keeps_dtype else usual))
    return Network(part, module, _sizes(part, module))


def _sizes(part: ComponentPlan, module: nn.Module) -> dict[str, int]:
    """Return sizes in bytes by the model's tensor names; tied tensors count once."""
    known = frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))
    sizes = {components.model_name(w.name, known) or w.name: w.bytes for w in part.weights}
    floats = {
        name: tensor.numel() * tensor.element_size()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name not in sizes
    }
    return {name: host_store.aligned(size) for name, size in (sizes | floats).items()}
