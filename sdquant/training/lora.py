"""LoRA on quantized models: `add_lora` to train one, `save_lora` to write it. The one place that imports peft.

    parameters = lora.add_lora(pipe.unet, rank=8)
    ...                                            # any training loop over these parameters
    lora.save_lora(pipe, "seven.safetensors")
    pipe.load_lora_weights("seven.safetensors")    # of any pipeline of that model, quantized or not

The base stays packed and frozen. For its gradient a layer decodes its weight a second time, so that training takes the
memory of the quantized model. LoRAs that exist need nothing of this: diffusers' own calls put them on, see `adapters`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BackendUnavailableError, SettingsError
from ..utils.install import install_packages

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

FILE = "pytorch_lora_weights.safetensors"  # diffusers' name, inside a folder
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "out_proj")
ALL = "all"


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float | None = None,
    target_modules: str | Sequence[str] = ATTENTION,
    dropout: float = 0.0,
    dora: bool = False,
    name: str = "default",
) -> list[nn.Parameter]:
    """Put a new LoRA on a component (UNet, transformer, text encoder), quantized or not, ready to be trained.

    It changes nothing yet: one of its two matrices is zero. All other parameters of the component are frozen.

    Args:
        alpha: the LoRA's strength is alpha / rank; None for rank.
        target_modules: ends of the paths of the layers to put it on, or "all" for every Linear and convolution.
        dropout: share of its inputs dropped during training. dora: train the magnitudes separately (DoRA).

    Returns:
        Its parameters, float32 whatever the base is.

    Raises:
        BackendUnavailableError: peft is missing. SettingsError: an invalid value, or no layer of that name.
        IncompatibleError: the model's offload mode gives no gradients.
    """
    from .. import offload

    peft = _peft("Cannot add a LoRA")
    if rank < 1 or not 0 <= dropout < 1:
        raise SettingsError(
            f"Cannot add a LoRA of rank {rank} with dropout {dropout}",
            "the rank must be at least 1, and the dropout at least 0 and below 1",
            "Use for example a rank from 4 to 64 and no dropout",
        )
    if name in (getattr(model, "peft_config", None) or {}):
        raise SettingsError(
            f"Cannot add a LoRA {name!r}", "the model already has one of that name", "Choose another name"
        )
    paths = list(_targets(model, target_modules, rank))
    if not paths:
        raise SettingsError(
            f"Cannot add a LoRA to {target_modules!r}",
            f"{type(model).__name__} has no Linear or convolution layer whose path ends like that",
            f"Use the ends of layer paths, such as {', '.join(ATTENTION[:3])}, or {ALL!r}",
        )
    offload.refuse_training(model)
    strength = rank if alpha is None else alpha
    config = peft.LoraConfig(r=rank, lora_alpha=strength, target_modules=paths, lora_dropout=dropout, use_dora=dora)
    own: Any = model
    with offload.suspended(model):
        if hasattr(own, "add_adapter"):
            own.add_adapter(config, adapter_name=name)
        else:
            peft.inject_adapter_in_model(config, model, adapter_name=name)
        return _trainable(model, name)


def trainable(model: nn.Module, name: str = "default") -> list[nn.Parameter]:
    """Return the parameters of the LoRA called `name`, made float32 and trainable; all others are frozen.

    They are excluded from offloading from then on: they stay on the device.
    """
    from .. import offload

    offload.refuse_training(model)
    with offload.suspended(model):
        return _trainable(model, name)


def _trainable(model: nn.Module, name: str) -> list[nn.Parameter]:
    import torch

    from ..offload import blocks

    parameters = []
    for path, parameter in model.named_parameters():
        mine = "lora_" in path and f".{name}." in path
        parameter.requires_grad_(mine)
        if mine:
            parameter.data = parameter.data.to(torch.float32)
            setattr(parameter, blocks.TRAINED, True)
            parameters.append(parameter)
    return parameters


def save_lora(model: Any, path: str | Path, *, name: str = "default") -> Path:
    """Write the LoRA called `name` of a pipeline (of all its components), or of one component.

    The file is in diffusers' format, with alpha / rank multiplied into one matrix, so that readers that ignore alpha or
    assume that it equals the rank apply the LoRA at the strength it was trained with.

    Args:
        path: a file ending in .safetensors, which is replaced; else a folder, the file in it has diffusers' name.

    Returns:
        The file's path.

    Raises:
        SettingsError: there is no LoRA of that name. DiskSpaceError: see `writing`.
    """
    from ..formats import safetensors_writer
    from ..models import is_pipeline, weight_parts
    from ..offload import suspended

    parts = weight_parts(model) if is_pipeline(model) else {_prefix(model): model}
    with suspended(*parts.values()):
        tensors = {f"{part}.{key}": value for part, one in parts.items() for key, value in _tensors(one, name)}
    if not tensors:
        raise SettingsError(
            f"Cannot save the LoRA {name!r}",
            f"the model has only {', '.join(sorted(names))}" if (names := _names(parts)) else "the model has none",
            "Add one with sdquant.lora.add_lora, or load one",
        )
    target = Path(path)
    if target.suffix != ".safetensors":
        target.mkdir(parents=True, exist_ok=True)
        target /= FILE
    safetensors_writer.write(target, tensors, {"format": "pt"})
    return target


def _tensors(model: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of a component's LoRA tensors with diffusers' keys."""
    for path, module in model.named_modules():
        layer: Any = module
        if "base_layer" not in module._modules or name not in getattr(layer, "scaling", {}):
            continue
        if name not in layer.lora_A:  # of a table of embeddings, which diffusers does not load
            log.warning("%s: the LoRA on an embedding layer is not saved", path)
            continue
        path = path.replace(".base_layer", "")
        # set_adapters changes `scaling`; what was trained is alpha / rank.
        strength = layer.lora_alpha[name] / layer.r[name] ** (0.5 if layer.use_rslora[name] else 1)
        yield f"{path}.lora_A.weight", layer.lora_A[name].weight.detach().clone()
        yield f"{path}.lora_B.weight", layer.lora_B[name].weight.detach() * strength
        if layer.lora_B[name].bias is not None:
            yield f"{path}.lora_B.bias", layer.lora_B[name].bias.detach() * strength
        if name in layer.lora_magnitude_vector:
            yield f"{path}.lora_magnitude_vector", layer.lora_magnitude_vector[name].weight.detach().clone()


def _targets(model: nn.Module, target_modules: str | Sequence[str], rank: int) -> Iterator[str]:
    from torch import nn

    names = [target_modules] if isinstance(target_modules, str) else target_modules
    ends = () if target_modules == ALL else tuple(f".{end}" for end in names)
    for path, module in model.named_modules():
        kind = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and "lora_" not in path
        # PEFT cannot put a LoRA on a grouped convolution whose groups do not divide its rank.
        if kind and rank % getattr(module, "groups", 1) == 0 and (target_modules == ALL or f".{path}".endswith(ends)):
            yield path.replace(".base_layer", "")


def _prefix(model: Any) -> str:
    """Return the key prefix for a single component, as in a pipeline that contains it."""
    if type(model).__name__.startswith("UNet"):
        return "unet"
    return "transformer" if hasattr(type(model), "load_lora_adapter") else "text_encoder"


def _names(parts: dict[str, Any]) -> set[str]:
    return {name for part in parts.values() for name in getattr(part, "peft_config", None) or {}}


def _peft(what: str) -> Any:
    try:
        import peft
    except ImportError as error:
        fix = f"Run: {install_packages('peft')}"
        raise BackendUnavailableError(what, "it needs peft, which is not installed", fix) from error
    return peft
