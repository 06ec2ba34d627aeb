"""Up to how many rows of activations a product is faster than decoding into scratch and torch's own product.

Measured on a Zen5 core with weights of 3072 and 12288 rows and columns. Where both take as long the product is left to
torch, which has more cores to spread it over.
"""

from __future__ import annotations

import torch

from . import isa

ALL = 1 << 30
# In float32 the product takes 0.5 to 0.6 of torch's at any number of rows on an AMD CPU; 512 is where there would be
# little to lose if a library were at the CPU's limit.
_FEW = {
    "avx512bf16": {torch.bfloat16: 96, torch.float32: 512, torch.float16: 96},
    "avx2": {torch.bfloat16: 16, torch.float32: 16},
}


def few_rows(dtype: torch.dtype) -> int:
    """See `Reader.few`."""
    few = _FEW.get(isa() or "", {}).get(dtype, 0)
    # Without instructions for float16 torch's product takes 5 times as long as this one.
    return ALL if few and dtype == torch.float16 and not _halves() else few


def _halves() -> bool:
    """Whether torch multiplies float16 by instructions for it."""
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return known is not None and bool(known())
