"""Quantized weights that a file's header shows. Schemes are names here: files name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Key in the details of weights that no module of the scheme's library can run: `PrequantizedWeight.plain_only`.
PLAIN_ONLY = "plain_only"


@dataclass(frozen=True, kw_only=True)
class PrequantizedWeight:
    """A quantized weight found in a file's header.

    Attributes:
        name: the weight's name as the model knows it, e.g. "proj.weight".
        scheme: canonical scheme name.
        keys: file key of each part.
        extra: file keys that belong to the weight but are not weights (code tables, descriptions).
        evidence: description of how the header shows it, the same for all weights of one format.
        details: entries of `PackedSpec.details` that are known from the header.
        nbytes: size of the parts in memory, if it differs from the file.
        shape: of the float weight, where the shape of its codes does not show it.
        cut: set if the weight is only some rows of the tensors in the file; the fields above are those of the whole.
    """

    name: str
    scheme: str
    keys: Mapping[str, str]
    evidence: str
    extra: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    nbytes: int | None = None
    shape: tuple[int, ...] | None = None
    cut: Cut | None = None

    @property
    def plain_only(self) -> bool:
        """True if the scheme's library has no module for this variant, so that only plain layers can run it."""
        return bool(self.details.get(PLAIN_ONLY))


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Some rows of a quantized weight of a file.

    Attributes:
        of: the weight. shape: of the whole as floats.
        rows: ranges of its first dimension; () for all of it.
        nbytes: what these rows take in memory.
    """

    of: PrequantizedWeight
    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    nbytes: int

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(end - begin for begin, end in self.rows) if self.rows else self.shape[0]
