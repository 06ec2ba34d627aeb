"""What was measured to be faster on this machine, kept for the next time that the program runs.

A file beside the settings, sorted by device and by the versions of what was timed:

    {"format": "sdquant-verdicts", "machines": {"AMD EPYC ...": {"('int8', 3072, ...)": [0.0031, 0.0026]}}}

The numbers are seconds, of the usual implementation and of the other one; `false` if the latter does not work. What
layers take is kept here as well, for plans (`planning/estimate/layer_timings.py`). The file is written when the program
ends. With SDQUANT_TUNE=0 it is neither read nor written. One that cannot be read counts as none, and what cannot be
written is lost: it is measured again.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import threading
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import SdquantError
from ..utils.atomic_write import whole_file
from ..utils.processor import processor_name
from ..utils.settings_path import default_path
from . import cpu

log = logging.getLogger(__name__)

SWITCH, FORMAT = "SDQUANT_TUNE", "sdquant-verdicts"
_MOST = 16  # numbers of a verdict
_LARGEST = 1 << 22  # bytes of a file; those of a hundred models take a tenth of it
Verdict = bool | list[float]  # whether the other one is faster, or what was measured
_Verdicts = dict[str, Verdict]
_new: dict[str, _Verdicts] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the thread that held it is not in the new process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def tunes() -> bool:
    """Return whether implementations may be timed."""
    return os.environ.get(SWITCH) != "0"


def path() -> Path:
    """Return the path of the file."""
    return default_path().with_name("verdicts.json")


def known(device: torch.device, kind: object) -> Verdict | None:
    """Return what was found before for a kind of product on a device; None if nothing was."""
    if not tunes():
        return None
    machine, name = _machine(device), repr(kind)
    new = _new.get(machine, {}).get(name)
    return _stored().get(machine, {}).get(name) if new is None else new


def keep(device: torch.device, kind: object, verdict: Verdict) -> None:
    """Remember a verdict beyond the end of the program."""
    if not tunes():
        return
    with _lock:
        if not _new:
            atexit.register(write)
        _new.setdefault(_machine(device), {})[repr(kind)] = verdict


def drop_verdicts(device: torch.device) -> None:
    """Forget what was found on a device."""
    with _lock:
        _new.pop(_machine(device), None)
        stored = _read()
        if stored.pop(_machine(device), None) is not None:
            _save(stored)
        _stored.cache_clear()


def write() -> None:
    """Write what is new to the file, beside what other processes have written."""
    with _lock:
        if not _new:
            return
        stored = _read()
        for machine, verdicts in _new.items():
            stored[machine] = {**stored.get(machine, {}), **verdicts}
        _new.clear()
        _save(stored)
        _stored.cache_clear()
        atexit.unregister(write)


def _save(stored: dict[str, _Verdicts]) -> None:
    text = json.dumps({"format": FORMAT, "machines": stored}, indent=1, sort_keys=True)
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path(), len(text)) as file:
            file.write(text.encode())
    except (OSError, SdquantError) as error:
        log.debug("What was measured is not kept: %s", error)


@cache
def _stored() -> dict[str, _Verdicts]:
    return _read()


def _read() -> dict[str, _Verdicts]:
    try:
        if path().stat().st_size > _LARGEST:
            return {}
        value: Any = json.loads(path().read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    machines = value.get("machines") if isinstance(value, dict) and value.get("format") == FORMAT else None
    if not isinstance(machines, dict):
        return {}
    return {
        str(machine): {str(kind): verdict for kind, verdict in verdicts.items() if _is_verdict(verdict)}
        for machine, verdicts in machines.items()
        if isinstance(verdicts, dict)
    }


def _is_verdict(value: object) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= _MOST and all(isinstance(one, float) and 0 <= one < math.inf for one in value)
    return isinstance(value, bool)


def _machine(device: torch.device) -> str:
    """Return what the speed of an implementation depends on."""
    if device.type == "cpu":
        return f"{_software(device)}, {cpu.isa()}, {torch.get_num_threads()} threads"
    return _software(device)


@cache
def _software(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{processor_name()}, torch {torch.__version__}, kernels {cpu.VERSION}"
    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else str(device)
    driver = torch.version.hip or torch.version.cuda
    versions = f"torch {torch.__version__}, {driver}, triton {_version('triton')}, sdquant {_version('sdquant')}"
    return f"{name}, {versions}, cold caches"  # they were warm before


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
