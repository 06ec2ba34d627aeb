"""Device functions that load a number of a packed weight. What is not live is zero."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import triton
import triton.language as tl


@triton.jit
def byte(codes, at, live):
    """int32, signed where `codes` is."""
    return tl.load(codes + at, mask=live, other=0).to(tl.int32)


@triton.jit
def half(codes, at, live):
    """Load the half-precision number at index `at` as float32."""
    return tl.load(codes.to(tl.pointer_type(tl.float16)) + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def short(codes, at, live):
    """Load the number of 16 bits at index `at` as int32, without a sign."""
    return tl.load(codes.to(tl.pointer_type(tl.int16)) + at, mask=live, other=0).to(tl.int32) & 0xFFFF
