"""Device code for GGUF blocks whose codes are indices of a table, of 8 or 4 weights each: IQ3, IQ2 and IQ1.

The table is in words of four weights, so that a thread loads four at a time and shifts a word by constants, as
`decoding.nibbles` does. Where signs are, and in what order, is that of `core.ggml_iq`, whose numbers these are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import triton
import triton.language as tl

from .loads import byte, half, short


@triton.jit
def of_seven(signs):
    """Return eight signs, a bit each, of the first seven: their number is even."""
    odd = signs ^ (signs >> 4)
    odd = odd ^ (odd >> 2)
    return signs | (((odd ^ (odd >> 1)) & 1) << 7)


@triton.jit
def four_of_eight(codes, at, live):
    """Load the number of 32 bits at index `at` of those of 16, as int32."""
    return short(codes, at, live) | (short(codes, at + 1, live) << 16)


@triton.jit
def half_and_more(number):
    """Return number + 0.5, a float."""
    return number.to(tl.float32) + 0.5


@triton.jit
def grid_values(
    codes, table, many, g, live, KIND: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, D: tl.constexpr,
    Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D_STEP: tl.constexpr, Q_STEP: tl.constexpr,
    H_STEP: tl.constexpr, S_STEP: tl.constexpr,
):  # fmt: skip
    """Return the weights of chunks g, [n, c, LANES]; for the fields see `decoding.block_values`."""
    each: tl.constexpr = LANES // 4  # words
    w = tl.arange(0, each)[None, None, :]
    c, block = g % CHUNKS, g // CHUNKS
    alive = live[:, :, None]
    at_codes, at_high, at_scales = Q * many + block * Q_STEP, H * many + block * H_STEP, S * many + block * S_STEP
    eight = (LANES // 8) * c[:, :, None] + (w >> 1)  # the number of an index in a block, or of eight signs
    if D >= 0:
        scale = half(codes, D * many + block * D_STEP, live)
    if KIND == "iq3_s":
        four = 8 * c[:, :, None] + w
        high = byte(codes, at_high + c, live)[:, :, None] >> w
        index = byte(codes, at_codes[:, :, None] + four, alive) | ((high & 1) << 8)
        signs = byte(codes, at_scales[:, :, None] + eight, alive)
        both = byte(codes, at_scales + 32 + c // 2, live) >> ((c & 1) * 4)
        scale = scale * (1 + 2 * (both & 15)).to(tl.float32)
    elif KIND == "iq3_xxs":
        index = byte(codes, at_codes[:, :, None] + 8 * c[:, :, None] + w, alive)
        last = four_of_eight(codes, at_scales // 2 + 2 * c, live)
        signs = of_seven((last[:, :, None] >> (7 * (w >> 1))) & 127)
        scale = scale * half_and_more((last >> 28) & 15) * 0.5
    elif KIND == "iq2_xxs":
        index = byte(codes, (at_codes + 8 * c)[:, :, None] + (w >> 1), alive)
        last = four_of_eight(codes, at_codes // 2 + 4 * c + 2, live)
        signs = of_seven((last[:, :, None] >> (7 * (w >> 1))) & 127)
        scale = scale * half_and_more((last >> 28) & 15) * 0.25
    elif KIND == "iq2_xs":
        both = short(codes, (at_codes // 2)[:, :, None] + eight, alive)
        index, signs = both & 511, of_seven(both >> 9)
        of_scale = byte(codes, at_scales + c // 2, live) >> ((c & 1) * 4)
        scale = scale * half_and_more(of_scale & 15) * 0.25
    elif KIND == "iq2_s":
        high = byte(codes, at_high[:, :, None] + (eight >> 2), alive) >> (2 * (eight & 3))
        index = byte(codes, at_codes[:, :, None] + eight, alive) | ((high & 3) << 8)
        signs = byte(codes, at_codes[:, :, None] + 32 + eight, alive)
        of_scale = byte(codes, at_scales + c // 2, live) >> ((c & 1) * 4)
        scale = scale * half_and_more(of_scale & 15) * 0.25
    elif KIND == "iq1_s":
        both = short(codes, at_high // 2 + c * LANES // 32, live)
        high = (both[:, :, None] >> (3 * (eight & 3))) & 7
        index = byte(codes, at_codes[:, :, None] + eight, alive) | (high << 8)
        shift = tl.where((both & 0x8000) > 0, -0.125, 0.125)[:, :, None]
        scale = scale * (2 * ((both >> 12) & 7) + 1).to(tl.float32)
    else:
        # IQ1_M: the block's scale is in the upper four bits of four numbers, whose others are three of each chunk.
        first = at_scales // 2
        bits = (short(codes, first, live) >> 12) | ((short(codes, first + 1, live) >> 8) & 0xF0)
        bits = bits | ((short(codes, first + 2, live) >> 4) & 0xF00) | (short(codes, first + 3, live) & 0xF000)
        scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        scale = scale * (2 * ((short(codes, first + c // 4, live) >> (3 * (c & 3))) & 7) + 1).to(tl.float32)
        high = byte(codes, at_high[:, :, None] + (eight >> 1), alive) >> (4 * (eight & 1))
        index = byte(codes, at_codes[:, :, None] + eight, alive) | ((high & 7) << 8)
        shift = tl.where((high & 8) > 0, -0.125, 0.125)
    if KIND != "iq3_s" and KIND != "iq3_xxs":
        index = 2 * index + (w & 1)
    word = tl.load(table + index)
    k = tl.arange(0, 4)[None, None, None, :]
    v = (((word[:, :, :, None] >> (8 * k)) & 255) ^ 128) - 128
    v = v.to(tl.float32)
    if KIND == "iq1_s" or KIND == "iq1_m":
        v = v + shift[:, :, :, None]
    else:
        negative = (signs[:, :, :, None] >> (4 * (w & 1)[:, :, :, None] + k)) & 1
        v = tl.where(negative > 0, -v, v)
    return tl.reshape(v, [g.shape[0], g.shape[1], LANES]) * scale[:, :, None]
