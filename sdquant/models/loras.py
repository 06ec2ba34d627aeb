"""LoRA files on a loaded pipeline: put on with strengths, changed between images, and taken off again.

The weights stay as they are, packed or not: a LoRA is a branch beside them (PEFT's adapters), so that an image without
it afterwards is equal to one before it, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError, SettingsError
from ..utils.install import install_packages

_Stamp = tuple[Path, int, int]  # with modification time (ns) and size: a file that was written anew is read anew


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A LoRA file and its strength."""

    path: Path
    strength: float = 1.0


class LoraSet:
    """The LoRAs of one pipeline. Nobody else may put any on it."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._files: tuple[_Stamp, ...] = ()
        self._strengths: list[float] = []

    def use(self, loras: Sequence[Lora]) -> None:
        """Make these the LoRAs of the pipeline; those of strength 0 are left out. On failure it has none.

        Raises:
            SettingsError: one of them does not fit the pipeline, or cannot be read.
            BackendUnavailableError: peft is missing.
        """
        loras = [lora for lora in loras if lora.strength]
        files = tuple(_stamp(lora.path) for lora in loras)
        strengths = [lora.strength for lora in loras]
        if (files, strengths) == (self._files, self._strengths):
            return
        try:
            if files != self._files:
                self._replace(loras, files)
            if loras:
                with _quiet():
                    self._pipe.set_adapters(_names(loras), strengths)
            self._strengths = strengths
        except BaseException:
            self._remove()
            raise

    def _replace(self, loras: Sequence[Lora], files: tuple[_Stamp, ...]) -> None:
        self._remove()
        self._files = files  # now, so that those that are on are removed if a later one fails
        for name, lora in zip(_names(loras), loras, strict=True):
            self._put_on(name, lora.path)

    def _remove(self) -> None:
        if self._files:
            with _quiet():
                self._pipe.unload_lora_weights()
        self._files, self._strengths = (), []

    def _put_on(self, name: str, path: Path) -> None:
        what = f"Cannot use the LoRA {path.stem}"
        if not hasattr(self._pipe, "load_lora_weights"):
            why = f"{type(self._pipe).__name__} takes no LoRAs in this version of diffusers"
            raise SettingsError(what, why, "Leave it out, or choose another model")
        if find_spec("peft") is None:
            fix = f"Run: {install_packages('peft')}"
            raise BackendUnavailableError(what, "it needs peft, which is not installed", fix)
        try:
            with _quiet(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
                self._pipe.load_lora_weights(str(path), adapter_name=name)
        except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, OSError) as error:
            text = (str(error).strip().splitlines() or [""])[0][:200]
            raise _misfit(what, f"it is not for this model, or damaged ({text})") from error
        if not any(name in names for names in self._pipe.get_list_adapters().values()):
            raise _misfit(what, "none of its layers is in this model")


def _misfit(what: str, why: str) -> SettingsError:
    return SettingsError(what, why, "Use one that was trained on a model of this family")


def _names(loras: Sequence[Lora]) -> list[str]:
    return [f"lora_{number}" for number in range(len(loras))]


def _stamp(path: Path) -> _Stamp:
    try:
        stat = path.stat()
    except OSError as error:
        why = "the file is not there any more"
        raise SettingsError(f"Cannot use the LoRA {path.stem}", why, "Press Refresh, and choose another") from error
    return path, stat.st_mtime_ns, stat.st_size


def _quiet() -> AbstractContextManager[None]:
    from .components import quiet  # imports torch

    return quiet()
