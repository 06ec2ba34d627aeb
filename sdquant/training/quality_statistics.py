"""What quality needs to know of a float model as it runs: magnitudes and second moments of the inputs of its layers,
and how much noise in each layer changes its output. See `rules.layer_statistics` for what is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConflictError
from ..nn import kind_of, quantized
from ..planning import is_quantized_by_default
from ..rules import QuantStat, input_operand, layer_statistics, merge_quant_stats, operation_of
from .input_moments import InputMoments, block_shape, block_size, columns_of, input_rows
from .output_gradients import Places, add_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ..utils.distributed import Processes

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Layer:
    """What is collected of one layer: of component `component`, at `path` in it."""

    component: str
    path: str
    module: nn.Module
    magnitudes: QuantStat
    moments: InputMoments
    gradient: QuantStat


@dataclass
class QualityCollector:
    """Collects while a pipeline draws.

    Attributes:
        models: the components, by name. steps: denoising steps of an image; probes: how many of them, evenly spaced,
            get a gradient; 0 for none.
    """

    models: Mapping[str, nn.Module]
    limit: int
    steps: int
    probes: int
    layers: list[_Layer] = field(init=False)
    _looking: bool = False  # at the sizes of numbers only
    _paused: bool = False
    _again: bool = False  # the call of which a gradient was just measured
    # By component and layer: what each row of inputs counts for, by the last gradient of this image.
    _places: dict[str, Mapping[str, Places]] = field(default_factory=dict)
    _image: tuple[str, int, int] = ("", 0, 0)
    _calls: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = [
            (name, path, module)
            for name, model in self.models.items()
            for path, module in model.named_modules(remove_duplicate=True)
            if kind_of(module) in ("linear", "conv")
        ]
        block = block_size([columns_of(module) for _, _, module in rows], self.limit)
        self.layers = [_layer(*row, block) for row in rows]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: watch the layers and the models."""
        undo: list[Any] = [
            layer.module.register_forward_pre_hook(self._seer(layer), with_kwargs=True) for layer in self.layers
        ]
        for name, model in self.models.items():
            undo.append(model.register_forward_hook(self._prober(name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in undo:
                handle.remove()

    def begin(self, draw_step: Callable[[], None], processes: Processes | None) -> None:
        """Look at the sizes of numbers in one short run of the pipeline, `draw_step`, the same in all processes."""
        self._looking = True
        draw_step()
        self._looking = False
        for layer in self.layers:
            layer.moments.begin()
        if processes is not None:
            of_first = processes.gathered([layer.moments.step for layer in self.layers])[0]
            for layer, step in zip(self.layers, of_first, strict=True):
                layer.moments.step = step

    def image(self, prompt: str, seed: int, number: int) -> None:
        """Tell that the next calls are for this image. number: its number among all of them."""
        self._image, self._calls, self._places = (prompt, seed, number), {}, {}

    def statistics(self, *, exact: bool) -> dict[str, Tensor]:
        """Return what has been collected by name; see `rules.layer_statistics`."""
        tensors: dict[str, Tensor] = {}
        for layer in self.layers:
            parts = [layer.magnitudes.to_dict(exact=exact), layer.moments.to_dict(exact=exact)]
            parts += [layer.gradient.to_dict(exact=exact)] if self.probes else []
            tensors |= {f"{layer.component}.{name}": value for part in parts for name, value in part.items()}
        return tensors

    def load(self, known: Mapping[str, Tensor]) -> None:
        """Load what `statistics(exact=True)` returned."""
        operands: dict[str, dict[str, Tensor]] = {}
        for name, value in known.items():
            operand, _, what = name.rpartition(".")
            operands.setdefault(operand, {})[what] = value
        for layer in self.layers:
            values = operands[f"{layer.component}.{layer.moments.name}"]
            layer.moments.load(values)
            layer.magnitudes.load(values)
            if self.probes:
                layer.gradient.load(operands[f"{layer.component}.{layer.gradient.name}"])

    def merged(self, processes: Processes) -> dict[str, Tensor]:
        """Return what all processes have collected. Sums of moments are added layer by layer, for want of memory."""
        tensors = merge_quant_stats(processes.gathered(self._small()))
        tensors = {name: value for name, value in tensors.items() if ".exact_of_" not in name}
        for layer in self.layers:
            layer.moments.merge(processes)
            tensors |= {f"{layer.component}.{k}": v for k, v in layer.moments.to_dict(exact=False).items()}
        return tensors

    def _small(self) -> dict[str, Tensor]:
        """Return what has been collected but for the moments, exact."""
        stats = [
            (layer, one) for layer in self.layers for one in (layer.magnitudes, *([layer.gradient] * bool(self.probes)))
        ]
        return {f"{layer.component}.{k}": v for layer, one in stats for k, v in one.to_dict(exact=True).items()}

    def _seer(self, layer: _Layer) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Any, ...], values: dict[str, Any]) -> None:
            if self._paused:
                return
            x = (args[0] if args else values["input"]).detach()
            if self._looking:
                layer.moments.look(input_rows(module, x))
                return
            weights = self._places.get(layer.component)
            if weights is not None or not self.probes:
                layer.moments.add(input_rows(module, x), (weights or {}).get(layer.path, {}).get(tuple(x.shape)))
            if self._again:
                return
            x = x if kind_of(module) == "linear" else x.movedim(1 - layer.module.weight.ndim, -1)  # type: ignore[operator]
            layer.magnitudes.add({"absmax": x.reshape(-1, x.shape[-1]).abs().amax(dim=0, keepdim=True)})

        return see

    def _prober(self, name: str) -> Callable[..., None]:
        stats = {layer.path: layer.gradient for layer in self.layers if layer.component == name}

        def probe(model: nn.Module, args: tuple[Any, ...], values: dict[str, Any], _: Any) -> None:
            if self._paused or self._looking or self._again or not self.probes:
                return
            call = self._calls[name] = self._calls.get(name, -1) + 1
            prompt, seed, number = self._image
            # The first call of each model, and evenly spaced ones, others for the next image.
            shift, probes = number % max(1, self.steps // self.probes), min(self.probes, self.steps)
            if call and (call + shift) * probes // self.steps == (call + shift - 1) * probes // self.steps:
                return
            self._paused = True
            try:
                self._places[name] = add_gradients(model, args, values, stats, f"{prompt}|{seed}|{name}|{call}")
            finally:
                self._paused = False
            if call == 0:  # whose inputs could not be weighed before
                self._again = True
                try:
                    with torch.no_grad():
                        model(*args, **values)
                finally:
                    self._again = False

        return probe


def _layer(component: str, path: str, module: nn.Module, block: int | None) -> _Layer:
    operation = operation_of(tuple(module.get_parameter("weight").shape))
    name = input_operand(path, operation)
    weight = f"{path}.{layer_statistics.WEIGHT}" if path else layer_statistics.WEIGHT
    columns = columns_of(module)
    return _Layer(
        component=component, path=path, module=module,
        magnitudes=QuantStat(name, None), gradient=QuantStat(weight, None),
        moments=InputMoments(name=name, shape=block_shape(columns, block), columns=columns),
    )  # fmt: skip


def models_to_watch(parts: Mapping[str, nn.Module], components: Sequence[str]) -> dict[str, nn.Module]:
    """Return the components to collect from: those named, or the default ones.

    Raises:
        ConflictError: layers of theirs are quantized.
    """
    models = {
        name: model
        for name, model in parts.items()
        if (name in components if components else is_quantized_by_default(name))
    }
    for name, model in models.items():
        schemes = sorted({str(packed.spec.scheme) for _, packed in quantized(model)})
        if schemes:
            raise ConflictError(
                f"Cannot calibrate the {name}",
                f"its layers are quantized already ({', '.join(schemes)}), and statistics are of unquantized ones",
                "Calibrate the unquantized model, or what `sdquant dequantize MODEL OUT` makes of this one",
            )
    return models
