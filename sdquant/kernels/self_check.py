"""What is common to the checks that hold kernels against torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch

P = ParamSpec("P")


def undisturbed(check: Callable[P, bool]) -> Callable[P, bool]:
    """A check on the CPU, whatever default device the user has set, that is not under `torch.autocast`: its verdict is
    kept for calls that are not either."""

    @wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> bool:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):
            return check(*args, **kwargs)

    return run
