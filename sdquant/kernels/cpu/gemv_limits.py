"""The number of rows of activations up to which our product is faster than dequantizing and torch's own product.

Measured on Zen 4 and Zen 5 cores and on a Granite Rapids core, with AMX and with AVX2 alone (for torch too), with
weights of 3072 and 12288 rows and columns. Where both take as long the product is left to torch, which has more cores
to spread it over.
"""

from __future__ import annotations

import torch

from ..onednn import multiplies
from . import extension, isa

ALL = 1 << 30
_FEW = {
    "amx": {torch.float32: 96, torch.float16: 32},
    "avx512bf16": {torch.bfloat16: 32, torch.float32: 96, torch.float16: 96},  # in bfloat16 then `tiled` takes over
    "avx2": {torch.bfloat16: 64, torch.float32: 64, torch.float16: 64},  # then `widened` takes over
}
_PATCHES = {"avx512bf16": {torch.bfloat16: 96}}  # of images, where that is more: torch's convolutions take longer
# With AMX activations of bf16 are laid out anew, once: so many numbers, beyond which reading them takes over, and so
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
    if name == "avx512bf16" and dtype == torch.float32 and extension().amd():  # type: ignore[union-attr]
        return _ON_AMD
    # Without instructions for float16 torch's product takes 5 times as long as this one.
    return ALL if few and dtype == torch.float16 and name != "avx2" and not multiplies(dtype) else few


def few_patches(dtype: torch.dtype, columns: int) -> int:
    """Return `Reader.few_patches` for a weight of so many columns."""
    return max(few_rows(dtype, columns), _PATCHES.get(isa() or "", {}).get(dtype, 0))
