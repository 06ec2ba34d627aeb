"""Find out which implementations of products in integers are faster on this machine, before a model runs: for
`sdquant doctor --tune`. What a model's own sizes need beyond that is found while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ..core import registry
from ..kernels import fastest, verdicts
from ..nn import quantized_layer, set_compute

SCHEMES = ("int8_sym", "int8", "nf4")
SIZES = ((3072, 3072), (3072, 12288))  # inputs and outputs of Flux's layers
ROWS = (77, 256, 1024, 4608)  # a prompt; images of 256, 512 and 1024 pixels, the last with its prompt
_CALLS = 2 * fastest.CALLS + 1


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A product, and what was found.

    Attributes:
        by_torch: whether torch's product is faster than the one of sdquant's kernels; None if there is one only.
        seconds: of the faster one.
    """

    scheme: str
    inputs: int
    outputs: int
    rows: int
    by_torch: bool | None
    seconds: float


def tune(device: torch.device) -> Iterator[Tuned]:
    """Forget what was found on a device, find it anew, and yield it; what was found is kept at the end."""
    fastest.start_over(device)
    with torch.inference_mode():
        for inputs, outputs in SIZES:
            floats = nn.Linear(inputs, outputs, dtype=torch.bfloat16, device=device).requires_grad_(False)
            for scheme in SCHEMES:
                weight = registry.of_scheme(scheme).encode(floats.weight.data, registry.parse(scheme))
                layer = quantized_layer(floats, weight)
                set_compute(layer, "int8")
                for count in ROWS:
                    yield _tuned(layer, scheme, count)
    verdicts.write()


def _tuned(layer: Any, scheme: str, rows: int) -> Tuned:
    x = torch.randn(rows, layer.in_features, dtype=layer.bias.dtype, device=layer.bias.device)
    seconds = []
    with fastest.lookups() as keys:  # schemes may share one, whose verdict is then there
        for _ in range(_CALLS):
            start = perf_counter()
            layer(x)
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            seconds.append(perf_counter() - start)
    own = [verdict for key, verdict in fastest.verdicts_so_far().items() if key in keys]
    return Tuned(
        scheme=scheme,
        inputs=layer.in_features,
        outputs=layer.out_features,
        rows=rows,
        by_torch=own[0] if own else None,
        seconds=min(seconds),
    )
