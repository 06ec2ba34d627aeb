"""The shipped models: two small pipelines that draw digits, trained by `python -m tools.digits_models.train`."""

from __future__ import annotations

from ..planning.bundled_models import MODELS, path, place

__all__ = ["MODELS", "path", "place"]
