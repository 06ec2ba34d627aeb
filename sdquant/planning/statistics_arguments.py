"""The argument `quant_stats`: which schemes use a file of `sdquant calibrate`, and which need one. No torch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from ..core import LONE
from ..errors import SettingsError
from ..formats import Checkpoint, closing_files
from ..rules import CalibratedSpec, calibrated_schemes, weight_samples, with_statistics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from ..core import QuantSpec


def calibrated(specs: Mapping[str, QuantSpec | None], file: str | None) -> Mapping[str, QuantSpec | None]:
    """Return the schemes with the file of statistics, those that use one.

    Raises:
        SettingsError: there is a file and none uses it, or none and one has an option that does nothing without.
    """
    refuse_useless(specs, file)
    if file is None:
        for spec in specs.values():
            require_statistics(spec)
        return specs
    some = {name: spec for name, spec in specs.items() if spec is not None and spec.takes_statistics}
    return {**specs, **{name: with_statistics(spec, file) for name, spec in some.items()}}


def refuse_useless(specs: Mapping[str, QuantSpec | None], file: str | None) -> None:
    """Raise SettingsError for a file of statistics that no scheme uses."""
    if file is None or any(spec is not None and spec.takes_statistics for spec in specs.values()):
        return
    raise SettingsError(
        f"Cannot use quant_stats={file!r} with these settings",
        f"only rules, {calibrated_schemes()}, and auto with a size or quality use what calibration found",
        "Set size= or quality= with quant='auto', or rules, or remove quant_stats",
    )


def refuse_other_weights(file: str | None, components: Mapping[str, Checkpoint | nn.Module]) -> tuple[str, ...]:
    """Read a few values of the weights of components, and return a sentence for each that is far from what a file of
    statistics was calibrated with. Every path to quantized weights calls this once, before any is chosen or written.

    Args:
        components: those to be quantized, as files or as modules.

    Raises:
        SettingsError: the file is about weights that have nothing to do with these.
    """
    lines: list[str] = []
    for name, component in components.items() if file is not None else ():
        with _opened(component) as (names, read):
            lines += weight_samples.refuse_other_weights(str(file), "" if name == LONE else name, names, read)
    return tuple(lines)


@contextmanager
def _opened(component: Checkpoint | nn.Module) -> Iterator[tuple[Container[str], Callable[[str], Tensor]]]:
    """Yield the names of a component's float weights that have values, and what returns one."""
    if isinstance(component, Checkpoint):
        with closing_files(component.open()) as files:
            yield component.plain, partial(component.read, files)
        return
    weights = {
        name: row for name, row in component.named_parameters() if row.is_floating_point() and row.device.type != "meta"
    }
    yield weights, weights.__getitem__


def require_statistics(spec: QuantSpec | None) -> None:
    """Raise SettingsError for a scheme with an option that does nothing without statistics, and without these. Every
    path to quantizing floats calls this; weights that are quantized in a file keep what was done to them."""
    known = {} if spec is None or isinstance(spec, CalibratedSpec) else spec.scheme.options
    for name, value in () if spec is None else spec.options:
        if value and name in known and known[name].calibrated:
            raise SettingsError(
                f"Cannot quantize to {spec} without statistics",
                f"{name} means: {known[name].help}",
                f"Run `sdquant calibrate MODEL --prompt ... -o stats.safetensors`, and set "
                f"quant_stats=stats.safetensors; or leave {name} out",
            )
