"""What people do to a pipeline: rows of an action by name, each done to a Stable Diffusion pipeline in every mode."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

PROMPT = "a handwritten seven"
Action = Callable[[Any], Any]
ABSENT: dict[str, Any] = dict.fromkeys(("safety_checker", "image_encoder", "feature_extractor"))  # of digits-sd
ACTIONS: dict[str, Action] = {}  # each gives None, the pipeline to draw with instead, or what a call of it gets more


def action(function: Action) -> Action:
    """A row."""
    ACTIONS[function.__name__] = function
    return function


def beside(pipe: Any, module: Any) -> Any:
    """A new module where the pipeline computes, as people have to put it."""
    return module.to(pipe._execution_device)


def seeded() -> torch.Generator:
    """The same random numbers for every mode."""
    return torch.Generator().manual_seed(7)


# Casts and moves.


@action
def pipe_to_dtype(pipe: Any) -> None:
    pipe.to(torch.bfloat16)


@action
def components_to_dtype(pipe: Any) -> None:
    pipe.unet.bfloat16()
    pipe.vae.to(dtype=torch.bfloat16)
    pipe.text_encoder.bfloat16()


@action
def block_to_dtype(pipe: Any) -> None:
    pipe.unet.down_blocks[0].half().float()
    pipe.vae.decoder.to(torch.float16).to(torch.float32)


@action
def pipe_to_cpu(pipe: Any) -> None:
    assert pipe.to("cpu") is pipe
    assert pipe.unet.cpu() is pipe.unet
    pipe.unet.down_blocks[0].to("cpu")


@action
def pipe_to_meta(pipe: Any) -> None:
    pipe.to("meta")


@action
def block_to_meta(pipe: Any) -> None:
    pipe.unet.down_blocks[0].to("meta")


@action
def channels_last(pipe: Any) -> None:
    pipe.vae.to(memory_format=torch.channels_last)


# Pipelines of the same components.


@action
def from_pipe(pipe: Any) -> Any:
    from diffusers import StableDiffusionPAGPipeline

    return StableDiffusionPAGPipeline.from_pipe(pipe, pag_applied_layers=["mid"], **ABSENT)


@action
def image_to_image(pipe: Any) -> Any:
    from diffusers import StableDiffusionImg2ImgPipeline

    return StableDiffusionImg2ImgPipeline.from_pipe(pipe, dtype=torch.bfloat16, **ABSENT)


@action
def auto_pipeline(pipe: Any) -> Any:
    from diffusers import AutoPipelineForInpainting

    return AutoPipelineForInpainting.from_pipe(pipe)


@action
def of_components(pipe: Any) -> Any:
    from diffusers import StableDiffusionPipeline

    other = StableDiffusionPipeline(**pipe.components)
    other.unet.conv_in.to(torch.float16).to(torch.float32)
    other.to(torch.bfloat16)
    return other


@action
def with_a_controlnet(pipe: Any) -> Any:
    from diffusers import ControlNetModel, StableDiffusionControlNetPipeline

    torch.manual_seed(7)
    channels = (8, 16, 32)  # which make the picture as small as this VAE makes it
    net = ControlNetModel.from_unet(
        pipe.unet, conditioning_embedding_out_channels=channels, load_weights_from_unet=False
    )
    for block in net.controlnet_down_blocks:
        nn.init.normal_(block.weight, std=0.1)
    return StableDiffusionControlNetPipeline.from_pipe(pipe, controlnet=beside(pipe, net), **ABSENT)


# What a text encoder knows.


@action
def textual_inversion(pipe: Any) -> Any:
    pipe.load_textual_inversion({"<digit>": torch.randn(128, generator=seeded())})
    return {"prompt": "a <digit> seven"}


@action
def textual_inversion_unloaded(pipe: Any) -> None:
    pipe.load_textual_inversion({"<digit>": torch.randn(128, generator=seeded())})
    pipe.unload_textual_inversion()


@action
def resized_embeddings(pipe: Any) -> None:
    pipe.text_encoder.resize_token_embeddings(600, mean_resizing=False)
    with pipe.handle.suspended():  # the new rows are the device's random numbers
        rows = pipe.text_encoder.get_input_embeddings().weight.data[512:]
        rows.copy_(torch.randn(rows.shape, generator=seeded()))


@action
def other_embeddings(pipe: Any) -> None:
    table = nn.Embedding(600, 128)
    table.weight.data.normal_(generator=seeded())
    pipe.text_encoder.set_input_embeddings(beside(pipe, table))


# Adapters and attention.


def ip_adapter(pipe: Any) -> dict[str, dict[str, torch.Tensor]]:
    """An IP-Adapter's state dict with random weights."""
    made = seeded()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made) * 0.1

    keys, heights = {}, pipe.unet.config.block_out_channels
    for index, name in enumerate(pipe.unet.attn_processors):
        if name.endswith("attn2.processor"):
            wide = heights[-1]
            if not name.startswith("mid_block"):
                side, block = name.split(".")[:2]
                wide = (heights if side == "down_blocks" else heights[::-1])[int(block)]
            keys |= {f"{index}.to_{part}_ip.weight": random(wide, 128) for part in "kv"}
    norm = {"norm.weight": torch.ones(128), "norm.bias": torch.zeros(128)}
    return {"image_proj": {"proj.weight": random(512, 32), "proj.bias": random(512), **norm}, "ip_adapter": keys}


@action
def ip_adapter_loaded(pipe: Any) -> Any:
    pipe.load_ip_adapter(ip_adapter(pipe), subfolder="", weight_name="", image_encoder_folder=None)
    pipe.set_ip_adapter_scale(0.7)
    return {"ip_adapter_image_embeds": [torch.randn(2, 1, 32, generator=seeded())]}


@action
def ip_adapter_unloaded(pipe: Any) -> None:
    pipe.load_ip_adapter(ip_adapter(pipe), subfolder="", weight_name="", image_encoder_folder=None)
    pipe.unload_ip_adapter()


def lora(pipe: Any, seed: int = 7) -> dict[str, torch.Tensor]:
    """A LoRA's state dict with random weights."""
    made, keys = torch.Generator().manual_seed(seed), {}
    for name, layer in pipe.unet.named_modules():
        if name.endswith(("to_q", "to_v")) and "lora" not in name:
            path = f"unet.{name}".replace(".base_layer", "")
            keys[f"{path}.lora_A.weight"] = torch.randn(4, layer.in_features, generator=made) * 0.1
            keys[f"{path}.lora_B.weight"] = torch.randn(layer.out_features, 4, generator=made) * 0.1
    return keys


@action
def lora_loaded(pipe: Any) -> None:
    pipe.load_lora_weights(lora(pipe), adapter_name="one")
    pipe.set_adapters(["one"], [0.5])


@action
def lora_exchanged(pipe: Any) -> None:
    pipe.load_lora_weights(lora(pipe), adapter_name="one")
    pipe.load_lora_weights(lora(pipe, 8), adapter_name="one", hotswap=True)


@action
def lora_unloaded(pipe: Any) -> None:
    pipe.load_lora_weights(lora(pipe), adapter_name="one")
    pipe.disable_lora()
    pipe.enable_lora()
    pipe.delete_adapters("one")
    pipe.load_lora_weights(lora(pipe), adapter_name="two")
    pipe.unload_lora_weights()


@action
def lora_fused(pipe: Any) -> None:
    pipe.load_lora_weights(lora(pipe), adapter_name="one")
    pipe.fuse_lora(components=["unet"])


@action
def adapter_by_peft(pipe: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(7)
    config = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    inject_adapter_in_model(config, pipe.unet)


@action
def fused_projections(pipe: Any) -> None:
    pipe.fuse_qkv_projections()


@action
def unfused_projections(pipe: Any) -> None:
    pipe.fuse_qkv_projections(vae=False)
    pipe.unfuse_qkv_projections(vae=False)


@action
def attention_processors(pipe: Any) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    pipe.unet.set_attn_processor(AttnProcessor())
    pipe.vae.set_default_attn_processor()


@action
def settings(pipe: Any) -> None:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()
    pipe.enable_attention_slicing()
    pipe.unet.requires_grad_(False)
    pipe.vae.decoder.conv_out.requires_grad_(True)
    pipe.unet.train()
    pipe.unet.eval()
    pipe.unet.set_attention_backend("native")


# Weights and modules, by whoever has them.


@action
def other_weights(pipe: Any) -> None:
    norms = [module for module in pipe.text_encoder.modules() if isinstance(module, nn.LayerNorm)]
    for part in (pipe.unet, pipe.vae, *norms):
        state = part.state_dict()
        floats = {name: t * 1.1 for name, t in state.items() if t.is_floating_point() and "packed" not in name}
        part.load_state_dict(state | floats)


@action
def written_while_suspended(pipe: Any) -> None:
    with pipe.handle.suspended():
        pipe.vae.decoder.conv_out.weight.data.mul_(1.5)
        pipe.unet.conv_in.bias.data.add_(0.5)


@action
def initialized(pipe: Any) -> None:
    def shift(module: nn.Module) -> None:
        if isinstance(module, nn.GroupNorm):
            module.bias.data.add_(0.1)

    pipe.unet.apply(shift)
    pipe.vae.decoder.apply(shift)


@action
def another_layer(pipe: Any) -> None:
    torch.manual_seed(7)
    pipe.unet.conv_out = beside(pipe, nn.Conv2d(32, 4, 3, padding=1))
    norm = torch.full(pipe.vae.decoder.conv_norm_out.weight.shape, 0.5)
    pipe.vae.decoder.conv_norm_out.weight = nn.Parameter(beside(pipe, norm))
    pipe.unet.register_buffer("extra", beside(pipe, torch.ones(3)))
    pipe.unet.mid_block.register_parameter("more", nn.Parameter(beside(pipe, torch.ones(2))))


@action
def another_weight(pipe: Any) -> None:
    layer = pipe.unet.mid_block.attentions[0].proj_in
    layer.weight = nn.Parameter(torch.randn(layer.weight.shape, generator=seeded()) * 0.1, requires_grad=False)


@action
def an_own_method(pipe: Any) -> None:
    pipe.shift(0.5)
    pipe.unet.shift(0.5)


@action
def other_components(pipe: Any) -> None:
    with pipe.handle.suspended():
        unet, vae = type(pipe.unet).from_config(pipe.unet.config), copy.deepcopy(pipe.vae)
    for number, weight in enumerate(unet.parameters()):
        weight.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(number))
    vae.decoder.conv_out.bias.data.add_(0.1)
    pipe.unet = beside(pipe, unet.eval())
    pipe.register_modules(vae=beside(pipe, vae))
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)


@action
def saved(pipe: Any) -> Any:
    from diffusers import StableDiffusionPipeline

    with tempfile.TemporaryDirectory() as folder:
        pipe.vae.save_pretrained(folder)
        other = type(pipe.vae).from_pretrained(folder, torch_dtype=torch.float32)
        return StableDiffusionPipeline(**{**pipe.components, "vae": beside(pipe, other)})


# What hands the weights to somebody else.


@action
def deep_copied(pipe: Any) -> None:
    pipe.unet = copy.deepcopy(pipe.unet)


@action
def pipe_deep_copied(pipe: Any) -> Any:
    return copy.deepcopy(pipe)


@action
def block_deep_copied(pipe: Any) -> None:
    pipe.unet.mid_block = copy.deepcopy(pipe.unet.mid_block)


@action
def shallow_copied(pipe: Any) -> Any:
    return copy.copy(pipe)


@action
def pickled(pipe: Any) -> None:
    pickle.dumps(pipe.unet)


@action
def saved_by_torch(pipe: Any) -> None:
    torch.save(pipe.unet.mid_block, io.BytesIO())


@action
def shared_memory(pipe: Any) -> None:
    pipe.unet.down_blocks[0].share_memory()


@action
def emptied(pipe: Any) -> None:
    pipe.unet.conv_out.to_empty(device="cpu")


@action
def model_cpu_offload(pipe: Any) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


@action
def sequential_cpu_offload(pipe: Any) -> None:
    pipe.enable_sequential_cpu_offload(device="cpu")


@action
def group_offload(pipe: Any) -> None:
    pipe.unet.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")


@action
def layerwise_casting(pipe: Any) -> None:
    pipe.unet.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
