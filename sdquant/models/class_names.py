"""Whether a folder's classes are there, told without importing diffusers and transformers where that suffices.

What a name is found to be in the libraries' own text is there. What is not found may still be: then they are imported,
which takes seconds, and asked.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadFileError, MissingComponentError, UnsupportedFileError
from ..formats import config_sizes
from ..formats import folder as folders
from ..formats.folder import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..formats.source import Source

_NO_MODELS = ("Pipeline", "Scheduler", "Tokenizer", "TokenizerFast", "Processor", "Config")
_QUOTED = re.compile(r"[\"'](\w+)[\"']")
_CLASS = re.compile(r"^class (\w+)\b", re.MULTILINE)


def check_component(src: Source) -> None:
    """Refuse a component whose config names no class that there is, or sizes that no model has, as loading would.

    Raises:
        UnsupportedFileError: there is no such model class. BadFileError: the sizes.
    """
    if src.class_name is None or not src.config:
        return
    if src.class_name.endswith(_NO_MODELS) or not is_surely_there(src.library, src.class_name):
        from ..components import model_class

        try:
            model_class(src.library, src.class_name)
        except UnsupportedFileError as error:
            raise UnsupportedFileError(
                f"Cannot load {src.path}",
                f"its config says that it is a {src.class_name!r:.80}: {error.why}",
                error.fix,
            ) from error
    try:
        config_sizes.refuse_endless(src.class_name, src.config)
        if not config_sizes.is_ordinary(src.config):
            from ..components import empty

            empty(src.library, src.class_name, src.config)
    except BadFileError as error:
        raise BadFileError(f"Cannot load {src.path}: {error.what}", error.why, error.fix) from error


def check_pipeline(folder: Path, index: Mapping[str, Any], sources: Mapping[str, Source]) -> None:
    """Refuse a pipeline whose model_index.json names what is not there, as loading would.

    Args:
        sources: its components that have weights or a config of a model.

    Raises:
        MissingComponentError: a component has no config. UnsupportedFileError, BadFileError: see
            `components.check_pipeline`.
    """
    names: list[tuple[Any, Any]] = [("diffusers", index.get("_class_name"))]
    for name, row in index.items():
        if name.startswith("_") or not isinstance(row, list) or row == [None, None]:
            continue
        names.append((row[0], row[1]) if len(row) == 2 else (None, None))
    bare = next((src for src in sources.values() if not src.config), None)
    if bare is not None:
        raise MissingComponentError(
            f"Cannot load {bare.path}",
            "it has weights, and no config.json that gives its class and sizes",
            "Get its config.json from where the weights are from",
        )
    same = all(_agrees(index[name], src.config) for name, src in sources.items())
    for path in folder.glob("*/scheduler_config.json"):
        config_sizes.refuse_endless(f"{path.parent.name} of {folder}", read_json(path))
    for name, row in folders.named_parts(index).items():
        there = (folder / name).is_dir()  # some pipelines make their scheduler themselves
        if row.endswith("Scheduler") and there and not (folder / name / "scheduler_config.json").is_file():
            raise MissingComponentError(
                f"Cannot load {folder}",
                f"its {name} ({row}) has no scheduler_config.json",
                f"Put that of the same model into {folder / name}",
            )
    pipeline = str(index.get("_class_name")).endswith("Pipeline")
    if same and pipeline and all(is_surely_there(library, name) for library, name in names):
        return
    from ..components import check_pipeline as ask

    ask(folder)


def _agrees(row: Any, config: Mapping[str, Any]) -> bool:
    """Whether a component's config is plainly that of the class which model_index.json names, or names none."""
    library, name = row
    said = config.get("_class_name")
    if library == "diffusers":
        return said in (name, None) and ("architectures" not in config or said is not None)
    return library != "transformers" or said is None


def is_surely_there(library: Any, name: Any) -> bool:
    """Whether a library's text has a class of that name; False where it is not certain."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or not isinstance(library, str):
        return False
    if library == "diffusers":
        return name in _quoted_in_diffusers()
    if library == "transformers":
        name = name.removesuffix("Fast")  # transformers 5 has one class for both, by either name
        return name in _quoted_in_transformers() or name in _defined_near(name)
    return library.isidentifier() and name in _defined_in_pipelines(library)


@cache
def _quoted_in_diffusers() -> frozenset[str]:
    root = _root("diffusers")
    return frozenset() if root is None else _found(_QUOTED, root / "__init__.py")


@cache
def _quoted_in_transformers() -> frozenset[str]:
    """Those that its tables of models, tokenizers and processors have."""
    root = _root("transformers")
    files = () if root is None else (root / "models" / "auto").glob("*.py")
    return frozenset().union(*(_found(_QUOTED, path) for path in files))


@cache
def _defined_near(name: str) -> frozenset[str]:
    """The classes that are defined in the folders of transformers' models that `name` begins with."""
    root = _root("transformers")
    low = name.lower().replace("_", "")
    folders = () if root is None else (root / "models").iterdir()
    near = (folder for folder in folders if folder.is_dir() and low.startswith(folder.name.replace("_", "")))
    return frozenset().union(*(_found(_CLASS, path) for folder in near for path in folder.glob("*.py")))


@cache
def _defined_in_pipelines(module: str) -> frozenset[str]:
    """The classes of one of diffusers' modules of pipelines, such as "stable_diffusion"."""
    root = _root("diffusers")
    files = () if root is None else (root / "pipelines" / module).glob("*.py")
    return frozenset().union(*(_found(_CLASS, path) for path in files))


def _found(pattern: re.Pattern[str], path: Path) -> frozenset[str]:
    try:
        return frozenset(pattern.findall(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return frozenset()


def _root(package: str) -> Path | None:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None
