"""What a model with quantized layers needs so that LoRAs go onto it by diffusers' own calls, and come off again.

The layers take PEFT's adapters as they are. Two things are left, and neither needs peft to be there:
* Flux pipelines look up each weight that a LoRA is for in the model's `state_dict()`, where a packed one is not.
* Fusing a LoRA adds it to the weights. Packed ones would have to be quantized anew, which loses most of a small change,
  and some libraries' weights take the sum without an error and forget it. So fusing is refused, before the first layer.
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


def adapted(model: nn.Module) -> list[str]:
    """The paths of the layers that have an adapter around them."""
    return [path for path, module in model.named_modules() if _wraps(module)]


def refuse_adapted(name: str, model: nn.Module, what: str) -> None:
    """Raise ConflictError if the model has adapters on it, which `what` would take for its own layers."""
    paths = adapted(model)
    if paths:
        raise ConflictError(
            f"The {name} cannot be {what}",
            f"a LoRA is attached to {len(paths)} of its layers ({paths[0]!r} is the first)",
            "Unload the LoRA first (unload_lora_weights), and load it again afterwards; "
            "save_lora_weights or sdquant.lora.save_lora saves the LoRA itself",
        )


def prepare(model: Any, layers: Iterable[str] | None = None) -> None:
    """Let a component with quantized layers take LoRAs, and give its state dicts, or those of modules in it, to modules
    of floats. Again is as good as once; copies of it are prepared too.

    Args:
        layers: paths of those quantized layers that are new; None: of all, which takes a walk through the model.
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
    """The model, these layers, and the modules that they are in."""
    paths = {""}
    for names in (path.split(".") for path in layers):
        paths.update(".".join(names[:end]) for end in range(1, len(names) + 1))
    yield from (model.get_submodule(path) for path in sorted(paths))


def prepare_pipeline(pipe: Any) -> None:
    """Refuse fusing on this pipeline, or component, where a LoRA is on quantized layers."""
    if hasattr(type(pipe), _FUSE) and _FUSE not in pipe.__dict__:
        pipe.__dict__[_FUSE] = _Fuse(pipe)


class _Fuse:
    """`fuse_lora` of one pipeline or component, which looks at its layers first.

    Refers to its owner weakly: a model's memory is to be free as soon as nobody has the model.
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
        """Of a copied owner the copy's, which is known already when its attributes are copied."""
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
        """Pickled and copied as torch's own: not with the model, which is no tensor and may be offloaded."""
        return OrderedDict, (), {k: v for k, v in vars(self).items() if k != "owner"}, None, iter(self.items())


def _with_packed(model: nn.Module, state: Any, prefix: str, metadata: Any) -> Any:
    """A state dict hook of `torch.nn.Module`: what it returns is the state dict, if it is that of the whole module."""
    if prefix:
        return None
    made = _State(state)
    made.owner = model
    if hasattr(state, "_metadata"):
        vars(made)["_metadata"] = state._metadata
    return made


def owner_of(state: Any) -> nn.Module:
    """The model whose `state_dict()` this is, one that is `prepare`d."""
    assert isinstance(state, _State)
    return state.owner


def _wraps(module: nn.Module) -> bool:
    return "base_layer" in module._modules and hasattr(type(module), "merge")


def _base(module: nn.Module) -> nn.Module:
    """The layer inside its adapters."""
    while "base_layer" in module._modules:
        inner = module._modules["base_layer"]
        assert inner is not None
        module = inner
    return module
