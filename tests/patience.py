"""How long a test waits for what comes at last: a page, a server, an answer.

A wait that succeeds ends at once, so a long one costs nothing, and a machine may be busy with twenty other things.
"""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("SDQUANT_TEST_PATIENCE", "300"))  # seconds
