"""fp8 as made on the fly: 8-bit codes of bitsandbytes' E4M3 table, a scale for each block of 256 weights.

bitsandbytes has the table and the kernels but no layer and no file format for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..core import (
    COMPUTE_DTYPES,
    Packed,
    PackedLayout,
    PackedSpec,
    PrequantizedWeight,
    TensorSpec,
    Unfit,
    code_tables,
    dtype_name,
    registry,
    torch_dtypes,
)
from ._bnb_arithmetic import decode_bytes
from ._bnb_codec import Codec, bad, require
from ._bnb_library import library, on_library
from ._chunks import by_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..core import QuantSpec

BLOCK = 256


class Blockwise(Codec):
    """The blockwise packing of fp8. Parts: codes uint8 [n]; absmax float32 [ceil(n/256)]."""

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        if dtype not in COMPUTE_DTYPES:
            raise Unfit(f"bitsandbytes can only quantize {', '.join(COMPUTE_DTYPES)}, but the weight is {dtype}")
        size = math.prod(shape)
        return {
            "codes": TensorSpec(dtype="uint8", shape=(size,)),
            "absmax": TensorSpec(dtype="float32", shape=(math.ceil(size / BLOCK),)),
        }

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        dtype = dtype_name(weight.dtype)
        layout = self.layout(spec, tuple(weight.shape), dtype)
        details = {"packing": "blockwise", "block_size": BLOCK}
        flat = weight.detach().reshape(-1)
        if flat.numel() % BLOCK == 0:
            blocks = {"codes": TensorSpec(dtype="uint8", shape=(len(flat) // BLOCK, BLOCK)), "absmax": layout["absmax"]}
            parts = by_rows(flat.view(-1, BLOCK), blocks, _encode)
            parts["codes"] = parts["codes"].view(-1)
        else:
            parts = _encode(flat)
        return Packed(
            spec=PackedSpec(scheme=spec.scheme, shape=tuple(weight.shape), dtype=dtype, details=details),
            parts=parts,
        )

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        codes, absmax, block = packed.parts["codes"], packed.parts["absmax"], packed.spec.details["block_size"]
        if on_library("dequantize_blockwise.out", out.device) and out.dtype in torch_dtypes.COMPUTE_DTYPES:
            state = library().functional.QuantState(
                absmax, code=code_tables.e4m3_code(out.device), blocksize=block, dtype=out.dtype
            )
            library().functional.dequantize_blockwise(codes, state, out=out.view(-1))
        else:  # on a CPU twice as fast as bitsandbytes
            decode_bytes(codes, absmax, code_tables.e4m3_code(out.device), block, out.view(-1))

    def read(self, detected: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        """Read a weight. Only sdquant writes such files; it stores the shape in their metadata."""
        parts = dict(require(detected, part, get) for part in ("codes", "absmax"))
        (key, codes), (scale_key, absmax) = parts.items()
        shape = tuple(codes.shape) if shape is None else shape
        size = math.prod(shape)
        if codes.dtype != torch.uint8 or codes.shape != (size,):
            raise bad(key, f"it is {codes.dtype} {list(codes.shape)}, but the weight needs {size} uint8 codes")
        if absmax.dtype != torch.float32 or absmax.shape != (math.ceil(size / BLOCK),):
            why = f"it is {absmax.dtype} {list(absmax.shape)}, but {size} weights make {math.ceil(size / BLOCK)} blocks"
            raise bad(scale_key, why)
        details = {"packing": "blockwise", "block_size": BLOCK}
        scheme = registry.scheme(detected.scheme)
        spec = PackedSpec(scheme=scheme, shape=shape, dtype=detected.details["dtype"], details=details)
        return Packed(spec=spec, parts={"codes": codes, "absmax": absmax})

    def form(self, packed: Packed) -> PackedLayout:
        shape = packed.spec.shape
        return PackedLayout(
            rows=shape[0],
            columns=math.prod(shape[1:]),
            codes="codes",
            packing="uint8",
            group=packed.spec.details["block_size"],
            table="e4m3",
            scale="absmax",
        )

    def by_row(self, packed: Packed) -> bool:
        return bool(math.prod(packed.spec.shape[1:]) % packed.spec.details["block_size"] == 0)


def _encode(weights: Tensor) -> dict[str, Tensor]:
    """Quantize to codes in the shape of `weights`, and a scale for every 256 of them."""
    table = code_tables.e4m3_code(weights.device)
    codes, state = library().functional.quantize_blockwise(weights, code=table, blocksize=BLOCK)
    absmax = state.absmax
    if not bool(torch.isfinite(weights.abs().amax())):  # bitsandbytes overlooks NaN; others put it into the scale
        absmax = torch.full_like(absmax, torch.nan)
    return {"codes": codes, "absmax": absmax}
