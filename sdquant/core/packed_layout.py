"""Memory layout and meaning of the numbers in packed weights: the contract between backends and kernels.

A backend describes its packed weights by a `PackedLayout` (`Backend.form`), and kernels read forms. So kernels need no
knowledge of backends, and a new backend that describes its weights can use all existing kernels. Nothing here imports
torch.

A weight is seen as a matrix, [rows, columns], row-major: outputs by everything else. "The k-th weight" counts in that
order. Its value is

    (code - zero) * scale * factor - shift

where each operation is rounded to `arithmetic`; with `fused` the last two are one, rounded once. Scales that are float8
are multiplied by the factor first, in float32. The result is rounded to the requested dtype. Every implementation must
produce exactly these bits, so that they are interchangeable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Packings of one code per byte; float8 codes are their own values.
BYTES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
# Packings of several unsigned codes per byte.
# * "nibbles-low": weights 2i and 2i + 1 in byte i, the first in the low half; "nibbles-high": in the high half.
# * "planes4", "planes2": optimum-quanto's. The groups are the rows of a matrix; of its R rows, byte row r of R / n
#   holds rows r, r + R / n, r + 2R / n, ..., the first in the low bits (R / n rounded up; the last plane may be short).
# * "threes": eight 3-bit codes in three bytes, a little-endian number with code k in bits 3k to 3k + 2; "twos",
#   "fives", "sixes" and "sevens": the same of 2, 5, 6 and 7 bits.
# * "sdnq6", "sdnq3": SDNQ's, four codes in three bytes and eight in three; their bits are in `backends/_sdnq_codes`.
PACKED = (
    "nibbles-low", "nibbles-high", "planes4", "planes2", "threes", "sdnq6", "sdnq3", "twos", "fives", "sixes",
    "sevens",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Memory layout of a packed weight; see the module's docstring.

    Attributes:
        rows, columns: of the weight as a matrix.
        codes: name of the part that contains the codes.
        packing: one of BYTES or PACKED, or the name of a GGUF block type ("q8_0"): blocks of ggml's layout, which hold
            their scales, so that of the fields below only `group` and `apart` count.
        group: number of weights that share a scale: the k-th has scale k // group. For GGUF: weights per block.
        taps: number of scales per group, used in turn: the k-th weight has scale k // group * taps + k % taps. For
            convolutions with a scale for each kernel position.
        table: name of the table that maps codes to numbers ("nf4", "fp4", "e4m3", "e2m1"; see `code_tables`), which
            are rounded to `arithmetic`; "" if the code is the number.
        scale: name of the part of scales, flat in the order of the groups, which may be float8; "" for none.
        nested: scales are uint8 codes of the "dynamic" table themselves, times `nested`'s value (float32, one for each
            256 scales), plus `offset`: the name of that part, else "".
        offset: see `nested`.
        zero: zero point, subtracted from the code: a number, or the name of a part with one per group.
        zero_packing: packing of that part: "uint8", "int8" or "nibbles-low".
        factor: a second factor, a float32; 1.0 for none.
        shift: name of the part that is subtracted after scaling, one value per group; "" for none.
        added: the shift is added instead.
        arithmetic: "float32", "float16" or "bfloat16".
        apart: GGUF blocks are stored field by field instead of block by block (`gguf_fields`).
        fused: scaling and shifting are one operation with one rounding (a fused multiply-add in float32).
    """

    rows: int
    columns: int
    codes: str
    packing: str
    group: int
    taps: int = 1
    table: str = ""
    scale: str = ""
    nested: str = ""
    offset: float = 0.0
    zero: int | str = 0
    zero_packing: str = "uint8"
    factor: float = 1.0
    shift: str = ""
    added: bool = False
    arithmetic: str = "float32"
    fused: bool = False
    apart: bool = False

    @property
    def aligned(self) -> bool:
        """True if groups do not cross rows: each row is whole groups, or each group whole rows."""
        return self.columns % self.group == 0 or self.group % self.columns == 0

    @property
    def by_row(self) -> bool:
        """True if each row has a single scale."""
        return self.group % self.columns == 0 and self.taps == 1


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Activation quantization of a scheme that quantizes activations itself (`Backend.activations`).

    A code is x / scale, rounded to the dtype of x (to float32 for float16), then to the nearest integer, ties to even,
    and saturated; NaN is 0. The result is the sum of products of codes times the scale of the row of activations, times
    that of the row of the weight, plus the bias: the sum and each step rounded to the dtype of x (of float16 the last
    two alone). In tiles of columns such sums are added in float32, in order, and their sum rounded.

    Attributes:
        bound: a scale is the largest magnitude of its row of activations / bound.
        low, high: the smallest and the largest code.
        scale: name of the part with a static scale for all activations, from calibration; "" for none.
        tile: number of columns that share a scale, in the weight too; 0: all of them.
    """

    bound: float
    low: int
    high: int
    scale: str = ""
    tile: int = 0


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Parameters of a convolution, one number per spatial dimension. For padding modes other than zeros the input is
    already padded.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True, kw_only=True)
class FloatGemm:
    """`Backend.linear` or `convolve` expressed as a floating-point GEMM.

    Attributes:
        x: replaces the activations.
        scales: factors of the product, applied one after another, each result rounded to the dtype of x. If there are
            any, x is multiplied by the codes of the weight as numbers, else by the dequantized weight.
    """

    x: Tensor
    scales: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FloatRounding:
    """Activations [m, columns] of `Backend.as_floats` that are rounded to codes: each run of `tile` columns in units of
    its scale, or `decoded`, in the dtype of scales (float32 for float16).

    Attributes:
        limits: the number that the largest magnitude of a tile becomes, the smallest code and the largest one.
        kind: of codes: "int", or a float8 dtype.
        decoded: whether the product is one with the dequantized weight; else its codes are multiplied as numbers, and
            the results by the scales of rows of activations and of the weight.
    """

    limits: tuple[float, float, float]
    kind: str
    tile: int
    decoded: bool
