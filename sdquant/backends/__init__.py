"""The backends: a file for each library, with its codecs and its file format.

In: float weights, or the tensors of a file. Out: packed weights. May import `kernels`, `core`, `utils`.
A module here with a `BACKEND` is a backend (`core.registry` finds it), as is every entry point of the group
`sdquant.backends`. Modules whose name starts with an underscore are helpers.
"""

from __future__ import annotations

from ..core.backend import Backend, PrequantizedWeight
from ..core.registry import get, names, of_scheme, parse, scheme, schemes
from ..core.scheme import QuantSpec, Scheme

Found = PrequantizedWeight  # its name in the first backends outside of this package

__all__ = [
    "Backend", "Found", "PrequantizedWeight", "QuantSpec", "Scheme", "get", "names", "of_scheme", "parse", "scheme",
    "schemes",
]  # fmt: skip
