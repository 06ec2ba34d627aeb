"""The weights of a component that a mix chooses schemes for, their bytes in each scheme, and their errors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import compat
from ..core import LONE, registry
from ..errors import SdquantError, SettingsError
from ..rules import ComponentStatistics
from . import mix_errors, planner
from .weight_selection import nbytes, select

if TYPE_CHECKING:
    from torch import Tensor

    from ..compat import Machine
    from ..formats import Checkpoint
    from .request import Request
    from .resolve import Resolved

FLOAT = "none"  # the name of a float weight among schemes

# A context manager that opens the weights of a component: it yields a function that returns one by name.
Opening = Callable[["Resolved", str], Any]
OnWeights = Callable[[int, int], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """The weights of a component that can be quantized.

    Attributes:
        bytes: by name of a weight and of a scheme, FLOAT last. floats: of the float weights. values: their number.
        statistics: by path; None without.
    """

    bytes: Mapping[str, Mapping[str, int]]
    floats: Mapping[str, int]
    values: Mapping[str, int]
    statistics: ComponentStatistics | None

    @staticmethod
    def of(name: str, resolved: Resolved, schemes: Sequence[str]) -> Pool:
        """Return the pool of component `name`."""
        request, src = resolved.request, resolved.detected.sources[name]
        shapes = planner.shapes_in_memory(src, resolved.dtype)
        table: dict[str, dict[str, int]] = {}
        for scheme in schemes:
            spec = registry.parse(scheme)
            weights, _ = select(shapes, spec, "plain", request.skip, src.class_name, src.layers, src.keys)
            for weight in weights:
                table.setdefault(weight.name, {})[scheme] = weight.bytes
        floats = {weight: nbytes(*shapes[weight]) for weight in table}
        known = None
        if request.quant_stats is not None:
            layers = ComponentStatistics(request.quant_stats, "" if name == LONE else name)
            known = layers or None
        return Pool(
            bytes={weight: {**row, FLOAT: floats[weight]} for weight, row in sorted(table.items())},
            floats=floats, values={weight: math.prod(shapes[weight][0]) for weight in table}, statistics=known,
        )  # fmt: skip


def refuse_other_statistics(
    request: Request, components: Mapping[str, tuple[ComponentStatistics | None, Iterable[str]]]
) -> None:
    """Raise SettingsError if a file of statistics says nothing of any weight that is to be quantized.

    Args:
        components: by name, what the file says of the component, and the names of those weights.
    """
    if request.quant_stats is None:
        return
    for known, names in components.values():
        if known is not None and any(known.get(name.removesuffix(".weight")) for name in names):
            return
    raise SettingsError(
        f"Cannot choose a mix by quant_stats={request.quant_stats!r}",
        f"it knows no layer of {' or '.join(components)}: it is about another model",
        "Calibrate this model: sdquant calibrate MODEL --prompt ... -o FILE; or leave quant_stats out",
    )


def runs(scheme: str, resolved: Resolved, here: Machine) -> bool:
    """Return whether a scheme works on this machine in the offload mode, in plain layers."""
    row = registry.parse(scheme).scheme
    mode = "pre" if row.on_the_fly else "found"  # GGUF's types: as a file of them would be
    try:
        compat.check(
            scheme, resolved.offload_mode.name, mode=mode, runtime="plain", device=resolved.device, machine=here,
            compute=resolved.request.compute,
        )  # fmt: skip
    except SdquantError:
        return False
    return True


def errors_of(
    name: str, pool: Pool, resolved: Resolved, opening: Opening | None, on_weights: OnWeights | None
) -> tuple[mix_errors.Errors, bool]:
    """Return the noise of each weight in each scheme, and whether it was measured.

    Args:
        opening: None to read no weights: what was measured before counts, else what is typical of a scheme.
        on_weights: called with the number of weights read and of all; what it raises ends the reading.
    """
    src, request = resolved.detected.sources[name], resolved.request
    schemes = {weight: [word for word in row if word != FLOAT] for weight, row in pool.bytes.items()}

    def run(tick: Callable[[int], object], errors: dict[str, dict[str, float]] | None = None) -> mix_errors.Errors:
        assert opening is not None
        done = itertools.count(1)

        def report(count: int) -> None:
            tick(count)
            if on_weights is not None:
                on_weights(next(done), len(pool.bytes))

        with opening(resolved, name) as read:
            return mix_errors.measure_errors(list(pool.bytes), read, schemes, pool.statistics, report, errors)

    stats = None if pool.statistics is None else mix_errors.file_identity(str(request.quant_stats))
    key = {"files": [*mix_errors.identity(src), *request.config_table.items()], "dtype": resolved.dtype,
           "statistics": stats, "name": name, "schemes": schemes,
           "versions": dict(compat.hardware.versions())}  # fmt: skip
    measured: mix_errors.Errors | None
    if opening is None:
        measured = mix_errors.remembered_errors(key, schemes) if src.files else None
    else:
        measured = mix_errors.remembered(key, schemes, request.progress, run) if src.files else run(_ignore)
    noises = mix_errors.typical_errors(schemes) if measured is None else measured
    return {weight: {**row, FLOAT: 0.0} for weight, row in noises.items()}, measured is not None


def _ignore(_: int) -> None:
    """Show no progress."""


@contextmanager
def from_files(resolved: Resolved, name: str) -> Iterator[Callable[[str], Tensor]]:
    """Yield what reads a float weight of a component, in the dtype that it is quantized from."""
    from ..core import dtype_named
    from ..formats import closing_files

    src: Checkpoint = resolved.detected.sources[name]
    dtypes = planner.shapes_in_memory(src, resolved.dtype)
    with closing_files(src.open()) as files:

        def read(key: str) -> Tensor:
            return src.read(files, key).to(dtype_named(dtypes[key][1]))

        yield read
