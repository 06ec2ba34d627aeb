"""docs/lora.md: its example runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tools import readme

if TYPE_CHECKING:
    import pytest

EXAMPLES = re.findall(r"^```python\n(.*?)^```$", readme.LORAS.read_text(encoding="utf-8"), flags=re.M | re.S)


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert EXAMPLES
    for number, text in enumerate(EXAMPLES):
        exec(compile(text, f"lora.md, example {number + 1}", "exec"), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my-lora.safetensors", "seven.png"]
