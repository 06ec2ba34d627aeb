"""reForge 3b56b268 (2026-03-11), modules_forge/forge_loader.py: real networks, whose layers are reForge's."""

import types

import torch
from ldm_patched.modules import ops
from ldm_patched.modules.model_patcher import ModelPatcher


class BaseModel(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.diffusion_model = model


def _with_layers(model):
    for layer in model.modules():
        if type(layer) in (torch.nn.Linear, torch.nn.Conv2d):
            layer.__class__ = getattr(ops.disable_weight_init, type(layer).__name__)
    return model.requires_grad_(False)


def load_model_for_a1111(timer, checkpoint_info=None, state_dict=None):
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(checkpoint_info.filename, torch_dtype=torch.float32)
    unet = ModelPatcher(BaseModel(_with_layers(pipe.unet)), "cpu", "cpu")
    encoder = torch.nn.ModuleDict({"clip_l": _with_layers(pipe.text_encoder)})
    clip = types.SimpleNamespace(cond_stage_model=encoder, patcher=ModelPatcher(encoder, "cpu", "cpu"))
    sd_model = torch.nn.Module()
    sd_model.forge_objects = types.SimpleNamespace(unet=unet, clip=clip, vae=None, clipvision=None)
    sd_model.sd_checkpoint_info = checkpoint_info
    return sd_model
