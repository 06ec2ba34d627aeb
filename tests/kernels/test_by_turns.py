"""Codes whose scales go by turns, HQQ's along axis 0: decoded in C as torch does it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdquant.backends import _hub_codes
from sdquant.core import Packed, PackedSpec, registry
from sdquant.kernels.cpu import extension

from .instructions import others, use

NAMES = ["", *others("avx512bf16", "avx2", "portable")]


@pytest.fixture(autouse=True, params=NAMES, ids=[name or "best" for name in NAMES])
def by(request: pytest.FixtureRequest) -> Iterator[None]:
    if extension() is None:
        pytest.skip("the C kernels are not built")
    use(request.param)
    yield
    use("")


def packed(bits: int, shape: tuple[int, int], group: int, shifted: bool) -> Packed:
    torch.manual_seed(bits)
    codes = _hub_codes.packed(torch.randint(0, 1 << bits, shape, dtype=torch.uint8), bits)
    scale = torch.rand(1, shape[0] * shape[1] // group).add(0.01).half()
    parts = {"codes": codes, "scale": scale} | ({"shift": torch.rand(scale.shape) * 7} if shifted else {})
    details = {_hub_codes.AXIS: 0, **({_hub_codes.ZERO: 0} if shifted else {})}
    spec = PackedSpec(scheme=registry.scheme(f"hub-int{bits}"), shape=shape, dtype="float16", details=details)
    return Packed(spec=spec, parts=parts)


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_numbers_are_torchs(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []

    def counted(*of: object) -> bool:
        used.append(decode(*of))
        return used[-1]

    decode = _hub_codes.decode_by_turns
    for shape, group, shifted in (((64, 128), 64, True), ((24, 1160), 8, False), ((6, 8), 16, True)):
        weight = packed(bits, shape, group, shifted)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            outs: list[Tensor] = []
            for run in (counted, lambda *of: False):
                monkeypatch.setattr(_hub_codes, "decode_by_turns", run)
                outs.append(torch.full(shape, 7.0, dtype=dtype))
                _hub_codes.decode_into(weight, outs[-1])
            assert torch.equal(*outs), (shape, dtype)
    assert any(used)  # the last of the widths is no whole number of bytes


def test_shifts_of_another_dtype_are_left_to_torch() -> None:
    """They come so with `load_state_dict(assign=True)`; read as float32 they are others, and end beyond the tensor."""
    weight = packed(4, (64, 128), 64, True)
    outs = []
    for shift in (weight.parts["shift"].half(), weight.parts["shift"].half().float()):
        outs.append(torch.empty(64, 128))
        _hub_codes.decode_into(replace(weight, parts={**weight.parts, "shift": shift}), outs[-1])
    assert torch.equal(*outs)
