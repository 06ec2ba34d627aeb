"""The compatibility matrix: which combinations work, known before any weights are read; and the hardware it is about.

In: a scheme, a mode, an offload mode, a runtime, a `Machine`. Out: a verdict: `look_up` answers one query, `check`
refuses unsupported combinations, `matrix` lists all. The rules are in table.py.
May import `rules` and what is below. Importing this imports no torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..core import check_offload_mode, registry
from ..errors import (
    BackendUnavailableError,
    IncompatibleError,
    IncompatibleWarning,
    RefusedFileError,
    SdquantError,
    SdquantWarning,
    SettingsError,
    UntestedWarning,
)
from ..utils.arguments import answered
from ..utils.suggestions import did_you_mean
from . import hardware, library_kernels
from .hardware import Device, Machine
from .requirements import require
from .row import COMPUTES, MODES, OFFLOADS, RUNTIMES, SOURCES, Query, Row, meant
from .runtimes import default_runtime
from .table import ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..backends import Lack
    from ..core import Scheme

__all__ = [
    "COMPUTES", "OFFLOADS", "ROWS", "Cell", "Device", "IncompatibleWarning", "Machine", "Query", "Row",
    "SdquantWarning", "UntestedWarning", "check", "default_runtime", "hardware", "library_kernels", "look_up",
    "matrix", "meant", "requirements",
]  # fmt: skip

ERRORS: Mapping[str, type[SdquantError]] = {
    "combination": IncompatibleError,
    "file": RefusedFileError,
    "backend": BackendUnavailableError,
}


_LAYERS = {"library": ", the library's modules", "plain": ", plain layers", "openvino": ", run by OpenVINO"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A combination and its verdict: one row of `sdquant matrix`."""

    scheme: str
    backend: str
    mode: str
    offload: str
    runtime: str
    device: str
    verdict: str
    why: str
    fix: str
    seen: str

    def to_dict(self) -> dict[str, str]:
        """Return the fields as JSON values."""
        return asdict(self)


def look_up(query: Query) -> Row:
    """Return the rule that decides on this combination: the first that matches."""
    return next(row for row in ROWS if row.matches(query))


def matrix(
    device: str | Iterable[str] | None = None,
    *,
    schemes: Iterable[str] | None = None,
    machine: Machine | None = None,
) -> tuple[Cell, ...]:
    """Return the verdict on every scheme × mode × offload × runtime × device kind.

    It considers the version ranges of installed packages, not whether packages are missing; see `sdquant doctor`.

    Args:
        device: device kinds or device names; None for those of this machine.
        schemes: names of schemes; None for all.
        machine: the machine to describe; None for this one.
    """
    if machine is None and device is None:
        machine = hardware.probe()
    if device is None:
        kinds = machine.kinds if machine is not None else ()
    else:
        names = [device] if isinstance(device, str) else device
        kinds = tuple(dict.fromkeys(hardware.device_kind(name, machine) for name in names))
    rows = registry.schemes() if schemes is None else tuple(registry.scheme(name) for name in schemes)
    versions = machine.versions if machine is not None else hardware.versions()
    return tuple(
        _cell(scheme, mode, offload, runtime, kind, versions)
        for scheme in rows
        for mode in MODES
        for offload in OFFLOADS
        for runtime in ("default", *scheme.runtimes)
        for kind in kinds
    )


def _cell(scheme: Scheme, mode: str, offload: str, runtime: str, kind: str, versions: Mapping[str, str]) -> Cell:
    axes = {"mode": mode, "offload": offload, "runtime": runtime, "device": kind}
    row = look_up(Query.of(scheme, versions=versions, **axes))
    return Cell(
        scheme=scheme.name,
        backend=scheme.backend,
        verdict=row.verdict,
        why=row.why,
        fix=row.fix,
        seen=row.seen,
        **axes,
    )


@answered
def check(
    quant: str | Mapping[str, str | None] | None,
    offload: str = "none",
    *,
    mode: str = "auto",
    runtime: str | None = None,
    device: str | None = None,
    machine: Machine | None = None,
    source: str = "weights",
    allow_incompatible: bool = False,
    compute: str | None = None,
) -> None:
    """Refuse unsupported combinations. Reads no file; imports torch only if `machine` and `device` are both None.

    Args:
        quant: a scheme with its options ("nf4,double_quant"), a dict component -> scheme, or None or "none".
        offload: name of the offload mode; "auto" for the first that works.
        mode: auto | pre | post | found. auto is "pre", or "found" for schemes that can only be read (gguf).
        runtime: library | plain | openvino; None for the scheme's default.
        device: the compute device, e.g. "cuda:0", here or on another machine; None for this machine's default.
        machine: devices and installed packages; None for this machine.
        source: "weights", or "all-in-one" for a file that also contains the VAE and the text encoders.
        compute: float | int8 | fp8 | fp4; None is "float".
        allow_incompatible: warn instead of refusing. Missing or outdated packages are still refused.

    Raises:
        UnknownQuantError, UnknownOffloadError: no such scheme or offload mode.
        SettingsError: a mode, runtime, device or source that does not exist or that this scheme does not support.
        IncompatibleError: the matrix refuses the combination (RefusedFileError: the file).
        BackendUnavailableError: the package is missing, too old, or does not support the device.
    """
    if offload == "auto":
        offload = _working(quant, mode=mode, runtime=runtime, device=device, machine=machine, source=source)
    offload = str(offload).strip().lower()
    check_offload_mode(offload)
    mode = _choice("mode", mode, ("auto", *MODES))
    named_runtime = _choice("runtime", runtime or "default", RUNTIMES)
    source = _choice("source", source, SOURCES)
    compute = _choice("compute", compute or "float", COMPUTES)
    if device is not None:
        hardware.device_kind(device, machine)  # a wrong name is an error even if nothing is quantized
    specs = [registry.parse(name).scheme for name in _names(quant)]
    for scheme in specs:
        if named_runtime != "default" and named_runtime not in scheme.runtimes:
            raise SettingsError(
                f"Cannot run {scheme.name} with runtime={named_runtime!r}",
                f"it supports only {', '.join(scheme.runtimes)}",
                f"Use runtime={scheme.runtimes[0]!r}, or remove runtime",
            )
    if not specs:
        return
    kind = _kind(device, machine)
    if machine is None and any(library_kernels.needs_card(scheme, named_runtime, kind) for scheme in specs):
        machine = hardware.probe()
    versions = machine.versions if machine is not None else hardware.versions()
    for scheme in {spec.name: spec for spec in specs}.values():
        way = ("pre" if scheme.on_the_fly else "found") if mode == "auto" else mode
        query = Query.of(
            scheme, mode=way, offload=offload, runtime=named_runtime, device=kind, source=source, compute=compute,
            versions=versions,
        )  # fmt: skip
        lack = library_kernels.lack(scheme, named_runtime, kind, device, versions, machine)
        _check(scheme, query, allow_incompatible, lack)


def _check(scheme: Scheme, query: Query, allow: bool, lack: Lack | None) -> None:
    row = look_up(query)
    breaks = row.verdict == "breaks"
    if breaks and row.refuses != "backend":
        _refuse(row, query, allow)
    # After the refusals that do not depend on what is installed, before those about the backend's devices.
    if lack is not None:
        raise BackendUnavailableError(f"Cannot run {scheme.name} with runtime={query.runtime!r}", lack.why, lack.fix)
    require(scheme, query.mode, query.runtime, query.versions)
    if breaks and row.refuses == "backend":
        _refuse(row, query, allow)
    if row.verdict == "untested":
        text = f"{_asked(query)} is untested: {row.why}. {row.fix or 'If it fails, please report it'}."
        warnings.warn(text, UntestedWarning, stacklevel=4)


def _refuse(row: Row, query: Query, allow: bool) -> None:
    others = registry.namesakes(registry.scheme(query.scheme))
    hint = f". Another backend's scheme of the same name is quant={others[0].name!r}" if others else ""
    error = ERRORS[row.refuses](f"Cannot use {_asked(query)}", row.why, row.fix + hint)
    if not allow:
        raise error
    warnings.warn(f"Trying a combination that the matrix refuses: {error}", IncompatibleWarning, stacklevel=5)


def _asked(query: Query) -> str:
    ways = {"pre": "quantized while loading", "post": "quantized after loading", "found": "already quantized"}
    layers = _LAYERS.get(query.runtime, "")
    return f"{query.scheme} ({ways[query.mode]}{layers}) with offload={query.offload!r} on {query.device}"


def _names(quant: str | Mapping[str, str | None] | None) -> Iterator[str]:
    """Yield the names of the requested schemes; nothing for None and "none"."""
    values: Iterable[Any] = quant.values() if isinstance(quant, Mapping) else (quant,)
    for value in values:
        if value is None:
            continue
        if not isinstance(value, str):
            raise SettingsError(
                f"Invalid quant={quant!r}",
                f"{value!r} is not the name of a scheme",
                'Use a name such as "nf4", or a dict of component names to scheme names',
            )
        if value.strip().lower() != "none":
            yield value


def _working(quant: str | Mapping[str, str | None] | None, **axes: Any) -> str:
    """Return the first offload mode that the matrix does not refuse; the first of all if it refuses every one."""
    for name in OFFLOADS:
        try:
            check(quant, name, **axes)
        except IncompatibleError:
            continue
        return name
    return OFFLOADS[0]


def _choice(setting: str, value: str, known: tuple[str, ...]) -> str:
    short = str(value).strip().lower()
    if short in known:
        return short
    raise SettingsError(
        f"Unknown {setting} {value!r}",
        f"{setting} must be one of {', '.join(known)}",
        did_you_mean(short, known, f"Use {known[0]!r}, or remove {setting}"),
    )


def _kind(device: str | None, machine: Machine | None) -> str:
    """Return the kind of the compute device. Only torch knows the default device, and whether "cuda" is rocm."""
    if device is None:
        machine = machine or hardware.probe()
        return hardware.device_kind(hardware.default_device(machine), machine)
    if machine is None and hardware.device_kind(device) == "cuda":
        machine = hardware.probe()
    return hardware.device_kind(device, machine)
