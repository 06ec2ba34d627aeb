"""GGUF block types decoded by libgguf (ggml's own code, in the extra `gguf`), for use without the C extension.

It writes float32, bit-equal to torch's decoding; a tile of it in the cache is rounded to the requested dtype. It is
used only for types that it decodes in less than 0.8 of torch's time.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import torch

from ..core import gguf_types
from .base import Parts, Reader
from .cpu.layout_descriptors import by_block, is_blocks
from .cpu.threads import over_rows
from .workspace import scratch

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import PackedLayout

# CPU time as a share of torch's decoding, to bfloat16 and to float32: bench/gguf_decode.py, one core of an AMD EPYC
# (Zen 5). The other types take 0.8 to 1.6 of it.
_SHARES = {
    "q4_0": (0.77, 0.51), "q4_1": (0.71, 0.56), "q5_0": (0.99, 0.71), "q5_1": (0.92, 0.61),
    "q2_k": (1.04, 0.73), "q3_k": (0.58, 0.58), "q4_k": (0.67, 0.40), "q5_k": (0.44, 0.30),
    "iq1_s": (0.33, 0.25), "iq1_m": (0.30, 0.24), "iq2_xxs": (0.33, 0.30), "iq4_xs": (0.71, 0.74),
    "tq1_0": (0.47, 0.41), "tq2_0": (0.73, 0.70), "mxfp4": (0.39, 0.35), "nvfp4": (0.40, 0.38),
}  # fmt: skip
_WORTH_IT = 0.8
_TILE = 1 << 18  # weights: a megabyte of float32


class Libgguf(Reader):
    """Reader that only dequantizes, with libgguf; products are torch's."""

    name: ClassVar[str] = "libgguf"

    def reads(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> bool:
        if form.packing not in _SHARES or form.apart or parts[form.codes].device.type != "cpu":
            return False
        assert is_blocks(form)
        rounded, exact = _SHARES[form.packing]
        shares = {torch.bfloat16: rounded, torch.float16: rounded, torch.float32: exact}
        return shares.get(dtype, 1.0) < _WORTH_IT

    def decode_into(self, form: PackedLayout, parts: Parts, out: Tensor) -> None:
        library, kind, blocks = _library(), gguf_types.TYPES[form.packing], parts[form.codes].detach().numpy()
        assert library is not None
        form, flat = by_block(form), out.view(-1)
        tile = _TILE // kind.block

        def decode(first: int, last: int) -> None:
            """Decode rows of the form, each of which is whole blocks."""
            each = form.columns // kind.block
            for start in range(first * each, last * each, tile):
                stop = min(start + tile, last * each)
                to = flat[start * kind.block : stop * kind.block]
                floats = to if to.dtype == torch.float32 else scratch(tuple(to.shape), torch.float32, to.device)
                library.dequantize_rows_into_raw(kind.id, blocks[start:stop], floats.numpy(), stop - start, kind.block)
                if floats is not to:
                    to.copy_(floats)

        over_rows(form.rows, form.columns, decode)


@cache
def _library() -> ModuleType | None:
    try:
        import libgguf
    except ImportError:
        return None
    module: ModuleType = libgguf
    return module


def reader() -> Libgguf | None:
    """Return the reader; None if libgguf is not installed."""
    return Libgguf() if _library() is not None else None
