"""The `quantization_config` for diffusers and transformers, and which weights they read without sdquant."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..backends import NUNCHAKU_SCHEMES
from ..core import METHOD, QuantSpec, Unfit
from ..models import is_of_transformers, libraries, matched
from ..nn import quantized

if TYPE_CHECKING:
    from torch import nn

    from ..core import Packed, PackedSpec, Scheme

_LINEAR = ("linear",)
_GROUP = "group_size"


@dataclass(frozen=True)
class Reading:
    """The result of reading a component with these libraries.

    Attributes:
        config: their `quantization_config` for it; {} if no weight is quantized, or none that they read.
        floats: the quantized weights that they do not read. With these the component needs sdquant; once they are
            written as floats, `config` describes the rest.
        package: package that has to be imported first, such as sdnq; None if they need none.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    floats: frozenset[str] = frozenset()
    package: str | None = None


def library_config(model: nn.Module, floats: Collection[str] = frozenset()) -> dict[str, Any]:
    """Return the entries of a component's config.json that describe its quantization; {} if it is not quantized.

    If the libraries do not read all of it, the config names sdquant: they load the folder after `import sdquant`, and
    refuse it otherwise.

    Args:
        floats: quantized weights that are written as floats.
    """
    specs = _specs(model)
    if not set(specs) - set(floats):
        if specs or not said_rules(model):  # which may be for products of activations alone
            return {}
        return {"quantization_config": own_config(model)}
    read = reading(model)
    if read.config and read.floats <= set(floats):
        return {"quantization_config": dict(read.config)}
    return {"quantization_config": own_config(model)}


def own_config(model: nn.Module) -> dict[str, Any]:
    """Return the `quantization_config` of a quantized component that names sdquant as its method."""
    counts = Counter(spec.scheme.name for spec in _specs(model).values())
    most = counts.most_common(1)[0][0] if counts else "rules"
    return {"quant_method": METHOD, "quant": most, "skip": [], **said_rules(model)}


def said_rules(model: nn.Module) -> dict[str, Any]:
    """Return {"rules": [...]} as JSON values for a model that was quantized by rules, else {}."""
    from ..rules import qconfig, rules_of_model

    rules = rules_of_model(model)
    return {"rules": [qconfig.to_dict(row) for row in rules]} if rules else {}


def reading(model: nn.Module) -> Reading:
    """Return how diffusers or transformers reads a component.

    They read a single scheme, in linear layers: if there are several, the one of most weights.
    """
    specs = _specs(model)
    counts = Counter(spec.scheme for spec in specs.values() if readable(spec.scheme))
    counts = counts or Counter(spec.scheme for spec in specs.values())
    if not counts:
        return Reading()
    scheme = counts.most_common(1)[0][0]
    first = next(spec for spec in specs.values() if spec.scheme == scheme)
    weights = dict(quantized(model))
    described = scheme.codec.config_of(
        {name: packed for name, packed in weights.items() if packed.spec.scheme.codec is scheme.codec}
    )
    if described is not None:
        return _described(model, specs, *described)
    asked = _asked(scheme, [packed for packed in weights.values() if packed.spec.scheme == scheme])
    config = scheme.codec.config(asked, first.dtype)
    if not config:
        return Reading(floats=frozenset(specs))
    read = _READ.get(config["quant_method"])
    if read is not None:
        return read(model, specs, scheme, config)
    floats = frozenset(
        name for name, packed in weights.items() if not (_is_stored_as(packed, asked) and _is_run(model, name))
    )
    if "modules_to_not_convert" in config:
        config["modules_to_not_convert"] = [f"{path}.weight" for path in _floats(model, specs, ("linear", "conv"))]
    return Reading(config, floats, package=config["quant_method"])


def refused_here(model: nn.Module, entries: Mapping[str, Any]) -> str:
    """Return the error with which a component's library refuses it on this machine; "" if it accepts it.

    The library itself validates it: bitsandbytes runs on CPUs, but diffusers 0.42 loads none of its models there.

    Args:
        entries: those of its config.json that describe its quantization.
    """
    config = entries.get("quantization_config")
    if not config or config["quant_method"] == METHOD:
        return ""
    theirs = is_of_transformers(model)
    auto = libraries.module("transformers.quantizers.auto" if theirs else "diffusers.quantizers.auto")
    kind = auto.AutoHfQuantizer if theirs else auto.DiffusersAutoQuantizer
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecation warnings of classes that the user did not choose
            kind.from_config(dict(config), pre_quantized=True).validate_environment(device_map=None)
    except (ImportError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


def readable(scheme: Scheme) -> bool:
    """Return whether diffusers reads the scheme without a further package for quantized models."""
    config = scheme.codec.config(QuantSpec(scheme), "bfloat16")
    if scheme.name in NUNCHAKU_SCHEMES:
        return True
    return config is not None and config["quant_method"] in _READ


def float_linears(model: nn.Module, packed: Collection[str]) -> list[str]:
    """Return the names of the weights of linear layers that are not in `packed`."""
    return [f"{path}.weight" for path in _floats(model, set(packed), _LINEAR)]


def _bitsandbytes(
    model: nn.Module, specs: Mapping[str, PackedSpec], scheme: Scheme, config: Mapping[str, Any]
) -> Reading:
    """Return the reading of bitsandbytes weights. The libraries treat every linear layer as quantized, except those
    that the config names or the model's class keeps in float32. A name also matches other layers: quantized ones among
    these have to be floats as well."""
    read = {_path(name) for name, spec in specs.items() if _in_linear(model, name, spec, scheme)}
    read -= {path for path in read if matched(path, getattr(model, "_keep_in_fp32_modules", None) or ())}
    while True:
        unquantized = _floats(model, {f"{path}.weight" for path in read}, _LINEAR)
        caught = {path for path in read if matched(path, unquantized)}
        if not caught:
            break
        read -= caught
    floats = frozenset(name for name in specs if _path(name) not in read)
    return Reading({**config, "llm_int8_skip_modules": unquantized} if read else {}, floats)


def _quanto(model: nn.Module, specs: Mapping[str, PackedSpec], scheme: Scheme, config: Mapping[str, Any]) -> Reading:
    """Return the reading of quanto weights. transformers cannot load quanto's and would start from random weights.
    diffusers treats every linear layer as quantized, except those whose own name, without a path, is in the config or
    kept in float32 by the model's class; float weights in the others would be quantized at every step."""
    if is_of_transformers(model):
        return Reading(floats=frozenset(specs))
    read = {_path(name) for name, spec in specs.items() if _in_linear(model, name, spec, scheme)}
    named = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    named |= {_leaf(path) for path in _floats(model, {f"{path}.weight" for path in read}, _LINEAR)}
    read = {path for path in read if _leaf(path) not in named}
    unquantized = sorted({_leaf(path) for path in _floats(model, {f"{path}.weight" for path in read}, _LINEAR)})
    floats = frozenset(name for name in specs if _path(name) not in read)
    return Reading({**config, "modules_to_not_convert": unquantized} if read else {}, floats)


# By the `quant_method` of the configs.
_READ = {"bitsandbytes": _bitsandbytes, "quanto": _quanto}


def _specs(model: nn.Module) -> dict[str, PackedSpec]:
    return {name: packed.spec for name, packed in quantized(model)}


def _described(
    model: nn.Module, specs: Mapping[str, PackedSpec], config: Mapping[str, Any], names: Collection[str]
) -> Reading:
    """Return the reading of weights that a backend's own config describes, by name."""
    floats = frozenset(name for name in specs if name not in names or not _is_run(model, name))
    unquantized = [f"{path}.weight" for path in _floats(model, specs, ("linear", "conv"))]
    return Reading({**config, "modules_to_not_convert": unquantized}, floats, package=config["quant_method"])


def _is_run(model: nn.Module, name: str) -> bool:
    """Return whether SDNQ runs the layer of a weight: it is no embedding, and the model's class does not keep it in
    float32. (A model casts activations to the weight dtype of such a layer, in SDNQ's layers that of the codes.)"""
    from torch import nn

    keep_in_fp32 = getattr(model, "_keep_in_fp32_modules", None) or ()
    table = isinstance(model.get_submodule(_path(name)), nn.Embedding)
    return not table and not matched(_path(name), keep_in_fp32)


def _in_linear(model: nn.Module, name: str, spec: PackedSpec, scheme: Scheme) -> bool:
    """Return whether a weight has this scheme and belongs to a linear layer."""
    from torch import nn

    table = isinstance(model.get_submodule(_path(name)), nn.Embedding)
    return spec.scheme == scheme and len(spec.shape) == 2 and not table


def _floats(model: nn.Module, packed: Mapping[str, Any] | set[str], kinds: tuple[str, ...]) -> list[str]:
    """Return the paths of the layers of these kinds whose weights are not in `packed`."""
    from torch import nn

    from ..nn import kind_of, packed_of

    def fits(module: nn.Module) -> bool:
        if kind_of(module) in kinds:
            return True
        return isinstance(module, nn.Linear) and packed_of(module) is not None

    return [path for path, module in model.named_modules() if f"{path}.weight" not in packed and fits(module)]


def _path(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _asked(scheme: Scheme, weights: Sequence[Packed]) -> QuantSpec:
    """Return the scheme with the options that these weights have: by their descriptions, else the size of groups that
    fits most of them."""
    details = weights[0].spec.details
    spec = QuantSpec(scheme, tuple(sorted((k, details[k]) for k in scheme.options if k in details)))
    if _GROUP not in scheme.options or _GROUP in details:
        return spec
    sizes = dict.fromkeys((spec[_GROUP], *scheme.options[_GROUP].choices))
    specs = [replace(spec, options=tuple(sorted((*spec.options, (_GROUP, size))))) for size in sizes]
    return max(specs, key=lambda one: sum(_is_stored_as(packed, one) for packed in weights))


def _is_stored_as(packed: Packed, spec: QuantSpec) -> bool:
    """Return whether the parts of a weight are those of this spec, in shape; scales may have a dtype of their own."""
    from ..kernels import prepack

    if packed.spec.scheme != spec.scheme or not packed.spec.details.keys() <= spec.scheme.options.keys():
        return False
    try:
        layout = spec.scheme.codec.layout(spec, packed.spec.shape, packed.spec.dtype)
    except Unfit:
        return False
    return {part: tuple(tensor.shape) for part, tensor in prepack.file_shape(packed).parts.items()} == {
        part: row.shape for part, row in layout.items()
    }
