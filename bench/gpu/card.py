"""What the card is, and its rates: copies, products of 16 and of 8 bits, transfers from pinned memory."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench._cards import Clock
from sdquant.offload.pinned_memory import ByTorch, pinning

SIDE = 8192  # of the square matrices that are multiplied
COPIED = 1 << 30  # bytes


def measure(device: torch.device, small: bool) -> Iterator[dict[str, Any]]:
    """A row that describes the device, and one for each rate."""
    yield {"name": "device", "case": "card", **_described(device)}
    clock = Clock(device)
    side, copied = (256, 1 << 20) if small else (SIDE, COPIED)
    for name, make in _rates(device, side, copied).items():
        row: dict[str, Any] = {"name": name, "case": "rates"}
        try:
            run, work, unit = make()
            seconds = clock.medians({"run": run}, 3 if small else 7)["run"]
            row |= {"seconds": seconds, "rate": work / seconds, "unit": unit}
        except Exception as error:  # a card without this product, or torch without the argument: a row that says so
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        yield row


def _described(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"text": platform.processor() or platform.machine()}
    values = torch.cuda.get_device_properties(device)
    return {
        "text": values.name, "capability": [values.major, values.minor], "processors": values.multi_processor_count,
        "memory": values.total_memory, "l2": values.L2_cache_size, "cuda": torch.version.cuda,
    }  # fmt: skip


def _rates(
    device: torch.device, side: int, copied: int
) -> dict[str, Callable[[], tuple[Callable[[], Any], float, str]]]:
    products = 2.0 * side**3

    def bf16() -> Any:
        a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
        return lambda: a @ b.T, products, "FLOP/s"

    def int8() -> Any:
        a, b = (torch.randint(-127, 127, (side, side), device=device, dtype=torch.int8) for _ in range(2))
        return lambda: torch._int_mm(a, b.t()), products, "OP/s"

    def fp8(fast: bool) -> Any:
        a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        left, right = torch.ones(side, 1, device=device), torch.ones(1, side, device=device)
        return (
            lambda: torch._scaled_mm(
                a, b.T, scale_a=left, scale_b=right, out_dtype=torch.bfloat16, use_fast_accum=fast
            ),
            products, "FLOP/s",
        )  # fmt: skip

    def copy() -> Any:
        a, b = (torch.empty(copied, dtype=torch.uint8, device=device) for _ in range(2))
        return lambda: b.copy_(a), 2.0 * copied, "B/s"

    def fetch(how: Any) -> Any:
        host, there = how.make(copied), torch.empty(copied, dtype=torch.uint8, device=device)
        return lambda: there.copy_(host, non_blocking=True), float(copied), "B/s"

    rates = {
        "bf16 product": bf16, "int8 product": int8, "fp8 product, slow sums": lambda: fp8(False),
        "fp8 product, fast sums": lambda: fp8(True), "copy on the device": copy,
    }  # fmt: skip
    if device.type == "cuda":
        rates |= {
            "fetched, pinned by torch": lambda: fetch(ByTorch(rounds=True)),
            "fetched, pinned by CUDA": lambda: fetch(pinning(device)),
        }
    return rates
