"""Imports what the first table and the first image need, while somebody opens the page and reads it.

The page itself needs none of it: diffusers, its quantizers and a pipeline's classes take seconds to import.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model_folders import Roots

log = logging.getLogger(__name__)


def warm_up(roots: Roots, settings_path: Path) -> None:
    """Plan the load of the first model, and import its classes. What fails is said when the page asks for it."""
    from ..loading import import_classes
    from ..planning import prepare
    from ..settings import settings_file
    from .plan_preview import Target

    try:
        models = roots.models()
        if models:
            request = Target(path=str(models[0].path)).request(settings_file.load(settings_path))
            import_classes(prepare(request, read=False))
    except Exception as error:
        log.info("nothing was imported before it is needed: %s", error)
