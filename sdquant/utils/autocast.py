"""`torch.autocast`, asked for devices of every type."""

from __future__ import annotations

import torch


def is_autocast_on(device_type: str) -> bool:
    """Return whether autocast is on for a type of device; off for "meta", for which torch raises instead."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
