"""Pipelines whose networks another library has quantized and calibrated in its own way, for images of them.

NNCF's `compress_weights` with AWQ or scale estimation gets the UNet or transformer and the text encoders, while
AutoRound takes the transformer alone. Both compute in float32, so that inputs are cast before and outputs after.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import sdquant
from bench import _pictures
from bench._calibrated import COMPONENTS, IMAGES, STEPS, quantized_components, task
from bench._calibrating_peers import Compressed, autoround, has_autoround, nncf_ways
from bench._pictures import path, prompt, wanted
from sdquant.models import draw

SIDES = {"digits-flux": 32, "digits-sd": 32, "glyphs-flux": 16}  # of an image, in pixels
AUTOROUND = "AutoRound int4"
PEERS = ("NNCF int4, AWQ", "NNCF int4, scale estimation", AUTOROUND)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerPipeline:
    """A pipeline to draw with.

    Attributes:
        networks: what the library made of a component, by its name.
    """

    pipe: Any
    networks: dict[str, Compressed]


def can_quantize(peer: str, model: str) -> bool:
    """Return whether a library is here and takes a model's network: AutoRound takes no UNet."""
    return peer != AUTOROUND or (has_autoround() and COMPONENTS[model] == "transformer")


def load_peer(model: str, peer: str) -> PeerPipeline:
    """Return a model's pipeline with the networks that a peer quantized."""
    pipe = sdquant.load_model(path(model), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        networks = _autoround(model) if peer == AUTOROUND else _nncf(model, peer)
    for name, made in networks.items():
        setattr(pipe, name, _InFloat32(made.model, getattr(pipe, name).dtype))
    return PeerPipeline(pipe=pipe, networks=networks)


def _autoround(model: str) -> dict[str, Compressed]:
    return {COMPONENTS[model]: autoround(path(model), task(model).prompts, STEPS, SIDES[model])}


def _nncf(model: str, peer: str) -> dict[str, Compressed]:
    networks = {}
    for name in quantized_components(model):
        pipe = sdquant.load_model(path(model), progress=False)
        calls = calls_of(model, pipe, getattr(pipe, name), 0)
        ways = dict(nncf_ways(lambda pipe=pipe, name=name: getattr(pipe, name).float(), calls))
        networks[name] = ways[peer]()
    return networks


def calls_of(name: str, pipe: Any, model: nn.Module, seed: int) -> list[dict[str, Any]]:
    """Return the keyword arguments of each call of a component while images are drawn, as float32."""
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(model.forward)

    def keep(module: nn.Module, args: tuple[Any, ...], values: dict[str, Any]) -> None:
        both = {**signature.bind(*args, **values).arguments, "return_dict": False}
        both |= both.pop("kwargs", {})
        calls.append({name: _float(value) for name, value in both.items()})

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    for number, thing in enumerate(wanted(name, IMAGES, seed)):
        if name == "glyphs-flux":
            _pictures.draw(name, pipe, [thing], [seed + number], STEPS)
        else:
            draw(pipe, [prompt(thing, number // 10)], seeds=[seed + number], steps=STEPS)
    handle.remove()
    return calls


def _float(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.float() if value.is_floating_point() else value.clone()


class _InFloat32(nn.Module):
    """A network that computes in float32, between others that compute in `dtype`, which it tells as its own."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("network"), name)

    def forward(self, *args: Any, **values: Any) -> Any:
        result = self.network(*map(_float, args), **{name: _float(value) for name, value in values.items()})
        return _cast(result, self.dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a network's output with its floating tensors in a dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(one, dtype) for one in value)
    return type(value)(**{name: _cast(one, dtype) for name, one in value.items()}) if hasattr(value, "items") else value
