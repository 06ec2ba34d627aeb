"""Importing NNCF and OpenVINO without what they tell their makers.

Both report their use over the network by `openvino_telemetry`, which pip installs with them; OpenVINO does it as soon
as it is imported (and NNCF imports it where it is installed). Both go on without it where it is missing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "openvino_telemetry"
_lock = threading.RLock()


@contextmanager
def no_telemetry() -> Iterator[None]:
    """What is imported in here finds no `openvino_telemetry`, and so never reports anything.

    Where someone else has imported that package already, nothing is hidden: then it has been reported by them.
    """
    with _lock:
        if _NAME in sys.modules:
            yield
            return
        sys.modules[_NAME] = None  # type: ignore[assignment]  # Python's own way to say that an import fails
        try:
            yield
        finally:
            sys.modules.pop(_NAME, None)
