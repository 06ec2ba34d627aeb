"""Pipelines in folders: their classes, checked against the installed diffusers, and their assembly."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import BadFileError, MissingComponentError, UnsupportedFileError
from ..formats import folders, refuse_endless
from ..utils.process_state import no_warnings
from . import fast_tokenizers, libraries
from .components import _model_libraries, _no_bars, _pipelines_module, _public, quiet, remapped

if TYPE_CHECKING:
    from torch import nn


def check_pipeline(folder: Path) -> None:
    """Look up all classes that a pipeline's folder names, before diffusers does, which imports any module named there.

    Raises:
        UnsupportedFileError: a name is not that of a class of diffusers or transformers.
        BadFileError: a component's config is of another class, or a scheduler has implausibly many steps.
        MissingComponentError: a component that the pipeline's class requires has no folder.
    """
    libraries = _model_libraries()
    diffusers = libraries["diffusers"][0]
    place = folder / "model_index.json"
    index = folders.read_json(place)
    whole: Any = _public(diffusers, index.get("_class_name"))
    if not isinstance(whole, type) or not issubclass(whole, diffusers.DiffusionPipeline):
        raise _unknown(place, "the pipeline", index.get("_class_name"))
    kind: Any = whole
    expected = kind._get_signature_keys(kind)[0]
    for name, row in index.items():
        if name.startswith("_") or not isinstance(row, list) or row == [None, None]:
            continue
        if name not in expected and not folders.is_named(row):
            continue  # of numbers, which the constructor is given: Krea 2's layers of its text encoder
        tokenizer = folders.is_named(row) and folders.is_tokenizer(row[1])  # which may come from another file
        if name in expected and not (folder / name).is_dir() and not tokenizer:
            raise folders.no_folder(folder, name, row[-1] if row else None)
        library, cls = row if len(row) == 2 else (None, None)
        package: Any = libraries[str(library)][0] if str(library) in libraries else _pipelines_module(library)
        named = _public(package, _heir(cls)) if isinstance(package, ModuleType) and isinstance(cls, str) else None
        if not isinstance(named, type):
            raise _unknown(place, name, row)
        if library in libraries:
            _refuse_another(folder / name / "config.json", named, str(library))
        scheduler = folder / name / "scheduler_config.json"
        if scheduler.is_file():
            values = folders.read_json(scheduler)
            refuse_endless(f"{name} of {folder}", values)
            _refuse_misfit(scheduler, named, values)
    pipe: Any = whole
    named_by = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    absent = [
        name
        for name, parameter in inspect.signature(pipe.__init__).parameters.items()
        if parameter.kind in named_by and parameter.default is parameter.empty
        if name not in ("self", *index, *getattr(pipe, "_optional_components", ()))
    ]
    if absent:
        raise MissingComponentError(
            f"Cannot load {folder}",
            f"its model_index.json does not name the {absent[0]}, which {pipe.__name__} requires",
            "Get the folder, or its model_index.json, from its source again",
        )


def _refuse_misfit(path: Path, kind: type, values: Mapping[str, Any]) -> None:
    """Raise BadFileError if a scheduler cannot be built from its config; building it takes little memory."""
    if not issubclass(kind, libraries.diffusers().SchedulerMixin):
        return
    scheduler_class: Any = kind
    try:
        with quiet(), no_warnings:  # they are given when it is made for the pipeline
            scheduler_class.from_config(dict(values))
    except Exception as error:  # whatever a constructor says to values that nobody has written it for
        raise BadFileError(
            f"Cannot load {path}",
            f"its values are invalid for {kind.__name__}: {str(error).splitlines()[0] if str(error) else error!r}",
            "Get the scheduler from its source again",
        ) from error


def _heir(name: str) -> str:
    """Return the present name of a transformers class that diffusers lists as renamed; else the same name."""
    theirs = libraries.module("diffusers.utils.deprecation_utils")
    row = getattr(theirs, "_TRANSFORMERS_CLASS_REMAPPING", {}).get(name, {})
    return str(row.get("new_class", name))


def _refuse_another(config: Path, named: type, library: str) -> None:
    """Raise BadFileError if a component's config is that of another model class than its pipeline names.

    Classes of one family can be built from each other's configs: the same transformers model with and without a head,
    or a diffusers class and its subclass.
    """
    libraries = _model_libraries()
    if not config.is_file() or not issubclass(named, libraries[library][1]):
        return
    values = folders.read_json(config)
    class_name = values.get("_class_name")
    if not isinstance(class_name, str):
        architectures = values.get("architectures")
        class_name = architectures[0] if isinstance(architectures, list) and architectures else None
    other = "diffusers" if "_class_name" in values else "transformers"
    cls = _public(libraries[other][0], class_name)
    if not isinstance(cls, type):
        return
    one, two = remapped(named, values), remapped(cls, values)
    if other == library and (library == "transformers" or issubclass(one, two) or issubclass(two, one)):
        return
    if other == library and "from_pretrained" in vars(named):
        # Its own way into folders: one for each model that it holds. None of them is bad.
        raise UnsupportedFileError(
            f"Cannot load {config.parent}",
            f"it is the first of several {class_name}s in separate folders, which only diffusers combines into one "
            f"{named.__name__}",
            "Load the pipeline with diffusers' from_pretrained, then call sdquant.quantize and sdquant.offload.apply "
            "on it; or load each folder alone with load_model",
        )
    raise BadFileError(
        f"Cannot load {config.parent}",
        f"its config.json is that of a {class_name}, but model_index.json names the class {named.__name__}",
        "Put the matching component into the folder",
    )


def _unknown(place: Path, what: str, entry: Any) -> UnsupportedFileError:
    return UnsupportedFileError(
        f"Cannot load {place}",
        f"it names {entry or 'nothing'!r:.80} as the class of {what}, which diffusers and transformers do not have",
        "Update diffusers and transformers, or check the file",
    )


def pipeline(folder: Path, parts: Mapping[str, nn.Module], tokenizers: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return the diffusers pipeline of a folder with these components; schedulers and tokenizers come from the folder.

    Args:
        tokenizers: those that the folder lacks.

    Call `check_pipeline` first.
    """
    index = folders.read_json(folder / "model_index.json")
    # Saved as [null, null]: diffusers wants to be told again that Stable Diffusion 3 comes without its T5.
    left_out = {name: None for name, row in index.items() if row == [None, None]}
    try:
        with quiet(), _no_bars:
            cls = pipeline_class(folder)
            reader = fast_tokenizers.reader(cls, folder, index, tokenizers)
            pipe = reader.from_pretrained(str(folder), local_files_only=True, **{**left_out, **parts, **tokenizers})
            pipe.__class__ = cls
    except (OSError, ValueError) as error:
        raise MissingComponentError(
            f"Cannot assemble the pipeline {folder}", str(error), "Check that the folder is complete"
        ) from error
    except Exception as error:  # whatever a scheduler or tokenizer says to values that nobody has written it for
        raise BadFileError(
            f"Cannot assemble the pipeline {folder}",
            f"a file in it does not fit its class: {error}",
            "Get the scheduler and the tokenizers from their source again",
        ) from error
    strange = [name for name, part in parts.items() if pipe.components.get(name, part) is not part]
    if strange:
        raise UnsupportedFileError(
            f"Cannot assemble the pipeline {folder}",
            f"diffusers' {type(pipe).__name__} did not accept the {strange[0]} that was loaded for it",
            "Load that component alone, and pass it to the pipeline",
        )
    return pipe


def pipeline_class(folder: Path) -> Any:
    """Return diffusers' pipeline class of a pipeline's folder; `DiffusionPipeline` if it names none.

    Through `DiffusionPipeline`, diffusers does not know the optional components of the actual class: it drops those
    that are passed (Wan's transformer) and loads them from the folder again.
    """
    diffusers = libraries.diffusers()
    name = str(folders.read_json(folder / "model_index.json").get("_class_name"))
    cls = getattr(diffusers, name, None) if name.isidentifier() and not name.startswith("_") else None
    whole = isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)
    return cls if whole else diffusers.DiffusionPipeline
