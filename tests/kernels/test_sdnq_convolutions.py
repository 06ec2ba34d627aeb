"""Convolutions whose groups have a scale for each position of the kernel, decoded in C: SDNQ's, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sdquant import backends
from sdquant.kernels.cpu.cpu_kernels import native

SCHEMES = ("sdnq-int8", "sdnq-int6", "sdnq-int4", "sdnq-uint4", "sdnq-uint3", "sdnq-fp8")
SHAPES = ((33, 64, 3, 3), (17, 96, 5, 5), (8, 64, 1, 3), (5, 128, 11, 11))


def any_bytes(part: Tensor) -> Tensor:
    """Codes of all kinds, NaN among those of floats."""
    random = torch.randint(0, 256, (part.numel() * part.element_size(),), dtype=torch.uint8)
    return random.view(part.dtype).view(part.shape)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_are_those_of_torch(scheme: str, dtype: torch.dtype) -> None:
    reader = native()
    if reader is None:
        pytest.skip("the C extension is not built, or turned off")
    torch.manual_seed(0)
    backend, looked_at = backends.of_scheme(scheme), 0
    for shape in SHAPES:
        for size in (0.02, 1e-30, 1e30, 0.0):  # of the last three scales some cannot be worked with as usual
            weight = (torch.randn(*shape) * size).to(dtype)
            if not weight.isfinite().all():  # 1e30 in half precision
                continue
            packed = backend.encode(weight, backends.parse(scheme))
            packed = dataclasses.replace(packed, parts=packed.parts | {"weight": any_bytes(packed.parts["weight"])})
            form = backend.form(packed)
            assert form is not None
            if form.taps == 1:  # of 96 inputs some schemes take no whole groups
                continue
            for out in (torch.float32, torch.bfloat16, torch.float16):
                assert reader.reads(form, packed.parts, out)
                found, wanted = torch.empty(shape, dtype=out), torch.empty(shape, dtype=out)
                reader.decode_into(form, packed.parts, found.view(form.rows, form.columns))
                backend.decode_into(packed, wanted)
                assert torch.equal(found.isnan(), wanted.isnan())
                assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
                looked_at += 1
    assert looked_at >= 12
