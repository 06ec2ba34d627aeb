"""The parts of a pipeline that a scheme is chosen for, one row each. Pipelines call their components differently."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Role:
    """A part of a pipeline. `pattern` matches the whole names of the components that play it."""

    name: str
    label: str
    pattern: str

    def plays(self, component: str) -> bool:
        """Whether the component of this name plays this role."""
        return re.fullmatch(self.pattern, component) is not None


ROLES = (
    Role(name="model", label="UNet / transformer", pattern=r"(model|(\w+_)?(unet|transformer|prior)|decoder)(_\d+)?"),
    Role(name="text_encoder", label="Text encoders", pattern=r"(\w+_)?text_encoder(_\d+)?"),
    Role(name="vae", label="VAE", pattern=r"vae|vqgan|movq|vae_.*"),
)


def role_of(component: str) -> Role | None:
    """The role that the component of a pipeline plays; None for what is never quantized by a setting."""
    return next((row for row in ROLES if row.plays(component)), None)
