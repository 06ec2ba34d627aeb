"""Choose the format of each tensor of a file that other tools read: `sdquant quantize MODEL OUT -q auto,size=4GB`.

The file decides the family of formats: GGUF's block types, or those that ComfyUI has for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import compat
from ..errors import BudgetError
from ..formats import closing_files
from ..planning import knapsack, mix_errors, mix_pool
from ..rules import ComponentStatistics
from ..utils.byte_sizes import size as text_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..formats import Checkpoint
    from ..planning import Request


@dataclass(frozen=True, kw_only=True)
class MixedTensor:
    """A tensor of the file.

    Attributes:
        sources: the model's weights that it is made of.
        bytes: that it takes in the file by the format, header and all; that of its float type last.
    """

    name: str
    sources: tuple[str, ...]
    bytes: Mapping[str, int]

    @property
    def plain(self) -> str:
        """The name of its float type."""
        return list(self.bytes)[-1]

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that fit it, beside its float type."""
        return tuple(self.bytes)[:-1]


@dataclass(frozen=True, kw_only=True)
class MixedFile:
    """A file whose formats are still to be chosen.

    Attributes:
        src: the component. name: its own in the statistics.
        rows: all tensors of the file, also those that no format fits. rest: bytes of the file beside them.
        kind: for messages.
    """

    src: Checkpoint
    name: str
    rows: Sequence[MixedTensor]
    rest: int
    kind: str

    @property
    def fewest(self) -> int:
        """The bytes of the file in the coarsest formats."""
        return self.rest + sum(min(row.bytes.values()) if row.formats else row.bytes[row.plain] for row in self.rows)


def formats_of(
    file: MixedFile, request: Request, on_weights: Callable[[int, int], object] | None = None
) -> dict[str, str]:
    """Return the format of each tensor that may be quantized.

    Args:
        on_weights: called with the number of weights read and of all.

    Raises:
        BudgetError: the file cannot be so small. SettingsError: the statistics are another model's.
    """
    _refuse_fewer(file, request, file.fewest)
    some = [row for row in file.rows if row.formats]
    errors = _errors(file, some, request, on_weights)
    words = [[word for word in row.formats if _is_known(row, word, errors)] + [row.plain] for row in some]
    items = [
        [knapsack.Cost(row.bytes[word], _noise(row, word, errors)) for word in each]
        for row, each in zip(some, words, strict=True)
    ]
    if request.size_bytes is None:
        assert request.quality is not None
        picks = knapsack.within_noise(items, 10 ** (-request.quality / 10))
    else:
        rest = file.rest + sum(row.bytes[row.plain] for row in file.rows if not row.formats)
        _refuse_fewer(file, request, rest + knapsack.fewest_bytes(items))
        picks = knapsack.within_bytes(items, request.size_bytes - rest)
    return {row.name: each[pick] for row, each, pick in zip(some, words, picks, strict=True)}


def _refuse_fewer(file: MixedFile, request: Request, fewest: int) -> None:
    if request.size_bytes is not None and fewest > request.size_bytes:
        raise BudgetError(
            f"Cannot make a {file.kind} file of {file.src.path} as small as {text_of(request.size_bytes)}",
            f"with the coarsest formats, and what is not quantized, it takes {text_of(fewest)}",
            f"Use size={fewest} or more",
        )


def statistics_of(request: Request, component: str) -> ComponentStatistics | None:
    """Return the statistics of a component; None without."""
    if request.quant_stats is None:
        return None
    layers = ComponentStatistics(request.quant_stats, component)
    return layers or None


def _errors(
    file: MixedFile, rows: Sequence[MixedTensor], request: Request, on_weights: Callable[[int, int], object] | None
) -> mix_errors.Errors:
    src, component = file.src, file.name
    statistics = statistics_of(request, component)
    schemes = {source: row.formats for row in rows for source in row.sources}
    mix_pool.refuse_other_statistics(request, {component or "the model": (statistics, schemes)})
    with closing_files(src.open()) as files:

        def read(key: str) -> Tensor:
            return src.read(files, key)

        def run(tick: Callable[[int], object], errors: dict[str, dict[str, float]]) -> None:
            done = 0

            def counted(more: int) -> None:
                nonlocal done
                done += more
                tick(more)
                if on_weights is not None:
                    on_weights(done, len(schemes))

            mix_errors.measure_errors(list(schemes), read, schemes, statistics, counted, errors)

        identity = None if statistics is None else mix_errors.file_identity(str(request.quant_stats))
        key = {"files": [*mix_errors.identity(src), *request.config_table.items()], "statistics": identity,
               "schemes": schemes, "file": file.kind, "component": component,
               "versions": dict(compat.hardware.versions())}  # fmt: skip
        return mix_errors.remembered(key, schemes, request.progress, run)


def _is_known(row: MixedTensor, word: str, errors: mix_errors.Errors) -> bool:
    return all(word in errors[source] for source in row.sources)


def _noise(row: MixedTensor, word: str, errors: mix_errors.Errors) -> float:
    return 0.0 if word == row.plain else sum(errors[source][word] for source in row.sources)
