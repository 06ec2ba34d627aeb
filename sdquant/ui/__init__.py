"""`sdquant ui`: a local web app to generate, choose a quantization, inspect and compare.

In: folders whose models the page may open (`Roots`). Out: a page of a head and five tabs, served until it is stopped
(`serve`). `app.py` builds the page, `server/` guards and serves it, `model_manager.py` has the one model in memory.
May import `demo` and what is below. Only `app.py` and its imports, and `server/serve.py` when it serves, import gradio;
none imports torch at import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import background_task
    from .model_folders import Roots
    from .preloading import warm_up
    from .server.serve import gradio_is_there, serve
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["Roots", "background_task", "gradio_is_there", "serve", "warm_up"]
