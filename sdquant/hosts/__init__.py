"""sdquant inside the web UIs that people already use: SD.Next, Forge, AUTOMATIC1111, ComfyUI.

In: a host's settings and what it loads. Out: quantized models in that host, a section in its settings, a tab.
`sdnext.py`, `forge.py`, `a1111.py` and `comfy_*.py` have a load path each; `webui/` and `comfyui/` are the folders
that `sdquant install-extension` copies. May import `ui` and what is below.
Importing a module here imports no gradio or diffusers, and none of a host's modules, since web UIs pin old versions.
Only the modules with layers (forge_layers.py, comfy_*.py) import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import bundle, preflight
    from .host import HostProgram
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["HostProgram", "bundle", "host", "preflight"]
