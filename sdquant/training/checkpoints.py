"""Checkpoints of a run: folders checkpoints/step-N, written atomically; only the last few are kept.

trained.safetensors   the trained weights (for a LoRA, only its own)
optimizer.bin, scheduler.bin, ...   written by accelerate
training.json         the step, and the settings that a resumed training must share
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadFileError, SettingsError
from ..utils.atomic_write import remove, whole_folder
from . import trainable

if TYPE_CHECKING:
    from .settings import TrainingSettings

STATE, WEIGHTS = "training.json", "trained.safetensors"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path


def found(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, the oldest first."""
    rows = []
    for path in folder.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / STATE).is_file():
            rows.append(Checkpoint(step=int(match[1]), path=path))
    return sorted(rows, key=lambda row: row.step)


def choose(folder: Path, resume: str) -> Checkpoint | None:
    """Return the checkpoint to resume from; None to start from scratch.

    Raises:
        SettingsError: that checkpoint does not exist, or there are checkpoints and `resume` is empty.
    """
    rows = found(folder)
    named = {row.path.name: row for row in rows}
    if not resume:
        if rows:
            raise SettingsError(
                f"Cannot start a training in {folder.parent}", f"it already contains one, up to step {rows[-1].step}",
                "Add resume=latest to continue it, or choose another run_name",
            )  # fmt: skip
        return None
    if resume == "latest" and rows:
        return rows[-1]
    if resume not in named:
        there = f"the checkpoints are {', '.join(named)}" if named else "there is no checkpoint"
        raise SettingsError(
            f"Cannot resume {folder.parent} from {resume!r}", there,
            "Set resume to an existing checkpoint, or leave it out to start from scratch",
        )  # fmt: skip
    return named[resume]


def attach_state(accelerator: Any) -> None:
    """Have accelerate save and load only the trained weights, without the frozen ones."""
    from safetensors.torch import load_file, save_file

    def save(models: list[Any], weights: list[Any], place: str) -> None:
        weights.clear()
        (model,) = models
        state = trainable.state_of(accelerator.unwrap_model(model))
        save_file({name: row.cpu().contiguous() for name, row in state.items()}, Path(place) / WEIGHTS)

    def load(models: list[Any], place: str) -> None:
        trainable.put_state(accelerator.unwrap_model(models.pop()), load_file(Path(place) / WEIGHTS))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def write(accelerator: Any, folder: Path, step: int, state: Mapping[str, Any], keep: int, nbytes: int) -> Path:
    """Write a checkpoint and remove all but the last `keep`. Every process calls it; the first one writes."""
    target = folder / f"step-{step}"
    if accelerator.is_main_process:
        with whole_folder(target, nbytes) as beside:
            accelerator.save_state(str(beside))
            (beside / STATE).write_text(json.dumps({"step": step, **state}, indent=1))
        for old in found(folder)[:-keep]:
            remove(old.path)
    accelerator.wait_for_everyone()
    return target


def read(accelerator: Any, checkpoint: Checkpoint, state: Mapping[str, Any], settings: TrainingSettings) -> None:
    """Load a checkpoint into the objects that accelerate has prepared.

    Raises:
        BadFileError: it is damaged. SettingsError: it belongs to another training.
    """
    from safetensors import SafetensorError

    place = checkpoint.path
    try:
        recorded = json.loads((place / STATE).read_text())
        _refuse_other(place, recorded["settings"], state["settings"])
        if recorded["data"] != state["data"]:
            raise SettingsError(
                f"Cannot resume from {place}", "the pictures or captions have changed",
                "Restore them, or choose another run_name",
            )  # fmt: skip
        accelerator.load_state(str(place))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        RuntimeError,
        pickle.UnpicklingError,
        SafetensorError,
    ) as error:
        raise BadFileError(
            f"Cannot resume from {place}", f"it is damaged: {error}",
            f"Delete it and resume from an earlier one, or start {settings.run_name} from scratch",
        ) from error  # fmt: skip


def _refuse_other(place: Path, recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    for name, value in current.items():
        if recorded.get(name) != value:
            raise SettingsError(
                f"Cannot resume from {place} with {name}={value!r}", f"it began with {recorded.get(name)!r}",
                "Restore that value, or choose another run_name",
            )  # fmt: skip
