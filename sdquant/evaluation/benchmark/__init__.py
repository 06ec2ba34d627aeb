"""Benchmark a model's step in each scheme and in peer libraries: time, memory, load time and accuracy.

    made = bench("some-model", ["nf4", "int8"], size=(512, 512))
    print(made.reference.step_seconds, [(row.name, row.ratio, row.snr) for row in made.measured])

The command is `sdquant bench`. Importing this package imports no torch.
"""

from __future__ import annotations

from .results import CLOCKS, Benchmark, BenchmarkRow
from .runner import INPUT_KINDS, PROMPT, bench

__all__ = ["CLOCKS", "INPUT_KINDS", "PROMPT", "Benchmark", "BenchmarkRow", "bench"]
