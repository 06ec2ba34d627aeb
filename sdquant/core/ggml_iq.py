"""Dequantize the rarer GGUF block types: IQ1 to IQ4, ternary, MXFP4, NVFP4. The common ones are in `_gguf_decode`.

The IQ types store indices into tables of 8 (or 4) small weights each, which are part of the format: `tools/gguf_grids`
wrote them into `gguf_grids.safetensors`. Layouts: ggml's `ggml-common.h`; order of the arithmetic: gguf-py's.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..utils.device_constants import constant
from . import bit_fields

if TYPE_CHECKING:
    from collections.abc import Callable


_FILE = Path(__file__).with_name("gguf_grids.safetensors")
# Types with a table, and its name in the file.
GRIDS = {
    "iq2_xxs": "iq2_xxs", "iq2_xs": "iq2_xs", "iq2_s": "iq2_s", "iq3_xxs": "iq3_xxs", "iq3_s": "iq3_s",
    "iq1_s": "iq1_s", "iq1_m": "iq1_s",
}  # fmt: skip
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4's 16 values
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of a float with 2 + 1 bits
_DELTA = 0.125  # shift of IQ1's weights
_THREES = (1, 3, 9, 27, 81)


def contiguous(part: Tensor) -> Tensor:
    """Copy to aligned memory, which a view as a wider dtype needs; `contiguous` would not copy a single row."""
    return part.clone(memory_format=torch.contiguous_format)


def half(blocks: Tensor, at: int, count: int = 1) -> Tensor:
    """Read the fp16 numbers from byte `at` of each block: float32 [n, count]."""
    return contiguous(blocks[:, at : at + 2 * count]).view(torch.float16).float()


@cache
def grid(kind: str) -> Tensor:
    """Load the table of a type: int8 [codes, 8 or 4], contiguous, on the CPU."""
    from safetensors import safe_open

    with safe_open(str(_FILE), framework="pt") as file:
        table: Tensor = file.get_tensor(GRIDS[kind])
    return table.contiguous()


@constant
def _grid(kind: str, device: torch.device) -> Tensor:
    """Return the table of a type as float32."""
    return grid(kind).float().to(device)


@constant
def _values(values: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@constant
def _signs(device: torch.device) -> Tensor:
    """Return the signs that each byte encodes, -1 for a set bit, lowest bit first: float32 [256, 8]."""
    byte = torch.arange(256, device=device)[:, None]
    return 1.0 - 2.0 * (byte >> torch.arange(8, device=device) & 1)


@constant
def _even_signs(device: torch.device) -> Tensor:
    """Return the signs that 7 bits encode, with an eighth that makes the count of -1 even: float32 [128, 8]."""
    seven = _signs(device)[:128].clone()
    seven[:, 7] = seven[:, :7].prod(1)
    return seven


def _ints(blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Read bytes of each block as unsigned integers of 2 or 4 bytes: int64 [n, count]."""
    return contiguous(blocks[:, start:stop]).view(dtype).to(torch.int64) & ((1 << 8 * dtype.itemsize) - 1)


def _split(numbers: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Split each number into bit fields: [n, a] to [n, a * len(shifts)]."""
    return bit_fields.split(numbers, shifts, mask, 2).flatten(1)


def _looked_up(table: tuple[int, ...], blocks: Tensor, start: int, stop: int, group: int) -> Tensor:
    """Look up 4-bit codes in a table: float32 [n, 2 * bytes]; of each `group` bytes the low nibbles come first."""
    codes = blocks[:, start:stop].reshape(len(blocks), -1, group)
    index = bit_fields.split(codes, (0, 4), 15, 2).flatten().int()
    return _values(table, blocks.device).index_select(0, index).view(len(blocks), -1)


def _put(out: Tensor, scale: Tensor, values: Tensor) -> None:
    """Compute out = scale [n, groups] * values, which has as many elements as `out`."""
    torch.mul(scale.unsqueeze(2), values.reshape(*scale.shape, -1), out=out.view(*scale.shape, -1))


def _signed(out: Tensor, scale: Tensor, kind: str, index: Tensor, signs: Tensor) -> None:
    """Compute out = scale * table weights * signs."""
    _put(out, scale, _grid(kind, out.device)[index])
    view = out.view(signs.shape)
    view.mul_(signs)


def _iq2_xxs(blocks: Tensor, out: Tensor) -> None:
    index = blocks[:, 2:].reshape(-1, 8, 8)[:, :, :4].long()
    high = _ints(blocks, 2, 66, torch.int32)[:, 1::2]
    signs = _even_signs(out.device)[_split(high, (0, 7, 14, 21), 127)]
    scale = half(blocks, 0) * (0.5 + (high >> 28).float()) * 0.25
    _signed(out, scale, "iq2_xxs", index, signs)


def _iq2_xs(blocks: Tensor, out: Tensor) -> None:
    codes = _ints(blocks, 2, 66, torch.int16)
    scales = _split(blocks[:, 66:74], (0, 4), 15)
    scale = half(blocks, 0) * (0.5 + scales.float()) * 0.25
    _signed(out, scale, "iq2_xs", codes & 511, _even_signs(out.device)[codes >> 9])


def _iq2_s(blocks: Tensor, out: Tensor) -> None:
    high = _split(blocks[:, 66:74], (0, 2, 4, 6), 3)
    signs = _signs(out.device)[blocks[:, 34:66].long()]
    scales = _split(blocks[:, 74:82], (0, 4), 15)
    scale = half(blocks, 0) * (0.5 + scales.float()) * 0.25
    _signed(out, scale, "iq2_s", _of_bytes(blocks[:, 2:34], high), signs)


def _iq3_xxs(blocks: Tensor, out: Tensor) -> None:
    high = _ints(blocks, 66, 98, torch.int32)
    signs = _even_signs(out.device)[_split(high, (0, 7, 14, 21), 127)]
    scale = half(blocks, 0) * (0.5 + (high >> 28).float()) * 0.5
    _signed(out, scale, "iq3_xxs", blocks[:, 2:66].long(), signs)


def _iq3_s(blocks: Tensor, out: Tensor) -> None:
    high = _split(blocks[:, 66:74], tuple(range(8)), 1)
    signs = _signs(out.device)[blocks[:, 74:106].long()]
    scale = half(blocks, 0) * (1 + 2 * _split(blocks[:, 106:110], (0, 4), 15))
    _signed(out, scale, "iq3_s", _of_bytes(blocks[:, 2:66], high), signs)


def _of_bytes(low: Tensor, high: Tensor) -> Tensor:
    """Return low + 256 * high, of bytes: int64."""
    return torch.add(low, high.long(), alpha=256)


def _iq1_s(blocks: Tensor, out: Tensor) -> None:
    high = _ints(blocks, 34, 50, torch.int16)
    index = _of_bytes(blocks[:, 2:34], _split(high, (0, 3, 6, 9), 7))
    scale = half(blocks, 0) * (2 * (high >> 12 & 7) + 1)
    shift = torch.where(high >= 1 << 15, -_DELTA, _DELTA).unsqueeze(2)
    _put(out, scale, _grid("iq1_s", out.device)[index].view(*high.shape, -1) + shift)


def _iq1_m(blocks: Tensor, out: Tensor) -> None:
    scales = contiguous(blocks[:, 48:56]).view(torch.int16)
    index = _of_bytes(blocks[:, :32], _split(blocks[:, 32:48], (0, 4), 15))
    scale = iq1_m_scale(blocks) * (2 * _split(scales, (0, 3, 6, 9), 7) + 1)
    _put(out, scale, _grid_with_shift(out.device)[index])


@constant
def _grid_with_shift(device: torch.device) -> Tensor:
    """Return IQ1's table with its shift, the twelfth bit of an index that says whether it is negative."""
    table = grid("iq1_s").float()
    return torch.cat((table + _DELTA, table - _DELTA)).to(device)


def iq1_m_scale(blocks: Tensor) -> Tensor:
    """Read the fp16 scale that IQ1_M stores in the upper four bits of four numbers: float32 [n, 1]."""
    upper = blocks[:, 49:56:2]
    return (upper[:, ::2] >> 4 | upper[:, 1::2] & 0xF0).view(torch.float16).float()


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    _put(out, half(blocks, 0), _looked_up(NON_LINEAR, blocks, 2, 18, 16))


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    low, high = _split(blocks[:, 4:8], (0, 4), 15), _split(blocks[:, 2:4], (0, 2, 4, 6), 3)
    scale = half(blocks, 0) * ((low | high << 4).view(torch.int8) - 32)
    _put(out, scale, _looked_up(NON_LINEAR, blocks, 8, 136, 16))


def _tq1_0(blocks: Tensor, out: Tensor) -> None:
    parts = []
    for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        threes = _values(_THREES[:count], out.device, torch.uint8)[:, None]
        parts.append((blocks[:, start:stop].unsqueeze(1) * threes).flatten(1))  # modulo 256
    codes = torch.cat(parts, dim=1).to(torch.int16).mul_(3).bitwise_right_shift_(8).sub_(1)
    torch.mul(half(blocks, 52), codes, out=out)


def _tq2_0(blocks: Tensor, out: Tensor) -> None:
    codes = bit_fields.split(blocks[:, :64].reshape(-1, 2, 32), (0, 2, 4, 6), 3, 2).flatten(1).view(torch.int8).sub_(1)
    torch.mul(half(blocks, 64), codes, out=out)


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    scale = _exponents(out.device)[blocks[:, :1].long()]
    _put(out, scale, _looked_up(E2M1_TWICE, blocks, 1, 17, 16))


@constant
def _exponents(device: torch.device) -> Tensor:
    """Return 2 ** (exponent - 128) for each byte: half of the scale, as the table has twice the values."""
    exponent = torch.arange(256, device="cpu")
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1).clamp(min=0) << 23)
    return bits.to(torch.int32).view(torch.float32).to(device)


def _nvfp4(blocks: Tensor, out: Tensor) -> None:
    scale = _halves_of_e4m3(out.device)[blocks[:, :4].long()]
    _put(out, scale, _looked_up(E2M1_TWICE, blocks, 4, 36, 8))


@constant
def _halves_of_e4m3(device: torch.device) -> Tensor:
    """Return half of the value of each byte as a float without a sign; 0x7F is 0."""
    codes = torch.arange(256, device="cpu")
    exponent, mantissa = codes >> 3 & 15, (codes & 7).float()
    normal = (1.0 + mantissa / 8.0) * torch.exp2(exponent.float() - 7)
    scale = torch.where(exponent == 0, mantissa * 2.0**-9, normal) * 0.5
    return torch.where((codes == 0) | (codes == 0x7F), 0.0, scale).float().to(device)


# Type name to its decoder.
IQ_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "iq1_s": _iq1_s, "iq1_m": _iq1_m, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs,
    "iq2_s": _iq2_s, "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs, "tq1_0": _tq1_0, "tq2_0": _tq2_0, "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}  # fmt: skip
