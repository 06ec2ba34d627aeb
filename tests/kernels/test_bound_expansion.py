"""Weights whose codes stand for 8-bit integers, bound to a layer: their launches are those of Triton's own, and as many
as the product has steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from sdquant import backends
from sdquant.kernels import linear_of_integers
from sdquant.kernels.base import Coding, EightBit
from sdquant.kernels.triton import bound_eight, bound_expansion, expansion, imports, rotation
from sdquant.nn import quantized_layer
from sdquant.nn.quantized_layers import PREFIX

from .test_bound_triton import LAUNCHED, _no_card, _same  # noqa: F401  (a fixture of all tests here)

BF16 = torch.bfloat16


def _bound(scheme: str, compute: str | None, bias: bool = True) -> tuple[Any, bound_expansion.BoundExpansion]:
    spec = backends.parse(scheme)
    floats = nn.Linear(512, 64, bias=bias, dtype=BF16).requires_grad_(False)
    layer: Any = quantized_layer(floats, spec.scheme.codec.encode(floats.weight.data, spec))
    expand = layer._backend.integers(layer.packed)
    weight = expand()
    form = weight.spec.scheme.codec.form(weight.without_rotation)
    eight = EightBit(32, Coding.BY_ROW) if compute else None
    inner = bound_eight.bind(form, weight.parts, BF16, 16, PREFIX, eight, layer.packed.spec.rotation)
    of = expand.sources(), layer.packed.parts
    assert bound_expansion.can_bind(*of, inner, (form.codes, form.scale))
    few = None if compute else 32
    return layer, bound_expansion.BoundExpansion(
        *of, layer.packed.spec.shape, BF16, PREFIX, layer.packed.spec.rotation, few, inner
    )


@pytest.mark.parametrize(
    ("scheme", "compute", "rows", "bias", "names"),
    [
        ("w4a8", None, 1, True, ["expand_kernel", "rotate_kernel", "one_row_kernel"]),
        ("w6a8", None, 7, False, ["expand_kernel", "rotate_kernel", "rows_kernel"]),
        ("w4a8", None, 40, False, ["expand_kernel", "rotate_kernel"]),  # and torch's product
        ("w4a8", "int8", 40, True, ["expand_kernel", "quantize_kernel", "product_kernel"]),
    ],
)
def test_the_launches_are_those_of_triton(
    scheme: str, compute: str | None, rows: int, bias: bool, names: list[str]
) -> None:
    """They were as many before, but 270 us of the processor where 57 are left on the same machine beside others."""
    layer, bound = _bound(scheme, compute, bias)
    x = torch.ones(1, rows, 512, dtype=BF16)
    made = [bound(x, layer._parameters) for _ in range(3)]
    assert all(y is not None and y.shape == (1, rows, 64) and y.dtype == BF16 for y in made)
    assert [name for name, _, _ in LAUNCHED] == names * 3
    unused = "out" if scheme == "w6a8" else ""
    for turn in (1, 2):
        first, again = LAUNCHED[0], LAUNCHED[turn * len(names)]
        in_floats = compute is None and rows == 40
        _same(first, again, expansion.expand_kernel, ("out", "table" if unused else "", "" if in_floats else "channel"))
        given = dict(zip(expansion.expand_kernel.arg_names, again[2], strict=True))
        parts = layer.packed.parts
        assert (given["codes"], given["scale"]) == (parts["codes"].data_ptr(), parts["s_rel"].data_ptr())
        assert unused or given["table"] == parts["codebook"].data_ptr()
        assert not in_floats or given["channel"] == parts["s_channel"].data_ptr()
        if in_floats:
            turned = dict(zip(rotation.rotate_kernel.arg_names, LAUNCHED[turn * 2 + 1][2], strict=True))
            assert turned["x"] == x.data_ptr()
            continue
        name, _, values = LAUNCHED[turn * 3 + 2]
        kernel = {one.fn.__name__: one for one in _kernels()}[name]
        last = dict(zip(kernel.arg_names, values, strict=True))
        assert last["weight" if compute else "codes"] == given["out"]
        assert last["scale"] == parts["s_channel"].data_ptr() and (not bias or last["bias"] == layer.bias.data_ptr())


def _kernels() -> tuple[Any, ...]:
    from .test_bound_triton import KERNELS

    return KERNELS


def test_codes_without_a_table_of_their_own_have_the_plain_one() -> None:
    layer, _ = _bound("w4a8", None)
    spec, parts = layer.packed.spec, {name: part for name, part in layer.packed.parts.items() if name != "codebook"}
    of = layer._backend.integers(layer.packed.__class__(spec=spec, parts=parts)).sources()
    assert of.table == "" and torch.equal(of.levels, torch.arange(-8.0, 8.0))
    assert _bound("w6a8", None)[1].of.levels is None


@pytest.mark.parametrize(
    "change",
    [lambda x: x.float(), lambda x: x[:0], lambda x: x[:, :256], lambda x: x.clone().requires_grad_(),
     lambda x: x.repeat(1, 2)[:, ::2]],
    ids=["another dtype", "no rows", "another width", "gradient", "strided"],
)  # fmt: skip
def test_what_it_was_not_compiled_for_is_left_to_others(change: Any) -> None:
    layer, bound = _bound("w4a8", None)
    x = torch.ones(2, 512, dtype=BF16)
    assert bound(change(x), layer._parameters) is None and not LAUNCHED
    layer.bias.requires_grad_()
    assert bound(x, layer._parameters) is None and not LAUNCHED
    with torch.no_grad():
        assert bound(x, layer._parameters) is not None


@pytest.mark.parametrize(("compute", "few"), [(None, 64), ("", 64), ("int8", None), ("fp8", 0)])
def test_a_layer_on_a_card_is_bound(compute: str | None, few: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels work; products in 8-bit floats have steps of torch's between."""
    layer, bound = _bound("w4a8", compute)
    packed, device = layer.packed, torch.device("cuda", 0)
    expand = layer._backend.integers(packed)
    made = expand()
    monkeypatch.setattr(imports, "rotation", lambda on, group: rotation if on == device else None)
    monkeypatch.setattr(imports, "expansion", lambda on: expansion if on == device else None)
    monkeypatch.setattr(type(packed), "device", device)
    found = linear_of_integers.bound_to_layer(expand, packed, made, BF16, compute, PREFIX, bound.inner)
    if compute == "fp8":
        assert found is None
        return
    assert isinstance(found, bound_expansion.BoundExpansion)
    assert found.few == (None if few is None else few * 512) and found.inner is bound.inner
    monkeypatch.setattr(imports, "expansion", lambda on: None)
    assert linear_of_integers.bound_to_layer(expand, packed, made, BF16, compute, PREFIX, bound.inner) is None
