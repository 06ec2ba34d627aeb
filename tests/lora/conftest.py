"""LoRA files of the shipped models, and what their UNets and transformers put out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sdquant
from sdquant.models.components import quiet
from sdquant.models.pipelines import main_part

Out = Callable[[Any], torch.Tensor]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other libraries say while they are imported
    import peft

RANK, ALPHA = 4, 6.0
PLACES = {
    "unet": ("to_q", "to_v", "to_out.0", "conv1", "conv_in", "proj_in"),
    "transformer": ("to_q", "to_v", "to_out.0", "proj_mlp", "x_embedder"),
    "text_encoder": ("q_proj", "fc1"),
}
# Some of the names of Flux' layers in the scripts that kohya wrote for it.
KOHYA = {
    "transformer_blocks.0.attn.to_out.0": "double_blocks_0_img_attn_proj",
    "transformer_blocks.0.ff.net.0.proj": "double_blocks_0_img_mlp_0",
    "single_transformer_blocks.0.proj_out": "single_blocks_0_linear2",
    "single_transformer_blocks.0.norm.linear": "single_blocks_0_modulation_lin",
}


def out(pipe: Any, *, gradient: bool = False) -> torch.Tensor:
    """What the UNet or transformer puts out for fixed inputs, float32; the prompt goes through the text encoders."""
    model, make = main_part(pipe), torch.Generator().manual_seed(0)
    with torch.set_grad_enabled(gradient):
        if hasattr(pipe, "unet"):
            text, _ = pipe.encode_prompt("a handwritten seven", "cpu", 1, False)
            found = model(torch.randn(1, 4, 8, 8, generator=make), 500, text.float()).sample
        else:
            text, pooled, text_ids = pipe.encode_prompt("a handwritten seven", "a handwritten seven", device="cpu")
            found = model(
                torch.randn(1, 16, 16, generator=make), timestep=torch.tensor([0.5]), guidance=torch.tensor([3.5]),
                encoder_hidden_states=text.float(), pooled_projections=pooled.float(), txt_ids=text_ids.float(),
                img_ids=torch.zeros(16, 3),
            ).sample  # fmt: skip
    return found.flatten()


def load(model: str, scheme: str | None, offload: str = "none", **more: Any) -> Any:
    """The shipped pipeline, float32 beside what is quantized."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other libraries say while they are imported
        return sdquant.load_model(sdquant.demo.path(model), scheme, offload, dtype="float32", progress=False, **more)


def put_on(pipe: Any, path: Path, name: str = "one") -> None:
    """`load_lora_weights`, without the remarks on text encoders that a LoRA is not for, and on a second LoRA."""
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
        pipe.load_lora_weights(str(path), adapter_name=name)


@pytest.fixture(scope="session")
def lora_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """lora_file(model, text=False, kohya=False): a LoRA with random sides, for Linear and convolution, as PEFT or
    kohya's scripts write it; `text`: also for the text encoder."""
    made: dict[tuple[Any, ...], Path] = {}

    def get(model: str, text: bool = False, kohya: bool = False) -> Path:
        key = (model, text, kohya)
        if key not in made:
            make = torch.Generator().manual_seed(1)
            pipe = load(model, None)
            parts = {"unet" if model == "digits-sd" else "transformer": main_part(pipe)}
            parts |= {"text_encoder": pipe.text_encoder} if text else {}
            tensors: dict[str, torch.Tensor] = {}
            for part, network in parts.items():
                for path, layer in network.named_modules():
                    flux = kohya and part == "transformer"
                    if not (path in KOHYA if flux else path.endswith(PLACES[part])):
                        continue
                    if not isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
                        continue
                    down, up = _sides(layer, make)
                    if kohya:
                        first = "te_text_model" if part == "text_encoder" else "unet"
                        first = first.replace("te_", "te1_") if model == "digits-flux" else first
                        flat = f"lora_{first}_{KOHYA[path] if flux else path.replace('.', '_')}"
                        named = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(ALPHA)}
                        tensors |= {f"{flat}.{name}": value for name, value in named.items()}
                    else:
                        tensors[f"{part}.{path}.lora_A.weight"] = down
                        tensors[f"{part}.{path}.lora_B.weight"] = up * (ALPHA / RANK)
            made[key] = tmp_path_factory.mktemp("lora") / "lora.safetensors"
            save_file(tensors, made[key], {"format": "pt"})
        return made[key]

    return get


def _sides(layer: Any, make: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    shape = layer.weight.shape
    fan = shape[1:].numel()
    down = torch.randn(RANK, *shape[1:], generator=make) / fan**0.5
    up = torch.randn(shape[0], RANK, *(1 for _ in shape[2:]), generator=make)
    return down, up * float(layer.weight.detach().norm()) / (20 * shape[0] ** 0.5)


@pytest.fixture(scope="session")
def float_effect(lora_file: Callable[..., Path]) -> Callable[..., torch.Tensor]:
    """float_effect(model, ...): what that LoRA changes of the unquantized model's output."""
    made: dict[tuple[Any, ...], torch.Tensor] = {}

    def get(model: str, text: bool = False, kohya: bool = False) -> torch.Tensor:
        key = (model, text, kohya)
        if key not in made:
            pipe = load(model, None)
            before = out(pipe)
            put_on(pipe, lora_file(model, text, kohya))
            made[key] = out(pipe) - before
            assert made[key].norm() / before.norm() > 0.03  # it changes something
        return made[key]

    return get


def config(targets: list[str], **more: Any) -> Any:
    """A LoRA of PEFT's with random sides."""
    return peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=targets, **more)
