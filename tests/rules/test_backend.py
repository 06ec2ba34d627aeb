"""Weights quantized by rules as the backend packs them: every type, linear and convolution, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdquant import backends
from sdquant.core import registry
from sdquant.core.backend import Unfit
from sdquant.errors import SettingsError
from sdquant.rules.core.bit_packing import pack, unpack
from sdquant.rules.core.qarray import dequantize, quantize
from sdquant.rules.core.qtypes import QTYPES, qtype
from sdquant.rules.packed_layout import row_bytes, weight_how
from sdquant.rules.qconfig import QtRule, QuantizationRule
from sdquant.rules.quant_spec import RuleSpec

if TYPE_CHECKING:
    from sdquant.core.backend import QuantSpec

BACKEND = backends.get("rules")
ROW = backends.scheme("rules")


def _weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).mul(0.05).to(dtype)


def _spec(rule: QuantizationRule) -> QuantSpec:
    return RuleSpec(ROW, rule=rule)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("row", [1, 7, 8, 64])
def test_packed_codes_come_back_and_lie_as_documented(bits: int, row: int) -> None:
    codes = torch.randint(0, 2**bits, (5, row), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (5, row_bytes(row, bits)) and torch.equal(unpack(packed, bits, row), codes)
    # The bits of a row, lowest first, written out one after another.
    stream = np.unpackbits(codes.numpy(), axis=1, bitorder="little").reshape(5, row, 8)[:, :, :bits].reshape(5, -1)
    stream = np.pad(stream, ((0, 0), (0, packed.shape[1] * 8 - stream.shape[1])))
    assert np.array_equal(np.packbits(stream, axis=1, bitorder="little"), packed.numpy())


def _rules() -> list[QuantizationRule]:
    made = []
    for row in QTYPES:
        made += [
            QuantizationRule(weight_qtype=row.name, tile_size=size)
            for size in ((row.tile,) if row.tile else (None, 16))
        ]
        if row.asymmetric:
            made.append(QuantizationRule(weight_qtype=row.name, weight_calibration_method="minmax"))
    made.append(QuantizationRule(weight_qtype="int8", weight_calibration_method="fixed,-0.1,0.2"))
    made.append(QtRule(weight_qtype="int8", disable_channelwise_axes=True))
    made.append(QtRule(weight_qtype="int6", disable_channelwise_axes=True, tile_size=32))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(12, 64), (8, 32, 3, 3)], ids=["linear", "conv"])
@pytest.mark.parametrize(
    "rule", _rules(), ids=lambda r: f"{r.weight_qtype}-{r.tile_size}-{r.weight_calibration_method}"
)
def test_packed_as_foretold_and_decoded_as_dequantized(
    rule: QuantizationRule, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = _weight(*shape, dtype=dtype)
    packed = BACKEND.encode(weight, _spec(rule))
    layout = BACKEND.layout(_spec(rule), shape, str(dtype).removeprefix("torch."))
    assert {n: (str(t.dtype), tuple(t.shape)) for n, t in packed.parts.items()} == {
        n: (f"torch.{row.dtype}", row.shape) for n, row in layout.items()
    }
    wanted = dequantize(quantize(weight, weight_how(rule, shape)))
    assert torch.equal(BACKEND.decode(packed, dtype), wanted)
    again = BACKEND.spec_of(registry.packed_spec(packed.spec.to_dict()))
    assert isinstance(again, RuleSpec) and again.rule == rule
    if BACKEND.by_row(packed):
        from sdquant.core.packed_rows import cut

        assert torch.equal(BACKEND.decode(cut(packed, [(2, 5)]), dtype), wanted[2:5])


def test_codes_and_scales_of_a_known_weight() -> None:
    packed = BACKEND.encode(torch.tensor([[0.0, 1.0, -7.5, 3.75]]), _spec(QuantizationRule(weight_qtype="int4")))
    # absmax / 7.5 = 1: codes 0, 1, -8 (a tie, to even), 4 (a tie, to even), with 8 added, two in a byte.
    assert packed.parts["scale"].tolist() == [[1.0]]
    assert packed.parts["qvalue"].tolist() == [[8 | 9 << 4, 0 | 12 << 4, 0, 0]]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_scales_are_kept_as_their_format_says(name: str) -> None:
    rule = QuantizationRule(weight_qtype=name, tile_size=qtype(name).tile)
    scale = BACKEND.encode(_weight(4, 64), _spec(rule)).parts["scale"]
    assert scale.itemsize == 1 and scale.float().min() > 0


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_what_was_written_before_scales_were_outlier_aware_is_read_alike(name: str) -> None:
    """Such a file says mxfp8, and has other powers of two: they are its own."""
    weight = torch.linspace(-1.02, 1.02, 64).repeat(4, 1) * qtype(name).bound
    old = BACKEND.encode(weight, _spec(QuantizationRule(weight_qtype=f"{name}_ceil", tile_size=32)))
    said = replace(old.spec, details={**old.spec.details, "weight_qtype": name})
    decoded = BACKEND.decode(replace(old, spec=said), torch.float32)
    assert torch.equal(decoded, BACKEND.decode(old, torch.float32))
    now = BACKEND.encode(weight, _spec(QuantizationRule(weight_qtype=name, tile_size=32)))
    assert not torch.equal(now.parts["scale"].float(), old.parts["scale"].float())


@pytest.mark.parametrize(
    ("rule", "shape", "words"),
    [
        (QuantizationRule(weight_qtype="int8", tile_size=48), (4, 64), "48"),
        (QuantizationRule(weight_qtype="int8"), (4,), "1 dimension"),
        (QuantizationRule(weight_qtype="int8", act_qtype="mxfp8", tile_size=32), (4, 32, 3, 3), "mxfp8"),
    ],
)
def test_what_a_rule_cannot_hold_is_said(rule: QuantizationRule, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises((Unfit, SettingsError), match=words):
        BACKEND.layout(_spec(rule), shape, "float32")
    with pytest.raises((Unfit, SettingsError), match=words):
        BACKEND.encode(_weight(*shape), _spec(rule))


@pytest.mark.parametrize("values", [{"weight_qtype": "mxfp8", "tile_size": 16}, {"weight_qtype": "nvfp4"}])
def test_formats_with_tiles_of_their_own_want_these(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"tile_size=(32|16)"):
        QuantizationRule(**values)


def test_a_zero_point_needs_a_type_that_has_one() -> None:
    with pytest.raises(SettingsError, match="no zero point"):
        QuantizationRule(weight_qtype="int3", weight_calibration_method="minmax")
    with pytest.raises(SettingsError, match="no zero point"):
        QuantizationRule(weight_qtype="int8", act_qtype="float8_e4m3fn", act_calibration_method="fixed,0,1")
