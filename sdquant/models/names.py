"""Map a model's tensor names to the names in its library's files and back, with the library's own mapping.

transformers renames tensors while it loads (`conversion_mapping` of transformers 5, `_checkpoint_conversion_mapping` of
the classes before), merges several into one (experts, fused projections), and undoes all of it when it saves.
diffusers renames those of deprecated attention blocks. The mappings are the libraries', but for what ComfyUI renames.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .libraries import is_of_transformers

if TYPE_CHECKING:
    from torch import Tensor, nn

# The attribute of a quantized model in which the transforms wait that its files were renamed by; of any other model
# they are where transformers itself has them.
KEPT, LIBRARYS = "_sdquant_conversions", "_weight_conversions"

# What ComfyUI calls the parts of language models that see, where transformers' mapping knows only its own old names.
_COMFY = (
    (re.compile(r"^model\.(?=(embed_tokens|layers|norm)\.)"), "model.language_model."),
    (re.compile(r"^vision_model\."), "model.vision_tower."),
    (re.compile(r"^(?=(visual|multi_modal_projector)\.)"), "model."),
)


@dataclass(frozen=True)
class Group:
    """Tensors that are built from others.

    Attributes:
        sources: the others. convert: a state dict of these -> one of the tensors built from them.
    """

    sources: tuple[str, ...]
    convert: Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Mapped:
    """The result of a mapping of tensor names, from one side (model or file) to the other.

    Attributes:
        names: target name -> source name, of tensors that are only renamed. groups: the others.
        strays: source names that have no target.
        used: the transforms of transformers 5 that were applied, in their order.
    """

    names: Mapping[str, str]
    groups: tuple[Group, ...] = ()
    strays: tuple[str, ...] = ()
    used: tuple[Any, ...] = field(default=(), repr=False)


def to_model(model: nn.Module, keys: Collection[str], known: Collection[str] | None = None) -> Mapped:
    """Map the tensors of a file to those of a model.

    Args:
        model: on any device. keys: the tensors' keys; for quantized weights their names.
        known: the model's tensor names; None for those of its state dict.
    """
    names = frozenset(known if known is not None else model.state_dict(keep_vars=True))
    if not is_of_transformers(model):
        return _of_diffusers(model, keys, names)
    return _of_transformers(model, keys, names)


def to_file(model: nn.Module, names: Collection[str], packed: Collection[str] = ()) -> Mapped:
    """Map the tensors of a model to their names in the files that its library writes.

    Args:
        names: of its tensors. packed: the quantized weights among them: they cannot be split or merged, so they and
            the rest of their group are written under the model's own names, which the library reads as well.
    """
    if not is_of_transformers(model) or _transforms(model) == ():
        return Mapped({name: name for name in names})
    renamed, convert = _backwards(model)
    keys: dict[str, str] = {}
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    patterns: dict[str, str] = {}
    for name in _in_order(names):
        key, pattern = renamed(name)
        if pattern is None:
            keys.setdefault(key, name)
        else:
            groups[key].append((name, pattern))
            patterns[key] = pattern
    built: list[Group] = []
    for key, members in groups.items():
        if any(name in packed for name, _ in members):
            keys |= {name: name for name, _ in members}
        else:
            built.append(Group(tuple(name for name, _ in members), convert(key, members)))
    own = {name: name for name in names}
    if packed and not _returns(model, keys, names):
        return Mapped(own)
    return Mapped(keys, tuple(built))


def _returns(model: nn.Module, keys: Mapping[str, str], names: Collection[str]) -> bool:
    """Return whether the names in files map back to the model's."""
    back = to_model(model, keys, names)
    return all(keys[key] == name for name, key in back.names.items()) and len(back.names) == len(keys)


def remember(model: nn.Module, used: tuple[Any, ...], *, quantized: bool) -> None:
    """Record on a transformers model how its files were renamed, as its own `from_pretrained` does.

    Args:
        quantized: transformers cannot take the weights for its own ones; what is written has the names already.
    """
    if not is_of_transformers(model) or not hasattr(model, "base_model_prefix"):
        return
    if quantized:
        model.__dict__[KEPT] = list(used)
        model.__dict__[LIBRARYS] = []
    else:
        model.__dict__.pop(KEPT, None)
        model.__dict__[LIBRARYS] = list(used)


def conversions(model: nn.Module) -> tuple[Any, ...]:
    """Return the transforms to undo when the model is saved."""
    return (_transforms(model) or ()) if is_of_transformers(model) else ()


def _transforms(model: nn.Module) -> tuple[Any, ...] | None:
    """Return the transforms to undo when the model is saved; None if this transformers has none (before 5)."""
    known = model.__dict__.get(KEPT)
    if known is None:
        known = getattr(model, LIBRARYS, None)
    if known is not None:
        return tuple(known)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        return None
    if not hasattr(model, "base_model_prefix"):
        return ()
    # As in `revert_weight_conversion`: of a model that no file was read for nobody knows whether it had a prefix.
    every = get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
    return tuple(one for one in every if not isinstance(one, PrefixChange))


def _of_diffusers(model: nn.Module, keys: Collection[str], known: frozenset[str]) -> Mapped:
    fixed: dict[str, Any] = {key: key for key in keys}
    fix: Any = getattr(model, "_fix_state_dict_keys_on_load", None)
    if fix is not None:
        fix(fixed)
    return _placed(fixed.items(), known)


def _placed(rows: Iterable[tuple[str, str]], known: frozenset[str], used: tuple[Any, ...] = ()) -> Mapped:
    """Map (name, key) pairs; of several keys for one name the first is used."""
    from .components import model_name

    names: dict[str, str] = {}
    strays = []
    for name, key in rows:
        target = model_name(name, known)
        if target is None or target in names:
            strays.append(key)
        else:
            names[target] = key
    return Mapped(names, (), tuple(strays), used)


def _of_transformers(model: Any, keys: Collection[str], known: frozenset[str]) -> Mapped:
    if not hasattr(model, "base_model_prefix"):
        return _placed(((key, key) for key in keys), known)
    try:
        import transformers.core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return _placed(((_before_5(model, key, known), key) for key in _in_order(keys)), known)
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state: Any = dict.fromkeys(known, True)  # only asked whether a name is in it
    rows: list[tuple[str, str]] = []
    members: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key in _in_order(keys):  # the order in which transformers asks; one of the transforms heeds it
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in known and key in known:
            name, pattern = loading.rename_source_key(key, [], [], model.base_model_prefix, state)
        if name not in known:
            name = _of_comfy(key, known) or name
        if pattern is not None and name in known:
            members[name].append((key, pattern))
        else:
            rows.append((name, key))
    groups = tuple(
        Group(tuple(key for key, _ in some), _converter(model, by_pattern[some[0][1]], name, some))
        for name, some in members.items()
    )
    used = tuple(one for one in transforms if one.was_used())
    placed = _placed(rows, known, used)
    return Mapped(placed.names, groups, placed.strays, used)


def _of_comfy(key: str, known: frozenset[str]) -> str | None:
    """Return the model's name for a tensor of ComfyUI's; None if it has none."""
    return next((name for was, now in _COMFY if was.match(key) and (name := was.sub(now, key)) in known), None)


def _converter(
    model: Any, transform: Any, name: str, members: list[tuple[str, str]]
) -> Callable[[dict[str, Any]], Mapping[str, Any]]:
    """Return a function that runs a transformers converter on these tensors: (key, the pattern that matched it)."""

    def convert(state: dict[str, Any]) -> Mapping[str, Any]:
        one = deepcopy(transform)
        for key, pattern in members:
            one.add_tensor(name, key, pattern, state[key])
        result = one.convert(name, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in result.items()}

    return convert


def _backwards(
    model: Any,
) -> tuple[Callable[[str], tuple[str, str | None]], Callable[[str, list[tuple[str, str]]], Any]]:
    """Return two functions for saving: one maps a model's name to a file's (and the pattern of the converter that
    matches, if any), the other returns what that converter does."""
    transforms = _transforms(model)
    if transforms is None:
        return lambda name: (_to_file_before_5(model, name), None), lambda key, members: None
    import transformers.core_model_loading as loading

    every = [one.reverse_transform() for one in transforms[::-1]]
    renamings = [one for one in every if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in every if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}

    def plainly(name: str) -> str:
        for one in renamings:
            name, _ = one.rename_source_key(name)
        return name

    def renamed(name: str) -> tuple[str, str | None]:
        for one in converters:
            key, pattern = one.rename_source_key(name)
            if pattern is not None:
                return key, pattern
        return plainly(name), None

    def convert(key: str, members: list[tuple[str, str]]) -> Any:
        run = _converter(model, by_pattern[members[0][1]], key, members)
        return lambda state: {plainly(name): value for name, value in run(state).items()}

    return renamed, convert


def _before_5(model: Any, key: str, known: frozenset[str]) -> str:
    """Return the model's name for a file's tensor in transformers 4.57: by the mapping of the class, or by adding or
    removing the prefix of the base model."""
    name = key
    for pattern, replacement in (getattr(model, "_checkpoint_conversion_mapping", None) or {}).items():
        name, count = re.subn(pattern, replacement, name)
        if count:
            break
    fix: Any = getattr(model, "_fix_state_dict_key_on_load", None)
    if fix is not None:
        name = fix(name)[0]
    prefix = f"{model.base_model_prefix}."
    if name in known:
        return name
    return next((one for one in (name.removeprefix(prefix), prefix + name, key) if one in known), None) or (
        _of_comfy(key, known) or name
    )


def _to_file_before_5(model: Any, name: str) -> str:
    for replacement, pattern in (getattr(model, "_checkpoint_conversion_mapping", None) or {}).items():
        key, count = re.subn(pattern, re.sub(r"\(.*\)", "", replacement.lstrip("^")), name)
        if count:
            return key
    return name


def _in_order(keys: Iterable[str]) -> list[str]:
    """Sort keys in the order in which transformers 5 reads a file."""
    try:
        from transformers.core_model_loading import dot_natural_key
    except ImportError:
        return sorted(keys)
    return sorted(keys, key=dot_natural_key)


def converted(group: Group, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Build the tensors of a group from its sources."""
    return group.convert({name: tensors[name] for name in group.sources})
