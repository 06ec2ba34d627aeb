"""The `Reader` over the C extension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...core import hadamard
from ..base import Coding, Parts, Reader
from ..onednn import multiplies
from . import extension, isa, narrow
from .bound_branch import FewWithBranch, IntegersWithBranch
from .bound_linear import Few, Integers
from .layout_descriptors import TYPES, addresses, by_block, describe_layout, is_blocks
from .threads import over_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ...core import LowRank, PackedLayout
    from ..base import EightBit, Prepared

# The number of rows of activations up to which our product is faster than dequantizing and torch's own product.
#
# Measured on Zen 4 and Zen 5 cores and on a Granite Rapids core, with AMX and with AVX2 alone (for torch too), with
# weights of 3072 and 12288 rows and columns. Where both take as long the product is left to torch, which has more cores
# to spread it over.
ALL = 1 << 30
_FEW = {
    "amx": {torch.float32: 96, torch.float16: 32},
    "avx512bf16": {torch.bfloat16: 512, torch.float32: 96, torch.float16: 96},
    "avx2": {torch.bfloat16: 64, torch.float32: 64, torch.float16: 64},  # then `widened` takes over
}
_PATCHES = {"avx512bf16": {torch.bfloat16: 96}}  # of images, whose patches are copied first
# Activations of bf16 are laid out anew, once: so many numbers, beyond which reading them takes over, and with AMX so
# many rows, beyond which decoding is a small part of either way.
_LAID_OUT, _TALL = 1 << 22, 1024
# torch's product in float32 takes twice as long as this one at any number of rows on an AMD CPU; 512 is where there
# would be little to lose if a library were at the CPU's limit.
_ON_AMD = 512


def few_rows(dtype: torch.dtype, columns: int) -> int:
    """Return `Reader.few` for a weight of so many columns."""
    name = isa() or ""
    if name == "amx" and dtype == torch.bfloat16:
        return min(_LAID_OUT // columns, _TALL)
    few = _FEW.get(name, {}).get(dtype, 0)
    if name == "avx512bf16" and dtype == torch.bfloat16:
        return min(_LAID_OUT // columns, few)
    if name == "avx512bf16" and dtype == torch.float32 and extension().amd():  # type: ignore[union-attr]
        return _ON_AMD
    # Without instructions for float16 torch's product takes 5 times as long as this one.
    return ALL if few and dtype == torch.float16 and name != "avx2" and not multiplies(dtype) else few


def few_patches(dtype: torch.dtype, columns: int) -> int:
    """Return `Reader.few_patches` for a weight of so many columns."""
    return _PATCHES.get(isa() or "", {}).get(dtype) or few_rows(dtype, columns)


class Native(Reader):
    """Reader for weights in CPU memory. Only if `extension()` is available."""

    name: ClassVar[str] = "native"

    def reads(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> bool:
        if dtype not in TYPES or any(part.device.type != "cpu" for part in parts.values()):
            return False
        return describe_layout(form, parts) is not None

    def decode_into(self, form: PackedLayout, parts: Parts, out: Tensor) -> None:
        form = by_block(form) if is_blocks(form) else form
        decode = extension().decode  # type: ignore[union-attr]
        common = (describe_layout(form, parts), TYPES[out.dtype], *addresses(form, parts))
        to = out.data_ptr()
        over_rows(form.rows, form.columns, lambda start, stop: decode(*common, start, stop, to))

    def rows_into(self, form: PackedLayout, parts: Parts, start: int, stop: int, out: Tensor) -> bool:
        if not _in_rows(form):
            return False
        self._part(extension().part, form, parts, out.dtype, start, stop, out)  # type: ignore[union-attr]
        return True

    def rounded(self, form: PackedLayout, parts: Parts, dtype: torch.dtype, start: int, stop: int, out: Tensor) -> bool:
        if not _in_rows(form):
            return False
        self._part(extension().rounded, form, parts, dtype, start, stop, out)  # type: ignore[union-attr]
        return True

    @staticmethod
    def _part(
        decode: Any, form: PackedLayout, parts: Parts, dtype: torch.dtype, start: int, stop: int, out: Tensor
    ) -> None:
        common, to = (describe_layout(form, parts), TYPES[dtype], *addresses(form, parts)), out.data_ptr()
        size = form.columns * out.element_size()
        over_rows(
            stop - start, form.columns, lambda one, end: decode(*common, start + one, start + end, to + one * size)
        )

    def few(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> int:
        return few_rows(dtype, form.columns) if _in_rows(form) else 0

    def few_patches(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> int:
        return few_patches(dtype, form.columns) if _in_rows(form) else 0

    def product(self, form: PackedLayout, parts: Parts, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if not x.shape[0]:
            return  # kernels have at least one row
        product = extension().product  # type: ignore[union-attr]
        common = (describe_layout(form, parts), TYPES[x.dtype], *addresses(form, parts))
        to, of, m, added = out.data_ptr(), x.data_ptr(), x.shape[0], 0 if bias is None else bias.data_ptr()
        over_rows(form.rows, form.columns * m, lambda start, stop: product(*common, start, stop, to, of, m, added))

    def unrounded(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> bool:
        result: bool = extension().unrounded(describe_layout(form, parts), TYPES[dtype])  # type: ignore[union-attr]
        return result

    def prepared(
        self,
        form: PackedLayout,
        parts: Parts,
        dtype: torch.dtype,
        few: int,
        prefix: str,
        eight: EightBit | None,
    ) -> Prepared | None:
        few_kernel = Few(form, parts, dtype, few, prefix) if few else None
        if eight is None or eight.coding is None:
            return few_kernel
        return Integers(form, parts, dtype, eight.coding, eight.least, few_kernel, prefix, left=eight.left)

    def prepared_with_rotation(
        self,
        form: PackedLayout,
        parts: Parts,
        dtype: torch.dtype,
        few: int,
        prefix: str,
        eight: EightBit | None,
        rotation: int,
    ) -> Prepared | None:
        if eight is None or eight.coding is None or eight.coding & Coding.BOTH or not hadamard.is_regular(rotation):
            return None
        return Integers(form, parts, dtype, eight.coding, eight.least, None, prefix, rotation)

    def prepared_with_branch(
        self,
        form: PackedLayout,
        parts: Parts,
        branch: LowRank,
        of: Parts,
        dtype: torch.dtype,
        prefix: str,
        few: int,
        eight: EightBit | None,
        rotation: int,
    ) -> Prepared | None:
        if branch.rows or not narrow.can(dtype, form.columns, branch.rank(of)):
            return None
        if rotation and (eight is None or branch.smooth or not hadamard.is_regular(rotation)):
            return None
        if eight is None:
            return FewWithBranch(form, parts, branch, dtype, few, prefix) if few else None
        if eight.coding is None or eight.coding & Coding.BOTH:  # runs of inputs are quantized as they are
            return None
        return IntegersWithBranch(form, parts, branch, dtype, eight, prefix, few, rotation)


def _in_rows(form: PackedLayout) -> bool:
    """Return whether every block lies within one row."""
    return not is_blocks(form) or form.columns % form.group == 0


def native() -> Native | None:
    """Return the reader; None if the extension is not built or is turned off."""
    return Native() if extension() is not None else None
