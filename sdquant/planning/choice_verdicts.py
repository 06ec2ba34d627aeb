"""The verdict of the matrix on one scheme among settings that need not agree with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..compat import OFFLOADS, Query, library_kernels, look_up, meant, requirements
from ..core import registry
from ..errors import SdquantError
from .request import AUTO, NOT_QUANTIZED

if TYPE_CHECKING:
    from ..compat import Machine

# From the best to the worst; a choice has the worst verdict of all schemes it is combined with.
VERDICTS = ("works", "slow", "untested", "breaks")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of the matrix on one choice, given the other settings."""

    verdict: str
    why: str = ""
    fix: str = ""


def verdict_on(
    values: Mapping[str, Any], choice: str | None, disk_scheme: str | None, kind: str, here: Machine
) -> Verdict:
    """Return the verdict on weights that get a scheme.

    Args:
        values: a value for each field of the settings. choice: the scheme, as a field has it.
        disk_scheme: the scheme that the weights have on disk; None if they are floats.
        kind: the kind of the device.
    """
    if disk_scheme is None and (choice is None or choice.lower() == NOT_QUANTIZED):
        return Verdict(verdict="works")
    try:
        scheme = registry.scheme(disk_scheme) if disk_scheme is not None else registry.parse(str(choice)).scheme
    except SdquantError as error:
        return Verdict(verdict="breaks", why=error.why, fix=error.fix)
    compute = values["compute"] or "float"
    runtime = meant(values["runtime"], compute) or "default"
    if runtime != "default" and runtime not in scheme.runtimes:
        why = f"{scheme.name} has only the runtime {', '.join(scheme.runtimes)}"
        return Verdict(verdict="breaks", why=why, fix="Leave the runtime at its default")
    mode = "found" if disk_scheme is not None else values["mode"] if values["mode"] != "auto" else "pre"
    trouble = requirements.problem(scheme.codec, here.versions)
    if trouble is not None and disk_scheme is None and scheme.name not in requirements.PACKAGE_OPTIONAL:
        return Verdict(verdict="breaks", why=trouble, fix=requirements.pip_line(scheme.codec) or "")
    lack = library_kernels.lack(scheme, runtime, kind, None, here.versions, here)
    if lack is not None:
        return Verdict(verdict="breaks", why=lack.why, fix=lack.fix)
    named = values["offload"]
    rows = [
        look_up(
            Query.of(
                scheme,
                mode=mode,
                offload=offload,
                runtime=runtime,
                device=kind,
                compute=compute,
                versions=here.versions,
            )
        )
        for offload in (OFFLOADS if named == AUTO else (named,))
    ]
    row = min(rows, key=lambda row: VERDICTS.index(row.verdict))  # auto takes none that breaks
    return Verdict(verdict=row.verdict, why=row.why, fix=row.fix)
