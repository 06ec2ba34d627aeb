"""fp8 as made on the fly: 8-bit codes of bitsandbytes' E4M3 table, a scale for each block of 256 weights.

bitsandbytes has the table and the kernels but no layer and no file format for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ._bnb_codec import Codec
from ._bnb_library import FLOATS, TORCH_FLOATS, e4m3_code, library, tile
from .base import Packed, PackedSpec, Part, QuantSpec, Unfit

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256


class Blockwise(Codec):
    """The blockwise packing of fp8. Parts: codes uint8 [n]; absmax float32 [ceil(n/256)]."""

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Part]:
        if dtype not in FLOATS:
            raise Unfit(f"bitsandbytes quantizes {', '.join(FLOATS)}, and the weight is {dtype}")
        size = math.prod(shape)
        return {
            "codes": Part(dtype="uint8", shape=(size,)),
            "absmax": Part(dtype="float32", shape=(math.ceil(size / BLOCK),)),
        }

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        dtype = str(weight.dtype).removeprefix("torch.")
        self.layout(spec, tuple(weight.shape), dtype)
        flat = weight.detach().reshape(-1)
        codes, state = library().functional.quantize_blockwise(flat, code=e4m3_code(flat.device), blocksize=BLOCK)
        details = {"packing": "blockwise", "block_size": BLOCK}
        return Packed(
            spec=PackedSpec(scheme=spec.scheme.name, shape=tuple(weight.shape), dtype=dtype, details=details),
            parts={"codes": codes, "absmax": state.absmax},
        )

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        functional = library().functional
        codes, absmax, flat = packed.parts["codes"], packed.parts["absmax"], out.view(-1)
        block: int = packed.spec.details["block_size"]
        dtype = out.dtype if out.dtype in TORCH_FLOATS else TORCH_FLOATS[0]
        step = tile(out.device, flat.numel())
        for start in range(0, flat.numel(), step):
            piece = slice(start, start + step)
            state = functional.QuantState(
                absmax[start // block : math.ceil((start + step) / block)],
                code=e4m3_code(out.device),
                blocksize=block,
                dtype=dtype,
            )
            flat[piece].copy_(functional.dequantize_blockwise(codes[piece], state))

    def by_row(self, packed: Packed) -> bool:
        return bool(math.prod(packed.spec.shape[1:]) % packed.spec.details["block_size"] == 0)
