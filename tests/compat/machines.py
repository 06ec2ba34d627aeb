"""Machines that the tests speak of. Values only: nothing here asks the machine."""

from __future__ import annotations

from typing import Any

from sdquant import backends
from sdquant.compat.hardware import KINDS, Device, Machine

GIB = 1 << 30
CPU = Device(kind="cpu", index=0, name="a processor", memory_total=32 * GIB, memory_free=20 * GIB)
VERSIONS = {
    "torch": "2.13.0+cpu", "diffusers": "0.42.1", "transformers": "5.23.0", "accelerate": "1.15.0",
    "safetensors": "0.8.0", "bitsandbytes": "0.50.2", "optimum-quanto": "0.2.7", "gguf": "0.19.0",
    "libgguf": "0.2.2", "nncf": "3.4.0", "sdnq": "0.2.8", "openvino": "2026.4.1", "comfy-kitchen": "0.2.40",
}  # fmt: skip

# The schemes that the design promises, by backend. GGUF's are those that issue 2 names; sdnq's are the backend's own.
PROMISED = {
    "bnb": ("nf4", "fp4", "fp8", "bnb-int8"),
    "quanto": ("qint8", "qint4", "qint3", "qint2", "qfloat8"),
    "gguf": ("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "q3_k", "q2_k", "q4_k_m", "bf16", "f16"),
    "nncf": ("int8", "int8_sym", "int4", "int4_sym"),
}
OWNER = {scheme: backend for backend, schemes in PROMISED.items() for scheme in schemes}


def card(kind: str, free: float = 10 * GIB, index: int = 0) -> Device:
    """A device of this kind with 12 GiB of memory."""
    return Device(kind=kind, index=index, name=f"a {kind} card", memory_total=12 * GIB, memory_free=int(free))


def machine(
    *devices: Device, without: tuple[str, ...] = (), newer: dict[str, str] | None = None, **values: Any
) -> Machine:
    """A Linux machine with everything installed, but for `without`, and with the versions in `newer` instead."""
    versions = {name: version for name, version in VERSIONS.items() if name not in without} | (newer or {})
    standard: dict[str, Any] = {
        "platform": "linux", "wsl": False, "python": "3.11.7", "ram_total": 32 * GIB, "ram_available": 20 * GIB,
        "has_compiler": True, "has_ninja": True, "has_triton": False,
    }  # fmt: skip
    return Machine(devices=(*devices, CPU), versions=versions, **(standard | values))


EVERYTHING = machine(*(card(kind) for kind in KINDS if kind not in ("cpu", "rocm")))


def runtimes(scheme: str) -> tuple[str, ...]:
    """The runtimes that can be asked for."""
    return ("default", *backends.scheme(scheme).runtimes)
