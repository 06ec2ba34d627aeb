"""Folders that transformers 5 saved, for the transformers 4 of test_versions.py; its classes are stand-ins."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from sdquant.models import fast_tokenizers, libraries


class Slow:
    vocab_files_names: dict[str, str] = {"vocab_file": "vocab.json"}  # noqa: RUF012 - transformers' own


class Pipe:
    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"tokenizer": ["transformers", "Slow"], "unet": ["diffusers", "UNet2DConditionModel"]}


@pytest.mark.parametrize(
    ("files", "given", "other"),
    [
        (["tokenizer.json"], None, True),
        (["tokenizer.json", "vocab.json"], None, False),
        (["vocab.json"], None, False),
        ([], object(), True),
        ([], Slow(), False),
    ],
)
def test_the_second_class_is_taken_where_the_first_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], given: Any, other: bool
) -> None:
    theirs = types.SimpleNamespace(Slow=Slow, SlowFast=type("SlowFast", (), {}))
    monkeypatch.setattr(libraries, "transformers", lambda: theirs)
    (tmp_path / "tokenizer").mkdir()
    for name in files:
        (tmp_path / "tokenizer" / name).write_text("{}")
    index = Pipe.load_config()
    reader = fast_tokenizers.reader(Pipe, tmp_path, index, {} if given is None else {"tokenizer": given})
    assert reader.load_config(tmp_path) == {**index, **({"tokenizer": ["transformers", "SlowFast"]} if other else {})}
    assert (reader is Pipe) == (not other)
