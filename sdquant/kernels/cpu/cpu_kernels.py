"""The `Reader` over the C extension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..base import Parts, Reader
from . import extension
from .bound_linear import Few, Integers
from .gemv_limits import few_patches, few_rows
from .ggml_blocks import by_block, is_blocks
from .layout_descriptors import TYPES, addresses, describe_layout
from .threads import over_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...core.packed_layout import PackedLayout
    from ..base import Coding, Prepared


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
        integers: tuple[Coding, int] | None,
    ) -> Prepared | None:
        few_kernel = Few(form, parts, dtype, few, prefix) if few else None
        return few_kernel if integers is None else Integers(form, parts, dtype, *integers, few_kernel, prefix)


def _in_rows(form: PackedLayout) -> bool:
    """Return whether every block lies within one row."""
    return not is_blocks(form) or form.columns % form.group == 0


def native() -> Native | None:
    """Return the reader; None if the extension is not built or is turned off."""
    return Native() if extension() is not None else None
