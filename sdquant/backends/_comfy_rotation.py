"""The rotation that a file says of a weight, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core import ROTATION, hadamard
from ..errors import BadFileError

if TYPE_CHECKING:
    from ..core import PrequantizedWeight


def rotation_in(found: PrequantizedWeight, columns: int) -> int:
    """Return the group size of the rotation of a weight with so many inputs.

    Raises:
        BadFileError: it is not a power of 4 that divides them.
    """
    rotation: Any = found.details.get(ROTATION)
    if not hadamard.is_regular(rotation) or columns % rotation:
        raise BadFileError(
            f"Cannot read weight {found.name!r}",
            f"it is rotated in groups of {rotation!r}, but groups are powers of 4 that divide its {columns} inputs",
            "Download the file again from its source",
        )
    return int(rotation)
