"""Exact products of integer codes, by the fastest kernel that is exact on this machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from .dispatch_guard import undisturbed

# cuBLAS takes these multiples only, and more rows than 16.
CUDA_MULTIPLE, CUDA_LEAST_ROWS = 8, 17
_PIECE = 2**24 // 2**14  # products of two bytes whose sum float32 holds
_X86 = ("x86_64", "amd64", "x86", "i386", "i686")


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply left [M, K] by right [N, K] transposed, int8 or int16 codes: exact sums, int32 for int8, else int64.

    int8 goes through `torch._int_mm`, which is 10 to 20 times as fast on a CPU as float64 (measured with 1 to 1024
    rows, K of 512 and 4096); what it cannot do goes through float64, which holds every integer below 2**53.
    """
    if left.dtype == right.dtype == torch.int8:
        if left.numel() and right.numel():
            if left.is_cuda and fast(left.device):
                return _on_cuda(left, right)
            if left.device.type == "cpu" and _good_on_cpu():
                # Of one of these two forms: with other strides torch uses a loop that is thousands of times slower.
                turned = right.T if right.T.is_contiguous() else right.contiguous().T
                if left.shape[1] > 1:
                    return torch._int_mm(left.contiguous(), turned)
                return left.int() * turned.int()  # torch's product of one column is of other memory than that (2.13)
        return exactly(left, right).to(torch.int32)
    return exactly(left, right)


def fast(device: torch.device) -> bool:
    """Return whether a device has a fast and exact int8 kernel of torch's."""
    return (device.type == "cuda" and _good_on_cuda(device)) or (device.type == "cpu" and _good_on_cpu())


def beats_floats(device: torch.device) -> bool:
    """Return whether that kernel is faster than products of 16-bit floats. On datacenter Blackwell it is one of
    Ampere's, 6 to 13 times slower than those (pytorch#187094)."""
    if not fast(device):
        return False
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return True
    return not (10, 0) <= torch.cuda.get_device_capability(device) < (12, 0)


def exactly(left: Tensor, right: Tensor) -> Tensor:
    """Multiply left [M, K] by right [N, K] transposed, 8- or 16-bit codes: int64, in floats that hold all sums.

    Without float64 (GPUs of Macs, Intel Arc) int8 is multiplied in float32, in pieces whose sums it holds; int16, whose
    products may be too large for that, on the CPU.
    """
    if has_float64(left.device):
        return _in_float64(left, right)
    if max(left.itemsize, right.itemsize) > 1:
        return _in_float64(left.cpu(), right.cpu()).to(left.device)
    pieces = zip(torch.split(left, _PIECE, 1), torch.split(right, _PIECE, 1), strict=True)
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.int64, device=left.device)
    for one, other in pieces:
        total += (one.float() @ other.float().T).to(torch.int64)
    return total


@cache
@undisturbed
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64."""
    try:
        ones = torch.ones(2, 2, dtype=torch.float64, device=device)
        return bool((ones @ ones).any())
    except (TypeError, RuntimeError):  # torch's for MPS and XPU
        return False


def _in_float64(left: Tensor, right: Tensor) -> Tensor:
    return (left.double() @ right.double().T).to(torch.int64)


def _on_cuda(left: Tensor, right: Tensor) -> Tensor:
    rows, columns = left.shape[0], right.shape[0]
    inner = -left.shape[1] % CUDA_MULTIPLE
    left = _padded(left, inner, max(CUDA_LEAST_ROWS - rows, 0))
    right = _padded(right, inner, -columns % CUDA_MULTIPLE)
    return torch._int_mm(left.contiguous(), right.contiguous().T)[:rows, :columns]


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    """Add zeros to the right and below; torch would copy a tensor that nothing is added to."""
    return torch.nn.functional.pad(x, (0, columns, 0, rows)) if columns or rows else x


@cache
@undisturbed
def _good_on_cuda(device: torch.device) -> bool:
    """Return whether a GPU multiplies int8 exactly: some of AMD's and those before Turing have no kernel for it."""
    try:
        for left in _hard(33, 256):
            for right in _hard(64, 256):
                if not torch.equal(_on_cuda(left.to(device), right.to(device)).cpu().long(), _in_float64(left, right)):
                    return False
    except RuntimeError:
        return False
    return True


@cache
@undisturbed
def _good_on_cpu() -> bool:
    """Return whether the CPU's int8 kernel is fast and does not saturate: without VNNI it may add pairs of products in
    16 bits, and if torch knows that, it uses a loop that is a hundred times slower than float64."""
    vnni = getattr(torch.cpu, "_is_vnni_supported", None)
    if platform.machine().lower() in _X86 and vnni is not None and not vnni():
        return False
    for rows, columns, size in ((1, 5, 129), (33, 64, 256)):
        for left in _hard(rows, size):
            for right in _hard(columns, size):
                try:
                    result = torch._int_mm(left, right.T)
                except RuntimeError:  # a build of torch without it
                    return False
                if not torch.equal(result.long(), _in_float64(left, right)):
                    return False
    return True


def _hard(rows: int, size: int) -> Iterator[Tensor]:
    """Yield test cases, int8 [rows, size]: the largest possible sums, of either sign and mixed, and sums of any codes.

    Kernels shift one side by 128: pairs of neighbours that are large there overflow, whatever their sign was.
    """
    places = torch.arange(rows * size, device="cpu").view(rows, size)
    for one, other in ((127, 127), (-128, -128), (127, -128), (-128, 127)):
        yield torch.where(places % size % 3 > 0, one, other).to(torch.int8)
    yield places.mul(149).remainder(255).sub(127).to(torch.int8)
