"""A stand-in for the kernels of `rootonchair/nunchaku-lite-kernels`, which run on NVIDIA's cards alone.

Operators with the arguments that diffusers' layers pass, in torch: of the tensors in the kernels' tiles by the formulas
of `nunchaku_layers`, which Nunchaku's own packer agrees with. Activations have 4 bits, as in Nunchaku: a scale for each
row and 64 inputs, of 16 bits, or for 16 inputs, an 8-bit float. What the kernels round between is not known and exact
here. How activations lie between two operators is their affair, and natural order here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import nunchaku_layers as layers

_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_HALF, *(-value for value in _HALF)])
ROWS = 256  # what rows of activations are filled up to a multiple of


class Ops:
    """The operators. seen: names of those called."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def quantize_w4a4_act_fuse_lora(
        self,
        x: Tensor,
        out: Tensor,
        scales: Tensor,
        down: Tensor,
        between: Tensor,
        smooth: Tensor,
        glu: bool,
        fp4: bool,
    ) -> None:
        self.seen.append("quantize")
        (m, k), rank, size = x.shape, down.shape[1], 16 if fp4 else 64
        padded = -(-m // ROWS) * ROWS
        assert x.is_contiguous() and x.dtype in (torch.float16, torch.bfloat16) and k % 128 == 0 and not glu
        assert (out.dtype, out.shape) == (torch.uint8, (padded, k // 2))
        assert (scales.dtype, scales.shape) == (torch.float8_e4m3fn if fp4 else x.dtype, (k // size, padded))
        assert (between.dtype, between.shape) == (torch.float32, (padded, rank)) and rank % 16 == 0
        assert (down.dtype, down.shape, smooth.dtype, smooth.shape) == (x.dtype, (k, rank), x.dtype, (k,))
        rows = torch.nn.functional.pad(x.float(), (0, 0, 0, padded - m))
        between.copy_(rows @ undone(layers.down, down))
        groups = (rows / undone(layers.vector, smooth)).view(padded, -1, size)
        step = (groups.abs().amax(-1) / (6 if fp4 else 7)).to(scales.dtype)
        scales.copy_(step.view(torch.uint8).T.view(step.dtype) if fp4 else step.T)
        scaled = torch.nan_to_num(groups / step.float().unsqueeze(-1), 0, 0, 0).flatten(1)
        codes = _nearest(scaled) if fp4 else scaled.round().clamp(-7, 7).to(torch.uint8) & 15
        out.copy_(codes[:, ::2] | codes[:, 1::2] << 4)

    def gemm_w4a4(
        self, x: Tensor, weight: Tensor, out: Tensor, _1: None, x_scales: Tensor, scales: Tensor, _2: None, _3: None,
        between: Tensor, up: Tensor, _4: None, _5: None, _6: None, _7: None, _8: None, bias: Tensor | None, _9: None,
        _10: None, _11: None, unsigned: bool, of_lora: list[float], silu: bool, fp4: bool, factor: Tensor | None,
        of_rows: Tensor | None, _12: None, _13: None, _14: None, _15: int,
    ) -> None:  # fmt: skip
        self.seen.append("gemm")
        (m, n), (height, half), size = out.shape, weight.shape, 16 if fp4 else 64
        assert (weight.dtype, height) == (torch.int8, n) and n % 128 == 0 and not unsigned and not silu
        assert of_lora == [1.0] * (up.shape[1] // 16) and {up.dtype, out.dtype} == {out.dtype}
        assert (scales.dtype, scales.shape) == (x_scales.dtype, (half * 2 // size, n))
        assert fp4 is (factor is not None) is (of_rows is not None)
        codes, steps = _half_bytes(x), x_scales.float().T
        wide = (E2M1[codes.long()] if fp4 else _signed(codes)).view(len(x), -1, size) * steps.unsqueeze(-1)
        y = wide.flatten(1)[:m] @ residual(weight, scales, fp4=fp4).T
        if factor is not None and of_rows is not None:
            assert factor.dtype == of_rows.dtype == out.dtype
            y = y * factor.float() * undone(layers.vector, of_rows)
        y = y + between[:m] @ undone(layers.up, up).T
        out.copy_(y if bias is None else y + undone(layers.vector, bias))

    def gemv_awq(
        self, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, m: int, n: int, k: int, group: int
    ) -> Tensor:
        self.seen.append("gemv_awq")
        assert x.shape == (m, k) and m <= 8 and group == 64
        return self._awq(x, weight, scales, zeros, n)

    def awq_gemm_w4a16_g64_int32(self, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        self.seen.append("gemm_awq")
        return self._awq(x, weight, scales, zeros, scales.shape[1])

    def _awq(self, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, n: int) -> Tensor:
        k = x.shape[1]
        assert (weight.dtype, weight.shape) == (torch.int32, (n // 4, k // 2)) and x.is_contiguous()
        assert scales.shape == zeros.shape == (k // 64, n) and {x.dtype, scales.dtype, zeros.dtype} == {x.dtype}
        flat = _half_bytes(weight.view(torch.uint8)).flatten()
        codes = flat[layers.awq_codes_at(n, k)].float().view(n, -1, 64)
        values = codes * scales.float().T.unsqueeze(-1) + zeros.float().T.unsqueeze(-1)
        return (x.float() @ values.flatten(1).T).to(x.dtype)


def residual(weight: Tensor, scales: Tensor, *, fp4: bool) -> Tensor:
    """The weight that is in codes and scales in tiles: float32 [n, k]."""
    height, width = weight.shape[0], weight.shape[1] * 2
    codes = _half_bytes(weight.view(torch.uint8)).flatten()[layers.codes_at(height, width)]
    values = E2M1[codes.long()] if fp4 else _signed(codes)
    shape = (height, width // (16 if fp4 else 64))
    if fp4:
        steps = _undone(layers.small_positions, scales.view(torch.uint8), shape).view(scales.dtype)
    else:
        steps = _undone(layers.scales, scales, shape)
    return (values.view(*shape, -1) * steps.float().unsqueeze(-1)).flatten(1)


def undone(packer: Callable[[Tensor], Tensor], packed: Tensor) -> Tensor:
    """What a packer made the tensor of, which has its shape: in float32."""
    return _undone(packer, packed, tuple(packed.shape)).float()


def _undone(packer: Callable[[Tensor], Tensor], packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    at = packer(torch.arange(packed.numel()).view(shape)).flatten()
    natural = torch.empty_like(packed.flatten())
    natural[at] = packed.flatten()
    return natural.view(shape)


def _half_bytes(packed: Tensor) -> Tensor:
    """[.., k / 2] bytes as [.., k] codes, the low half first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _signed(codes: Tensor) -> Tensor:
    return ((codes.to(torch.int8) ^ 8) - 8).float()


def _nearest(values: Tensor) -> Tensor:
    """Codes of the nearest numbers of E2M1."""
    return (values.unsqueeze(-1) - E2M1).abs().argmin(-1).to(torch.uint8)
