"""Parameters of modules, put where they belong whatever other threads are doing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def put(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Make this the module's parameter of that name.

    Not by an assignment or `register_parameter`: while diffusers loads a model in some thread, accelerate exchanges
    that method for the modules of all threads, and what it gets goes to the meta device.
    """
    module._parameters[name] = parameter
