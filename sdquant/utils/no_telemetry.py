"""Importing NNCF and OpenVINO without their telemetry.

Both report their use over the network through `openvino_telemetry`, which pip installs with them; OpenVINO does so as
soon as it is imported (and NNCF imports it if it is installed). Both work without that package.
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
    """Hide `openvino_telemetry` from imports in the block, so that they never report anything.

    If other code has already imported that package, nothing is hidden: that code has reported by then.
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
