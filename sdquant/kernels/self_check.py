"""Decorator shared by the checks that compare kernels with torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch

P = ParamSpec("P")


def undisturbed(check: Callable[P, bool]) -> Callable[P, bool]:
    """Decorator: run a check on the CPU, whatever the default device, and outside `torch.autocast`, as its verdict is
    cached for calls outside of both."""

    @wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> bool:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):
            return check(*args, **kwargs)

    return run
