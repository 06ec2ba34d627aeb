"""A plan: what will be done with each weight of a model, and the bytes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.backend import QuantSpec
    from ..formats.checkpoint import Source
    from ..models.detection import Detected
    from . import plan
    from .weight_selection import WeightPlan


@dataclass(frozen=True, kw_only=True)
class ComponentPlan:
    """What will be done with one component.

    Attributes:
        name: in the pipeline ("unet"); "model" where the component stands alone.
        action: "encode" (quantize float weights), "found" (they are quantized on disk), or "keep".
        mode: "pre" or "post" for "encode", else "found".
        compute: "int8" or "fp8" where products with the quantized weights are in those; None as the scheme stores them.
        weights: the quantized weights.
        products: modules whose products of activations are quantized; None where the model was not looked at.
        kept: float weights of a layer that could be quantized and is not, with the reason.
        bytes: of the whole component in memory. bytes_bf16: of the same with every weight in bf16.
        path: of the file or folder that it is read from.
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

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; weights as their number and sums."""
        return {
            "name": self.name,
            "path": self.path,
            "class_name": self.class_name,
            "action": self.action,
            "scheme": str(self.spec) if self.spec else self.scheme,
            "mode": self.mode,
            "runtime": self.runtime,
            "compute": self.compute or "float",
            "quantized_weights": len(self.weights),
            "quantized_products": self.products or 0,
            "quantized_bytes": sum(weight.bytes for weight in self.weights),
            "quantized_bytes_bf16": sum(weight.bytes_bf16 for weight in self.weights),
            "kept": dict(self.kept),
            "bytes": self.bytes,
            "bytes_bf16": self.bytes_bf16,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole load, before it happens.

    Attributes:
        peak: how much of the fast memory it takes at the most, where that was asked for (`peaks.predict`).
        why: what was chosen and why, where "auto" was asked for; a sentence without a period.
        foreseen: a step's computing time over the unquantized model's, where that was asked for (`foreseeing.step`).
    """

    path: str
    base: str | None
    container: str
    family: str | None
    offload: str
    device: str
    dtype: str | None
    budget: int | None
    components: tuple[ComponentPlan, ...]
    warnings: tuple[str, ...]
    detected: Detected = field(repr=False, compare=False)
    peak: Peak | None = None
    why: str | None = None
    foreseen: float | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all components in memory."""
        return sum(part.bytes for part in self.components)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "path": self.path,
            "base": self.base,
            "container": self.container,
            "family": self.family,
            "offload": self.offload,
            "device": self.device,
            "dtype": self.dtype,
            "budget": self.budget,
            "bytes": self.bytes,
            "bytes_bf16": sum(part.bytes_bf16 for part in self.components),
            "components": [part.to_dict() for part in self.components],
            "peak": None if self.peak is None else self.peak.to_dict(),
            "why": self.why,
            "foreseen": self.foreseen,
            "warnings": list(self.warnings),
        }


def source_of(made: plan.Plan, part: plan.ComponentPlan) -> Source:
    """Where a component is read from."""
    return made.detected.sources["." if part.name == "model" else part.name]


def folder_of(made: plan.Plan) -> Path:
    """Of the pipeline, which has what is no model: scheduler, tokenizers."""
    return Path(made.base) if made.base is not None else Path(made.path)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most fast memory at once, in bytes.

    Attributes:
        weights: on the device at once, buffers of streaming included.
        activations: of the component whose temporaries take most; None where they cannot be told.
        scratch: for weights that are decoded where they are used.
        bytes: at the worst moment, which need not be the worst of each: in model offload a small text encoder is alone
            on the device with its activations. Without activations where they cannot be told.
        parts: by component, in the order in which they run: its activations.
        budget: what balanced offload keeps to.
        copied: weights once more, as OpenVINO compiles them; see `openvino_runtime.memory`.
        kernels: what libraries keep of the components' operations on the CPU; see `activations.Trace`.
        unused: freed memory that a process on the CPU may hold; see `heap`. Budgets leave both to their margin.
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
        """As JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"parts": dict(self.parts)}
