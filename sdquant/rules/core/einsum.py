"""torch.einsum of two activations, as one batched matrix product."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import SettingsError
from ..providers.product import Site, product

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Equation:
    """An einsum equation of two operands.

    Attributes:
        left, right, out: letters, one for every axis.
    """

    left: str
    right: str
    out: str

    @property
    def summed(self) -> str:
        """Return the letters of both operands that the result lacks, in the left one's order."""
        return "".join(one for one in self.left if one in self.right and one not in self.out)

    @property
    def shared(self) -> str:
        """Return the letters of both operands and the result (batch axes)."""
        return "".join(one for one in self.left if one in self.right and one in self.out)

    def free(self, side: str) -> str:
        """Return the letters of one operand and the result only."""
        return "".join(one for one in side if one in self.out and one not in self.shared)


def parse(text: str, ndims: tuple[int, int]) -> Equation | None:
    """Parse an equation for operands of `ndims` axes; return None if it is not a product of two matrices.

    "..." stands for the remaining axes, aligned from the last, as in numpy.
    """
    inputs, arrow, out = text.replace(" ", "").partition("->")
    sides = inputs.split(",")
    if len(sides) != 2:
        return None
    wide = max(ndims[n] - len(side.replace("...", "")) for n, side in enumerate(sides))
    if wide < 0:
        return None
    spare = "".join(one for one in string.ascii_letters if one not in text)[:wide]
    full = []
    for side, ndim in zip(sides, ndims, strict=True):
        rest = ndim - len(side.replace("...", ""))
        full.append(side.replace("...", spare[len(spare) - rest :] if rest > 0 else ""))
    left, right = full
    if not arrow:
        once = sorted(one for one in {*left, *right} - {*spare} if (left + right).count(one) == 1)
        out = (spare if "..." in inputs else "") + "".join(once)
    out = out.replace("...", spare)
    equation = Equation(left=left, right=right, out=out)
    known = all(len(set(one)) == len(one) for one in (left, right, out)) and len(left) == ndims[0]
    lonely = {*left} ^ {*right}
    if not known or len(right) != ndims[1] or not {*out} <= {*left, *right} or not lonely <= {*out}:
        return None
    return equation


def einsum(text: str, a: Tensor, b: Tensor, site: Site) -> Tensor | None:
    """Compute the quantized product of an equation; return None if it sums over nothing.

    Raises:
        SettingsError: an equation that is not a product of two matrices, or tiles along more than one summed axis.
    """
    equation = parse(text, (a.ndim, b.ndim))
    if equation is None:
        raise refused(text, "it is not a product of two matrices")
    summed, shared = equation.summed, equation.shared
    if not summed:
        return None
    if len(summed) > 1 and site.rule.tile_size is not None:
        raise SettingsError(
            f"Cannot quantize the equation {text!r} in tiles of {site.rule.tile_size}",
            f"it sums over {len(summed)} axes at once",
            "Remove tile_size from the rule for this module",
        )
    sizes: dict[str, int] = {}
    for letter, size in (*zip(equation.left, a.shape, strict=True), *zip(equation.right, b.shape, strict=True)):
        sizes[letter] = max(sizes.get(letter, 1), size)
    a, b = (x.expand([sizes[one] for one in side]) for x, side in ((a, equation.left), (b, equation.right)))
    rows, columns = equation.free(equation.left), equation.free(equation.right)
    left = _arranged(a, equation.left, (shared, rows, summed))
    right = _arranged(b, equation.right, (shared, summed, columns))
    done = product(left, right, site)
    order = shared + rows + columns
    return done.reshape([sizes[one] for one in order]).permute([order.index(one) for one in equation.out])


def refused(text: str, why: str) -> SettingsError:
    """Return the error for an equation that cannot be quantized."""
    return SettingsError(f"Cannot quantize the equation {text!r}", why, "Exclude this module from the rule")


def _arranged(x: Tensor, letters: str, groups: tuple[str, str, str]) -> Tensor:
    """Permute the axes of x into the order of the groups, and flatten each of the last two groups to one axis."""
    turned = x.permute([letters.index(one) for group in groups for one in group])
    lead = list(turned.shape[: len(groups[0])])
    middle = turned.shape[len(groups[0]) : len(groups[0]) + len(groups[1])]
    return turned.reshape([*lead, math.prod(middle), math.prod(turned.shape[len(lead) + len(middle) :])])
