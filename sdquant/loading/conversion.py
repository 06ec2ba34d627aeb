"""From one quantized format to another: plan it, and measure what the second rounding costs.

`sdquant quantize` may start from a model that is quantized already. Its weights are dequantized one at a time while
they are read (`models.with_float_weights`), and quantized like those of any float model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core import LONE
from ..models import RoundingLoss
from ..nn import quantized
from ..planning import source_of
from ..utils.malloc_trim import Trimmer
from ..utils.progress import count_bar

if TYPE_CHECKING:
    from torch import nn

    from ..formats import Checkpoint
    from ..planning import Plan


def rounding_loss(model: nn.Module, plan: Plan, *, progress: bool = False) -> RoundingLoss:
    """Compare the weights of a model, or pipeline, that was loaded for a plan with those of its files, one at a time;
    only those that were quantized there, too."""
    loss = RoundingLoss()
    sources = {component.name: source_of(plan, component) for component in plan.components}
    with count_bar("Comparing", sum(len(src.origins) for src in sources.values()), "weight", progress) as bar:
        for name, src in sources.items():
            if src.origins:
                _compare(model if name == LONE else getattr(model, name), src, loss, bar.update)
    return loss


def _compare(model: nn.Module, src: Checkpoint, loss: RoundingLoss, tick: Callable[[], object]) -> None:
    trimmer, files = Trimmer(), src.open()
    try:
        for name, packed in quantized(model):
            if name in src.origins:
                loss.add(src.read(files, name, exact=True), packed)
                trimmer.add(src.tensors[name].nbytes)
                tick()
    finally:
        for file in files.values():
            file.close()
