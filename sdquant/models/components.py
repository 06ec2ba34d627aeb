"""The components of a pipeline: model classes, empty models, and replacing their tensors and modules.

The only file that looks up diffusers' and transformers' classes. Names that come from files are looked up in those
packages' public names and must be model classes; nothing that a file names is ever imported.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ..errors import BadFileError, UnsupportedFileError
from ..formats import model_families, refuse_endless
from ..utils.process_state import Shared, errors_only, no_warnings
from ..utils.quiet_imports import CHATTY, quiet_imports
from . import libraries, without_vision
from .bounds import refuse_oversized

# Prefixes that some versions of a library put before a component's tensor names and others do not, or other tools.
PREFIXES = ("text_model.", "transformer.", *model_families.PREFIXES)


def model_class(library: str | None, name: str) -> Any:
    """Return the model class called `name`.

    Args:
        library: "diffusers", "transformers", or a module of diffusers' pipelines ("stable_diffusion"), as in
            model_index.json; None for either. Where a module of theirs has the class, a config names the library alone.

    Raises:
        UnsupportedFileError: there is no such class.
    """
    known = _model_libraries()
    bases = tuple(base for _, base in known.values())
    places = (
        [known[str(library)][0]] if library in known else [_pipelines_module(library), *(p for p, _ in known.values())]
    )
    for package in chain(places, map(_home, [name])):  # the last imports all pipelines
        cls = _public(package, name) if package is not None and name.isidentifier() else None
        if isinstance(cls, type) and issubclass(cls, bases):
            return cls
    raise UnsupportedFileError(
        f"Cannot load a component of class {name!r}",
        "neither diffusers nor transformers has such a model class",
        "Update diffusers and transformers, or check the component's config.json",
    )


@cache
def _model_libraries() -> dict[str, tuple[Any, Any]]:
    """Return diffusers and transformers, each with the base of its model classes."""
    with quiet_imports():
        diffusers, transformers = libraries.diffusers(), libraries.transformers()
        return {
            "diffusers": (diffusers, diffusers.ModelMixin),
            "transformers": (transformers, transformers.PreTrainedModel),
        }


def _pipelines_module(name: str | None) -> Any:
    """Return diffusers' pipeline module of that name, such as "stable_diffusion"; None if there is none."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        return None
    with quiet_imports():
        module = getattr(_pipelines(), name, None)
    return module if isinstance(module, ModuleType) else None


@cache
def _home(name: str) -> Any:
    """Return the module of diffusers' pipelines with the class `name`: safety checkers, LTX-2's connectors, ..."""
    for one in sorted(getattr(_pipelines(), "_modules", ())):
        module = _pipelines_module(one)
        if module is not None and name in getattr(module, "__all__", ()):
            return module
    return None


@cache
def single_file() -> tuple[Mapping[str, Any], Any]:
    """Return diffusers' single-file converters by class ({"checkpoint_mapping_fn": ...}), and their module."""
    with quiet_imports():
        models = libraries.module("diffusers.loaders.single_file_model")
        return models.SINGLE_FILE_LOADABLE_CLASSES, libraries.module("diffusers.loaders.single_file_utils")


def reference(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the hub repository that diffusers takes the configs and tokenizers from, by tensor names and shapes."""
    _, functions = single_file()
    kind = functions.infer_diffusers_model_type({name: SimpleNamespace(shape=shape) for name, shape in shapes.items()})
    row = model_families.recognise(shapes)
    if row is not None and row.family == "ltx2":  # diffusers takes it for LTX-Video, whose names it has too
        kind = "ltx2-dev"
    return str(functions.DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"])


def empty(library: str | None, name: str, config: Mapping[str, Any]) -> nn.Module:
    """Build the model of a config with its parameters on the meta device; non-persistent buffers have their values."""
    cls = remapped(model_class(library, name), config)
    values = {k: v for k, v in config.items() if k != "quantization_config"}
    refuse_endless(name, values)

    def make() -> Any:
        with quiet(), no_warnings:  # of torch at layers of size 0: the weights tell that they do not fit
            if hasattr(cls, "config_class") and cls.config_class is not None:
                return cls(cls.config_class.from_dict(copy.deepcopy(values)))
            return cls.from_config(copy.deepcopy(values))

    refuse_oversized(name, values, make)
    try:
        with _parameters_on_meta():
            model = make()
    except Exception as error:  # whatever a constructor says to values that nobody has written it for
        raise BadFileError(f"Cannot build {name}", f"its config is invalid: {error}", "Check config.json") from error
    assert isinstance(model, nn.Module)
    if values.get(without_vision.KEY) is True:
        without_vision.take_out(model)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()  # the ties do not survive the move to the meta device
    return model.eval().requires_grad_(False)


def remapped(cls: Any, config: Mapping[str, Any]) -> Any:
    """Return the class that diffusers loads instead of a legacy one, by the config: PixArt's and DiT's folders name
    `Transformer2DModel`."""
    names = {base.__name__ for base in cls.__mro__}
    if not issubclass(cls, libraries.diffusers().ModelMixin) or "LegacyModelMixin" not in names:
        return cls
    with quiet():
        loading = libraries.module("diffusers.models.model_loading_utils")
        return loading._fetch_remapped_cls_from_config({"norm_type": None, **config}, cls)


def quiet() -> contextlib.AbstractContextManager[None]:
    """Keep remarks of libraries off the terminal; errors still come through."""
    return errors_only(*CHATTY)


@contextlib.contextmanager
def _bars_off() -> Iterator[None]:
    theirs = libraries.module("diffusers.utils.logging")
    shown = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            theirs.enable_progress_bar()


# No progress bar of diffusers: the components are loaded already, and sdquant has shown its own.
_no_bars = Shared(_bars_off)


_building = threading.local()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when it is registered, in this thread only: accelerate replaces a method
    of `nn.Module`, and so takes the weights of modules that other threads build meanwhile."""
    _hook_registrations()
    before = getattr(_building, "on_meta", False)
    _building.on_meta = True
    try:
        yield
    finally:
        _building.on_meta = before


@cache
def _hook_registrations() -> None:
    from torch.nn.modules.module import register_module_parameter_registration_hook

    register: Any = register_module_parameter_registration_hook  # whose type knows no hook that returns anything
    register(_to_meta)


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Parameter registration hook of torch: the parameter that it returns is registered instead."""
    if parameter is None or not getattr(_building, "on_meta", False):
        return None
    cls: Any = type(parameter)
    options = {**vars(parameter), "requires_grad": parameter.requires_grad}
    moved: nn.Parameter = cls(parameter.to("meta"), **options)
    return moved


def tied(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map the name of each parameter to all names of the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}


def ties_in(
    ties: Mapping[str, tuple[str, ...]], schemes: Mapping[str, str], known: frozenset[str]
) -> dict[str, tuple[str, ...]]:
    """Return those of the ties that hold for a file.

    SDNQ quantizes a language model's head and leaves the table of embeddings that it is tied to in floats: two weights
    from then on. So names that the file has each for itself are left apart if they are stored differently. A name that
    it does not have stays with the floats, or with the first.

    Args:
        ties: see `tied`. known: the names of all tensors of the model.
        schemes: the scheme of each tensor of the file, or "" for an unquantized one, by its name there.
    """
    stored = {name: scheme for key, scheme in schemes.items() if (name := model_name(key, known)) is not None}
    left = dict(ties)
    for names in set(ties.values()):
        kinds = [stored[name] for name in names if name in stored]
        if len(set(kinds)) > 1:
            rest = "" if "" in kinds else kinds[0]
            for name in names:
                kind = stored.get(name, rest)
                left[name] = tuple(other for other in names if stored.get(other, rest) == kind)
    return left


def model_name(key: str, known: frozenset[str]) -> str | None:
    """Return the model's name for a file's tensor: the same, or with a prefix more or less; None if it has none."""
    if key in known:
        return key
    for prefix in PREFIXES:
        if key.removeprefix(prefix) in known:
            return key.removeprefix(prefix)
        if prefix + key in known:
            return prefix + key
    return None


def set_tensor(model: nn.Module, names: Iterable[str], tensor: Tensor) -> None:
    """Replace a parameter or buffer by a tensor; several names are tied and get one parameter."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            module._parameters[leaf] = parameter


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at `path`."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


# Modules that cast their input to the dtype of a child's weight. In a library's module that may be the dtype of the
# codes: T5's feed-forward turned its activations into uint8, and the text into noise, without an error.
_PEEKING = {
    "T5DenseActDense": "wo",
    "T5DenseGatedActDense": "wo",
    "UMT5DenseActDense": "wo",
    "UMT5DenseGatedActDense": "wo",
}


def weight_dtype_matters(model: nn.Module, path: str) -> bool:
    """Return whether the parent of the module at `path` computes in the dtype of that module's weight."""
    parent, _, leaf = path.rpartition(".")
    return _PEEKING.get(type(model.get_submodule(parent)).__name__) == leaf


def missing_parameters(model: nn.Module) -> list[str]:
    """Return the names of parameters that are still on the meta device, so have no values."""
    return [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]


@cache
def _pipelines() -> Any:
    with quiet():
        return libraries.module("diffusers.pipelines")


def _public(package: Any, name: Any) -> Any:
    """Return the public object called `name` in diffusers or transformers; None if there is none."""
    if not isinstance(name, str) or name.startswith("_"):
        return None
    if name in vars(package):  # what was imported has nothing more to say
        return vars(package)[name]
    with quiet_imports():
        return getattr(package, name, None)
