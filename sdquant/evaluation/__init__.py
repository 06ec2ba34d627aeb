"""Schemes held against each other: the same prompt through several (`compare`), and time and memory (`benchmark`).

In: requests. Out: rows, sheets of pictures, charts. May import `training` and what is below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .benchmark import CLOCKS, INPUT_KINDS, PROMPT, Benchmark, BenchmarkRow, bench
    from .benchmark import figure as benchmark_figure
    from .comparison import Comparison, ComparisonRow
    from .mix_figure import mix_sheet
    from .tuning import Tuned, tune
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "CLOCKS", "INPUT_KINDS", "PROMPT", "Benchmark", "BenchmarkRow", "Comparison", "ComparisonRow", "Tuned",
    "bench", "benchmark_figure", "compare", "mix_sheet", "tune",
]  # fmt: skip
