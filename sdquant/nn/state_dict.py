"""Saving and loading of a quantized layer's state dict, beyond its own parameters.

Loading a state dict of other weights must leave the layer with those weights, or say why not. Three things differ from
torch's own loading: float weights are quantized as the layer is; another memory layout is converted to the layer's; and
the offset or factor of scales, which the kernels take as a number, is stored as a tensor. Parts that mean something
else than the layer's are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import NUMBERS, PLAIN_ONLY, ROTATION, Packed, PackedSpec, dtype_named
from ..errors import IncompatibleError, SettingsError
from ..kernels import prepack
from .packed_tensor import LayerWeight

if TYPE_CHECKING:
    from .packed_layer import PackedLayer

PREFIX = "packed_"  # parameter names: packed_codes, packed_scale, ...
# A parameter without elements, before the packed ones of a layer without a bias, that has the float weight's dtype. A
# model's `.dtype` is that of its first parameter of floats, which else could be one of scales; and it follows casts.
LIKE = "like"
_OF_ACTIVATIONS = "act_"  # how the names of parts begin that are about a layer's inputs
_SAVED_AS = "sdquant"  # in a layer's entry of `state_dict()._metadata`: what its parts are


def quantize_floats(layer: PackedLayer, state: dict[str, Any], prefix: str, errors: list[str]) -> bool:
    """Quantize a float weight in the state dict like this layer's weight; return whether that was done.

    Args:
        errors: torch's list of errors, raised as one RuntimeError. That the scheme cannot is one even if `strict` is
            False: the layer would keep its old weight, or parts of it.
    """
    weight = state.get(f"{prefix}weight")
    if not isinstance(weight, Tensor) or any(f"{prefix}{PREFIX}{name}" in state for name in layer.part_names):
        return False
    made = _like_own(layer, weight)
    if isinstance(made, str):
        errors.append(f"{prefix}weight: cannot quantize it to {layer.spec.scheme} as this layer's weight is: {made}")
        return False
    spec, parts = made
    del state[f"{prefix}weight"]
    for name, part in parts.items():
        own = layer._parameters[PREFIX + name]
        assert own is not None
        layer.set_part(name, part if own.is_meta else part.to(own.device))
        state[f"{prefix}{PREFIX}{name}"] = part
    state |= _numbers(spec, prefix)
    if LIKE in layer._parameters:
        layer._parameters[LIKE] = nn.Parameter(weight.new_empty(0), requires_grad=False)
        state.setdefault(f"{prefix}{LIKE}", weight.new_empty(0))
    return True


def _like_own(layer: PackedLayer, weight: Tensor) -> tuple[PackedSpec, dict[str, Tensor]] | str:
    """Return a float weight packed as the layer's own is, its description and its parts; or why that is impossible.

    Parts of another shape (one scale or one for each row), or a part that only some weights have, such as factors of
    columns, would be mixed with what is left of the old weight. Ranges of activations do not depend on the weight.
    """
    if weight.shape != torch.Size(layer.spec.shape):
        return f"its shape is {list(weight.shape)}, and the layer needs {list(layer.spec.shape)}"
    # Some schemes have scales in the dtype of the weight: then it is rounded to that of the layer's first.
    for dtype in dict.fromkeys((weight.dtype, dtype_named(layer.spec.dtype))):
        packed = layer._backend.encode_as(weight.detach().to(dtype), layer.spec)
        parts = None if packed is None else _parts_like(layer, packed)
        if packed is not None and parts is not None:
            return packed.spec, parts
    return (
        "a layer that has its weight from such a file cannot take floats. Load them into the unquantized model, and "
        "quantize that: sdquant.quantize(model, ...)"
    )


def _parts_like(layer: PackedLayer, packed: Packed) -> dict[str, Tensor] | None:
    """Return the parts in the order that the layer's have; None if they are others, or of other shapes or dtypes."""
    parts: dict[str, Any] = {PREFIX + name: part for name, part in packed.parts.items()}
    own = layer.packed
    prepack.bring_into_order(parts, PREFIX, own)
    parts = {key.removeprefix(PREFIX): part for key, part in parts.items()}
    there = {
        name: (part.dtype, part.shape)
        for name, part in own.parts.items()
        if name in parts or not name.startswith(_OF_ACTIVATIONS)
    }
    return parts if there == {name: (part.dtype, part.shape) for name, part in parts.items()} else None


def is_alike(one: PackedSpec, other: PackedSpec) -> bool:
    """Return whether the parts of two weights mean the same: those of another scheme, or of a weight that is rotated,
    may have the same shapes."""
    return _kind_of(one) == _kind_of(other)


def _kind_of(spec: PackedSpec) -> str:
    """Return all that tells what a weight's parts mean, but its numbers, as a line."""
    details = {key: value for key, value in spec.details.items() if key not in (*NUMBERS, PLAIN_ONLY)}
    return f"{spec.scheme.name} {json.dumps(details, sort_keys=True)}"


def put_weight(layer: PackedLayer, value: Any) -> None:
    """Implement `layer.weight = value`: a float tensor is quantized as the layer is.

    The parts stay the same parameters, with other values. `torch.func.functional_call` uses it as well, and restores
    the old weight afterwards.

    Raises:
        IncompatibleError: the scheme cannot quantize floats like this layer, or they require a gradient.
        SettingsError: the value is not a tensor of the weight's shape.
    """
    which = repr(layer._path) if layer._path else "a layer"
    what = f"Cannot set the weight of {which} in {layer.spec.scheme}"
    if not isinstance(value, Tensor) or value.shape != torch.Size(layer.spec.shape):
        actual = _described(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise SettingsError(
            what, f"it has shape {list(layer.spec.shape)}, and the new value is {actual}", "Use a tensor of that shape"
        )
    mode = layer.__dict__.get(
        "_sdquant_part_of"
    )  # an offload mode that may have put the parts away: `offload.state_guards`
    if mode is not None:
        mode.rest()
    if any(layer._parameters[PREFIX + name].is_meta for name in layer.part_names):  # type: ignore[union-attr]
        raise IncompatibleError(
            what, "it has no values now: it is offloaded, or a template", "Use the model's load_state_dict"
        )
    if isinstance(value, LayerWeight):
        packed = value.packed
        if not is_alike(packed.spec, layer.spec):
            raise SettingsError(what, f"the new weight is packed in another way ({packed.spec.scheme})", "Use floats")
    else:
        if value.requires_grad:
            raise IncompatibleError(
                what, "the tensor requires a gradient, but packed weights have none",
                "Use quantize_model(model, QtProvider(rules)) to train, or detach the tensor",
            )  # fmt: skip
        encoded = layer._backend.encode_as(value.detach(), layer.spec)
        if encoded is None:
            raise IncompatibleError(
                what,
                "the scheme cannot quantize floats like this layer",
                "Quantize the model with the new weights again",
            )
        packed = encoded
    state: dict[str, Any] = {PREFIX + name: part for name, part in packed.parts.items()}
    prepack.bring_into_order(state, PREFIX, layer.packed)
    there = {name: (part.dtype, part.shape) for name, part in layer.packed.parts.items()}
    if there != {key.removeprefix(PREFIX): (part.dtype, part.shape) for key, part in state.items()}:
        raise SettingsError(
            what, f"the new weight is packed in another way ({packed.spec.scheme})",
            "Quantize the model with the new weights again",
        )  # fmt: skip
    for name in layer.part_names:
        own = layer._parameters[PREFIX + name]
        assert own is not None
        own.data = state[PREFIX + name].detach().to(own.device)
    numbers = {name: packed.spec.details[name] for name in NUMBERS if name in packed.spec.details}
    spec = replace(layer.spec, details={**layer.spec.details, **numbers})
    layer._know(Packed(spec=spec, parts=layer.packed.parts))


def save_numbers(layer: PackedLayer, state: dict[str, Any], prefix: str) -> None:
    """Put the layer's offset or factor of scales, and the group size of its rotation, if it has one, into its state
    dict: float32 []. What its parts mean goes into the state dict's metadata, which `torch.save` keeps."""
    state |= _numbers(layer.spec, prefix)
    if layer.spec.rotation:
        state[_key(prefix, ROTATION)] = torch.tensor(layer.spec.rotation, dtype=torch.float32, device="cpu")
    table = getattr(state, "_metadata", {}).get(prefix[:-1])
    if table is not None:
        table[_SAVED_AS] = _saved_as(layer)


def refuse_others(
    layer: PackedLayer, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], errors: list[str]
) -> None:
    """Add an error unless the parts in a state dict mean what the layer's do: those of some other schemes, and of
    rotated weights, have the same names and shapes.

    Args:
        metadata: the layer's entry of `state_dict()._metadata`; {} for a dict that was rebuilt, which still has the
            rotation. errors: as in `load_numbers`.
    """
    rotation: Any = state.pop(_key(prefix, ROTATION), None)
    if not any(f"{prefix}{PREFIX}{name}" in state for name in layer.part_names):
        return
    saved, own = metadata.get(_SAVED_AS), layer.spec.rotation
    size = rotation.item() if isinstance(rotation, Tensor) and rotation.numel() == 1 and not rotation.is_meta else 0
    if rotation is None and own and saved is None:
        errors.append(
            f'{_key(prefix, ROTATION)}: the weight of "{prefix}{PREFIX}*" may not be rotated, as the layer\'s is: '
            "nothing says so. Load what `model.state_dict()` returns, which does"
        )
    elif size != own:
        there, here = (f"is rotated in groups of {n:g}" if n else "is not rotated" for n in (size, own))
        errors.append(f'{_key(prefix, ROTATION)}: the weight of "{prefix}{PREFIX}*" {there}, but the layer\'s {here}')
    elif saved is not None and saved != _saved_as(layer):
        errors.append(
            f"{prefix}{PREFIX}*: the weight was saved as {saved}, but the layer has {_saved_as(layer)}. "
            "Load the state dict of a layer of the same scheme, or floats"
        )


def _saved_as(layer: PackedLayer) -> str:
    """Return what the layer's parts mean, and those that not every weight of its kind has, as a line."""
    parts = sorted(name for name in layer.part_names if not name.startswith(_OF_ACTIVATIONS))
    return f"{_kind_of(layer.spec)} in {', '.join(parts)}"


def _numbers(spec: PackedSpec, prefix: str) -> dict[str, Tensor]:
    return {
        _key(prefix, name): torch.tensor(spec.details[name], dtype=torch.float32, device="cpu")
        for name in NUMBERS
        if name in spec.details
    }


def load_numbers(layer: PackedLayer, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Take the layer's offset or factor of scales out of a state dict that has its parts.

    Args:
        errors: torch's list of errors, raised as one RuntimeError. Parts without their number are an error even if
            `strict` is False: with the old number they would be other weights.
    """
    for name in NUMBERS:
        if name in layer.spec.details:
            _load_number(name, layer, state, prefix, errors)


def _load_number(name: str, layer: PackedLayer, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    key = _key(prefix, name)
    number = state.pop(key, None)
    if isinstance(number, Tensor) and number.numel() == 1 and number.is_floating_point() and not number.is_meta:
        layer.set_detail(name, number.to(torch.float32).item())  # which a Python float holds exactly
    elif number is not None or any(f"{prefix}{PREFIX}{part}" in state for part in layer.part_names):
        actual = "there is none" if number is None else f"it is {_described(number)}"
        errors.append(
            f'{key}: expected the {name} of the scales of "{prefix}{PREFIX}*", one float32, but {actual}. '
            "Load the complete state dict of a layer of the same scheme"
        )


def _described(value: Any) -> str:
    return (
        f"{value.dtype} {list(value.shape)} on {value.device}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )


def _key(prefix: str, number: str) -> str:
    return f"{prefix}{PREFIX}{number}"
