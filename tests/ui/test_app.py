"""The page is built without diffusers, whose import takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..patience import PATIENCE

BUILD = """
import sys
from pathlib import Path
import sdquant.ui.app as app
from sdquant.ui.model_folders import Roots
app.build(Roots(), Path(sys.argv[1])), app.look()
print([name for name in ("diffusers", "transformers", "scipy") if name in sys.modules])
"""


@pytest.mark.slow
def test_it_needs_no_diffusers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(tmp_path / "settings.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
