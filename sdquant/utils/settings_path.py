"""Where this user's settings are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = "SDQUANT_SETTINGS"


def default_path() -> Path:
    """Return the path of this user's settings: $SDQUANT_SETTINGS, else a file in the platform's settings folder."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(os.path.expanduser(named))
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        folder = Path(os.environ.get("APPDATA") or home / "AppData" / "Roaming")
    elif sys.platform == "darwin":
        folder = home / "Library" / "Application Support"
    else:
        config_home = os.environ.get("XDG_CONFIG_HOME", "")
        folder = Path(config_home) if os.path.isabs(config_home) else home / ".config"  # XDG: ignore relative paths
    return folder / "sdquant" / "settings.json"
