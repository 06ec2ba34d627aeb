"""The doctor's report: the schemes that this machine can run, missing packages, and hints for the platform.

`examine` turns a `Machine` into a `Report` without probing anything itself. The hints are in doctor_hints.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..compat import Query, look_up, requirements
from ..core import registry
from ..planning import activation_allowance
from ..utils.byte_sizes import gib
from .doctor_hints import Finding, advice

if TYPE_CHECKING:
    from ..compat import Machine
    from ..core import Backend, Scheme

# Bytes of a quantized weight against bf16, by bits, scales counted: the promise of the README.
RATIOS = {16: 1.0, 8: 0.54, 4: 0.30}

# Models that many people run: name, parameters of the UNet or transformer and of the text encoders, as published.
MODELS = (
    ("Stable Diffusion 1.5", 0.86e9, 0.12e9),
    ("SDXL", 2.57e9, 0.82e9),
    ("Stable Diffusion 3.5 Large", 8.1e9, 5.5e9),
    ("FLUX.1", 11.9e9, 4.9e9),
)


@dataclass(frozen=True, kw_only=True)
class BackendReport:
    """One backend on this machine.

    Attributes:
        name, title: the backend's.
        package: the distribution that it needs; None if it needs none.
        installed: version of that distribution; None if it is missing.
        problem: why it cannot be used now; None if it can.
        install: the pip line that helps; None if there is nothing to install.
        schemes: names of the schemes that can be used now.
        devices: kind of device to the worst verdict on those schemes there, without offload.
        runtimes: those that need a package of their own, each with what it lacks and the line that helps, or "ready".
    """

    name: str
    title: str
    package: str | None
    installed: str | None
    problem: str | None
    install: str | None
    schemes: tuple[str, ...]
    devices: dict[str, str]
    runtimes: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The fit of a well-known model in the free memory of the default device.

    Attributes:
        model: its name.
        bytes: bits to bytes of the UNet or transformer and the text encoders.
        advice: the most precise configuration that fits, in words.
    """

    model: str
    bytes: dict[int, int]
    advice: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The output of `sdquant doctor`."""

    machine: Machine
    backends: tuple[BackendReport, ...]
    findings: tuple[Finding, ...]
    fits: tuple[Fit, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "machine": self.machine.to_dict(),
            "backends": [asdict(row) | {"schemes": list(row.schemes)} for row in self.backends],
            "findings": [asdict(row) for row in self.findings],
            "fits": [asdict(row) | {"bytes": {str(bits): n for bits, n in row.bytes.items()}} for row in self.fits],
        }

    def render(self) -> str:
        """Return the report as text for a terminal."""
        return "\n\n".join("\n".join(part) for part in (_machine(self.machine), *_sections(self)) if part) + "\n"


def examine(machine: Machine) -> Report:
    """Report the schemes that `machine` can run, and the hints that apply to it."""
    return Report(
        machine=machine,
        backends=tuple(_backend(backend, machine) for backend in registry.backends()),
        findings=advice(machine),
        fits=tuple(_fit(*model, machine) for model in MODELS),
    )


def _backend(backend: Backend, machine: Machine) -> BackendReport:
    needs = backend.requires
    trouble = requirements.problem(backend, machine.versions)
    usable = tuple(row for row in backend.schemes if trouble is None or row.name in requirements.PACKAGE_OPTIONAL)
    return BackendReport(
        name=backend.name,
        title=backend.title,
        package=needs.package if needs is not None else None,
        installed=machine.versions.get(needs.package) if needs is not None else None,
        problem=trouble,
        install=requirements.pip_line(backend) if trouble is not None else None,
        schemes=tuple(row.name for row in usable),
        devices={kind: _verdict(usable, kind, machine) for kind in machine.kinds if usable},
        runtimes={name: _runtime(backend, name, machine) for name in backend.runtime_requires},
    )


def _runtime(backend: Backend, name: str, machine: Machine) -> str:
    needs = backend.runtime_requires[name]
    lacks = requirements.runtime_problem(backend, name, machine.versions)
    if lacks is not None:
        return f"{lacks}: {requirements.pip_line(backend, name)}"
    return f"ready on the CPU ({needs.package} {machine.versions[needs.package]})"


def _verdict(schemes: tuple[Scheme, ...], kind: str, machine: Machine) -> str:
    """Return the verdict on these schemes without offload: one word if they agree, else each with its schemes."""
    verdicts: dict[str, list[str]] = {}
    for row in schemes:
        query = Query.of(
            row,
            mode="pre" if row.on_the_fly else "found",
            offload="none",
            runtime="default",
            device=kind,
            versions=machine.versions,
        )
        verdicts.setdefault(look_up(query).verdict, []).append(row.name)
    if len(verdicts) == 1:
        return next(iter(verdicts))
    return "; ".join(f"{verdict}: {' '.join(names)}" for verdict, names in verdicts.items())


def _fit(model: str, core: float, encoders: float, machine: Machine) -> Fit:
    """Estimate the fit of a model from its number of parameters: `core` (UNet or transformer) and `encoders`."""
    sizes = {bits: int(2 * (core + encoders) * ratio) for bits, ratio in RATIOS.items()}
    free = machine.best.memory_free
    if free is None:
        return Fit(model=model, bytes=sizes, advice="the device does not tell how much of its memory is free")
    rest = activation_allowance.allowance(sizes[16])
    fits = (f"{_bits(bits)} fits whole" for bits, size in sizes.items() if size + rest <= free)
    ram = machine.ram_available + (free if machine.best.kind not in ("cpu", "mps") else 0)
    streams = (f'{_bits(bits)} with offload="balanced"' for bits, size in sizes.items() if size + rest <= ram)
    disk = '4-bit with offload="balanced" and part of it on disk'
    return Fit(model=model, bytes=sizes, advice=next(fits, None) or next(streams, disk))


def _bits(bits: int) -> str:
    return "bf16" if bits == 16 else f"{bits}-bit"


def _machine(machine: Machine) -> list[str]:
    place = f"{machine.platform}{' (WSL2)' if machine.wsl else ''}"
    packages = ("torch", "diffusers", "transformers", "accelerate")
    lines = [
        f"{place}, Python {machine.python}, RAM {gib(machine.ram_available)} free of {gib(machine.ram_total)}",
        ", ".join(f"{name} {machine.versions.get(name, 'missing')}" for name in packages),
        f"native kernels: {machine.native}",
    ]
    for device in machine.devices:
        memory = f"{gib(device.memory_free)} free of {gib(device.memory_total)}"
        lines.append(f"{device.torch_name:<8} {device.kind:<8} {device.name}, {memory}")
    return lines


def _sections(report: Report) -> tuple[list[str], ...]:
    return (
        ["Backends", *(line for row in report.backends for line in _lines(row))],
        ["Models (weights of the UNet or transformer and the text encoders)", *(_size(row) for row in report.fits)],
        ["Findings", *(f"  {row.level}: {row.text}" for row in report.findings)] if report.findings else [],
    )


def _lines(row: BackendReport) -> list[str]:
    state = f"{row.package} {row.installed}" if row.installed else row.package or "needs no package"
    lines = [f"  {row.title}: {state}" + (f" ({row.problem})" if row.problem else "")]
    if row.schemes:
        lines.append(f"    schemes  {' '.join(row.schemes)}")
    lines += [f"    {kind:<8} {verdict}" for kind, verdict in row.devices.items()]
    lines += [f"    runtime={name}: {state}" for name, state in row.runtimes.items()]
    return [*lines, f"    install  {row.install}"] if row.install else lines


def _size(row: Fit) -> str:
    sizes = ", ".join(f"{_bits(bits)} {gib(size)}" for bits, size in row.bytes.items())
    return f"  {row.model:<27} {sizes}: {row.advice}"
