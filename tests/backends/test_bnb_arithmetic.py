"""bitsandbytes' formats in plain torch, held against bitsandbytes: the same bits."""

from __future__ import annotations

import json

import pytest
import torch
from bitsandbytes import functional
from torch import Tensor

from sdquant import backends
from sdquant.backends import _bnb_arithmetic, _bnb_library
from sdquant.backends._bnb_arithmetic import decode_bytes, decode_fourbit, encode_fourbit
from sdquant.core import code_tables

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def test_the_tables_are_those_of_bitsandbytes() -> None:
    for kind in ("nf4", "fp4"):
        assert torch.equal(code_tables.fourbit_code(kind, CPU), functional.get_4bit_type(kind, device="cpu"))
    assert torch.equal(code_tables.dynamic_code(CPU), functional.create_dynamic_map())
    assert torch.equal(code_tables.e4m3_code(CPU), functional.create_fp8_map(True, 4, 3, 8))


def weights(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
    """Random ones, and what is special: zeros, borders between codes, denormals, huge numbers."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul_(0.02)
    flat = made.view(-1)
    code = code_tables.fourbit_code(kind, CPU).sort()[0]
    special = [(code[1:] + code[:-1]) / 2, code, -code, torch.tensor([0.0, -0.0, 1.0, 1e-39, -1e-39, 1e-30])]
    flat[: min(len(flat), 53)] = torch.cat(special)[: len(flat)]
    if len(flat) > 512:
        flat[128:192] = 0.0
        flat[192:256] = 1e-40
        flat[256:320] = 0.25  # a constant block
        flat[320:330] = 3e4
    return made.to(dtype)


@pytest.mark.parametrize("block", [32, 64, 512, 4096])
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (3, 33), (5, 64), (64, 256), (40, 4096)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits(kind: str, dtype: torch.dtype, shape: tuple[int, ...], block: int) -> None:
    weight = weights(shape, dtype, kind)
    codes, absmax = encode_fourbit(weight, kind, block)
    theirs, state = functional.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=False)
    assert torch.equal(codes, theirs)
    assert torch.equal(absmax, state.absmax)
    if weight.numel() % block or block > 1024:
        return  # not what bitsandbytes' kernel decodes rightly: see `_bnb_fourbit`
    for wanted in DTYPES:
        out = torch.empty(weight.numel(), dtype=wanted)
        decode_fourbit(codes.view(-1), absmax, kind, block, out)
        shown = functional.QuantState(
            absmax, shape=(len(absmax), block), blocksize=block, quant_type=kind, dtype=wanted
        )
        assert torch.equal(out, functional.dequantize_4bit(theirs, shown).view(-1))


@pytest.mark.parametrize("tile", [64, 192, 1 << 18])
def test_tiles_do_not_matter(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights((37, 97), torch.float32, "nf4")
    before = encode_fourbit(weight, "nf4", 64)
    monkeypatch.setattr(_bnb_arithmetic, "TILE", tile)
    after = encode_fourbit(weight, "nf4", 64)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("size", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eight_bits(dtype: torch.dtype, size: int) -> None:
    table = code_tables.e4m3_code(CPU)
    weight = torch.randn(size, generator=torch.Generator().manual_seed(2))
    codes, state = functional.quantize_blockwise(weight, code=table, blocksize=256)
    out = torch.empty(size, dtype=dtype)
    decode_bytes(codes, state.absmax, table, 256, out)
    state.dtype = dtype
    assert torch.equal(out, functional.dequantize_blockwise(codes, state))


@pytest.mark.parametrize("quant", ["nf4", "fp4", "nf4,double_quant"])
def test_decoded_without_bitsandbytes(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, backend = weights((24, 320), torch.bfloat16, "nf4"), backends.get("bnb")
    packed = backend.encode(weight, backends.parse(quant))
    with_library = backend.decode(packed, torch.bfloat16)
    monkeypatch.setattr("sdquant.backends._bnb_fourbit.installed", lambda: False)
    monkeypatch.setattr(_bnb_library, "library", lambda: pytest.fail("bitsandbytes was used"))
    assert torch.equal(backend.decode(packed, torch.bfloat16), with_library)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant", ["nf4", "fp4,block_size=128", "nf4,double_quant"])
def test_written_as_bitsandbytes_writes(quant: str, dtype: torch.dtype) -> None:
    backend = backends.get("bnb")
    packed = backend.encode(weights((24, 320), dtype, "nf4"), backends.parse(quant))
    written = backend.write("proj.weight", packed)
    from sdquant.backends._bnb_fourbit import _state

    theirs = {f"proj.weight.{key}": tensor for key, tensor in _state(packed).as_dict(packed=True).items()}
    theirs["proj.weight"] = packed.parts["codes"]
    assert set(written) == set(theirs)
    for key, tensor in theirs.items():
        if "quant_state" in key:
            assert json.loads(bytes(written[key].tolist())) == json.loads(bytes(tensor.tolist()))
        else:
            assert torch.equal(written[key], tensor) and written[key].dtype == tensor.dtype, key
