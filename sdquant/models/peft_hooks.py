"""Hooks that let diffusers load LoRAs onto a model with quantized layers, and unload them again.

The layers accept PEFT's adapters unchanged. Two things remain, and neither needs peft to be installed:
* Flux pipelines look up the weight of each LoRA layer in the model's `state_dict()`, which has no packed ones.
* Fusing a LoRA adds it to the weights. Packed ones would have to be quantized again, which loses most of a small
  change, and some libraries' weights drop the sum without an error. So fusing is refused before the first layer.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ..errors import ConflictError, IncompatibleError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

_FUSE = "fuse_lora"
_CHANGED = "weight_function"  # of a quantized layer; see `nn.weight_functions`


def adapted(model: nn.Module) -> list[str]:
    """Return the paths of the layers that are wrapped by an adapter, or whose weight a host's LoRA changes."""
    return [path for path, module in model.named_modules() if _wraps(module) or getattr(module, _CHANGED, False)]


def refuse_adapted(name: str, model: nn.Module, what: str) -> None:
    """Raise ConflictError if the model has adapters, which would be taken for its own layers.

    Args:
        what: what the model would be, for the error: "saved", "quantized".
    """
    paths = adapted(model)
    if paths:
        raise ConflictError(
            f"The {name} cannot be {what}",
            f"a LoRA is attached to {len(paths)} of its layers ({paths[0]!r} is the first)",
            "Unload the LoRA first (unload_lora_weights), and load it again afterwards; "
            "save_lora_weights or sdquant.lora.save_lora saves the LoRA itself",
        )


def prepare(model: Any, layers: Iterable[str] | None = None) -> None:
    """Prepare a component with quantized layers for LoRAs, and for loading its state dicts, or those of modules in it,
    into unquantized modules. Idempotent; copies of the model are prepared, too.

    Args:
        layers: paths of the new quantized layers; None for all, which walks through the model.
    """
    from ..nn import into_floats, packed_of

    into_floats.watch()
    if layers is None:
        layers = [path for path, module in model.named_modules() if packed_of(module) is not None]
    for module in _around(model, layers):
        if not any(hook is _with_packed for hook in module._state_dict_hooks.values()):
            module._register_state_dict_hook(_with_packed)  # type: ignore[no-untyped-call]
    prepare_pipeline(model)


def _around(model: nn.Module, layers: Iterable[str]) -> Iterator[nn.Module]:
    """Yield the model, these layers, and the modules that contain them, some several times."""
    yield model
    for path in layers:
        module = model
        for name in path.split(".") if path else ():
            module = module.get_submodule(name)
            yield module


def prepare_pipeline(pipe: Any) -> None:
    """Make `fuse_lora` of this pipeline or component raise if a LoRA is attached to quantized layers."""
    if hasattr(type(pipe), _FUSE) and _FUSE not in pipe.__dict__:
        pipe.__dict__[_FUSE] = _Fuse(pipe)


class _Fuse:
    """`fuse_lora` of one pipeline or component, which checks its layers first.

    Holds its owner weakly, so that a model's memory is freed with its last reference.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .pipelines import components_of

        owner = self._owner()
        for part in components_of(owner).values():
            _refuse_fusing(part)
        return getattr(type(owner), _FUSE)(owner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fuse:
        """Return a hook for the copied owner, which is in `memo` before its attributes are copied."""
        owner = self._owner()
        return _Fuse(memo.get(id(owner), owner))

    def __reduce__(self) -> Any:
        return _Fuse, (self._owner(),)


def _refuse_fusing(model: nn.Module) -> None:
    from ..nn import packed_of

    for path in adapted(model):
        packed = packed_of(_base(model.get_submodule(path)))
        if packed is not None:
            raise IncompatibleError(
                "Cannot fuse the LoRA (fuse_lora)",
                f"the layer {path!r} is quantized to {packed.spec.scheme}: the sum would have to be quantized again, "
                "which loses most of what the LoRA changes",
                "Keep the LoRA unfused, where it has its full effect; set its strength with set_adapters",
            )


class _State(OrderedDict[str, Any]):
    """A state dict that also answers for the float names of packed weights, without listing them."""

    owner: nn.Module

    def __missing__(self, key: str) -> Any:
        from ..nn import packed_of

        path, _, leaf = key.rpartition(".")
        if leaf == "weight":
            try:
                module = _base(self.owner.get_submodule(path))
            except AttributeError:
                raise KeyError(key) from None
            if packed_of(module) is not None:
                return module.weight
        raise KeyError(key)

    def __reduce__(self) -> Any:
        """Pickle and copy it as torch's own state dict, without the model, which may be offloaded."""
        return OrderedDict, (), {k: v for k, v in vars(self).items() if k != "owner"}, None, iter(self.items())


def _with_packed(model: nn.Module, state: Any, prefix: str, metadata: Any) -> Any:
    """State dict hook of `torch.nn.Module`: return a `_State` if it is the state dict of the whole module."""
    if prefix:
        return None
    result = _State(state)
    result.owner = model
    if hasattr(state, "_metadata"):
        vars(result)["_metadata"] = state._metadata
    return result


def owner_of(state: Any) -> nn.Module:
    """Return the model whose `state_dict()` this is; it must be `prepare`d."""
    assert isinstance(state, _State)
    return state.owner


def _wraps(module: nn.Module) -> bool:
    return "base_layer" in module._modules and hasattr(type(module), "merge")


def _base(module: nn.Module) -> nn.Module:
    """Return the layer inside its adapters."""
    while "base_layer" in module._modules:
        inner = module._modules["base_layer"]
        assert inner is not None
        module = inner
    return module
