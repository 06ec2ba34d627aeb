"""What diffusers and transformers, without sdquant, read of a folder that sdquant writes, and their config for it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core import registry
from ..core.choices import METHOD
from ..models import libraries
from ..models.keep_in_fp32 import matched
from ..models.libraries import is_of_transformers
from ..nn.weights import quantized

if TYPE_CHECKING:
    from torch import nn

    from ..core.backend import PackedSpec, QuantSpec

_LINEAR = ("linear",)


@dataclass(frozen=True)
class Reading:
    """How these libraries read a component.

    Attributes:
        config: their `quantization_config` for it; {} where none of it is quantized, or none that they read.
        floats: the quantized weights that they do not read. While it holds these, it needs sdquant; once they are
            written as floats, `config` is right for the rest.
        package: that has to be imported before, such as sdnq; None for what they read by themselves.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    floats: frozenset[str] = frozenset()
    package: str | None = None


def library_config(model: nn.Module, floats: Collection[str] = frozenset()) -> dict[str, Any]:
    """What a component's config.json says of its quantization; {} for a component that is not quantized.

    Where the libraries do not read all of it, it names sdquant: they read the folder after `import sdquant`, and refuse
    it without.

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
    """The `quantization_config` that names sdquant, of a component that is quantized."""
    counts = Counter(spec.scheme for spec in _specs(model).values())
    most = counts.most_common(1)[0][0] if counts else "rules"
    return {"quant_method": METHOD, "quant": most, "skip": [], **said_rules(model)}


def said_rules(model: nn.Module) -> dict[str, Any]:
    """{"rules": [...]}, as JSON values, of a model that was quantized by rules; {} of others."""
    from ..rules.model_rules import rules_of_model
    from ..rules.qconfig import to_dict

    rules = rules_of_model(model)
    return {"rules": [to_dict(row) for row in rules]} if rules else {}


def reading(model: nn.Module) -> Reading:
    """How diffusers or transformers reads a component.

    They read one scheme in it, in linear layers. Of several schemes, it is the one that most weights have.
    """
    specs = _specs(model)
    counts = Counter(spec.scheme for spec in specs.values() if readable(spec.scheme))
    counts = counts or Counter(spec.scheme for spec in specs.values())
    if not counts:
        return Reading()
    scheme = counts.most_common(1)[0][0]
    first = next(spec for spec in specs.values() if spec.scheme == scheme)
    config = registry.of_scheme(scheme).config(_asked(scheme, first.details), first.dtype)
    if not config:
        return Reading(floats=frozenset(specs))
    read = _READ.get(config["quant_method"])
    if read is not None:
        return read(model, specs, scheme, config)
    floats = frozenset(name for name, spec in specs.items() if not _in_sdnq(model, name, spec, scheme))
    if "modules_to_not_convert" in config:
        config["modules_to_not_convert"] = [f"{path}.weight" for path in _floats(model, specs, ("linear", "conv"))]
    return Reading(config, floats, package=config["quant_method"])


def refused_here(model: nn.Module, floats: Collection[str] = frozenset()) -> str:
    """Return what the library that reads a component says against it on this machine; "" if it says nothing.

    The library itself is asked: bitsandbytes runs on CPUs, and diffusers 0.42 takes none of its models there.

    Args:
        floats: quantized weights that are written as floats.
    """
    said = library_config(model, floats).get("quantization_config")
    if not said or said["quant_method"] == METHOD:
        return ""
    theirs = is_of_transformers(model)
    auto = libraries.module("transformers.quantizers.auto" if theirs else "diffusers.quantizers.auto")
    kind = auto.AutoHfQuantizer if theirs else auto.DiffusersAutoQuantizer
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that will go, which nobody here has chosen
            kind.from_config(dict(said), pre_quantized=True).validate_environment(device_map=None)
    except (ImportError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


def readable(scheme: str) -> bool:
    """Whether diffusers reads the scheme without another package that knows of quantized models."""
    row = registry.scheme(scheme)
    config = registry.get(row.backend).config(registry.QuantSpec(row), "bfloat16")
    return config is not None and config["quant_method"] in _READ


def _bitsandbytes(model: nn.Module, specs: Mapping[str, PackedSpec], scheme: str, config: Mapping[str, Any]) -> Reading:
    """They take every linear layer for quantized, but for those that the config names, and those that the model's class
    wants in floats. A name means more layers than its own: the quantized ones among these have to be floats as well."""
    read = {_path(name) for name, spec in specs.items() if _in_linear(model, name, spec, scheme)}
    read -= {path for path in read if matched(path, getattr(model, "_keep_in_fp32_modules", None) or ())}
    while True:
        kept = _floats(model, {f"{path}.weight" for path in read}, _LINEAR)
        caught = {path for path in read if matched(path, kept)}
        if not caught:
            break
        read -= caught
    floats = frozenset(name for name in specs if _path(name) not in read)
    return Reading({**config, "llm_int8_skip_modules": kept} if read else {}, floats)


def _quanto(model: nn.Module, specs: Mapping[str, PackedSpec], scheme: str, config: Mapping[str, Any]) -> Reading:
    """transformers writes nothing and reads nothing that is quanto's: it would start from random weights. diffusers
    takes every linear layer for quantized, but for those whose own name, without a path, the config or the model's
    class names; floats in the others it would quantize at every step."""
    if is_of_transformers(model):
        return Reading(floats=frozenset(specs))
    read = {_path(name) for name, spec in specs.items() if _in_linear(model, name, spec, scheme)}
    named = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    named |= {_leaf(path) for path in _floats(model, {f"{path}.weight" for path in read}, _LINEAR)}
    read = {path for path in read if _leaf(path) not in named}
    kept = sorted({_leaf(path) for path in _floats(model, {f"{path}.weight" for path in read}, _LINEAR)})
    floats = frozenset(name for name in specs if _path(name) not in read)
    return Reading({**config, "modules_to_not_convert": kept} if read else {}, floats)


# By the `quant_method` of the configs.
_READ = {"bitsandbytes": _bitsandbytes, "quanto": _quanto}


def _specs(model: nn.Module) -> dict[str, PackedSpec]:
    return {name: packed.spec for name, packed in quantized(model)}


def _in_sdnq(model: nn.Module, name: str, spec: PackedSpec, scheme: str) -> bool:
    """Whether SDNQ runs a weight: one of this scheme, of a layer that is no table, and that the model's class does not
    want in floats, by whose weight's dtype the model then casts activations: that of the codes, in SDNQ's layers."""
    from torch import nn

    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    table = isinstance(model.get_submodule(_path(name)), nn.Embedding)
    return spec.scheme == scheme and not table and not matched(_path(name), kept)


def _in_linear(model: nn.Module, name: str, spec: PackedSpec, scheme: str) -> bool:
    """Whether a weight is of this scheme and of a linear layer."""
    from torch import nn

    table = isinstance(model.get_submodule(_path(name)), nn.Embedding)
    return spec.scheme == scheme and len(spec.shape) == 2 and not table


def _floats(model: nn.Module, packed: Mapping[str, Any] | set[str], kinds: tuple[str, ...]) -> list[str]:
    """Paths of the layers of these kinds whose weights are not among those `packed`."""
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


def _asked(scheme: str, details: Mapping[str, Any]) -> QuantSpec:
    row = registry.scheme(scheme)
    return registry.QuantSpec(row, tuple(sorted((k, details[k]) for k in row.options if k in details)))
