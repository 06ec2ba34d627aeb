"""Biases of comfy-kitchen's layers whose activations are shifted before they are quantized (`act_unsigned`).

What such a layer adds has the product with the shift taken out, which comes back with the activations. Here they are
not shifted, so that its bias is the file's with the product in it, as it was in the model. Imports no torch for other
files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..backends import COMFY_SHIFTED
from ..core import dtype_named, leaf
from ..errors import UnsupportedFileError
from .tensor_file import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import PrequantizedWeight
    from .nunchaku_names import Tensors
    from .tensor_file import Get


def with_shifts(src: Tensors) -> Tensors:
    """Return a component whose biases are for activations that are not shifted.

    Raises:
        UnsupportedFileError: a layer with shifted activations has no bias.
    """
    shifted = {name: one for name, one in src.prequantized.items() if COMFY_SHIFTED in one.details}
    if not shifted:
        return src
    recipes, tensors = dict(src.recipes), dict(src.tensors)
    for name, weight in shifted.items():
        key = leaf(name, "bias")
        _require(src, name, key)
        recipe = _recipe(weight, key, tensors[key].shape)
        recipes[key], tensors[key] = recipe, recipe.info
    return replace(src, recipes=recipes, tensors=tensors)


def _require(src: Tensors, name: str, key: str) -> None:
    """Raise UnsupportedFileError unless a layer has a bias. That it has the right size is seen when it is read."""
    if key in src.tensors and len(src.tensors[key].shape) == 1:
        return
    raise UnsupportedFileError(
        f"Cannot load {src.path}",
        f"the activations of the layer of {name!r} are shifted (act_unsigned), and no bias is made for that",
        "Use a file of the same model in a format that `sdquant matrix` lists",
    )


def _recipe(weight: PrequantizedWeight, key: str, shape: tuple[int, ...]) -> Recipe:
    def make(get: Get) -> Tensor:
        from ..backends import comfy_bias

        return comfy_bias(weight, key, get)

    return Recipe((key, *weight.keys.values()), None, shape, dtype_named("float32"), make)
