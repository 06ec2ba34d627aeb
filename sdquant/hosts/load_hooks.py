"""Steps that the hosts' load paths share: read the requested schemes, check them, and report the result."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from .. import compat
from ..errors import IncompatibleError, SdquantError
from ..planning import NOT_QUANTIZED
from ..settings import ROLES, Settings
from . import display
from .status import ComponentStatus, Status

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

AS_FOUND = "as found"
PLAIN = "plain"


def asked(settings: Settings) -> dict[str, str]:
    """Return the requested schemes: role to scheme, for the roles to quantize."""
    each = {role.name: settings.values[f"quant.{role.name}"] for role in ROLES}
    return {role: scheme for role, scheme in each.items() if scheme not in (None, NOT_QUANTIZED)}


def refuse_load(settings: Settings, *, mode: str, offload: str, runtime: str) -> None:
    """Check all requested schemes against the matrix, before a weight is read.

    Raises:
        SdquantError: the matrix refuses one of them.
    """
    compat.check(
        asked(settings),
        offload,
        mode=mode,
        runtime=runtime,
        compute=settings["compute"],
        device=device(),
        allow_incompatible=settings["allow_incompatible"],
    )


def device() -> str | None:
    """Return the host's compute device by a name that the matrix knows; None for any other device."""
    from ..compat import hardware

    name = str(display.module("modules.devices").device)
    try:
        hardware.device_kind(name)
    except SdquantError:
        return None
    return name


def begin(status: Status, path: str | None) -> None:
    """Begin the status of a load of the file or folder at `path`, with what its headers say."""
    from ..models import detection

    name = os.path.basename(os.path.normpath(path)) if path else None
    contents = None
    if path and os.path.exists(path):
        try:
            detected = detection.read_headers(path, find_classes=False)
        except SdquantError as error:  # the host may know a kind of file that sdquant does not
            log.info("%s", error)
        else:
            contents = f"{detected.container}, {detected.family or 'unknown family'}, " + (
                f"quantized already: {detected.quant} ({detected.backend})"
                if detected.prequantized
                else "not quantized"
            )
    status.begin(name, contents)


def part_of(component: str, module: nn.Module, how: str) -> ComponentStatus:
    """Return the status of a component, from its layers."""
    from ..offload import weight_bytes

    schemes = sorted(schemes_in(module))
    return ComponentStatus(
        component=component,
        scheme=" and ".join(schemes) or None,
        how=how if schemes or how == AS_FOUND else "not quantized",
        bytes=weight_bytes(module),
    )


def schemes_in(module: nn.Module) -> set[str]:
    """Return the schemes of the layers with packed weights."""
    from ..nn import quantized

    return {packed.spec.scheme.name for _, packed in quantized(module)}


def quantized_elsewhere(module: Any) -> bool:
    """Return whether another library, such as SDNQ, quantized a component before it was saved or while it loaded."""
    import torch

    return any(
        one.element_size() == 1  # float8, or codes
        or (one.dim() > 1 and not one.is_floating_point())
        or type(one.data) is not torch.Tensor  # Neo's and ComfyUI's fp8 and nvfp4, which say that they are floats
        for one in module.parameters()
    )


def require_quantized(component: str, module: nn.Module, scheme: str) -> None:
    """Raise IncompatibleError if no weight of a component was quantized, instead of going on silently."""
    if not schemes_in(module):
        raise IncompatibleError(
            f"Cannot quantize the {component} to {scheme}",
            "it has no weight that would be quantized",
            "Check the setting Skip, or set its scheme to 'as found'",
        )
