"""Settings of a settings page, kept between starts: the fields, their values, and the settings file.

In: fields and values of `planning`, the settings file, SD.Next's config.json. Out: `Settings`, and for a refused choice
the nearest that works (`fixes`). May import `evaluation` and what is below, but no module here imports torch or gradio:
web UIs with old pins use them as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning import ROLES, Field, Role, Settings, field_named, fields, role_of
from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import file as settings_file
    from .suggestions import Fix, fixes
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "ROLES", "Field", "Fix", "Role", "Settings", "field_named", "fields", "fixes", "role_of", "sdnext",
    "settings_file",
]  # fmt: skip
