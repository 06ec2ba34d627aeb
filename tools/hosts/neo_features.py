"""ControlNet, IP-Adapter and textual inversion in Forge Neo, by its own code, on files made here for digits-sd."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import sd_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

HINT = (16, 16, 32, 32, 96, 96, 256, 32)  # channels of what a ControlNet makes of its image
IMAGE_WIDTH = 1024  # of what an image encoder gives
WORD = "glorp"  # which stands for a three's words


def embedding(folder: Path) -> None:
    """Write an embedding: the vectors of the letters of "three", as the model was trained with them."""
    from safetensors.torch import save_file

    table = sd_checkpoint.tensors()["cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"]
    folder.mkdir(exist_ok=True)
    save_file({"emb_params": table[250:254].float() * 4}, folder / f"{WORD}.safetensors")


def controlnet(unet: Any) -> Any:
    """Neo's patcher of the UNet with a ControlNet: the UNet's own encoder, with outputs that are not zero."""
    from modules_forge.supported_controlnet import ControlNetPatcher  # type: ignore[import-not-found]

    return _controlled(unet, ControlNetPatcher.try_build_from_state_dict(controlnet_tensors(), "digits.safetensors"))


def control_lora(unet: Any) -> Any:
    """The same as differences from the UNet's own weights, which Neo reads of the model."""
    from modules_forge.supported_controlnet import ControlNetPatcher

    own = control_lora_tensors()
    return _controlled(unet, ControlNetPatcher.try_build_from_state_dict(own, "digits_lora.safetensors"))


def controlnet_tensors() -> dict[str, Tensor]:
    """The file of a ControlNet: the UNet's own encoder, with outputs that are not zero."""
    return _encoder() | _outputs()


def control_lora_tensors() -> dict[str, Tensor]:
    """The file of a Control-LoRA: two differences from the UNet's own weights, and outputs that are not zero."""
    import torch

    own = _outputs() | {"lora_controlnet": torch.zeros(())}
    for path in ("input_blocks.1.1.transformer_blocks.0.attn1.to_q", "middle_block.1.transformer_blocks.0.attn2.to_v"):
        weight = _encoder()[f"{path}.weight"]
        own |= {f"{path}.up": _random(weight.shape[0], 4), f"{path}.down": _random(4, weight.shape[1])}
    return own


def ip_adapter(unet: Any) -> Any:
    """Neo's patcher of the UNet with an IP-Adapter for 16 places, as in Stable Diffusion; digits-sd has three."""
    import torch
    from lib_ipadapter.IPAdapterPlus import IPAdapterApply  # type: ignore[import-not-found]

    adapter = ip_adapter_tensors()
    seen = torch.stack([_random(1, IMAGE_WIDTH), torch.zeros(1, IMAGE_WIDTH)])
    apply = IPAdapterApply().apply_ipadapter
    more = {"model_filename": "digits"} if "model_filename" in inspect.signature(apply).parameters else {}  # reForge
    found = apply(ipadapter=adapter, model=unet, weight=1.0, embeds=seen, **more)
    return found[0] if isinstance(found, tuple) else found  # Forge gives a tuple


def ip_adapter_tensors() -> dict[str, dict[str, Tensor]]:
    """The two parts of an IP-Adapter's file."""
    import torch

    width, tokens = 128, 4
    layers = {
        f"{2 * place + 1}.to_{name}_ip.weight": _random(64 if place == 15 else 32, width)
        for place in range(16)
        for name in "kv"
    }
    projection = {"proj.weight": _random(tokens * width, IMAGE_WIDTH), "proj.bias": _random(tokens * width, 1)[:, 0]}
    projection |= {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    return {"image_proj": projection, "ip_adapter": layers}


FEATURES = {"ControlNet": controlnet, "Control-LoRA": control_lora, "IP-Adapter": ip_adapter}


def _controlled(unet: Any, patcher: Any) -> Any:
    place = "backend.patcher.controlnet" if importlib.util.find_spec("backend") else "modules_forge.controlnet"
    apply = importlib.import_module(place).apply_controlnet_advanced  # reForge has it at the second
    return apply(unet, patcher.model_patcher, _random(1, 3, 64, 64).sigmoid(), 1.0, 0.0, 1.0)


def _encoder() -> dict[str, Tensor]:
    prefix = "model.diffusion_model."
    return {
        key.removeprefix(prefix): value.float()
        for key, value in sd_checkpoint.tensors().items()
        if key.startswith(tuple(f"{prefix}{part}" for part in ("time_embed", "input_blocks", "middle_block")))
    }


def _outputs() -> dict[str, Tensor]:
    """The ControlNet's own layers: for its image, and those behind each block."""
    import torch

    found = {}
    for at, (into, out) in enumerate(zip((3, *HINT), HINT, strict=False)):
        found[f"input_hint_block.{2 * at}.weight"] = _random(out, into, 3, 3)
        found[f"input_hint_block.{2 * at}.bias"] = torch.zeros(out)
    behind = {f"zero_convs.{at}.0": size for at, size in enumerate((32, 32, 32, 64))} | {"middle_block_out.0": 64}
    for name, size in behind.items():
        found |= {f"{name}.weight": _random(size, size, 1, 1), f"{name}.bias": torch.zeros(size)}
    return found


def _random(*shape: int) -> Tensor:
    """Values that keep the size of what they multiply; the same for the same shape."""
    import math

    import torch

    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))
