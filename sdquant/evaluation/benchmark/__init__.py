"""How long a model's step takes in each scheme, and what it costs in memory, load time and accuracy; and in peers.

    made = bench("some-model", ["nf4", "int8"], size=(512, 512))
    print(made.reference.step_seconds, [(row.name, row.ratio, row.snr) for row in made.measured])

The command is `sdquant bench`. Importing this package imports no torch.
"""

from __future__ import annotations

from .results import CLOCKS, Benchmark, Row
from .runner import INPUT_KINDS, PROMPT, bench

__all__ = ["CLOCKS", "INPUT_KINDS", "PROMPT", "Benchmark", "Row", "bench"]
