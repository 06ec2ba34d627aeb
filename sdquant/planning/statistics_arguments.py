"""The argument `quant_stats`: which schemes use a file of `sdquant calibrate`, and which need one. No torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..core import LONE
from ..errors import SettingsError
from ..formats import closing_files
from ..rules import calibrated_schemes, weight_samples, with_statistics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..core import QuantSpec
    from ..formats import Checkpoint


def calibrated(specs: Mapping[str, QuantSpec | None], file: str | None) -> Mapping[str, QuantSpec | None]:
    """Return the schemes with the file of statistics, those that use one.

    Raises:
        SettingsError: there is a file and none uses it, or none and one has an option that does nothing without.
    """
    refuse_useless(specs, file)
    if file is None:
        _require(specs)
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


def refuse_other_weights(file: str | None, sources: Mapping[str, Checkpoint]) -> tuple[str, ...]:
    """Read a few values of the weights of components, and return a sentence for each that is far from what a file of
    statistics was calibrated with.

    Raises:
        SettingsError: the file is about weights that have nothing to do with these.
    """
    lines: list[str] = []
    for name, src in sources.items() if file is not None else ():
        with closing_files(src.open()) as files:
            read = partial(src.read, files)
            lines += weight_samples.refuse_other_weights(str(file), "" if name == LONE else name, src.plain, read)
    return tuple(lines)


def _require(specs: Mapping[str, QuantSpec | None]) -> None:
    for spec in specs.values():
        known = {} if spec is None else spec.scheme.options
        for name, value in () if spec is None else spec.options:
            if value and known[name].calibrated:
                raise SettingsError(
                    f"Cannot quantize to {spec} without statistics",
                    f"{name} means: {known[name].help}",
                    f"Run `sdquant calibrate MODEL --prompt ... -o stats.safetensors`, and set "
                    f"quant_stats=stats.safetensors; or leave {name} out",
                )
