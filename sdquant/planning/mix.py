"""`quant="auto"` with `size=` or `quality=`: a scheme for each weight, the least noise for the bytes or the reverse.

What it picks depends only on the request, the files, the statistics and which schemes run here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ..core import GPTQ, LONE, registry
from ..errors import BudgetError, IncompatibleError
from ..rules import Share, mix_of, with_statistics
from ..utils.byte_sizes import size as text_of
from ..utils.metrics import decibels
from . import knapsack, planner
from .component_types import is_quantized_by_default
from .mix_curve import curve_of
from .mix_pool import FLOAT, Opening, Pool, errors_of, from_files, refuse_other_statistics, runs
from .resolve import Resolved, completed, device_of
from .resolve import resolve as resolve_request

if TYPE_CHECKING:
    from ..compat import Machine
    from ..core import QuantSpec
    from ..formats import Checkpoint
    from ..rules import MixSpec
    from .mix_curve import MixCurve
    from .mix_pool import OnWeights
    from .request import Request

# Schemes by family, coarse to fine: of the bits that they take, those with the least noise, and quick to make. The
# first family is for models in memory and sdquant's own folders; the others are what a file of that kind can hold.
OWN, GGUF = "own", "gguf"
_BLOCKS = ("q2_k", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0")
_SDNQ = ("sdnq-uint3,hadamard", "sdnq-uint4", "sdnq-uint4,hadamard", "sdnq-int6", "sdnq-int6,hadamard")
FAMILIES: Mapping[str, tuple[str, ...]] = {
    OWN: (*_BLOCKS, "q4_0", "q5_0", *_SDNQ, "int8_row"),
    GGUF: (*_BLOCKS, "q4_0", "q5_0"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BytesBeside:
    """Bytes of a folder beside those of the weights themselves, at most.

    Attributes:
        fixed: bytes whatever is chosen. by_scheme: of what is said of a weight, by component, weight and scheme.
    """

    fixed: int = 0
    by_scheme: Mapping[str, Mapping[str, Mapping[str, int]]] = dataclasses.field(default_factory=dict)

    def of(self, component: str, weight: str, scheme: str) -> int:
        """Return the bytes that are said of a weight."""
        return self.by_scheme[component][weight][scheme] if self.by_scheme else 0


# Of the components, the schemes that there are to choose from of each weight, and the pipeline's folder: what is
# written beside their weights.
Beside = Callable[[Mapping[str, "Checkpoint"], Mapping[str, Mapping[str, Collection[str]]], str], BytesBeside]


def open_mix(request: Request, here: Machine) -> Resolved:
    """Resolve a request for a mix, which `resolve_mix` then chooses.

    Raises:
        SdquantError: as `auto.resolve`.
    """
    partial = resolve_request(request, device_of(request, here))
    planner.refuse_conflicts(partial)
    return completed(partial)


def resolve_mix(
    resolved: Resolved,
    here: Machine,
    *,
    read: bool = True,
    on_weights: OnWeights | None = None,
    beside: Beside | None = None,
) -> Resolved:
    """Choose the mix of a request. Reads the weights once; a second time, what was found is known.

    Args:
        resolved: by `open_mix`.
        read: whether weights may be read; without, and nothing known from before, their errors are typical ones.
        on_weights: called with the number of weights read and of all of a component.
        beside: for a size of files; without it, the size is that of the weights.

    Raises:
        BudgetError: not even the coarsest schemes fit. SdquantError: as `auto.settle`.
    """
    from . import auto

    resolved = choose_mix(resolved, here, from_files if read else None, on_weights, beside)
    return resolved if resolved.request.offload_mode is not None else auto.settle(resolved, here)


def choose_mix(
    resolved: Resolved,
    here: Machine,
    opening: Opening | None,
    on_weights: OnWeights | None = None,
    beside: Beside | None = None,
) -> Resolved:
    """Return it with a mix for each component that is to be quantized. opening, on_weights: see `errors_of`; beside:
    see `resolve_mix`."""
    request = resolved.request
    choice = _Choice.of(resolved, here, opening, on_weights, beside)
    if request.size_bytes is not None:
        picks = knapsack.within_bytes(choice.items_in_files, request.size_bytes - choice.rest - choice.beside.fixed)
    else:
        assert request.quality is not None
        picks = knapsack.within_noise(choice.items, 10 ** (-request.quality / 10))
    specs: dict[str, QuantSpec | None] = {}
    for name, pool in choice.pools.items():
        refine = _refiner(name, pool, request)
        shares = [
            _share(weight, pool.values[weight], choice.words[k], choice.items[k], picks[k], refine)
            for k, (component, weight) in enumerate(choice.rows)
            if component == name
        ]
        specs[name] = mix_of(shares, measured=pool.statistics is not None and pool.statistics.has_gradients)
    curve = curve_of(choice.items, choice.words, choice.schemes, picks, choice.rest, choice.how)
    return dataclasses.replace(resolved, specs=specs, why=_why(specs, curve, request), curve=curve)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Choice:
    """What a mix is chosen from.

    Attributes:
        pools: by component. schemes: that run here. rest: bytes of all weights that are no items of the knapsack.
        beside: what is written beside weights; nothing for a size of weights.
        errors: noise by component, weight and scheme. how: see `MixCurve`.
    """

    pools: Mapping[str, Pool]
    schemes: tuple[str, ...]
    rest: int
    beside: BytesBeside
    errors: Mapping[str, Mapping[str, Mapping[str, float]]]
    how: str

    @staticmethod
    def of(
        resolved: Resolved, here: Machine, opening: Opening | None, on_weights: OnWeights | None, beside: Beside | None
    ) -> _Choice:
        """Gather it. Raises as `resolve_mix`, before weights are read where possible."""
        request = resolved.request
        sources = resolved.detected.sources
        names = [name for name, src in sources.items() if not src.prequantized and _wanted(name, request)]
        schemes = tuple(name for name in FAMILIES[OWN] if runs(name, resolved, here))
        pools = {name: Pool.of(name, resolved, schemes) for name in names}
        pools = {name: pool for name, pool in pools.items() if pool.bytes}
        if not pools:
            raise IncompatibleError(
                f"Cannot choose a mix for {resolved.files.path}",
                "it has no float weights that a scheme here quantizes",
                "Leave quant out, or choose other components=, or fewer layers to skip=",
            )
        refuse_other_statistics(request, {name: (pool.statistics, pool.bytes) for name, pool in pools.items()})
        whole = planner.build_plan(dataclasses.replace(resolved, specs={}), here).bytes
        rest = whole - sum(sum(pool.floats.values()) for pool in pools.values())
        files = resolved.files
        options = {name: pool.bytes for name, pool in pools.items()}
        place = files.path if files.base is None else files.base
        others = BytesBeside() if beside is None else beside(sources, options, place)
        fewest = (
            min(nbytes + others.of(name, weight, word) for word, nbytes in row.items())
            for name, pool in options.items()
            for weight, row in pool.items()
        )
        _refuse_too_small(resolved, others.fixed + rest + sum(fewest))
        tables = {name: errors_of(name, pool, resolved, opening, on_weights) for name, pool in pools.items()}
        is_known = any(pool.statistics is not None and pool.statistics.has_gradients for pool in pools.values())
        how = "statistics" if is_known else "weights"
        choice = _Choice(
            pools=pools, schemes=schemes, rest=rest, beside=others,
            errors={name: table for name, (table, _) in tables.items()},
            how=how if all(measured for _, measured in tables.values()) else "names",
        )  # fmt: skip
        _refuse_too_small(resolved, others.fixed + rest + knapsack.fewest_bytes(choice.items_in_files))
        return choice

    @cached_property
    def rows(self) -> list[tuple[str, str]]:
        """Component and weight of each item."""
        return [(name, weight) for name, pool in self.pools.items() for weight in pool.bytes]

    @cached_property
    def words(self) -> list[list[str]]:
        """The schemes of each item whose errors are known, FLOAT last."""
        return [
            [word for word in self.pools[name].bytes[weight] if word in self.errors[name][weight]]
            for name, weight in self.rows
        ]

    @cached_property
    def items(self) -> list[list[knapsack.Cost]]:
        """The options of each item, in the order of `words`."""
        return [
            [knapsack.Cost(self.pools[name].bytes[weight][word], self.errors[name][weight][word]) for word in each]
            for (name, weight), each in zip(self.rows, self.words, strict=True)
        ]

    @cached_property
    def items_in_files(self) -> list[list[knapsack.Cost]]:
        """The same with what files say of each weight."""
        return [
            [
                knapsack.Cost(cost.bytes + self.beside.of(name, weight, word), cost.noise)
                for word, cost in zip(each, options, strict=True)
            ]
            for (name, weight), each, options in zip(self.rows, self.words, self.items, strict=True)
        ]


def _wanted(name: str, request: Request) -> bool:
    return name in request.components if request.components is not None else is_quantized_by_default(name)


def _refuse_too_small(resolved: Resolved, fewest: int) -> None:
    limit = resolved.request.size_bytes
    if limit is not None and fewest > limit:
        raise BudgetError(
            f"Cannot make {resolved.files.path} as small as {text_of(limit)}",
            f"with the coarsest schemes, and what is not quantized, it takes {text_of(fewest)}",
            f"Use size={fewest} or more, fewer bits for the rest (dtype=), or more components",
        )


def _refiner(name: str, pool: Pool, request: Request) -> Callable[[str, str], QuantSpec]:
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
    values: int,
    words: Sequence[str],
    options: Sequence[knapsack.Cost],
    one: int,
    refine: Callable[[str, str], QuantSpec],
) -> Share:
    now = options[one]
    better = [option for option in options if option.noise < now.noise and option.bytes > now.bytes]
    after = min(better, key=lambda option: option.bytes, default=None)
    return Share(
        name=name, spec=None if words[one] == FLOAT else refine(name, words[one]), noise=now.noise, bytes=now.bytes,
        values=values,
        next_bytes=0 if after is None else after.bytes - now.bytes,
        next_noise=now.noise if after is None else after.noise,
    )  # fmt: skip


_HOW = {
    True: "by its statistics",
    False: "from the weights alone",
}


def _why(specs: Mapping[str, QuantSpec | None], curve: MixCurve, request: Request) -> str:
    parts = []
    for name, spec in specs.items():
        if spec is None:
            parts.append(f"{name} as it is")
            continue
        mix: MixSpec = spec  # type: ignore[assignment]
        counts = Counter("as it is" if share.spec is None else share.spec.scheme.name for share in mix.shares)
        words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        how = "a guess before the weights are read" if curve.how == "names" else _HOW[mix.measured]
        parts.append(f"{name} {words} (about {decibels(1.0, mix.noise):.1f} dB of its output, {how})")
    target = f"size {text_of(request.size_bytes)}" if request.size_bytes is not None else f"{request.quality:g} dB"
    return f"{target}: {text_of(curve.pick.bytes if curve.pick else 0)} of weights; {'; '.join(parts)}"
