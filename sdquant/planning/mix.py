"""`quant="auto"` with `size=` or `quality=`: a scheme for each weight, the least noise for the bytes or the reverse.

What it picks depends only on the request, the files, the statistics and which schemes run here.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import compat
from ..core import GPTQ, LONE, registry
from ..errors import BudgetError, IncompatibleError, SdquantError, SettingsError
from ..rules import ComponentStatistics, Share, mix_of, with_statistics
from ..utils.byte_sizes import size as text_of
from . import knapsack, mix_errors, planner
from .component_types import is_quantized_by_default
from .resolve import Resolved, completed, device_of
from .resolve import resolve as resolve_request
from .weight_selection import nbytes, select

if TYPE_CHECKING:
    from torch import Tensor

    from ..compat import Machine
    from ..core import QuantSpec
    from ..formats import Checkpoint
    from ..rules import MixSpec
    from .request import Request

# Schemes by family, coarse to fine: of the bits that they take, those with the least noise, and quick to make. The
# first family is for models in memory and sdquant's own folders; the others are what a file of that kind can hold.
OWN, GGUF, COMFY = "own", "gguf", "comfy"
_K = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")
FAMILIES: Mapping[str, tuple[str, ...]] = {
    OWN: (*_K, "q4_0", "q5_0", "sdnq-uint4", "sdnq-int6", "int8_row"),
    GGUF: (*_K, "q4_0", "q5_0"),
    COMFY: ("w4a8", "w6a8", "int8_convrot", "int8_row"),
}

# Opens the weights of a component: a function that returns one by name.
Reading = Callable[[str], Any]


def resolve_mix(request: Request, here: Machine, family: str = OWN) -> Resolved:
    """Resolve a request for a mix, and choose it. Reads the weights once; a second time, what was found is known.

    Raises:
        BudgetError: not even the coarsest schemes fit. SdquantError: as `auto.resolve`.
    """
    partial = resolve_request(request, device_of(request, here))
    planner.refuse_conflicts(partial)
    return choose_mix(completed(partial), here, _from_files, family)


def choose_mix(
    resolved: Resolved, here: Machine, reading: Callable[[Resolved, str], Any], family: str = OWN
) -> Resolved:
    """Return it with a mix for each component that is to be quantized.

    Args:
        reading: a context manager that opens the weights of a component, see `Reading`.
    """
    request = resolved.request
    names = [name for name, src in resolved.detected.sources.items() if not src.prequantized and _wanted(name, request)]
    schemes = [name for name in FAMILIES[family] if _runs(name, resolved, here)]
    pools = {name: _Pool.of(name, resolved, schemes) for name in names}
    pools = {name: pool for name, pool in pools.items() if pool.bytes}
    if not pools:
        raise IncompatibleError(
            f"Cannot choose a mix for {resolved.files.path}", "it has no float weights that a scheme here quantizes",
            "Use the unquantized model, and components that have such weights",
        )  # fmt: skip
    _refuse_other_statistics(request, pools)
    unquantized = planner.build_plan(dataclasses.replace(resolved, specs={}), here)
    rows = [(name, weight) for name, pool in pools.items() for weight in pool.bytes]
    rest = unquantized.bytes - sum(pool.floats[weight] for name, pool in pools.items() for weight in pool.floats)
    fewest = rest + sum(min(pool.bytes[weight].values()) for pool in pools.values() for weight in pool.bytes)
    if request.size_bytes is not None and fewest > request.size_bytes:  # before weights are read
        raise _too_small(request.size_bytes, fewest, resolved)
    tables = {name: _errors(name, pool, resolved, reading) for name, pool in pools.items()}
    words = [[word for word in pools[name].bytes[weight] if word in tables[name][weight]] for name, weight in rows]
    items = [
        [knapsack.Cost(pools[name].bytes[weight][word], tables[name][weight][word]) for word in each]
        for (name, weight), each in zip(rows, words, strict=True)
    ]
    if request.size_bytes is not None:
        fewest = rest + knapsack.fewest_bytes(items)
        if fewest > request.size_bytes:
            raise _too_small(request.size_bytes, fewest, resolved)
        picks = knapsack.within_bytes(items, request.size_bytes - rest)
    else:
        assert request.quality is not None
        picks = knapsack.within_noise(items, 10 ** (-request.quality / 10))
    specs: dict[str, QuantSpec | None] = {}
    for name, pool in pools.items():
        refine = _refiner(name, pool, request)
        shares = [
            _share(weight, each, items[k], picks[k], refine)
            for k, ((component, weight), each) in enumerate(zip(rows, words, strict=True))
            if component == name
        ]
        specs[name] = mix_of(shares, measured=pool.statistics is not None)
    whole = rest + sum(items[k][one].bytes for k, one in enumerate(picks))
    return dataclasses.replace(resolved, specs=specs, why=_why(specs, whole, request))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pool:
    """The weights of a component that can be quantized.

    Attributes:
        bytes: by name of a weight and of a scheme, "none" for the float weight. floats: of the float weights.
        statistics: by path; None without.
    """

    bytes: Mapping[str, Mapping[str, int]]
    floats: Mapping[str, int]
    statistics: ComponentStatistics | None

    @staticmethod
    def of(name: str, resolved: Resolved, schemes: Sequence[str]) -> _Pool:
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
            known = layers if layers and layers.has_gradients else None
        return _Pool(
            bytes={weight: {**row, FLOAT: floats[weight]} for weight, row in sorted(table.items())},
            floats=floats, statistics=known,
        )  # fmt: skip


FLOAT = "none"


def _refuse_other_statistics(request: Request, pools: Mapping[str, _Pool]) -> None:
    """Raise SettingsError if a file of statistics says nothing of any weight that is to be quantized."""
    if request.quant_stats is None:
        return
    for pool in pools.values():
        if pool.statistics is not None and any(
            pool.statistics.get(name.removesuffix(".weight")) for name in pool.bytes
        ):
            return
    raise SettingsError(
        f"Cannot choose a mix by quant_stats={request.quant_stats!r}",
        f"it has no gradients of the layers of {' or '.join(pools)}: it is about another model, or was made without",
        "Calibrate this model: sdquant calibrate MODEL --prompt ... -o FILE; or leave quant_stats out",
    )


def _wanted(name: str, request: Request) -> bool:
    return name in request.components if request.components is not None else is_quantized_by_default(name)


def _runs(scheme: str, resolved: Resolved, here: Machine) -> bool:
    """Return whether a scheme works on this machine in the offload mode, in plain layers."""
    row = registry.scheme(scheme)
    mode = "pre" if row.on_the_fly else "found"  # GGUF's types: as a file of them would be
    try:
        compat.check(
            scheme, resolved.offload_mode.name, mode=mode, runtime="plain", device=resolved.device, machine=here,
            compute=resolved.request.compute,
        )  # fmt: skip
    except SdquantError:
        return False
    return True


def _errors(name: str, pool: _Pool, resolved: Resolved, reading: Callable[[Resolved, str], Any]) -> mix_errors.Errors:
    src, request = resolved.detected.sources[name], resolved.request
    schemes = {weight: [word for word in row if word != FLOAT] for weight, row in pool.bytes.items()}

    def run(tick: Callable[[int], object]) -> mix_errors.Errors:
        with reading(resolved, name) as read:
            return mix_errors.measure_errors(list(pool.bytes), read, schemes, pool.statistics, tick)

    stats = None if pool.statistics is None else mix_errors.file_identity(str(request.quant_stats))
    key = {"files": list(mix_errors.identity(src)), "dtype": resolved.dtype, "statistics": stats, "name": name,
           "schemes": schemes, "versions": dict(compat.hardware.versions())}  # fmt: skip
    noises = mix_errors.remembered(key, list(pool.bytes), request.progress, run) if src.files else run(lambda _: None)
    return {weight: {**row, FLOAT: 0.0} for weight, row in noises.items()}


@contextmanager
def _from_files(resolved: Resolved, name: str) -> Iterator[Reading]:
    """Yield what reads a float weight of a component, in the dtype that it is quantized from."""
    from ..core import dtype_named
    from ..formats import closing_files

    src: Checkpoint = resolved.detected.sources[name]
    dtypes = planner.shapes_in_memory(src, resolved.dtype)
    with closing_files(src.open()) as files:

        def read(key: str) -> Tensor:
            return src.read(files, key).to(dtype_named(dtypes[key][1]))

        yield read


def _refiner(name: str, pool: _Pool, request: Request) -> Callable[[str, str], QuantSpec]:
    """Return what makes a spec of the names of a weight and a scheme: with codes chosen by the statistics, if there are
    any of its layer and the scheme can."""

    def refine(weight: str, word: str) -> QuantSpec:
        spec = registry.parse(word)
        is_measured = pool.statistics is not None and weight.removesuffix(".weight") in pool.statistics
        if not is_measured or GPTQ not in spec.scheme.options:
            return spec
        assert request.quant_stats is not None
        better = registry.parse(f"{word},{GPTQ}")
        return with_statistics(better, request.quant_stats, "" if name == LONE else name)

    return refine


def _share(
    name: str,
    words: Sequence[str],
    options: Sequence[knapsack.Cost],
    one: int,
    refine: Callable[[str, str], QuantSpec],
) -> Share:
    now = options[one]
    better = [option for option in options if option.noise < now.noise and option.bytes > now.bytes]
    after = min(better, key=lambda option: option.bytes, default=None)
    return Share(
        name=name, spec=None if words[one] == FLOAT else refine(name, words[one]), noise=now.noise,
        next_bytes=0 if after is None else after.bytes - now.bytes,
        next_noise=now.noise if after is None else after.noise,
    )  # fmt: skip


def _too_small(limit: int, fewest: int, resolved: Resolved) -> BudgetError:
    return BudgetError(
        f"Cannot make {resolved.files.path} as small as {text_of(limit)}",
        f"with the coarsest schemes, and what is not quantized, it takes {text_of(fewest)}",
        f"Use size={fewest} or more, fewer bits for the rest (dtype=), or more components",
    )


def _why(specs: Mapping[str, QuantSpec | None], whole: int, request: Request) -> str:
    parts = []
    for name, spec in specs.items():
        if spec is None:
            parts.append(f"{name} as it is")
            continue
        mix: MixSpec = spec  # type: ignore[assignment]
        counts = Counter("as it is" if share.spec is None else share.spec.scheme.name for share in mix.shares)
        words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        how = "by its statistics" if mix.measured else "from the weights alone"
        parts.append(f"{name} {words} (about {_decibels(mix.noise):.1f} dB of its output, {how})")
    target = f"size {text_of(request.size_bytes)}" if request.size_bytes is not None else f"{request.quality:g} dB"
    return f"{target}: {text_of(whole)} of weights; {'; '.join(parts)}"


def _decibels(noise: float) -> float:
    """Return the signal-to-noise ratio of relative noise, in dB."""
    return -10 * math.log10(noise) if noise > 0 else math.inf
