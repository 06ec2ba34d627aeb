"""Cases of which the default run has half: each on one of the shipped models, by turns; the slow run has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sdquant.demo import MODELS


def by_turns(cases: Sequence[Any], turns: Sequence[int] | None = None, models: Sequence[Any] = MODELS) -> list[Any]:
    """Parameters (*case, model).

    Args:
        cases: values, tuples of them, or `pytest.param`. turns: which model's turn it is at each; None for the next.
    """
    made = []
    for index, case in enumerate(cases):
        param = case if hasattr(case, "marks") else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        turn = index if turns is None else turns[index]
        for other, model in enumerate(models):
            marks = [*param.marks, *([] if turn % len(models) == other else [pytest.mark.slow])]
            name = "-".join(map(str, model)) if isinstance(model, tuple) else str(model)
            words = param.id or "-".join(map(str, param.values))
            made.append(
                pytest.param(
                    *param.values, *(model if isinstance(model, tuple) else (model,)), marks=marks, id=f"{words}-{name}"
                )
            )
    return made
