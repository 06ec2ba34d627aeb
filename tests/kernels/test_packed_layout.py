"""Every backend describes its packed weights truly: the description decodes to the backend's own bits."""

from __future__ import annotations

import pytest
import torch

from sdquant import backends
from sdquant.core.backend import Unfit
from sdquant.core.gguf_types import TYPES

from .reference import decoded

SPECS = (
    "nf4", "fp4", "nf4,double_quant", "nf4,block_size=128", "fp8", "fp8,packing=float8", "bnb-int8",
    "qint8", "qint4", "qint3", "qint3,group_size=32", "qint2", "qfloat8",
    "int8", "int8_sym", "int4", "int4,group_size=-1", "int4_sym", "int4_sym,group_size=32",
    *(f"rules,weight_qtype=int{bits}" for bits in range(2, 9)),
    *(f"rules,weight_qtype={name}" for name in ("nf4", "float8_e4m3fn", "float8_e5m2")),
    "rules,weight_calibration_method=minmax", "rules,tile_size=32", "rules,weight_qtype=int4,tile_size=16",
    "rules,weight_qtype=mxfp8,tile_size=32", "rules,weight_qtype=mxfp4,tile_size=32",
    "rules,weight_qtype=nvfp4,tile_size=16",
    "sdnq-int8", "sdnq-int8,fp32_scales", "sdnq-fp8", "sdnq-int6", "sdnq-int4", "sdnq-uint4", "sdnq-uint3",
)  # fmt: skip
SHAPES = ((48, 384), (40, 64), (33, 128), (1, 256), (24, 32, 3, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("text", SPECS)
def test_a_form_decodes_to_the_backends_bits(text: str, dtype: torch.dtype) -> None:
    spec = backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    seen = 0
    for shape in SHAPES:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        weight[0] *= 3
        try:
            packed = backend.encode(weight, spec)
        except Unfit:
            continue
        form = backend.form(packed)
        if form is None:  # scales by kernel position, or one for each weight of a single row
            assert len(shape) == 4 or shape[0] == 1
            continue
        seen += 1
        found = torch.from_numpy(decoded(form, dict(packed.parts))).view(shape)
        for wanted in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(found.to(wanted), backend.decode(packed, wanted)), (shape, wanted)
    assert seen >= 3


def test_gguf_forms_name_the_block_type() -> None:
    backend = backends.get("gguf")
    for name in ("q8_0", "q4_k"):
        packed = backend.encode(torch.randn(8, 256), backends.parse(name))
        form = backend.form(packed)
        assert form is not None
        assert (form.packing, form.group, form.rows, form.columns) == (name, TYPES[name].block, 8, 256)
    floats = backend.encode(torch.randn(8, 256), backends.parse("f16"))
    assert backend.form(floats) is None
