"""Pipelines and the components in them. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core import LONE, MAIN
from ..nn import plain, quantized

if TYPE_CHECKING:
    from torch import nn


def weight_parts(model: Any) -> dict[str, nn.Module]:
    """Return a pipeline's components that are modules, by name, in the order in which the pipeline runs them.

    A single component is named "model".
    """
    from torch import nn

    if not is_pipeline(model):
        return {LONE: model}
    parts = {name: part for name, part in model.components.items() if isinstance(part, nn.Module)}
    sequence = getattr(model, "model_cpu_offload_seq", None)  # modular pipelines have none
    order = [name for name in str(sequence or "").split("->") if name in parts]
    return {name: parts[name] for name in [*order, *(n for n in parts if n not in order)]}


def main_part(model: Any) -> nn.Module:
    """Return the UNet or transformer of a pipeline; a single component is returned itself."""
    parts = weight_parts(model)
    return next((parts[name] for name in MAIN if name in parts), next(iter(parts.values())))


def is_pipeline(model: Any) -> bool:
    """Return whether it is a diffusers pipeline, judged by the attributes that are used here."""
    from torch import nn

    return not isinstance(model, nn.Module) and hasattr(model, "components") and hasattr(model, "save_config")


def is_modular(model: Any) -> bool:
    """Return whether it is a modular pipeline of diffusers, whose components are loaded and exchanged one by one."""
    return is_pipeline(model) and hasattr(model, "load_components")


def components_of(model: Any) -> dict[str, nn.Module]:
    """Return the networks of a pipeline by name, in the pipeline's order; a single component is named "model"."""
    from torch import nn

    if isinstance(model, nn.Module):
        return {LONE: model}
    parts: dict[str, nn.Module] = {}
    for name, part in model.components.items():
        # A network that has two names is one network.
        if isinstance(part, nn.Module) and not any(part is other for other in parts.values()):
            parts[name] = part
    return parts


def weight_bytes(model: Any) -> int:
    """Return the bytes of the weights of a pipeline or module: packed parts and unquantized tensors of the state.

    Counted as `Detected.bytes` and `Plan.bytes` are, from the loaded tensors themselves. Code tables, which are
    constants of a scheme, and buffers that no file holds are left out; `sdquant.offload.weight_bytes` counts those too.
    """
    parts = weight_parts(model).values()
    packed = sum(row.nbytes for part in parts for _, row in quantized(part))
    return packed + sum(t.numel() * t.element_size() for part in parts for t in plain(part).values())
