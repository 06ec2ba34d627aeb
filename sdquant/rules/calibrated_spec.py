"""A scheme whose weights are quantized with the statistics of their inputs, as a `QuantSpec`: SVDQuant. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..backends import without_effect
from ..core import BIAS, QuantSpec, name_patterns, registry
from ..errors import SettingsError
from .quant_spec import digest, operation_of

if TYPE_CHECKING:
    from torch import Tensor

    from .layer_statistics import LayerStatistics


# Rows for each input of a layer, with which half of what they show beside the diagonal counts. A fifth was best for
# int4 on digits-flux: 12 calls of the model 24.8 -> 25.8 dB, 30 calls 27.9 either way.
_INPUTS = 0.2
_NAMED = 3  # weights of which a sentence says the names


@dataclass(frozen=True)
class CalibratedSpec(QuantSpec):
    """A scheme with a file of statistics.

    Attributes:
        statistics: path of the file. component: see `RulesSpec`. path: of the module, once it is for one weight.
    """

    statistics: str = ""
    component: str = ""
    path: str = ""

    def of_component(self, name: str) -> CalibratedSpec:
        return replace(self, component=name)

    def of(self, name: str, shape: tuple[int, ...]) -> QuantSpec:
        if self.path:
            return self
        if len(shape) == 2 and name_patterns.is_table(name):  # which has no inputs that calibration could measure
            return QuantSpec(self.scheme, self.options, self.embeddings)
        return replace(self, path=name.removesuffix(".weight"))

    def described(self) -> str:
        return json.dumps([str(self), self.component, digest(self.statistics)])

    def second_moments(self, inputs: int) -> Tensor | None:
        """See `QuantSpec.second_moments`. None for a layer that calibration knows, and no image needed.

        Few rows say less of how inputs go together than of how large they are: what is beside the diagonal counts for
        n / (n + inputs / 5) of what n rows of calibration show.

        Raises:
            SettingsError: the file has nothing about the layer, or is about another number of inputs.
        """
        what = f"Cannot weigh the errors of {self.path!r}"
        layer = self._layer(what)
        moments = layer.second_moments
        if moments is None:
            return None
        blocks, size, _ = moments.shape
        if -(-inputs // size) != blocks or (blocks == 1 and inputs != size):
            about = size if blocks == 1 else f"{blocks * size - size + 1} to {blocks * size}"
            raise self._other_size(what, about, inputs)
        return shrink_moments(moments, layer.rows, inputs)

    def mean_input(self, inputs: int) -> Tensor | None:
        """See `QuantSpec.mean_input`. None for a layer that calibration knows, and no image needed.

        Raises:
            SettingsError: the file has nothing about the layer, is about another number of inputs, or is of a version
                of sdquant that did not measure them.
        """
        what = f"Cannot correct the bias of {self.path!r}"
        layer = self._layer(what)
        mean = layer.mean_input
        if mean is None and layer.rows:
            raise SettingsError(what, "quant_stats is of an earlier sdquant, and has no mean inputs", self._again)
        if mean is not None and len(mean) != inputs:
            raise self._other_size(what, len(mean), inputs)
        return mean

    def _layer(self, what: str) -> LayerStatistics:
        from .layer_statistics import ComponentStatistics

        layer = ComponentStatistics(self.statistics, self.component).get(self.path)
        if layer is None:
            raise self._unknown(what)
        return layer

    def _other_size(self, what: str, about: object, inputs: int) -> SettingsError:
        return SettingsError(what, f"quant_stats is about {about} inputs, but it has {inputs}", self._again)

    def magnitudes(self, inputs: int) -> Tensor | None:
        """See `QuantSpec.magnitudes`. None for a layer that calibration knows, and no image needed.

        Raises:
            SettingsError: the file has nothing about the layer, or not a magnitude for each of its inputs.
        """
        from .core.static_range import SUM, operand, spellings
        from .statistics_file import of_component, read_statistics

        known = of_component(read_statistics(self.statistics), self.component)
        names = (operand(path, operation_of((1, inputs))) for path in spellings(self.path))
        name = next((one for one in names if f"{one}.count" in known), None)
        what = f"Cannot smooth the inputs of {self.path!r}"
        if name is None:
            raise self._unknown(what)
        count, total = int(known[f"{name}.count"]), known.get(f"{name}.{SUM}absmax")
        if not count:
            return None
        if total is None or total.numel() != inputs:
            size = "no magnitudes" if total is None else f"{total.numel()} magnitudes"
            raise SettingsError(what, f"quant_stats has {size} for its {inputs} inputs", self._again)
        magnitudes = total.reshape(-1).float() / count
        if not bool(magnitudes.isfinite().all()):
            raise SettingsError(what, "quant_stats has magnitudes that are infinite or not a number", self._again)
        return magnitudes

    @property
    def _again(self) -> str:
        way = f" -q {self.scheme}" if self.scheme.calibrated else ""
        return f"Calibrate this model: sdquant calibrate MODEL{way} --prompt ... -o FILE"

    def _unknown(self, what: str) -> SettingsError:
        whole = f" of the {self.component}" if self.component else ""
        return SettingsError(
            what,
            f"quant_stats={self.statistics!r} knows no such layer{whole}",
            f"{self._again}; or name the components that it is about in components=",
        )


def shrink_moments(moments: Tensor, rows: int, inputs: int) -> Tensor:
    """Return second moments, changed in place, with as much beside the diagonal as so many rows of inputs tell."""
    means = moments.diagonal(dim1=1, dim2=2).clone()
    moments.mul_(rows / (rows + _INPUTS * inputs))
    moments.diagonal(dim1=1, dim2=2).copy_(means)
    return moments


def with_statistics(spec: QuantSpec, statistics: str, component: str = "") -> CalibratedSpec:
    """Return the spec of a calibrated scheme with a file of statistics."""
    return CalibratedSpec(spec.scheme, spec.options, spec.embeddings, statistics=statistics, component=component)


def calibrated_schemes() -> str:
    """Return which schemes use a file of statistics, for errors."""
    rows = [row for row in registry.schemes() if row.calibrated or row.moments]
    names = [row.aliases[0] if row.aliases else row.name for row in rows]
    options = {name for row in registry.schemes() for name, one in row.options.items() if one.uses_statistics}
    return f"{' and '.join(names)}, and the options {' and '.join(sorted(options))} of other schemes"


def require_magnitudes(spec: QuantSpec, weights: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise SettingsError if the statistics of a spec, if it has any, lack one of these weights, by name and shape."""
    if isinstance(spec, CalibratedSpec):
        for name, shape in weights:
            one = spec.of(name, shape)
            if spec.scheme.calibrated:
                one.magnitudes(shape[1])
            elif BIAS in spec.scheme.options and spec[BIAS]:  # which reads the moments, too
                one.mean_input(math.prod(shape[1:]))
            else:
                one.second_moments(math.prod(shape[1:]))


def unweighed(spec: QuantSpec, weights: Iterable[tuple[str, tuple[int, ...]]], component: str = "") -> list[str]:
    """Return a sentence for each option of a spec that changes nothing in some of the weights, by name and shape."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, shape in weights:
        for one in without_effect(spec.of(name, shape), shape):
            by_reason.setdefault(one, []).append(name)
    whole, lines = f"{component}: " if component else "", []
    for (option, why), names in by_reason.items():
        some = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        count = f"{len(names)} weight{'s' if len(names) > 1 else ''}"
        lines.append(f"{whole}{option} changes nothing in {count} ({some}): {why}")
    return lines
