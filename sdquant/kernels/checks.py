"""What is common to the checks that hold kernels against torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch

P = ParamSpec("P")


def on_cpu(check: Callable[P, bool]) -> Callable[P, bool]:
    """A check whose new tensors are on the CPU, whatever default device the user has set."""

    @wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> bool:
        with torch.device("cpu"):
            return check(*args, **kwargs)

    return run
