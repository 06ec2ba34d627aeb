"""Device functions: from packed codes to numbers, float32.

g are numbers of chunks, [n, c] (see `blocks`), `live` says which of them there are; results are [n, c, lanes], or
[n, c] for what a chunk has one of. What is not live is read as zeros. Everything is rounded where `forms` and
`backends/_gguf_decode` round, for which the kernels must be launched with `enable_fp_fusion=False`: a multiplication
and a subtraction that the compiler makes one instruction of would round once where they round twice.

Triton takes the annotations of parameters as they are, hence no `from __future__ import annotations` here.
"""

# ruff: noqa: SIM108  (branches on what is compiled in read better in full)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import triton
import triton.language as tl

from .grids import grid_values
from .loads import byte, half

GATHERS = tl.constexpr(hasattr(tl, "gather"))  # since Triton 3.3


@triton.jit
def rounded(v, TO: tl.constexpr, BITS: tl.constexpr):
    """v, float32, rounded to the dtype TO and still float32. BITS: by its bits, as Triton's interpreter does not round
    to bfloat16 but cuts off."""
    if TO == "float16":
        v = v.to(tl.float16).to(tl.float32)
    if TO == "bfloat16":
        if BITS:
            b = v.to(tl.int32, bitcast=True)
            b = (b + 0x7FFF + ((b >> 16) & 1)) & -65536
            v = tl.where(v == v, b.to(tl.float32, bitcast=True), v)
        else:
            v = v.to(tl.bfloat16).to(tl.float32)
    return v


@triton.jit
def position(g, lane, p: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr, ORDER: tl.constexpr):
    """Which weight that is, counted from chunk 0: int32, of the shape that g and lane have together."""
    if ORDER == "halves":
        at = (g >> 1) * 128 + (g & 1) * 16 + 32 * p + lane
    else:
        at = g * (PLANES * LANES) + LANES * p + lane
    return at


@triton.jit
def float8(code, E4M3: tl.constexpr):
    """Return the value of a float8 code (int32, the low byte)."""
    if E4M3:
        # With its exponent and mantissa where half precision has them, a number is 2 ** 8 times too small.
        bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
        v = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        v = tl.where((code & 0x7F) == 0x7F, float("nan"), v)
    else:
        v = ((code & 0xFF) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return v


@triton.jit
def power_of_two(code):
    """Return the value of a float8_e8m0fnu code, int32: 2 to the power of it less 127; NaN for 255."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def of_eight(codes, at, live, WIDTH: tl.constexpr):
    """The code of weight `at`, of which eight are in WIDTH bytes, a little-endian number."""
    unit = at // 8
    bit = WIDTH * (at - unit * 8)
    start = unit * WIDTH + bit // 8
    low = byte(codes, start, live)
    high = byte(codes, start + 1, live & (bit % 8 > 8 - WIDTH))
    return ((low | (high << 8)) >> (bit % 8)) & ((1 << WIDTH) - 1)


@triton.jit
def nibbles(codes, g, live, LANES: tl.constexpr, HIGH: tl.constexpr):
    """Codes of four bits, [n, c, LANES], from the words that hold eight of them. HIGH: first in a byte is its upper
    half.

    Threads load four words at a time, and shift a word by constants: bytes would first have to be taken apart.
    """
    each: tl.constexpr = LANES // 8
    at = g[:, :, None] * each + tl.arange(0, each)[None, None, :]
    word = tl.load(codes.to(tl.pointer_type(tl.int32)) + at, mask=live[:, :, None], other=0)
    k = tl.arange(0, 8)
    if HIGH:
        k = k ^ 1
    code = (word[:, :, :, None] >> (4 * k)[None, None, None, :]) & 15
    return tl.reshape(code, [g.shape[0], g.shape[1], LANES])


@triton.jit
def sixteen(table):
    """Load the table that `of_sixteen` looks up in."""
    if GATHERS:
        held = tl.load(table + tl.arange(0, 16))
    else:
        held = table
    return held


@triton.jit
def of_sixteen(held, code):
    """Look up codes below 16: in shared memory where Triton can, where it takes one instruction. From global memory it
    takes three with the address."""
    if GATHERS:
        v = tl.reshape(tl.gather(held, tl.reshape(code, [code.numel]), 0), code.shape)
    else:
        v = tl.load(held + code)
    return v


@triton.jit
def form_code(codes, at, live, plane_size, PACKING: tl.constexpr):
    """The code of weight `at`, int32. plane_size: of quanto's planes, in bytes."""
    if PACKING == "nibbles-low":
        code = (byte(codes, at // 2, live) >> ((at & 1) * 4)) & 15
    elif PACKING == "nibbles-high":
        code = (byte(codes, at // 2, live) >> (4 - (at & 1) * 4)) & 15
    elif PACKING == "planes4":  # beyond the end a plane may have any number, and no number shifts by 8 bits and more
        plane = at // plane_size
        code = (byte(codes, at - plane * plane_size, live) >> ((plane * 4) & 7)) & 15
    elif PACKING == "planes2":
        plane = at // plane_size
        code = (byte(codes, at - plane * plane_size, live) >> ((plane * 2) & 7)) & 3
    elif PACKING == "twos":
        code = of_eight(codes, at, live, 2)
    elif PACKING == "threes":
        code = of_eight(codes, at, live, 3)
    elif PACKING == "fives":
        code = of_eight(codes, at, live, 5)
    elif PACKING == "sixes":
        code = of_eight(codes, at, live, 6)
    elif PACKING == "sevens":
        code = of_eight(codes, at, live, 7)
    elif PACKING == "sdnq6":
        unit = at // 4
        k = at - unit * 4
        own = byte(codes, unit * 3 + k, live & (k < 3))
        last = live & (k == 3)
        a = byte(codes, unit * 3, last)
        b = byte(codes, unit * 3 + 1, last)
        c = byte(codes, unit * 3 + 2, last)
        code = (own & 63) | ((a >> 2) & 48) | ((b >> 4) & 12) | ((c >> 6) & 3)
    elif PACKING == "sdnq3":
        unit = at // 8
        k = at - unit * 8
        low = byte(codes, unit * 3 + k % 3, live)
        high = byte(codes, unit * 3 + 2, live & (k > 5))
        # Not by k - 2: of a shift by fewer than no bits LLVM may make any number, and what is masked out is not zero.
        code = ((low >> (k // 3 * 3)) & 7) | ((high >> tl.where(k > 5, k - 2, 0)) & 4)
    else:
        code = byte(codes, at, live)
    return code


@triton.jit
def by_weight(v, TAPS: tl.constexpr):
    """Return v, [n, c], of chunks, as [n, c, 1]; with several taps it is of weights already, [n, c, lanes]."""
    if TAPS == 1:
        v = v[:, :, None]
    return v


@triton.jit
def form_values(
    codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count,
    g, live, p: tl.constexpr, PACKING: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr, ORDER: tl.constexpr,
    TABLE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr, SHIFT: tl.constexpr,
    TAPS: tl.constexpr, FUSED: tl.constexpr, ARITHMETIC: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Plane p of a weight of any form but GGUF's blocks: (code - zero) * scale * factor - shift."""
    # All loads come first, as what is computed from them waits, in part at barriers: so they are on their way together.
    first = g * (PLANES * LANES)
    shared, there = first // group, live  # which scale
    if TAPS > 1:  # each weight has its own
        within = first[:, :, None] + LANES * p + tl.arange(0, LANES)[None, None, :]
        shared, there = shared[:, :, None] * TAPS + within % TAPS, live[:, :, None] & (within < count)
    if SCALE == "nested":
        s = tl.load(dynamic + byte(scale, shared, there)) * tl.load(nested + shared // 256, mask=there, other=0.0)
        s = s + offset
    elif SCALE == "floats":
        s = tl.load(scale + shared, mask=there, other=0.0).to(tl.float32)
    elif SCALE == "e4m3":
        s = float8(byte(scale, shared, there), True)
    elif SCALE == "e8m0":
        s = power_of_two(byte(scale, shared, there))
    if FACTOR and (SCALE == "e4m3" or SCALE == "e8m0"):
        s = s * factor
    if SHIFT != "":
        t = tl.load(shift + shared, mask=there, other=0.0).to(tl.float32)
    if ZERO == "nibbles-low":
        z = (byte(zero, shared // 2, there) >> ((shared & 1) * 4)) & 15
    elif ZERO == "bytes":
        z = byte(zero, shared, there)
    if TABLE and (PACKING == "nibbles-low" or PACKING == "nibbles-high"):
        held = sixteen(table)
    if LANES > 1 and PACKING == "nibbles-low":
        code = nibbles(codes, g, live, LANES, False)
    elif LANES > 1 and PACKING == "nibbles-high":
        code = nibbles(codes, g, live, LANES, True)
    else:
        at = position(g[:, :, None], tl.arange(0, LANES)[None, None, :], p, PLANES, LANES, ORDER)
        code = form_code(codes, at, live[:, :, None] & (at < count), plane_size, PACKING)
    if TABLE:
        if PACKING == "nibbles-low" or PACKING == "nibbles-high":
            v = of_sixteen(held, code)
        else:
            v = tl.load(table + (code & 0xFF))
    elif PACKING == "float8_e4m3fn":
        v = float8(code, True)
    elif PACKING == "float8_e5m2":
        v = float8(code, False)
    else:
        v = code.to(tl.float32)
    if ZERO == "number":
        v = v - number
    elif ZERO != "":
        v = v - by_weight(z.to(tl.float32), TAPS)
    if FUSED:
        if SHIFT == "subtracted":
            t = -t
        s, t = tl.broadcast_to(by_weight(s, TAPS), v.shape), tl.broadcast_to(by_weight(t, TAPS), v.shape)
        v = rounded(tl.fma(v, s, t), ARITHMETIC, BITS)
    else:
        if SCALE != "":
            v = rounded(v * by_weight(s, TAPS), ARITHMETIC, BITS)
        if FACTOR and SCALE != "e4m3" and SCALE != "e8m0":
            v = v * factor
        if SHIFT == "subtracted":
            v = rounded(v - by_weight(t, TAPS), ARITHMETIC, BITS)
        elif SHIFT == "added":
            v = rounded(v + by_weight(t, TAPS), ARITHMETIC, BITS)
    return v


@triton.jit
def block_values(
    codes, table, many, g, live, p: tl.constexpr, FAMILY: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D_STEP: tl.constexpr,
    Q_STEP: tl.constexpr, H_STEP: tl.constexpr, S_STEP: tl.constexpr, Z: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Plane p of GGUF blocks.

    D, M: where the scale and the minimum are, in half-precision numbers; Q, H, S: the codes, their upper bits, and the
    small scales, in bytes; each times `many`, which is the number of blocks where fields are apart, else 1, and plus
    the number of the block times its step. Z: zero.
    """
    lane = tl.arange(0, LANES)[None, None, :]
    c = g % CHUNKS
    block = g // CHUNKS
    alive = live[:, :, None]
    at_codes = (Q * many + block * Q_STEP)[:, :, None]
    at_high = (H * many + block * H_STEP)[:, :, None]
    at_scales = S * many + block * S_STEP
    if D >= 0:
        scale = half(codes, D * many + block * D_STEP, live)
    if FAMILY == "bytes":
        code = (byte(codes, at_codes + lane, alive) ^ 128) - 128
    elif FAMILY == "nibbles":
        code = (byte(codes, at_codes + lane, alive) >> (4 * p)) & 15
        if H >= 0:
            k = 16 * p + lane
            code = code | (((byte(codes, at_high + k // 8, alive) >> (k % 8)) & 1) << 4)
        if M >= 0:
            minimum = half(codes, M * many + block * D_STEP, live)
    elif FAMILY == "eights":
        # Eight scales and minimums of six bits in 12 bytes: see `_gguf_decode._six_bits`.
        s = 2 * c + p
        a = byte(codes, at_scales + (s & 3), live)
        b = byte(codes, at_scales + 4 + (s & 3), live)
        both = byte(codes, at_scales + 8 + (s & 3), live)
        of_scale = tl.where(s < 4, a & 63, (both & 15) | ((a >> 2) & 48))
        of_minimum = tl.where(s < 4, b & 63, (both >> 4) | ((b >> 2) & 48))
        minimum = half(codes, M * many + block * D_STEP, live) * of_minimum.to(tl.float32)
        scale = scale * of_scale.to(tl.float32)
        code = (byte(codes, at_codes + 32 * c[:, :, None] + lane, alive) >> (4 * p)) & 15
        if H >= 0:
            code = code | (((byte(codes, at_high + lane, alive) >> s[:, :, None]) & 1) << 4)
    elif FAMILY == "iq4_xs":
        # Upper halves of the eight scales in two bytes, then the lower ones in four.
        high = (byte(codes, at_scales + c // 4, live) >> ((c & 3) * 2)) & 3
        low = (byte(codes, at_scales + 2 + c // 2, live) >> ((c & 1) * 4)) & 15
        scale = scale * ((low | (high << 4)) - 32).to(tl.float32)
        code = (byte(codes, at_codes + 16 * c[:, :, None] + lane, alive) >> (4 * p)) & 15
    elif FAMILY == "mxfp4":
        # Half of the power of two, as the table has twice the values.
        exponent = byte(codes, at_scales, live)
        bits = tl.where(exponent < 2, 0x00200000 << (exponent & 1), (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
        code = (byte(codes, at_codes + lane, alive) >> (4 * p)) & 15
    elif FAMILY == "nvfp4":
        # As in `float8`, but without a sign, half as large, and zero for NaN.
        eight = byte(codes, at_scales + c, live)
        scale = ((eight & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 128.0
        scale = tl.where(eight == 0x7F, 0.0, scale)
        code = (byte(codes, at_codes + 8 * c[:, :, None] + lane, alive) >> (4 * p)) & 15
    elif FAMILY == "tq2_0":
        code = (byte(codes, at_codes + 32 * c[:, :, None] + lane, alive) >> (2 * p)) & 3
    elif FAMILY == "tq1_0":
        # Five numbers of three values in a byte, the last four bytes four: of the fraction that a byte is, the digits
        # in base 3. Ten chunks of the first 32 bytes by turns, five of the next 16, one of the last.
        d = c[:, :, None] + lane * 0
        digit = tl.where(d < 10, d >> 1, tl.where(d < 15, d - 10, lane >> 2))
        start = tl.where(d < 10, (d & 1) * 16, 32) + lane
        packed = byte(codes, at_codes + start, alive & (d < 15)) + byte(codes, at_high + (lane & 3), alive & (d == 15))
        power = (1 + 2 * (digit & 1)) * (1 + 8 * ((digit >> 1) & 1)) * (1 + 80 * (digit >> 2))
        code = (((packed * power) & 255) * 3) >> 8
    else:
        # Sixteen scales: half h of the block, plane p, and j says which 16 of 32 lanes.
        h = c >> 1
        j = c & 1
        s = 8 * h + 2 * p + j
        lanes = (16 * j)[:, :, None] + lane
        if FAMILY == "q2_k":
            both = byte(codes, at_scales + s, live)
            scale = scale * (both & 15).to(tl.float32)
            minimum = half(codes, M * many + block * D_STEP, live) * (both >> 4).to(tl.float32)
            code = (byte(codes, at_codes + (32 * h)[:, :, None] + lanes, alive) >> (2 * p)) & 3
        elif FAMILY == "q3_k":
            four = (byte(codes, at_scales + (s & 7), live) >> (4 * (s >> 3))) & 15
            two = (byte(codes, at_scales + 8 + (s & 3), live) >> (2 * (s >> 2))) & 3
            scale = scale * ((four | (two << 4)) - 32).to(tl.float32)
            code = (byte(codes, at_codes + (32 * h)[:, :, None] + lanes, alive) >> (2 * p)) & 3
            upper = byte(codes, at_high + lanes, alive) >> (4 * h + p)[:, :, None]
            code = code | ((upper & 1) << 2)
        else:
            of_scale = (byte(codes, at_scales + s, live) ^ 128) - 128
            scale = scale * of_scale.to(tl.float32)
            code = byte(codes, at_codes + (64 * h)[:, :, None] + 32 * (p & 1) + lanes, alive) >> (4 * (p >> 1))
            upper = byte(codes, at_high + (32 * h)[:, :, None] + lanes, alive) >> (2 * p)
            code = (code & 15) | ((upper & 3) << 4)
    if TABLE:
        v = tl.load(table + code)
    else:
        v = (code - Z).to(tl.float32)
    v = v * scale[:, :, None]
    if M >= 0:
        if FAMILY == "nibbles":
            v = v + minimum[:, :, None]
        else:
            v = v - minimum[:, :, None]
    return v


@triton.jit
def values(
    codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count,
    many, g, live, p: tl.constexpr, FAMILY: tl.constexpr, PACKING: tl.constexpr, PLANES: tl.constexpr,
    LANES: tl.constexpr, ORDER: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr,
    FACTOR: tl.constexpr, SHIFT: tl.constexpr, TAPS: tl.constexpr, FUSED: tl.constexpr, ARITHMETIC: tl.constexpr,
    CHUNKS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
    D_STEP: tl.constexpr, Q_STEP: tl.constexpr, H_STEP: tl.constexpr, S_STEP: tl.constexpr, Z: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Plane p of a weight of any form."""
    if FAMILY == "form":
        v = form_values(
            codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count,
            g, live, p, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS, FUSED, ARITHMETIC, BITS,
        )  # fmt: skip
    elif FAMILY == "grids":
        v = grid_values(codes, table, many, g, live, PACKING, LANES, CHUNKS, D, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP)
    else:
        v = block_values(
            codes, table, many, g, live, p, FAMILY, LANES, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z,
            TABLE,
        )  # fmt: skip
    return v
