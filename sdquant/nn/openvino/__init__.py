"""runtime="openvino": OpenVINO runs a quantized UNet or transformer on the CPU, with its weights compressed.

    attach(model)

From then on the model's `forward` is OpenVINO's (`forward.py`); everything else about it, and its packed weights, stay
as in the plain runtime, so that saving, copying, LoRAs and changes of dtype work. At its first call the model is traced
with its actual arguments (`trace.py`) and converted (`compile.py`): a packed weight becomes constants of its codes,
scales and zero points and the few operations that dequantize them (`weights.py`), which OpenVINO's kernels fuse into
the product.

Convolutions are the exception. OpenVINO's CPU plugin has no kernels for compressed ones: it dequantizes those of size 1
at each call, and all larger ones once, so their weights are floats in its memory.

Importing this package imports neither torch nor OpenVINO.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["NAME", "attach", "is_served", "suits"]

NAME = "openvino"
_FORWARD = "forward"
# The components that do the work of a pipeline, by their names in it, and by the classes of lone ones.
_WORKERS = re.compile(r"^(unet|transformer|prior|decoder)(_\d+)?$")
_CLASSES = re.compile(r"UNet|Transformer|DiT")


def suits(name: str, class_name: str | None) -> bool:
    """Return whether OpenVINO runs this component: UNets and transformers, which take nearly all of a pipeline's time.

    Text encoders run once for an image and stay in plain layers.

    Args:
        name: in the pipeline; "model" for a single component.
    """
    if name == "model":
        return class_name is not None and bool(_CLASSES.search(class_name))
    return bool(_WORKERS.match(name))


def attach(model: nn.Module) -> None:
    """Let OpenVINO run the model's forward. Nothing is converted before the first call."""
    from .forward import Served

    model.__dict__[_FORWARD] = Served(model)


def is_served(model: object) -> bool:
    """Return whether OpenVINO runs this module."""
    forward = getattr(model, "__dict__", {}).get(_FORWARD)
    return getattr(forward, "runs_in", None) == NAME
