"""Which instruction sets the C kernels can be tested with here, besides the one that they choose."""

from __future__ import annotations

from sdquant.kernels.cpu import extension, isa, layout_descriptors
from sdquant.kernels.cpu import int8 as native


def use(name: str) -> bool:
    """Have the kernels for such instructions run, "" for the best; whether this machine can."""
    found = extension()
    chosen = found is not None and bool(found.choose(name))
    native.sizes.cache_clear()
    layout_descriptors._plan.cache_clear()
    return chosen


def others(*names: str) -> list[str]:
    """Those of the names that run here, without the one that is chosen anyway."""
    best = isa()
    try:
        return [name for name in names if name != best and use(name)]
    finally:
        use("")
