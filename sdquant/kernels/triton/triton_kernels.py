"""The `Reader` over the Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from ...core import gguf_types, torch_dtypes
from ..base import Reader
from . import imports
from .blocks import GGUF, block_of
from .tensor_cores import has_tensor_cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ...core import LowRank, PackedLayout
    from ..base import EightBit, Parts, Prepared

# A card reads a weight of 4 bits in a quarter of the time of one of 16, and a row of activations is two operations for
# each: a 4090 does about 165 of those while it reads two bytes. Up to there the product waits for memory, if its own
# arithmetic for decoding were free. It is not, and such a card was not at hand to measure: less than half of it.
_FEW = 64
# On cards with the memory of data centers decoding costs less than that: on an H200 it is faster from four rows on, in
# every format (bench/results/gpu-h200.json). Compute capabilities.
_WIDE_MEMORY = ((9, 0), (10, 0), (10, 3))
_FEW_ON_WIDE = 1
# Without tensor cores that Triton uses a product of a few rows takes 140 instructions a weight and spills; decoding for
# cuBLAS takes ten.
_FEW_WITHOUT_TENSOR_CORES = 1
_WIDEST = 16  # bytes that a thread of a card loads at a time
_SCALES = (*torch_dtypes.COMPUTE_DTYPES, torch.float8_e4m3fn, torch_dtypes.E8M0)
# Products of float32 run without tensor cores, and torch's kernels for them are better.
_FEW_FLOAT32 = 1


def _alignment(form: PackedLayout) -> int:
    """Return what the addresses of codes must be a multiple of: words of nibbles, and half-precision numbers inside
    blocks, are read where they lie."""
    if form.packing in ("int8", "uint8"):
        return 1
    return 4 if form.packing.startswith("nibbles") else 2


class TritonReader(Reader):
    """Reader for GPUs. It reads nothing if Triton is missing or broken, or has no kernels for the device."""

    name: ClassVar[str] = "triton"

    def reads(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> bool:
        if dtype not in torch_dtypes.COMPUTE_DTYPES or block_of(form) is None:
            return False
        if form.scale and not form.nested and parts[form.scale].dtype not in _SCALES:
            return False
        launcher, codes = imports.launcher(), parts[form.codes]
        if launcher is None or not launcher.works_on(codes.device):
            return False
        return codes.storage_offset() * codes.element_size() % _alignment(form) == 0

    def wants_apart(self, form: PackedLayout) -> bool:
        """Return whether blocks are not a multiple of 16 bytes. Those that are (q4_k, q5_k) are read 16 bytes at a time
        in file order, too: the compiled code is the same for both."""
        if form.packing not in GGUF or block_of(form) is None or imports.launcher() is None:
            return False
        return gguf_types.TYPES[form.packing].nbytes % _WIDEST > 0

    def decode_into(self, form: PackedLayout, parts: Parts, out: Tensor) -> None:
        launcher, decode_into = imports.launcher(), imports.decoder()
        assert launcher is not None  # `reads` said so
        if decode_into is None:
            launcher.decode(form, parts, out)(out.device)
        else:
            decode_into(form, parts, out)

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
        bind, device = imports.branch_binder(), of[branch.up].device
        if bind is None or imports.branch_sides(device) is None:
            return None
        if rotation and imports.rotation(device, rotation) is None:
            return None
        most = self._most_below(form, parts, dtype, eight)
        return bind(form, parts, branch, of, dtype, few, most, prefix, eight, rotation)

    def few(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> int:
        launcher = imports.launcher()
        if launcher is None or not launcher.multiplies(form):
            return 0
        return few_rows(dtype, parts[form.codes].device)

    def most(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> int:
        few, device = self.few(form, parts, dtype), parts[form.codes].device
        tunes = device.type == "cuda" and dtype != torch.float32 and has_tensor_cores(device)
        return _FEW if few and tunes else few

    def product(self, form: PackedLayout, parts: Parts, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        launcher = imports.launcher()
        assert launcher is not None  # `reads` said so
        launcher.product(form, parts, x, bias, out)(out.device)

    def prepared(
        self,
        form: PackedLayout,
        parts: Parts,
        dtype: torch.dtype,
        few: int,
        prefix: str,
        eight: EightBit | None,
    ) -> Prepared | None:
        bind, most = imports.binder(), self._most_below(form, parts, dtype, eight)
        return None if bind is None else bind(form, parts, dtype, few, prefix, eight, most=most)

    def _most_below(self, form: PackedLayout, parts: Parts, dtype: torch.dtype, eight: EightBit | None) -> int:
        """Return `most`, but fewer rows than are multiplied in 8 bits."""
        most = self.most(form, parts, dtype)
        return most if eight is None else min(most, eight.least - 1)

    def prepared_convolution(
        self, form: PackedLayout, parts: Parts, dtype: torch.dtype, prefix: str, shape: tuple[int, ...],
        run: Callable[..., Tensor],
    ) -> Callable[..., Tensor | None] | None:  # fmt: skip
        bind = imports.convolution_binder()
        return None if bind is None else bind(form, parts, dtype, prefix, shape, run)

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
        bind = imports.binder()
        if bind is None or imports.rotation(parts[form.codes].device, rotation) is None:
            return None
        return bind(form, parts, dtype, few, prefix, eight, rotation, self._most_below(form, parts, dtype, eight))


def few_rows(dtype: torch.dtype, device: torch.device) -> int:
    """Return up to how many rows of activations of `dtype` the product is better than decoding on a device."""
    return _FEW_FLOAT32 if dtype == torch.float32 else _few(device)


def _few(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return _FEW
    if not has_tensor_cores(device):
        return _FEW_WITHOUT_TENSOR_CORES
    return _FEW_ON_WIDE if torch.cuda.get_device_capability(device) in _WIDE_MEMORY else _FEW
