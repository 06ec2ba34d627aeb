"""Check before a weight is read that the classes of a folder's components exist and accept its configs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadFileError, MissingComponentError, UnsupportedFileError
from ..formats import folders, model_families

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from ..formats import Checkpoint


def check_component(src: Checkpoint) -> None:
    """Refuse a component whose config names an unknown class or implausible sizes, as loading would.

    Raises:
        UnsupportedFileError: there is no such model class. BadFileError: the sizes are implausible.
    """
    if src.class_name is None or not src.config:
        return
    from .components import model_class
    from .fitting import shell

    try:
        model_class(src.library, src.class_name)
    except UnsupportedFileError as error:
        raise UnsupportedFileError(
            f"Cannot load {src.path}", f"its config names the class {src.class_name!r:.80}: {error.why}", error.fix
        ) from error
    try:
        shell(src)
    except BadFileError as error:
        raise BadFileError(f"Cannot load {src.path}: {error.inner}", error.why, error.fix) from error


def check_pipeline(folder: Path, index: Mapping[str, Any], sources: Mapping[str, Checkpoint]) -> None:
    """Refuse a pipeline whose model_index.json names missing components, as loading would.

    Args:
        sources: its components that have weights or a model config.

    Raises:
        MissingComponentError: a component has no config. UnsupportedFileError, BadFileError: see
            `pipeline_folders.check_pipeline`.
    """
    bare = next((src for src in sources.values() if not src.config), None)
    if bare is not None:
        raise MissingComponentError(
            f"Cannot load {bare.path}",
            "it has weights but no config.json, which gives its class and sizes",
            "Get the config.json from the source of the weights",
        )
    for name, row in folders.named_parts(index).items():
        there = (folder / name).is_dir()  # some pipelines make their scheduler themselves
        if row.endswith("Scheduler") and there and not (folder / name / "scheduler_config.json").is_file():
            raise MissingComponentError(
                f"Cannot load {folder}",
                f"its {name} ({row}) has no scheduler_config.json",
                f"Copy the scheduler_config.json of the same model into {folder / name}",
            )
    from .pipeline_folders import check_pipeline as check

    check(folder)


def class_of(src: Checkpoint) -> tuple[str | None, str]:
    """Return the library and the class of a component.

    Raises:
        MissingComponentError: a single file without a config that gives them and its sizes.
    """
    if src.class_name is None or not src.config:
        row = model_families.recognise(src.names)
        what = (
            f"it is a {' '.join(dict.fromkeys((row.family, row.component)))}"
            if row
            else "its tensor names are those of no known model"
        )
        if row is not None and row.foreign:
            what += f" in the {row.layout} layout"
        raise MissingComponentError(
            f"Cannot load {src.path}",
            f"{what}, and it has no config that gives its sizes",
            "Pass base=<pipeline folder> of the same model, or put its config.json next to the weights",
        )
    return src.library, src.class_name


def meta_model(src: Checkpoint) -> nn.Module:
    """Return the model of a source on the meta device.

    Raises:
        MissingComponentError: there is no config. BadFileError, UnsupportedFileError: see `components.empty`.
    """
    from .components import empty

    return empty(*class_of(src), src.config)
