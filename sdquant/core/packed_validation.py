"""Check that the parts of a packed weight match the layout of its scheme."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from .backend import Unfit
from .dtypes import dtype_name
from .scheme import QuantSpec

if TYPE_CHECKING:
    from .backend import Packed


def forms(packed: Packed) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of each part."""
    return {part: (dtype_name(t.dtype), tuple(t.shape)) for part, t in packed.parts.items()}


def has_layout(packed: Packed) -> bool:
    """Return whether the parts match the scheme's layout for such a weight, for some values of its options."""
    spec = packed.spec
    recorded = spec.scheme.codec.spec_of(spec)
    if recorded is not None:
        return _is_of(packed, recorded)
    values = [
        (spec.details[name],) if name in spec.details else option.choices or _both(option.default)
        for name, option in spec.scheme.options.items()
    ]
    for combination in itertools.product(*values):
        if _is_of(packed, QuantSpec(spec.scheme, tuple(zip(spec.scheme.options, combination, strict=True)))):
            return True
    return False


def _is_of(packed: Packed, spec: QuantSpec) -> bool:
    try:
        layout = spec.scheme.codec.layout(spec, packed.spec.shape, packed.spec.dtype)
    except Unfit:
        return False
    return forms(packed) == {part: (row.dtype, row.shape) for part, row in layout.items()}


def _both(default: bool | int | str | None) -> tuple[bool | int | str | None, ...]:
    return (False, True) if isinstance(default, bool) else (default,)
