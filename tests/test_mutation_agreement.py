"""What `plan` and `verify` call sound loads, of changed models too; `bench.mutations --agreement` tries more."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from sdquant.errors import BadFileError, SdquantError

from . import mutation_agreement
from .malformed import FORMATS, Model
from .mutation_models import Sound

COUNT = int(os.environ.get("SDQUANT_MUTATIONS", "400"))
ERROR = BadFileError("Cannot read it", "it is damaged", "Download it again")


@pytest.mark.parametrize(
    ("detect", "plan", "verify", "load", "words"),
    [
        (None, None, None, None, None),
        (ERROR, ERROR, ERROR, ERROR, None),
        (None, None, ERROR, ERROR, None),
        (None, None, ERROR, None, None),
        (None, None, None, ERROR, "called sound, and refused: Cannot read it"),
        (None, ERROR, None, None, "loads, and plan refuses it"),
        (ERROR, None, ERROR, ERROR, "detect refuses it, and others do not"),
    ],
)
def test_what_differs(
    detect: SdquantError | None,
    plan: SdquantError | None,
    verify: SdquantError | None,
    load: SdquantError | None,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdicts = {"detect": detect, "plan": plan, "verify": verify, "load_model": load}
    monkeypatch.setattr(mutation_agreement, "answers", lambda *given: verdicts)
    monkeypatch.setattr(mutation_agreement, "_is_said_to_need_more", lambda *given: False)
    _, difference = mutation_agreement.disagreement(Sound(Model({}, {}, {}), ()), Path())
    assert difference is None if words is None else words in str(difference)


@pytest.mark.slow
def test_what_is_called_sound_loads(tmp_path: Path) -> None:
    models = mutation_agreement.originals(tmp_path)
    assert models.keys() >= FORMATS.keys() and len(models) > len(FORMATS) + 100
    seed = "17" if COUNT == 400 else str(random.randrange(2**32))
    counts, differences = mutation_agreement.outcomes(models, tmp_path, seed, COUNT)
    assert not differences, "\n".join(differences)
    total = sum(counts.values(), Counter())
    assert total["loaded"] > COUNT // 20 and total["refused"] > COUNT // 5, total
