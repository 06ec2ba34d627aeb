"""The ways in which the files of other programs have the weights of `uniform`. Imports no torch."""

from __future__ import annotations

GROUP_SIZE = "group_size"
# In the details of a weight that was found: the way in which another program's file has it.
LAYOUT = "layout"
BYTES = "bytes"  # a code in each byte, scales and zero points [rows, groups]
NIBBLES = "nibbles"  # the even column in the low half, scales [groups, rows]; the zero point is added after scaling
HIGH_FIRST = "high first"  # the even column in the high half, 8 added; the inverse of the scales, [rows * groups, 1]
PAIRS = "pairs of rows"  # the even row in the low half, scales [rows, groups]
