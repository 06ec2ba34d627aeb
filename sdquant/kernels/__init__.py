"""Products with packed weights, each by the fastest kernel that gives correct results on this machine.

In: tensors and a `PackedLayout`, which says how a packed weight lies in memory. Out: products and decoded weights.
The files here read such weights, and `dispatch` chooses. May import `core` and what is below.
Importing this imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .base import Prepared
    from .cpu import int8 as cpu_int8
    from .cpu import state as cpu_state
    from .cpu.by_turns import decode_by_turns
    from .expansion import expand_rows
    from .workspace import scratch
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Prepared", "block_floats", "block_scaled", "cpu", "cpu_int8", "cpu_state", "decode_by_turns", "dispatch",
    "dispatch_guard", "expand_rows", "fastest", "flop_counts", "hadamard", "im2col", "int8_linear", "int_matmul",
    "onednn", "ops", "prepack", "preparation", "rotated_codes", "scheme_activations", "scheme_numbers", "scratch",
    "sdpa", "verdicts",
]  # fmt: skip
