"""A scheme whose weights are quantized with the statistics of their inputs, as a `QuantSpec`: SVDQuant. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..core import QuantSpec
from ..errors import SettingsError
from .quant_spec import digest, operation_of

if TYPE_CHECKING:
    from torch import Tensor


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

    def of(self, name: str, shape: tuple[int, ...]) -> CalibratedSpec:
        return self if self.path else replace(self, path=name.removesuffix(".weight"))

    def described(self) -> str:
        return json.dumps([str(self), self.component, digest(self.statistics)])

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
        again = f"Calibrate this model: sdquant calibrate MODEL -q {self.scheme} --prompt ... -o FILE"
        if name is None:
            whole = f" of the {self.component}" if self.component else ""
            raise SettingsError(
                what, f"quant_stats={self.statistics!r} knows no such layer{whole}", f"{again}; or name the components "
                "that it is about in components=",
            )  # fmt: skip
        count, total = int(known[f"{name}.count"]), known.get(f"{name}.{SUM}absmax")
        if not count:
            return None
        if total is None or total.numel() != inputs:
            size = "no magnitudes" if total is None else f"{total.numel()} magnitudes"
            raise SettingsError(what, f"quant_stats has {size} for its {inputs} inputs", again)
        return total.reshape(-1).float() / count


def with_statistics(spec: QuantSpec, statistics: str, component: str = "") -> CalibratedSpec:
    """Return the spec of a calibrated scheme with a file of statistics."""
    return CalibratedSpec(spec.scheme, spec.options, spec.embeddings, statistics=statistics, component=component)


def require_magnitudes(spec: QuantSpec, weights: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise SettingsError if the statistics of a spec, if it has any, lack one of these weights, by name and shape."""
    if isinstance(spec, CalibratedSpec):
        for name, shape in weights:
            spec.of(name, shape).magnitudes(shape[1])
