"""The shipped models: two small pipelines that draw handwritten digits, trained by `python -m sdquant.demo.train`."""

from __future__ import annotations

from ..planning.bundled_models import MODELS, path, place

__all__ = ["MODELS", "path", "place"]
