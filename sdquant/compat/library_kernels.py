"""The kernels behind `runtime="library"`, those of a scheme's library or Nunchaku's, and whether they can be used here.

Nunchaku's are for three schemes of which comfy-kitchen can multiply two: where both are here, Nunchaku's are used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..backends import NUNCHAKU_KERNELS, NUNCHAKU_REPOSITORY, Lack, nunchaku_lack
from ..utils.install import install_extra
from . import hardware
from .requirements import pip_line, runtime_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..core import Scheme
    from .hardware import Machine

LIBRARY = "library"
_NUNCHAKUS = "svdquant_nvfp4"  # which nobody else has kernels for


def needs_card(scheme: Scheme, runtime: str, kind: str) -> bool:
    """Return whether `lack` depends on what the card of this machine is."""
    return runtime == LIBRARY and scheme.name in NUNCHAKU_KERNELS and kind == "cuda"


def lack(
    scheme: Scheme, runtime: str, kind: str, device: str | None, versions: Mapping[str, str], machine: Machine | None
) -> Lack | None:
    """Return what a runtime of the scheme lacks on a device; None if nothing.

    Args:
        kind: of the device. device: torch's name for it; None for the machine's default.
        versions: of installed packages. machine: None if `needs_card` says that it does not matter.
    """
    own = runtime_problem(scheme.codec, runtime, versions)
    instead = f'Or use runtime="{scheme.runtimes[0]}", which needs no other package'
    missing = None if own is None else Lack(own, f"Run: {pip_line(scheme.codec, runtime)}. {instead}")
    if runtime != LIBRARY or scheme.name not in NUNCHAKU_KERNELS:
        return missing
    nunchaku = lack_of_nunchaku(scheme.name, kind, device, versions, machine)
    if nunchaku is None:
        return None
    if scheme.name == _NUNCHAKUS:
        return nunchaku
    return missing if missing is None else Lack(f"{missing.why}, and {nunchaku.why}", missing.fix)


def kernels_of(scheme: str, runtime: str, device: str, machine: Machine) -> str | None:
    """Return what a runtime of one of Nunchaku's schemes does, by whose kernels; None for other schemes."""
    if runtime != LIBRARY or scheme not in NUNCHAKU_KERNELS:
        return None
    kind = hardware.device_kind(device, machine)
    nunchaku = lack_of_nunchaku(scheme, kind, device, machine.versions, machine)
    if nunchaku is None:
        return (
            f"multiplies with Nunchaku's kernels, which diffusers downloads ({NUNCHAKU_REPOSITORY}), where a layer's "
            "sizes are multiples of 128, and elsewhere without them; nobody has run this on a card yet"
        )
    return f"multiplies with comfy-kitchen's kernels, not with Nunchaku's: {nunchaku.why}"


def lack_of_nunchaku(
    scheme: str, kind: str, device: str | None, versions: Mapping[str, str], machine: Machine | None
) -> Lack | None:
    """Return what keeps Nunchaku's kernels from multiplying weights in a scheme on a device; None if nothing does."""
    capability = None  # of a card of another machine
    if machine is not None and kind in machine.kinds:
        capability = machine.device(device or hardware.default_device(machine)).capability
    first = nunchaku_lack(scheme, kind, capability, versions, machine is not None and machine.remote_kernels)
    if first is None or not first.extra:
        return first
    return replace(first, fix=f'Run: {install_extra(first.extra)}. Or use runtime="plain"')
