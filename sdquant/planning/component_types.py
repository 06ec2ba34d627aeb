"""Roles of pipeline components that a scheme can be set for. Component names differ between pipelines."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Role:
    """A role in a pipeline.

    Attributes:
        pattern: matches the full names of the components that have it. diffusers also has two-word names: Ideogram 4's
            `unconditional_transformer`, Versatile Diffusion's `text_unet`, Stable Cascade's `prior_prior`.
        by_default: whether a scheme for the whole pipeline applies to them.
    """

    name: str
    label: str
    pattern: str
    by_default: bool = True

    def plays(self, component: str) -> bool:
        """Return whether the component of this name has this role."""
        return re.fullmatch(self.pattern, component) is not None


ROLES = (
    Role(name="model", label="UNet / transformer", pattern=r"(model|(\w+_)?(unet|transformer|prior)|decoder)(_\d+)?"),
    Role(name="text_encoder", label="Text encoders", pattern=r"(\w+_)?text_encoder(_\d+)?"),
    Role(name="vae", label="VAE", pattern=r"vae|vqgan|movq|vae_.*", by_default=False),
)


def role_of(component: str) -> Role | None:
    """Return the role of a component; None for components that settings never quantize."""
    return next((row for row in ROLES if row.plays(component)), None)


def is_quantized_by_default(component: str) -> bool:
    """Return whether a scheme for the whole pipeline applies to the component of this name; the VAE is left alone."""
    role = role_of(component)
    return role is not None and role.by_default
