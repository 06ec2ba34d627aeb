"""What a settings page keeps between starts: its fields, their values, the file they are in.

    roles.py    the parts of a pipeline that a scheme is chosen for
    fields.py   the fields of a settings page, made from Request and the registry
    values.py   Settings: a value for each field, checked; the Request they make for a model
    fixes.py    the nearest settings that work, for a refused choice
    file.py     the settings file
    sdnext.py   what SD.Next's own settings say of it; the import button

No module here imports torch or gradio: web UIs with old pins use them as they are.
"""

from __future__ import annotations

from ..planning.component_types import ROLES, Role, role_of
from ..planning.settings_fields import Field, field_named, fields
from ..planning.settings_values import Settings

__all__ = ["ROLES", "Field", "Role", "Settings", "field_named", "fields", "role_of"]
