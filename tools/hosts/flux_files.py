"""LoRAs on the shipped model digits-flux in the forms that ComfyUI reads, under diffusers' names, and what to measure
them with: the float model in its authors' names, and the inputs of a drawing as ComfyUI passes them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from . import lora_files

MODEL, INPUTS = "flux.safetensors", "inputs.safetensors"
PREFIX = "transformer."


def write(folder: Path) -> None:
    """Train, and write a file of each form, the model and the inputs."""
    import torch
    from safetensors.torch import save_file

    from bench.lora import calls
    from sdquant import demo, load_model, lora

    pipe = load_model(demo.path("digits-flux"), dtype="float32", progress=False)
    asked, drawn = calls(pipe, lora_files.ASKED), calls(pipe, lora_files.DRAWN)
    with torch.no_grad():
        goals = [call.run(pipe.transformer, other.rest) for call, other in zip(asked, drawn, strict=True)]
    save_file(_inputs(asked), folder / INPUTS)
    save_file(_authors(), folder / MODEL)
    runs = [(partial(call.run, pipe.transformer), goal) for call, goal in zip(asked, goals, strict=True)]
    lora_files._fit(lora.add_lora(pipe.transformer, rank=4, target_modules=lora.ATTENTION), runs, steps=80)
    layers = {
        PREFIX + path: (
            module.lora_A["default"].weight.detach(),
            module.lora_B["default"].weight.detach() * module.scaling["default"],
            module.base_layer.weight.detach(),
        )
        for path, module in pipe.transformer.named_modules()
        if hasattr(module, "lora_A")
    }
    for form in ("lora", "loha", "lokr", "dora"):
        tensors = {
            f"{name}.{leaf}": value.contiguous().clone()
            for name, matrices in layers.items()
            for leaf, value in lora_files._FORMS.get(form, lora_files._lora)(*matrices).items()
        }
        save_file(tensors, folder / f"digits_{form}.safetensors")


def _inputs(found: list[Any]) -> dict[str, Any]:
    """The inputs of all steps: x [n, c, h, w], timestep [n], context [n, words, width], y, guidance."""
    import torch

    def joined(name: str) -> Any:
        return torch.cat([call.rest[name].detach() for call in found])

    latents = torch.cat([call.latents.detach() for call in found])
    side = round(latents.shape[1] ** 0.5)
    patches = latents.reshape(len(latents), side, side, -1, 2, 2)
    x = patches.permute(0, 3, 1, 4, 2, 5).reshape(len(latents), -1, 2 * side, 2 * side)
    named = {"x": x, "timestep": joined("timestep"), "context": joined("encoder_hidden_states")}
    named |= {"y": joined("pooled_projections"), "guidance": joined("guidance")}
    return {name: tensor.float().contiguous() for name, tensor in named.items()}


def _authors() -> dict[str, Any]:
    from sdquant import demo, detect
    from sdquant.saving import original_layout

    src = detect(demo.path("digits-flux")).sources["transformer"]
    files = src.open()
    parts, _ = original_layout.names(src, alone=True)
    tensors = {part.name: original_layout.read(part, src, files).clone() for part in parts}
    for file in files.values():
        file.close()
    return tensors
