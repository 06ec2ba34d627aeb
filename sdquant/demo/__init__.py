"""The shipped models: two small pipelines that draw digits, trained by `python -m tools.digits_models.train`.

In: the name of one, and schemes. Out: its folder (`path`); the digits that each scheme draws, judged, as rows and a
figure (`run`). May import `settings` and what is below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..models import BUNDLED_MODELS as MODELS
from ..models import bundled_path as path
from ..models import bundled_place as place
from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .run import DemoRow, Result, SkippedCase
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["MODELS", "DemoRow", "Result", "SkippedCase", "figure", "path", "place", "run"]
