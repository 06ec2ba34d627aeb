"""Plans: how each weight of a model will be loaded, and its size in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import registry
from ..rules import MixSpec

if TYPE_CHECKING:
    from ..core import QuantSpec
    from ..formats import Checkpoint
    from ..models import Detected
    from ..offload import OffloadMode
    from .mix_curve import MixCurve
    from .weight_selection import WeightPlan


@dataclass(frozen=True, kw_only=True)
class ComponentPlan:
    """The plan for one component.

    Attributes:
        name: in the pipeline ("unet"); "model" for a single component.
        action: "encode" (quantize float weights), "found" (they are quantized on disk), or "keep".
        mode: "pre" or "post" for "encode", else "found".
        compute: "int8", "fp8" or "fp4" if products with the quantized weights are computed in it; else None.
        weights: the quantized weights.
        products: number of modules whose activation products are quantized; None if the model was not inspected.
        kept: float weights of layers that could be quantized but are not, with the reason.
        bytes: size of the component in memory. bytes_bf16: the same with every weight in bf16.
        path: the file or folder that it is read from.
    """

    name: str
    class_name: str | None
    action: str
    scheme: str | None
    mode: str
    runtime: str
    weights: tuple[WeightPlan, ...]
    kept: Mapping[str, str]
    bytes: int
    bytes_bf16: int
    spec: QuantSpec | None = field(default=None, repr=False)
    compute: str | None = None
    products: int | None = 0
    path: str | None = None

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the schemes of the quantized weights, that with the most bytes first. Of GGUF files, which mix types
        by design, the main one."""
        is_mix = isinstance(self.spec, MixSpec)
        if self.scheme is None or (registry.scheme(self.scheme).backend == "gguf" and not is_mix):
            return () if self.scheme is None else (self.scheme,)
        sizes: Counter[str] = Counter({self.scheme: 0})
        for weight in self.weights:
            sizes[weight.scheme] += weight.bytes
        return tuple(name for name, _ in sizes.most_common())

    @property
    def is_least(self) -> bool:
        """Return whether the bytes are the least: SDNQ gives some weights more bits, by values that no plan reads."""
        dynamic = self.spec is not None and "dynamic" in self.spec.scheme.options and self.spec["dynamic"]
        return self.action == "encode" and bool(dynamic)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, with the number and total sizes of the weights."""
        names = ("name", "path", "class_name", "action", "scheme", "mode", "runtime", "compute")
        mix = self.spec.to_dict() if isinstance(self.spec, MixSpec) else None
        return {name: getattr(self, name) for name in names} | {
            "scheme": str(self.spec) if self.spec else self.scheme,
            "formats": list(self.formats),
            "mix": mix,
            "compute": self.compute or "float",
            "quantized_weights": len(self.weights),
            "quantized_products": self.products or 0,
            "quantized_bytes": sum(weight.bytes for weight in self.weights),
            "quantized_bytes_bf16": sum(weight.bytes_bf16 for weight in self.weights),
            "kept": dict(self.kept),
            "bytes": self.bytes,
            "bytes_are_least": self.is_least,
            "bytes_bf16": self.bytes_bf16,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole load, before it happens.

    Attributes:
        peak: predicted peak of the fast memory, if requested (`peak_memory.predict`).
        why: for "auto", what was chosen and why; a sentence without a period.
        foreseen: predicted step time relative to the unquantized model, if requested (`step_time.step`).
        curve: of a mix, predicted quality against bytes.
    """

    path: str
    base: str | None
    container: str
    family: str | None
    offload_mode: OffloadMode
    device: str
    dtype: str | None
    budget: int | None
    components: tuple[ComponentPlan, ...]
    warnings: tuple[str, ...]
    detected: Detected = field(repr=False, compare=False)
    peak: Peak | None = None
    why: str | None = None
    foreseen: float | None = None
    curve: MixCurve | None = field(default=None, repr=False)

    @property
    def offload(self) -> str:
        """The name of the offload mode."""
        return self.offload_mode.name

    @property
    def bytes(self) -> int:
        """Size of all components in memory, in bytes."""
        return sum(component.bytes for component in self.components)

    @property
    def is_least(self) -> bool:
        """Return whether these bytes are the least; see `ComponentPlan.is_least`."""
        return any(component.is_least for component in self.components)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        names = ("path", "base", "container", "family", "offload", "device", "dtype", "budget", "bytes")
        return {name: getattr(self, name) for name in names} | {
            "bytes_bf16": sum(component.bytes_bf16 for component in self.components),
            "components": [component.to_dict() for component in self.components],
            "peak": None if self.peak is None else self.peak.to_dict(),
            "why": self.why,
            "foreseen": self.foreseen,
            "curve": None if self.curve is None else self.curve.to_dict(),
            "warnings": list(self.warnings),
        }


def source_of(plan: Plan, component: ComponentPlan) -> Checkpoint:
    """Return the source that a component is read from."""
    return plan.detected.sources[component.name]


def folder_of(plan: Plan) -> Path:
    """Return the pipeline folder, which has the scheduler and the tokenizers."""
    return Path(plan.base) if plan.base is not None else Path(plan.path)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak use of the fast memory, in bytes.

    Attributes:
        weights: most weights on the device at once, streaming buffers included.
        activations: of the component whose temporaries take most; None if unknown.
        scratch: workspace for weights that are dequantized when they are used.
        bytes: total at the worst moment, which need not be the sum of the maxima: with model offload a small text
            encoder is alone on the device with its activations. Without activations if they are unknown.
        parts: activations of each component, in the order in which they run.
        budget: weight budget of balanced offload.
        copied: OpenVINO's compiled copy of the weights; see `nn.openvino.memory_model`.
        kernels: memory that libraries cache for the components' operations on the CPU; see `activation_memory.Trace`.
        unused: freed memory that a CPU process may retain; see `malloc_trim`. Budgets leave the last two to their
            margin.
    """

    weights: int
    activations: int | None
    scratch: int
    bytes: int
    parts: Mapping[str, int | None] = field(default_factory=dict)
    budget: int | None = None
    copied: int = 0
    kernels: int = 0
    unused: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"parts": dict(self.parts)}
