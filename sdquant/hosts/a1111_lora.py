"""AUTOMATIC1111's LoRAs on quantized layers.

Each time that a float layer runs, A1111's extension Lora compares the LoRAs that are on with those in the layer's
weight, and writes the weight anew where they differ. A quantized layer looks up what is on in the same way, and changes
its dequantized weight. The LoRAs that are on are in a list that the extension changes in place.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .network_changes import BiasChange, Change, is_quantized, with_float_layer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .monkeypatch import Patches

log = logging.getLogger(__name__)
_JOINED = ("_q_proj", "_k_proj", "_v_proj")  # a LoRA's names of the three that SD3 has in one layer
Function = Callable[["Tensor"], "Tensor"]


def hook_networks(patches: Patches) -> None:
    """Hook into A1111's extension Lora. It is a module's name away: extensions can be off, and load in any order."""
    weights = getattr(sys.modules.get("network"), "NetworkWeights", None)
    if _networks() is not None and weights is not None and not hasattr(weights, "__wrapped__"):
        patches.wrap(sys.modules["network"], "NetworkWeights", _weights)


def follow_networks(model: nn.Module) -> None:
    """Have all quantized layers of a model look up the LoRAs that are on."""
    layer: Any
    for layer in model.modules():
        if is_quantized(layer):
            layer.weight_function, layer.bias_function = _Weight(layer), _Bias(layer)


@dataclass(frozen=True)
class _Live:
    """The functions that change a tensor of a layer now, as a sequence.

    Attributes:
        layer: the quantized layer, to which A1111 has given a name.
    """

    layer: Any

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Function]:
        name, host = getattr(self.layer, "network_layer_name", ""), _networks()
        for net in () if host is None else host.loaded_networks:
            for function in self._of(net.modules, name):
                yield _Counted(function, host, net.name)

    def _of(self, modules: dict[str, Any], name: str) -> Iterator[Function]:
        raise NotImplementedError


class _Weight(_Live):
    def _of(self, modules: dict[str, Any], name: str) -> Iterator[Function]:
        if name in modules:
            yield Change(modules[name])
        elif all(name + end in modules for end in _JOINED):
            yield _Rows(tuple(Change(modules[name + end]) for end in _JOINED))


class _Bias(_Live):
    def _of(self, modules: dict[str, Any], name: str) -> Iterator[Function]:
        if getattr(modules.get(name), "ex_bias", None) is not None:
            yield BiasChange(modules[name], self.layer)


@dataclass(frozen=True)
class _Rows:
    """Changes of the parts of a joined weight."""

    changes: tuple[Change, ...]

    def __call__(self, weight: Tensor) -> Tensor:
        import torch

        parts = weight.chunk(len(self.changes))
        return torch.cat([change(part) for change, part in zip(self.changes, parts, strict=True)])


@dataclass(frozen=True)
class _Counted:
    """A change that is left out where it does not fit the layer, and counted, as A1111 does."""

    change: Function
    host: Any
    name: str

    def __call__(self, values: Tensor) -> Tensor:
        try:
            return self.change(values)
        except RuntimeError as error:
            log.debug("LoRA %s: %s", self.name, error)
            errors = self.host.extra_network_lora.errors
            errors[self.name] = errors.get(self.name, 0) + 1
            return values


def _weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Name a float layer in the place of a quantized one; of a joined one, a third for each of a LoRA's names."""
    import torch

    weights = original(*args, **kwargs)
    layer = weights.sd_module
    if is_quantized(layer) and weights.sd_key.endswith(_JOINED) and layer.network_layer_name != weights.sd_key:
        out, into = layer.spec.shape
        return weights._replace(sd_module=torch.nn.Linear(into, out // len(_JOINED), bias=False, device="meta"))
    return with_float_layer(weights)


def _networks() -> Any:
    """Return the extension's module of the LoRAs that are on, or None."""
    networks = sys.modules.get("networks")
    return networks if hasattr(networks, "loaded_networks") else None
