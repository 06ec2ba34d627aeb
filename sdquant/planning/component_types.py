"""Roles of pipeline components that a scheme can be set for. Component names differ between pipelines."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Role:
    """A role in a pipeline. `pattern` matches the full names of the components that have it."""

    name: str
    label: str
    pattern: str

    def plays(self, component: str) -> bool:
        """Return whether the component of this name has this role."""
        return re.fullmatch(self.pattern, component) is not None


ROLES = (
    Role(name="model", label="UNet / transformer", pattern=r"(model|(\w+_)?(unet|transformer|prior)|decoder)(_\d+)?"),
    Role(name="text_encoder", label="Text encoders", pattern=r"(\w+_)?text_encoder(_\d+)?"),
    Role(name="vae", label="VAE", pattern=r"vae|vqgan|movq|vae_.*"),
)


def role_of(component: str) -> Role | None:
    """Return the role of a component; None for components that settings never quantize."""
    return next((row for row in ROLES if row.plays(component)), None)
