"""Choose the type of each tensor of a GGUF file: `sdquant quantize MODEL x.gguf -q auto --size 4GB`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import compat
from ..core import gguf_types
from ..errors import BudgetError
from ..formats import closing_files
from ..planning import knapsack, mix, mix_errors
from ..rules import ComponentStatistics
from ..utils.byte_sizes import size as text_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..formats import Checkpoint
    from ..planning import Request

_HEAD = 55  # bytes of a tensor's entry in the header beside name and sizes, and at most of its alignment


@dataclass(frozen=True, kw_only=True)
class MixedTensor:
    """A tensor of the file.

    Attributes:
        sources: the model's weights that it is made of. plain: its float type. types: the block types that fit it.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    plain: str
    types: tuple[str, ...]


def types_of(src: Checkpoint, rows: Sequence[MixedTensor], request: Request, component: str) -> dict[str, str]:
    """Return the type of each tensor that may be quantized.

    Args:
        rows: all tensors of the file, also those that fit no block type. component: its name in the statistics.

    Raises:
        BudgetError: the file cannot be so small.
    """
    statistics = None
    if request.quant_stats is not None:
        layers = ComponentStatistics(request.quant_stats, component)
        statistics = layers if layers and layers.has_gradients else None
    some = [row for row in rows if row.types]
    schemes = {source: row.types for row in some for source in row.sources}
    with closing_files(src.open()) as files:

        def read(key: str) -> Tensor:
            return src.read(files, key)

        def run(tick: Callable[[int], object]) -> mix_errors.Errors:
            return mix_errors.measure_errors(list(schemes), read, schemes, statistics, tick)

        identity = None if statistics is None else mix_errors.file_identity(str(request.quant_stats))
        key = {"files": list(mix_errors.identity(src)), "statistics": identity, "schemes": schemes, "gguf": component,
               "versions": dict(compat.hardware.versions())}  # fmt: skip
        errors = mix_errors.remembered(key, list(schemes), request.progress, run)
    words = [[*(word for word in row.types if _known(row, word, errors)), row.plain] for row in some]
    items = [
        [knapsack.Cost(_bytes(row, word), _noise(row, word, errors)) for word in each]
        for row, each in zip(some, words, strict=True)
    ]
    if request.size_bytes is None:
        assert request.quality is not None
        picks = knapsack.within_noise(items, 10 ** (-request.quality / 10))
    else:
        rest = sum(_bytes(row, row.plain) for row in rows if not row.types) + _overhead(src, rows)
        fewest = rest + knapsack.fewest_bytes(items)
        if fewest > request.size_bytes:
            raise BudgetError(
                f"Cannot make a GGUF file of {src.path} as small as {text_of(request.size_bytes)}",
                f"with the coarsest types, and what is not quantized, it takes {text_of(fewest)}",
                f"Use size={fewest} or more",
            )
        picks = knapsack.within_bytes(items, request.size_bytes - rest)
    return {row.name: each[pick] for row, each, pick in zip(some, words, picks, strict=True)}


def fitting(shape: tuple[int, ...], suits: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the types of a mix that a tensor can have. suits: of one type."""
    return tuple(word for word in mix.FAMILIES[mix.GGUF] if math.prod(shape) and suits(word))


def _known(row: MixedTensor, word: str, errors: mix_errors.Errors) -> bool:
    return all(word in errors[source] for source in row.sources)


def _noise(row: MixedTensor, word: str, errors: mix_errors.Errors) -> float:
    return 0.0 if word == row.plain else sum(errors[source][word] for source in row.sources)


def _bytes(row: MixedTensor, word: str) -> int:
    return gguf_types.TYPES[word].size(math.prod(row.shape))


def _overhead(src: Checkpoint, rows: Sequence[MixedTensor]) -> int:
    """Return a bound of what a file has besides its tensors' data."""
    config: Mapping[str, object] = src.config
    return 4096 + 2 * len(str(config)) + sum(_HEAD + 8 * len(row.shape) + len(row.name.encode()) for row in rows)
