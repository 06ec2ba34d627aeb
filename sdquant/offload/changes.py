"""Calls that an offloaded model cannot take as it is.

Modes cut a model into what they move when they are applied. So a call that changes what a model is made of, since a
LoRA comes or goes, suspends the mode: all weights come into ordinary memory, the call does its work there, and the mode
is applied to what the model is then. So does one that writes all weights, one that reads others (into what is given up
next) and one that gives them away (some of them are empty while they wait). Copying and pickling are refused.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..inference import ordinary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .handle import OffloadHandle

# Of diffusers' pipelines and models, and of transformers' models.
_METHODS = (
    "load_lora_weights", "unload_lora_weights", "delete_adapters", "set_lora_device", "fuse_lora", "unfuse_lora",
    "load_lora_adapter", "unload_lora", "load_adapter", "add_adapter", "delete_adapter",
    "save_pretrained",
)  # fmt: skip
_STATES = ("load_state_dict", "state_dict")  # of any module


def follow(model: Any, parts: Mapping[str, Any], handle: OffloadHandle) -> None:
    """Wrap those methods of a pipeline (or component) and its components, as attributes of the instances."""
    for owner in {id(one): one for one in (model, *parts.values())}.values():
        _refuse_pickling(owner, handle)
        for name in _METHODS:
            if hasattr(owner, name):
                _wrap(owner, name, handle)
    for module in {id(module): module for part in parts.values() for module in part.modules()}.values():
        for name in _STATES:
            _wrap(module, name, handle)


def _wrap(owner: Any, name: str, handle: OffloadHandle) -> None:
    method = getattr(owner, name)

    @ordinary  # what comes onto the model is there for longer than an inference mode around this call
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("keep_vars"):  # of `state_dict`: the parameters themselves, wherever they are
            return method(*args, **kwargs)
        with handle.suspended():
            return method(*args, **kwargs)

    _set(owner, name, call, handle)


def _refuse_pickling(owner: Any, handle: OffloadHandle) -> None:
    """What the hooks are made of is pickled before the handle would refuse it. `copy` asks with 4, and may: a shallow
    copy shares weights and hooks, and the handle refuses a deep one. `torch.save` asks with 2."""

    cls: Any = type(owner)

    def reduce(protocol: int) -> Any:
        if protocol != 4:
            handle.refuse("pickled")
        return cls.__reduce_ex__(owner, protocol)

    _set(owner, "__reduce_ex__", reduce, handle)


def _set(owner: Any, name: str, value: Any, handle: OffloadHandle) -> None:
    """An attribute of the instance, until the mode is undone."""
    earlier = owner.__dict__.get(name)

    def undo() -> None:
        if earlier is None:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = earlier

    owner.__dict__[name] = value
    handle.undo.callback(undo)
