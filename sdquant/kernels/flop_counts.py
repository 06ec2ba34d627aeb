"""The floating-point operations of our custom ops, and of those of libraries whose modules compute (runtime="library"),
for `torch.utils.flop_counter.FlopCounterMode`.

Importing torch's counter imports Triton, which takes a quarter of a second, and hardly anybody counts. So the formulas
are handed over where there is a counter: when `ops` is imported after it, and when a layer is called while one looks
on, which copied torch's formulas when it was made.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNTER = "torch.utils.flop_counter"
# Of x [..., in], which comes first, and a packed weight; without formulas of their own. The last two are quanto's too.
_OF_LIBRARIES = {
    "bitsandbytes": (
        "gemm_4bit", "gemv_4bit", "int8_linear_matmul", "int8_scaled_mm", "int8_mixed_scaled_mm",
    ),
    "quanto": ("qbytes_mm", "gemm_f16i4_awq", "gemm_f16i4_marlin"),
    "aten": ("_weight_int4pack_mm", "_weight_int8pack_mm"),
}  # fmt: skip
_FORMULAS: dict[Any, Callable[..., int]] = {}  # by the op's overload packet


def declare(op: Any, formula: Callable[..., int]) -> None:
    """Declare the formula of an op, which is given the op's arguments and its result as `out_val`."""
    formula._get_raw = True  # type: ignore[attr-defined]
    _FORMULAS[op] = formula
    hand_over()


def declare_of_library(namespace: str) -> None:
    """Declare those of a library that has been imported; both import torch's counter themselves."""
    for owner in (namespace, "aten"):
        ops = getattr(torch.ops, owner)
        for name in _OF_LIBRARIES[owner]:
            if hasattr(ops, name):  # some are for GPUs alone
                _FORMULAS[getattr(ops, name)] = _of_product
    hand_over()


def _of_product(x: Any, *of: Any, out_val: Any, **more: Any) -> int:
    out = out_val[0] if isinstance(out_val, tuple) else out_val
    return 2 * int(out.numel()) * int(x.shape[-1])


_of_product._get_raw = True  # type: ignore[attr-defined]


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


declare(torch.ops.aten._int_mm, _of_product)  # of which torch's own list has no formula (2.13)
