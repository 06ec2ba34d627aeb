"""Any of diffusers' pipeline classes, tiny, with random weights: put together from what its constructor asks for."""

from __future__ import annotations

import contextlib
import enum
import inspect
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from sdquant.models.components import quiet

from . import texts
from .rows import COMPONENTS, SCHEDULERS, Given

HERE = Path(__file__).parent
_LOADED = {"bool", "int", "float", "str", "list", "dict", "tuple", "NoneType"}  # plain values, kept in model_index.json


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Without what libraries say about their own classes."""
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        yield


@cache
def rows() -> dict[str, dict[str, Any]]:
    """The tables of tiny configs: class -> {"config": ..., "inputs": ...}."""
    with (HERE / "components.yaml").open() as file:
        diffusers = yaml.safe_load(file)
    with (HERE / "encoders.yaml").open() as file:
        transformers = yaml.safe_load(file)
    return {**diffusers, **{name: {"config": config} for name, config in transformers.items() if name[0] != "_"}}


@cache
def names() -> tuple[str, ...]:
    """Every pipeline class that diffusers exports, of torch: also those whose packages are missing here."""
    import diffusers

    found = []
    with silent():
        for name in sorted(set(dir(diffusers))):
            kind = getattr(diffusers, name, None) if not name.startswith("_") else None
            if not isinstance(kind, type) or kind is diffusers.DiffusionPipeline:
                continue
            dummy = "Pipeline" in name and ".dummy_" in kind.__module__
            if dummy or issubclass(kind, diffusers.DiffusionPipeline):
                found.append(name)
    return tuple(found)


def pipeline_class(name: str) -> Any:
    """The class of that name."""
    import diffusers

    with silent():
        return getattr(diffusers, name)


def build(name: str, given: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """A pipeline of the class called `name`, its floats of `dtype`.

    Args:
        given: component -> what is to be there instead of what its annotation says, as in `rows.COMPONENTS`.
    """
    kind = pipeline_class(name)
    chosen = {**COMPONENTS.get(name, {}), **(given or {})}
    parts = {}
    with silent():
        for part, types in kind._get_signature_types().items():
            parameter = inspect.signature(kind.__init__).parameters[part]
            if part in chosen:
                parts[part] = _given(chosen[part], part, dtype)
            elif parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                value = _component(types, part, dtype)
                parts[part] = parameter.default if value is inspect.Parameter.empty else value
        absent = [part for part, value in parts.items() if value is inspect.Parameter.empty]
        assert not absent, f"{name} needs {absent}, which no row of COMPONENTS gives"
        return kind(**parts)


def _given(row: Any, part: str, dtype: torch.dtype) -> Any:
    """What a row of COMPONENTS says: a class by name, with values of its config; several; or a value itself."""
    if isinstance(row, list) and row and all(isinstance(one, Given) for one in row):
        return [_given(one, part, dtype) for one in row]
    if not isinstance(row, Given):
        return row
    return _object(class_named(row.kind), part, dtype, row.config)


def _component(types: Any, part: str, dtype: torch.dtype) -> Any:
    """A component of the first class that the annotation names; `empty` where it names none."""
    for kind in types if isinstance(types, tuple | list) else (types,):
        if isinstance(kind, type) and issubclass(kind, enum.Enum):  # diffusers' list of all schedulers that fit
            return _object(class_named("DDIMScheduler"), part, dtype, {})
        if isinstance(kind, type) and kind is not inspect.Parameter.empty and kind.__name__ not in _LOADED:
            return _object(kind, part, dtype, {})
    return inspect.Parameter.empty


def class_named(name: str) -> Any:
    """A class by its name: public in diffusers or transformers, or one that a pipeline's constructor names."""
    import diffusers
    import transformers

    for package in (diffusers, transformers):
        kind = getattr(package, name, None)
        if isinstance(kind, type):
            return kind
    return _annotated()[name]


@cache
def _annotated() -> dict[str, Any]:
    """All classes that the constructors of diffusers' pipelines name."""
    from diffusers import DiffusionPipeline
    from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertModel

    known: dict[str, Any] = {"LDMBertModel": LDMBertModel}  # which its pipeline does not name
    for name in names():
        kind = pipeline_class(name)
        for types in kind._get_signature_types().values() if issubclass(kind, DiffusionPipeline) else ():
            for one in types if isinstance(types, tuple | list) else (types,):
                if isinstance(one, type):
                    known.setdefault(one.__name__, one)
    return known


def _object(kind: Any, part: str, dtype: torch.dtype, config: Mapping[str, Any]) -> Any:
    if issubclass(kind, nn.Module):
        return model(kind, part, dtype, config)
    if "scheduler" in part or "Scheduler" in kind.__name__:
        return class_named(SCHEDULERS.get(kind.__name__, kind.__name__))(**config)
    made = texts.made(kind)
    return kind(**config) if made is None else made


def model(kind: Any, part: str, dtype: torch.dtype, config: Mapping[str, Any]) -> nn.Module:
    """A model of the tiny config of its class, no weight of it at a constant start; the same for the same name."""
    values = {**rows()[kind.__name__]["config"], **config}
    torch.manual_seed(sum(part.encode()))
    config_class = getattr(kind, "config_class", None)
    values = {name: _filled(value) for name, value in values.items()}
    made = kind(**values) if config_class is None else kind(config_class(**values))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0, 0.05)
    if config_class is None:  # of diffusers, which cannot save one tensor under two names
        _untie(made)
    return made.to(dtype).eval().requires_grad_(False)


def _untie(model: nn.Module) -> None:
    seen: set[int] = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in seen:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(parameter.clone()))
        seen.add(id(parameter))


def _filled(value: Any) -> Any:
    """A value of a config's row; a table that is all the same is written {"fill": value, "shape": [rows, columns]}."""
    if isinstance(value, dict) and value.keys() == {"fill", "shape"}:
        return [[value["fill"]] * value["shape"][1] for _ in range(value["shape"][0])]
    return value
