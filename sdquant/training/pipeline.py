"""Load the pipeline to train: in float32, with its other components quantized as at inference."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..formats import main_dtype

if TYPE_CHECKING:
    from torch import nn

    from .settings import TrainingSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The pipeline, and the network in it that is trained.

    Attributes:
        pipe: the pipeline. main: name of the network that is trained.
        net: that network, in float32 or with a backend's weights.
        floats: the float versions of the components that are now quantized by rules.
        quantized: names of the network's weights that rules apply to; None without rules.
        dtype: of the saved model, a torch dtype.
    """

    pipe: Any
    main: str
    net: Any
    floats: dict[str, nn.Module]
    quantized: frozenset[str] | None
    dtype: Any

    def restore(self) -> None:
        """Restore the float components that were quantized by rules, so that the float model is saved."""
        for name, part in self.floats.items():
            setattr(self.pipe, name, part)

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Context in which the components that were quantized by rules are their float versions."""
        now = {name: getattr(self.pipe, name) for name in self.floats}
        self.restore()
        try:
            yield
        finally:
            for name, part in now.items():
                setattr(self.pipe, name, part)


def load(settings: TrainingSettings) -> Model:
    """Load the pipeline.

    Raises:
        SettingsError: it is not a pipeline, or its weights are already quantized and no LoRA is trained.
    """
    from ..core import MAIN, dtype_named
    from ..loading import load as load_whole
    from ..nn import quantized
    from ..planning import prepare

    request = settings.model
    detected = prepare(replace(request, quant=None, components=None, skip=())).detected
    main = next((name for name in MAIN if name in detected.sources), None)
    ruled = _ruled(main, settings) if settings.rules and main is not None else None
    pipe = load_whole(request if settings.lora_rank else replace(request, components=None, skip=()))
    if main is None or not hasattr(pipe, main):
        raise SettingsError(
            f"Cannot train {request.path}", f"it is a {type(pipe).__name__}, not a pipeline with a UNet or transformer",
            "Use a pipeline's folder, or base=<pipeline folder> together with the component",
        )  # fmt: skip
    net = getattr(pipe, main)
    if not settings.lora_rank and any(True for _ in quantized(net)):
        raise SettingsError(
            f"Cannot train {request.path}", "its weights are quantized, so only a LoRA on them can be trained",
            "Set lora_rank, or use the model with float weights",
        )  # fmt: skip
    floats = {} if ruled is None else _by_rules(pipe, [name for name in ruled if name != main], settings)
    dtype = dtype_named(settings.dtype or main_dtype(detected.sources[main]) or "float32")
    return Model(
        pipe=pipe, main=main, net=net, floats=floats, quantized=None if ruled is None else ruled[main], dtype=dtype
    )


def _ruled(main: str, settings: TrainingSettings) -> dict[str, frozenset[str]]:
    """Return the components that rules quantize, including the trained network, each with the names of the weights that
    the rules apply to. Only headers are read.

    Raises:
        IncompatibleError: nothing in the network would be quantized.
    """
    from ..planning import prepare, rule_checks, weight_selection

    request = replace(settings.model, rules=settings.rules, quant_stats=settings.quant_stats)
    plan = prepare(request)  # refuses statistics of other weights
    for line in plan.warnings:
        log.warning("%s", line)
    extents = rule_checks.extents_of(plan.components, plan.detected.sources)
    weight_selection.require_something(request.path, {name: part for name, part in extents.items() if name == main})
    components = {
        part.name: part for part in plan.components if part.name in extents and not extents[part.name].is_empty
    }
    return {name: frozenset(weight.name for weight in part.weights) for name, part in components.items()}


def _by_rules(pipe: Any, names: list[str], settings: TrainingSettings) -> dict[str, nn.Module]:
    """Quantize the other components that the rules apply to; return their float versions."""
    from ..loading import quantize

    floats = {name: copy.deepcopy(getattr(pipe, name)) for name in names}
    if names:
        quantize(
            pipe, rules=settings.rules, quant_stats=settings.quant_stats, components=tuple(names),
            skip=settings.model.skip, progress=settings.progress,
        )  # fmt: skip
    return floats
