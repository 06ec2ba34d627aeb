"""The floating-point operations of our custom ops, for `torch.utils.flop_counter.FlopCounterMode`.

Importing torch's counter imports Triton, which takes a quarter of a second, and hardly anybody counts. So the formulas
are handed over where there is a counter: when `ops` is imported after it, and when a layer is called while one looks
on, which copied torch's formulas when it was made.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNTER = "torch.utils.flop_counter"
_FORMULAS: dict[Any, Callable[..., int]] = {}  # by the op's overload packet


def declare(op: Any, formula: Callable[..., int]) -> None:
    """Declare the formula of an op, which is given the op's arguments and its result as `out_val`."""
    formula._get_raw = True  # type: ignore[attr-defined]
    _FORMULAS[op] = formula
    hand_over()


def hand_over() -> None:
    """Give the formulas to torch's list, if somebody imported it, and to the counters that look on."""
    counter: Any = sys.modules.get(_COUNTER)
    if counter is None:
        return
    lists = [
        getattr(getattr(mode, "counter", None), "flop_registry", {}) for mode in _get_current_dispatch_mode_stack()
    ]
    for one in (counter.flop_registry, *lists):
        for op, formula in _FORMULAS.items():
            one.setdefault(op, formula)
