"""Tensors that outlive torch's inference mode: `ordinary`. Importing this module imports no torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")


def ordinary(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have a function make ordinary tensors when it is called in inference mode, too, where programs may well load a
    model. What is made in that mode can be written to, computed with and trained with only there, or not at all, while
    weights and buffers outlive the call that made them."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        import torch

        with torch.inference_mode(False), torch.no_grad():  # the first by itself would turn gradients on
            return function(*args, **kwargs)

    return call
