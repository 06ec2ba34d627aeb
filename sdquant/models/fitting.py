"""Match a component on disk with its model before a weight is read: names, missing tensors, shapes.

From here on the tensors of a `Checkpoint` have the model's names, and the layer types are known. Mismatches raise the
same errors as loading would.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..core import INPUT_FIRST, dtype_named
from ..errors import BadFileError, UnsupportedFileError
from ..formats import model_families, over_files, text_encoders
from .left_out import TOGETHER, refuse_lacking
from .names import Group, Mapped, to_model

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from ..core import PackedSpec, PrequantizedWeight, TensorInfo
    from ..formats import Checkpoint, Recipe

_MODELS = 8  # that are remembered: those of a large pipeline


@dataclass(frozen=True)
class Shell:
    """A model without weights.

    Attributes:
        known: the names of its tensors. ties: see `components.tied`.
    """

    model: nn.Module
    known: frozenset[str]
    ties: Mapping[str, tuple[str, ...]]

    def tensor(self, name: str) -> Tensor:
        """Return the parameter or buffer of that name."""
        return self.model.get_parameter(name) if name in self.ties else self.model.get_buffer(name)

    def parameter(self, name: str) -> nn.Parameter | None:
        """Return the parameter of that name; None for a buffer."""
        return self.model.get_parameter(name) if name in self.ties else None

    def described(self, name: str, weight: PrequantizedWeight) -> PrequantizedWeight:
        """Return a quantized weight with what only its layer tells of it: which dimension is that of the inputs."""
        layer = self.model.get_submodule(name.rpartition(".")[0])
        if not getattr(layer, "transposed", False):  # of torch's convolutions
            return weight
        return replace(weight, details={**weight.details, INPUT_FIRST: True})


_shells: OrderedDict[str, Shell] = OrderedDict()
_lock = threading.Lock()  # several threads may plan and load at once


def shell(src: Checkpoint) -> Shell | None:
    """Return the model of a source without weights, shared and not to be changed; None if its class is unknown.

    Raises:
        BadFileError, UnsupportedFileError: see `components.empty`.
    """
    if src.class_name is None or not src.config:
        return None
    known = _shell(src)
    row = model_families.recognise(src.names)
    # Some classes of diffusers have names that are those of an original layout as well (Z-Image's ControlNet).
    return None if row is not None and row.foreign and not known.known.issuperset(row.names) else known


def _shell(src: Checkpoint) -> Shell:
    key = json.dumps([src.library, src.class_name, src.config], sort_keys=True, default=str)
    with _lock:
        known = _shells.get(key)
        if known is not None:
            _shells.move_to_end(key)
            return known
    from . import components

    assert src.class_name is not None
    model = components.empty(src.library, src.class_name, src.config)
    ties = components.tied(model)
    known = Shell(model, frozenset(model.state_dict(keep_vars=True)) | frozenset(ties), ties)
    with _lock:
        _shells[key] = known
        while len(_shells) > _MODELS:
            _shells.popitem(last=False)
    return known


def fitted(src: Checkpoint) -> Checkpoint:
    """Return the source under its model's names, validated against the model; unchanged if the model is unknown.

    Raises:
        BadFileError: a tensor of the model is missing, or one has another shape, or a quantized one has parts that are
            not of that shape, or of another dtype. UnsupportedFileError: a quantized weight would have to be split, or
            merged with others.
    """
    model = None if src.is_empty else shell(src)
    if model is None:
        return src
    from .components import ties_in
    from .header_reads import refuse_unreadable

    _refuse_other_depth(src)
    renamed = named(src, model)
    refuse_misfits(renamed, model)
    refuse_missing(renamed, model)
    refuse_unreadable(renamed, model.model, model.ties)
    return replace(renamed, layers=layers_of(model.model, ties_in(model.ties, renamed.schemes, model.known)))


def _refuse_other_depth(src: Checkpoint) -> None:
    """Raise BadFileError if a text encoder in GGUF has more or fewer layers than its config says: for such a file the
    names of what is missing, or too much, tell nobody what is wrong."""
    if src.container != "gguf" or src.library != "transformers":
        return
    there, wanted = text_encoders.sizes(src.tensors)[1], text_encoders.sizes_of(src.config)[1]
    if there is not None and wanted is not None and there != wanted:
        raise BadFileError(
            f"Cannot load {src.path} as a {src.class_name}",
            f"it has {there} layers, and the config says {wanted}",
            "Use a complete file of this model, or the pipeline folder of the model that the file is of",
        )


def named(src: Checkpoint, model: Shell) -> Checkpoint:
    """Return the source under its model's names. Tensors that the model does not use are listed in `strays` only."""
    from ..core import is_range

    ranges = [key for key in src.plain if is_range(key)]
    # In the order of the file, which is the same in all processes that share the work; that of a set is not.
    keys_of_model = [key for key in (*src.plain, *src.prequantized) if not is_range(key)]
    mapped = to_model(model.model, keys_of_model, model.known)
    _refuse_packed(src, mapped)
    parts = {key for match in src.prequantized.values() for key in (*match.keys.values(), *match.extra)}
    tensors: dict[str, TensorInfo] = {}
    home: dict[str, Path] = {}
    recipes: dict[str, Recipe] = {}
    matches: dict[str, PrequantizedWeight] = {}
    specs: dict[str, PackedSpec] = {}
    keys: dict[str, str] = {}
    for name, key in mapped.names.items():
        if name != key:
            keys[name] = src.keys.get(key, key)
        elif key in src.keys:
            keys[name] = src.keys[key]
        if key in src.prequantized:
            matches[name] = src.prequantized[key]  # whose own name says what its parts are called
            if key in src.specs:
                specs[name] = src.specs[key]
            else:
                matches[name] = model.described(name, matches[name])
            whole = (*src.prequantized[key].keys.values(), *src.prequantized[key].extra)
            tensors |= {part: src.tensors[part] for part in whole}
            home |= {part: src.home[part] for part in whole}
            recipes |= {part: src.recipes[part] for part in whole if part in src.recipes}
            continue
        tensors[name], home[name] = src.tensors[key], src.home[key]
        if key in src.recipes:
            recipes[name] = src.recipes[key]
    for group in mapped.groups:
        for name, recipe in _recipes(src, group).items():
            if name not in model.known or name in tensors:
                continue
            tensors[name], home[name], recipes[name] = recipe.info, src.home[group.sources[0]], recipe
    for key in ranges:
        name = _path_of(key, mapped)
        tensors[name], home[name] = src.tensors[key], src.home[key]
        if name != key:
            keys[name] = key
    clash = next((name for name in keys if name in parts and name not in matches), None)
    if clash is not None:
        raise _together(src, clash, "its file uses that name for a part of another weight")
    return replace(
        src,
        tensors=tensors,
        home=home,
        recipes=recipes,
        prequantized=matches,
        specs=specs,
        keys=keys,
        strays=(*src.strays, *_unexpected(model, mapped)),
        conversions=mapped.used,
        origins={name: src.origins[key] for name, key in mapped.names.items() if key in src.origins},
    )


def _unexpected(model: Shell, mapped: Mapped) -> tuple[str, ...]:
    """Return the keys that the model does not use, except those that its library ignores, too."""
    import re

    network: Any = model.model
    patterns = [*(getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ())]
    return tuple(key for key in mapped.strays if not any(re.search(pattern, key) for pattern in patterns))


def _refuse_packed(src: Checkpoint, mapped: Mapped) -> None:
    for group in mapped.groups:
        name = next((key for key in group.sources if key in src.prequantized), None)
        if name is not None:
            raise UnsupportedFileError(
                f"Cannot load weight {name!r} of {src.path}, which is quantized to {src.prequantized[name].scheme}",
                f"the model has no such weight: {src.class_name} combines "
                f"{len(group.sources)} of the file into its own, or splits this one",
                "Quantize the model again with this version of sdquant, or load the unquantized model",
            )


def _recipes(src: Checkpoint, group: Group) -> Mapping[str, Recipe]:
    """Return recipes that build the tensors of a group from those of the file."""
    from .single_file.trace import trace_conversion

    shapes = {key: (src.tensors[key].shape, dtype_named(src.tensors[key].dtype)) for key in group.sources}
    try:
        recipes = trace_conversion(group.convert, shapes)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _together(src, group.sources[0], f"it cannot be converted to the model's tensor: {error}") from error
    return {name: over_files(recipe, src.recipes, src.keys) for name, recipe in recipes.items()}


def _path_of(key: str, mapped: Mapped) -> str:
    """Return the model's name for a range of a product (`core.tensor_keys`), which no library maps: derived from
    the names of the weights in the same module."""
    path, _, leaf = key.rpartition(".")
    for name, there in mapped.names.items():
        if path and there.startswith(f"{path}."):
            rest = there.removeprefix(path)
            if name.endswith(rest):
                return f"{name.removesuffix(rest)}.{leaf}"
    return key


def refuse_misfits(src: Checkpoint, model: Shell) -> None:
    """Raise BadFileError if a tensor of the model is in the source in another shape."""
    from .weight_loader import misfit

    for name in src.plain:
        if name not in model.known:
            continue  # a range
        info = src.tensors[name]
        why = misfit(info.shape, info.dtype.startswith(("float", "bfloat")), model.tensor(name))
        if why is not None:
            raise _together(src, src.keys.get(name, name), why, home=src.home[name])
    for name, spec in src.specs.items():
        expected = tuple(model.tensor(name).shape)
        if spec.shape != expected:
            why = f"it has shape {list(spec.shape)}, but the model expects {list(expected)}"
            home = src.home[next(iter(src.prequantized[name].keys.values()))]
            raise _together(src, src.keys.get(name, name), why, home=home)


def refuse_missing(src: Checkpoint, model: Shell) -> None:
    """Raise BadFileError if a tensor of the model is not in the source, and has to be."""
    refuse_lacking(model.model, absent(src, model), src.path)


def absent(src: Checkpoint, model: Shell) -> list[str]:
    """Return the names of the model's parameters that are not in the source."""
    there = {one for name in src.names for one in model.ties.get(name, (name,))}
    return [name for name, _ in model.model.named_parameters() if name not in there]


def _together(src: Checkpoint, key: str, why: str, *, home: Any = None) -> BadFileError:
    return BadFileError(f"Cannot load tensor {key!r} of {home or src.path}", why, TOGETHER)


def layers_of(model: nn.Module, ties: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str | None, str]]:
    """Return `Checkpoint.layers` of a model, with the names of each parameter's tensor (`components.tied`)."""
    from .weight_loader import kind_to_quantize

    layers: dict[str, tuple[str | None, str]] = {}
    for name, names in ties.items():
        if name.endswith(".weight"):
            kind = kind_to_quantize(model, names)
            layers[name] = (kind, "" if kind is not None else _why_not(model, names))
    return layers


def _why_not(model: nn.Module, names: tuple[str, ...]) -> str:
    """Return the reason that a weight cannot be run quantized."""
    owners = [type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names]
    if len(set(owners)) == 1:
        return f"its layer ({owners[0]}) cannot be quantized"
    return f"its layers ({' and '.join(dict.fromkeys(owners))}) share it, and cannot run the same quantized weight"
