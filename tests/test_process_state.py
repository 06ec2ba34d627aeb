"""What belongs to the process is as before once the last thread is out of a block, whoever leaves first."""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import sdquant
from sdquant.models import components
from sdquant.utils.process_state import errors_only, no_warnings


def interleaved(block: AbstractContextManager[object], other: AbstractContextManager[object]) -> None:
    """This thread enters, another one enters, this one leaves, and the other one leaves."""
    entered, leave = threading.Event(), threading.Event()

    def inside() -> None:
        with other:
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=inside)
    with block:
        thread.start()
        assert entered.wait(60)
    leave.set()
    thread.join(60)


def test_loggers_have_their_levels_again() -> None:
    names = ("tests.one", "tests.two")
    levels = (logging.DEBUG, logging.WARNING)
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(level)
    interleaved(errors_only(*names), errors_only(*reversed(names)))
    assert tuple(logging.getLogger(name).level for name in names) == levels


def test_loggers_are_kept_down_until_the_last_is_out() -> None:
    logger = logging.getLogger("tests.three")
    with errors_only("tests.three"):
        with errors_only("tests.three"):
            assert not logger.isEnabledFor(logging.WARNING)
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.isEnabledFor(logging.WARNING)


def test_warnings_are_heard_again() -> None:
    before = list(warnings.filters)
    interleaved(no_warnings, no_warnings)
    assert list(warnings.filters) == before
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)


def test_progress_bars_are_shown_again() -> None:
    from diffusers.utils import logging as theirs

    before = theirs.is_progress_bar_enabled()
    interleaved(components._no_bars, components._no_bars)
    assert theirs.is_progress_bar_enabled() == before


def test_only_the_thread_that_builds_an_empty_model_has_meta_parameters() -> None:
    found: list[nn.Module] = []
    with components._parameters_on_meta():
        thread = threading.Thread(target=lambda: found.append(nn.Linear(4, 4)))
        thread.start()
        thread.join(60)
        here = nn.Linear(4, 4)
    assert {p.device.type for p in found[0].parameters()} == {"cpu"}
    assert {p.device.type for p in here.parameters()} == {"meta"}
    assert {p.device.type for p in nn.Linear(4, 4).parameters()} == {"cpu"}


def test_two_loads_and_a_quantization_at_once() -> None:
    folder = sdquant.demo.path("digits-sd")
    states: dict[str, dict[str, torch.Tensor]] = {}

    def load(key: str) -> None:
        states[key] = sdquant.load_model(folder / "unet", "int8", progress=False).state_dict()

    def quantize(key: str) -> None:
        model = sdquant.load_model(folder / "unet", None, progress=False)
        states[key] = sdquant.quantize(model, "int8").state_dict()

    load("alone")
    threads = [threading.Thread(target=load, args=(f"load {n}",)) for n in range(2)]
    threads.append(threading.Thread(target=quantize, args=("quantize",)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(states) == 4
    for key, state in states.items():
        assert state.keys() == states["alone"].keys(), key
        assert all(torch.equal(tensor, states["alone"][name]) for name, tensor in state.items()), key
