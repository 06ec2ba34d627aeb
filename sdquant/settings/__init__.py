"""Settings of a settings page, kept between starts: the fields, their values, and the settings file.

    suggestions.py  the nearest settings that work, for a refused choice
    file.py         the settings file
    sdnext.py       importing quantization and offload options from SD.Next's config.json

The fields and their values are those of `planning.settings_fields` and `planning.settings_values`.

No module here imports torch or gradio: web UIs with old pins use them as they are.
"""

from __future__ import annotations

from ..planning.component_types import ROLES, Role, role_of
from ..planning.settings_fields import Field, field_named, fields
from ..planning.settings_values import Settings

__all__ = ["ROLES", "Field", "Role", "Settings", "field_named", "fields", "role_of"]
