"""The shipped models: two small pipelines that draw digits, trained by `python -m tools.digits_models.train`.

In: the name of one, and schemes. Out: its folder (`path`); the digits that each scheme draws, judged, as rows and a
figure (`run`). May import `settings` and what is below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..models import bundled_models
from ..utils.lazy_exports import lazy_exports

MODELS, path, place = bundled_models.MODELS, bundled_models.path, bundled_models.place

if TYPE_CHECKING:
    from .run import DemoRow, Result, SkippedCase
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["MODELS", "DemoRow", "Result", "SkippedCase", "figure", "path", "place", "run"]
