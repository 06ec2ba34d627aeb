"""The `quantization_config` by which diffusers and transformers read a folder that sdquant writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import backends
from .integrations.config import METHOD
from .weights import quantized

if TYPE_CHECKING:
    from torch import nn

    from .backends.base import QuantSpec


def library_config(model: nn.Module) -> dict[str, Any]:
    """What a component's config.json says of its quantization; {} for a component that is not quantized.

    By themselves the libraries read it where every quantized weight is of one scheme with one set of details, and
    belongs to a linear layer (SDNQ's, to any). Else it names sdquant: they read the folder after `import sdquant`, and
    refuse it without. transformers reads less than diffusers: see `_read_by_transformers`.
    """
    from torch import nn

    rows = list(quantized(model))
    if not rows:
        return {}
    specs = [packed.spec for _, packed in rows]
    paths = [name.rpartition(".")[0] for name, _ in rows]
    most = Counter(spec.scheme for spec in specs).most_common(1)[0][0]
    ours = {"quantization_config": {"quant_method": METHOD, "quant": most, "skip": []}}
    tables = any(isinstance(model.get_submodule(path), nn.Embedding) for path in paths)
    if tables or any(len(spec.shape) != 2 for spec in specs) or len({spec.scheme for spec in specs}) != 1:
        return ours
    config = backends.of_scheme(specs[0].scheme).config(_asked(specs[0].scheme, specs[0].details), specs[0].dtype)
    if not config:
        return ours
    method = config["quant_method"]
    if method == "bitsandbytes":
        config["llm_int8_skip_modules"] = kept = _kept(model, ("linear",))
        if any(_matched(path, kept) for path in paths):
            return ours
    elif "modules_to_not_convert" in config:  # SDNQ, and quanto, which takes them for names and does without
        config["modules_to_not_convert"] = [f"{path}.weight" for path in _kept(model, ("linear", "conv"))]
    if is_of_transformers(model) and not _read_by_transformers(model, method, paths):
        return ours
    return {"quantization_config": config}


def is_of_transformers(model: nn.Module) -> bool:
    """Whether it is a transformers model; else it is one of diffusers."""
    return hasattr(getattr(model, "config", None), "to_json_string")


def _read_by_transformers(model: nn.Module, method: str, paths: Iterable[str]) -> bool:
    """Whether transformers' own quantizer reads these layers.

    quanto's writes nothing and reads nothing that is quantized: it would start from random weights. bitsandbytes'
    never takes the layers that the model's class wants in float32, T5's `wo`: it would take their codes for weights.
    """
    floats: Iterable[str] = getattr(model, "_keep_in_fp32_modules", None) or ()
    return method != "quanto" and not (method == "bitsandbytes" and any(_matched(path, floats) for path in paths))


def _matched(path: str, patterns: Iterable[str]) -> bool:
    """Whether diffusers or transformers would leave the layer as it is for one of these patterns: a layer's whole path
    for a start, or the end of a path, or, in diffusers, the name of the layer alone."""
    return any(
        path.endswith(pattern) or path.startswith(f"{pattern}.") or f"{pattern}." in path for pattern in patterns
    )


def _kept(model: nn.Module, kinds: tuple[str, ...]) -> list[str]:
    """Paths of the layers of these kinds that could hold a quantized weight and do not."""
    from .layers import kind_of, packed_of

    return [path for path, module in model.named_modules() if kind_of(module) in kinds and packed_of(module) is None]


def _asked(scheme: str, details: Mapping[str, Any]) -> QuantSpec:
    row = backends.scheme(scheme)
    return backends.QuantSpec(row, tuple(sorted((k, details[k]) for k in row.options if k in details)))
