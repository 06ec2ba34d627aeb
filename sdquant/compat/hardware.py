"""Probe the machine: platform, devices, memory, installed packages, compilers. No other file does.

`versions()` reads package metadata and imports nothing. `probe()` imports torch, because only torch knows its devices.
All sizes are bytes.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..backends import trusts_remote_kernels
from ..errors import SettingsError
from ..kernels import cpu_state as native_state
from ..utils.distributed import local_rank
from ..utils.processor import processor_name
from ..utils.quiet_imports import quiet_imports

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Device kinds in order of preference.
KINDS = ("cuda", "rocm", "xpu", "mps", "directml", "cpu")

# torch's names of device kinds, where they differ.
TORCH_NAMES: Mapping[str, str] = MappingProxyType({"rocm": "cuda", "directml": "privateuseone"})

# Distributions whose version affects what works, besides those that the backends require.
PACKAGES = (
    "torch", "diffusers", "transformers", "accelerate", "safetensors", "tokenizers", "huggingface-hub", "numpy",
    "bitsandbytes", "optimum-quanto", "gguf", "libgguf", "nncf", "sdnq", "torchao", "torch-directml",
    "triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "ninja", "gradio",
    "kernels",
)  # fmt: skip

# PCI vendor numbers of graphics cards.
VENDORS: Mapping[str, str] = MappingProxyType({"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"})

COMPILERS = ("c++", "g++", "clang++", "cl")
_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device that torch can compute on.

    Attributes:
        kind: one of KINDS.
        index: its number among those of its kind.
        name: the vendor's name for it.
        memory_total: bytes; None if the driver does not report it.
        memory_free: bytes currently available to this process; None if the driver does not report it.
        capability: NVIDIA's compute capability; None for other devices.
    """

    kind: str
    index: int
    name: str
    memory_total: int | None
    memory_free: int | None
    capability: tuple[int, int] | None = None

    @property
    def torch_name(self) -> str:
        """Name for `torch.device`: "cuda:0", "privateuseone:0", "mps", "cpu"."""
        name = TORCH_NAMES.get(self.kind, self.kind)
        return name if name in ("cpu", "mps") else f"{name}:{self.index}"


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A lock file of a compilation. torch writes no process id into it, so only its age tells whether it is stale."""

    path: str
    age_s: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Snapshot of the machine when it was probed.

    Attributes:
        platform: linux, windows or darwin.
        wsl: whether this Linux runs inside Windows.
        python: version of the interpreter.
        devices: devices that torch can compute on; the CPU is the last.
        versions: distribution name to version, installed ones only.
        ram_total: bytes; the container's limit, if it is lower than the machine's RAM.
        ram_available: bytes available without swapping.
        has_compiler: a C++ compiler is on the path.
        has_ninja: the build tool ninja is on the path.
        has_triton: triton can be imported.
        gpu_vendors: vendors of the graphics cards on the PCI bus, usable by torch or not; Linux only.
        locks: lock files in optimum-quanto's build folders.
        native: description of sdquant's C kernels that run here.
        remote_kernels: diffusers may download and run kernels of publishers that it does not know.
    """

    platform: str
    wsl: bool
    python: str
    devices: tuple[Device, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    ram_total: int
    ram_available: int
    has_compiler: bool
    has_ninja: bool
    has_triton: bool
    gpu_vendors: tuple[str, ...] = ()
    locks: tuple[Lock, ...] = ()
    native: str = "not asked for"
    remote_kernels: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the available devices in order of preference."""
        return tuple(kind for kind in KINDS if any(device.kind == kind for device in self.devices))

    @property
    def has_bf16(self) -> bool:
        """Return whether the CPU is known to have instructions for products of bf16, by its C kernels."""
        return self.native in ("amx", "avx512bf16")

    @property
    def best(self) -> Device:
        """Default compute device: the first of the preferred kind."""
        return min(self.devices, key=lambda device: (KINDS.index(device.kind), device.index))

    def device(self, name: str) -> Device:
        """Return the device that torch calls `name`, or the first of its kind if it lists none of that name."""
        kind = device_kind(name, self)
        named = (device for device in self.devices if device.torch_name == name)
        return next(named, None) or next(device for device in self.devices if device.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["devices"] = [asdict(device) | {"torch_name": device.torch_name} for device in self.devices]
        values["locks"] = [asdict(lock) for lock in self.locks]
        return values | {"versions": dict(self.versions), "gpu_vendors": list(self.gpu_vendors)}


def versions() -> dict[str, str]:
    """Return the versions of installed distributions that matter, by name. Reads metadata, imports none of them."""
    from ..core import registry

    required = [row for one in registry.backends() for row in (one.requires, *one.runtime_requires.values())]
    installed = {}
    for name in dict.fromkeys((*PACKAGES, *(row.package for row in required if row is not None))):
        try:
            installed[name] = _version(metadata.distribution(name))
        except metadata.PackageNotFoundError:
            continue
    return installed


def _version(one: metadata.Distribution) -> str:
    """Return a distribution's version without parsing all metadata, which includes the README."""
    match = _VERSION.search(one.read_text("METADATA") or "")
    return match[1] if match else one.version


def probe() -> Machine:
    """Probe the machine. Imports torch; on a GPU it creates a context, which is needed to read the free memory."""
    total, available = ram()
    return Machine(
        platform=platform.system().lower(),
        wsl=platform.system() == "Linux" and "microsoft" in platform.release().lower(),
        python=platform.python_version(),
        devices=(*_accelerators(), _cpu(total, available)),
        versions=versions(),
        ram_total=total,
        ram_available=available,
        has_compiler=any(shutil.which(name) for name in COMPILERS),
        has_ninja=shutil.which("ninja") is not None or Path(sys.executable).with_name("ninja").exists(),
        has_triton=importlib.util.find_spec("triton") is not None,
        gpu_vendors=_gpu_vendors(Path("/sys/class/drm")),
        locks=tuple(_locks(_quanto_extensions())),
        native=native_state(),
        remote_kernels=trusts_remote_kernels(),
    )


def default_device(machine: Machine) -> str:
    """Return torch's name of the default compute device. Each process of torchrun has its own."""
    same = [device for device in machine.devices if device.kind == machine.best.kind]
    return sorted(same, key=lambda device: device.index)[local_rank() % len(same)].torch_name


def device_kind(name: str, machine: Machine | None = None) -> str:
    """Return the kind of the device called `name`: "cuda:0" is cuda or rocm, depending on the machine's torch build.

    The device need not exist here: the matrix also answers for other machines.

    Raises:
        SettingsError: no device kind has such a name.
    """
    stem, colon, index = str(name).strip().lower().partition(":")
    kind = "directml" if stem == TORCH_NAMES["directml"] else stem
    if kind not in KINDS or (colon and not index.isdigit()):
        raise SettingsError(
            f"Unknown device {name!r}",
            f"the kinds of device are {', '.join(KINDS)}, with an index after a colon if there are several",
            'Use for example "cuda:0" or "cpu", or remove device',
        )
    kinds = machine.kinds if machine is not None else ()
    return "rocm" if kind == "cuda" and "rocm" in kinds and "cuda" not in kinds else kind


def ram() -> tuple[int, int]:
    """Return total RAM and RAM available without swapping, in bytes; within a container, its limits."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # required by accelerate, hence always there

    memory = psutil.virtual_memory()
    limit, used = _container(Path("/sys/fs/cgroup"))
    if limit is None:
        return int(memory.total), int(memory.available)
    return min(int(memory.total), limit), max(0, min(int(memory.available), limit - used))


def _container(folder: Path) -> tuple[int | None, int]:
    """Return the cgroup v2 memory limit of this container and the bytes in use; (None, 0) without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # not Linux, cgroup v1, or no container
        return None, 0
    # Cached file pages count as used but are given back on demand.
    return (None, 0) if limit == "max" else (int(limit), max(0, used - int(stat.get("inactive_file", 0))))


def _cpu(total: int, available: int) -> Device:
    return Device(kind="cpu", index=0, name=processor_name(), memory_total=total, memory_free=available)


def _accelerators() -> Iterator[Device]:
    with quiet_imports():  # nothing imports torch before
        import torch

    if torch.cuda.is_available():
        kind = "rocm" if torch.version.hip else "cuda"
        for index in range(torch.cuda.device_count()):
            yield _card(kind, index, torch.cuda)
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        for index in range(torch.xpu.device_count()):
            yield _card("xpu", index, torch.xpu)
    if torch.backends.mps.is_available():
        free, total = mps_memory()
        yield Device(kind="mps", index=0, name=platform.machine(), memory_total=total, memory_free=free)
    if importlib.util.find_spec("torch_directml") is not None:
        directml = importlib.import_module("torch_directml")
        for index in range(directml.device_count()):
            name = str(directml.device_name(index))
            yield Device(kind="directml", index=index, name=name, memory_total=None, memory_free=None)


def _card(kind: str, index: int, api: Any) -> Device:
    """Describe a GPU through `torch.cuda` or `torch.xpu`, which share this part of their API."""
    properties = api.get_device_properties(index)
    try:
        free, _ = card_memory(api, index)
    except RuntimeError:  # the GPU is full or reserved for another process, or the driver does not report it
        free = None
    total = int(properties.total_memory)
    capability = (int(properties.major), int(properties.minor)) if kind == "cuda" else None
    return Device(
        kind=kind, index=index, name=str(properties.name), memory_total=total, memory_free=free, capability=capability
    )


def card_memory(api: Any, device: Any) -> tuple[int, int]:
    """Return the memory of a GPU that is available to this process, and its total memory, in bytes.

    Freed memory in torch's caching allocator, which the driver counts as used, counts as free.

    Args:
        api: torch's module for such GPUs: torch.cuda, torch.xpu, or another vendor's.
        device: the GPU, or its index.

    Raises:
        RuntimeError: the driver does not report it.
    """
    free, total = api.mem_get_info(device)
    cached = api.memory_reserved(device) - api.memory_allocated(device) if hasattr(api, "memory_reserved") else 0
    return int(free) + max(0, int(cached)), int(total)


def mps_memory() -> tuple[int, int]:
    """Return how many bytes of a Mac's unified memory this process should still use, and in total, as recommended by
    the driver."""
    import torch

    total = int(torch.mps.recommended_max_memory())
    return max(0, total - int(torch.mps.driver_allocated_memory())), total


def _gpu_vendors(folder: Path) -> tuple[str, ...]:
    """Return the vendors of the graphics cards under `folder` (/sys/class/drm), each once."""
    names = (VENDORS.get(path.read_text().strip()) for path in sorted(folder.glob("card*/device/vendor")))
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _quanto_extensions() -> Path | None:
    """Return the folder in which optimum-quanto compiles its extensions; None if not installed. Imports nothing."""
    try:
        quanto = metadata.distribution("optimum-quanto")
    except metadata.PackageNotFoundError:
        return None
    return Path(str(quanto.locate_file("optimum/quanto/library/extensions")))


def _locks(extensions: Path | None) -> Iterator[Lock]:
    """Yield lock files under optimum-quanto's extensions: `<extension>/build/lock`, written by torch's builder."""
    for path in sorted(extensions.glob("*/build/lock")) if extensions is not None else ():
        try:
            yield Lock(path=str(path), age_s=max(0.0, time.time() - path.stat().st_mtime))
        except FileNotFoundError:  # its owner has just finished
            continue
