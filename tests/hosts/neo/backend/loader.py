"""Forge Neo 2.26, 5692d2d (2026-08-17), backend/loader.py: real networks, whose layers are Neo's."""

import types

import torch
from backend.diffusion_engine.base import ForgeDiffusionEngine
from backend.operations import ForgeOperations
from backend.patcher.base import ModelPatcher


class KModel(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.diffusion_model = model


def _with_layers(model):
    for layer in model.modules():
        if type(layer) in (torch.nn.Linear, torch.nn.Conv2d):
            layer.__class__ = getattr(ForgeOperations, type(layer).__name__)
            layer.parameters_manual_cast = False
    return model.requires_grad_(False)


def forge_loader(sd, additional_state_dicts=None):
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(sd, torch_dtype=torch.float32)
    unet = ModelPatcher(KModel(_with_layers(pipe.unet)), "cpu", "cpu")
    encoder = torch.nn.ModuleDict({"clip_l": _with_layers(pipe.text_encoder)})
    clip = types.SimpleNamespace(cond_stage_model=encoder, patcher=ModelPatcher(encoder, "cpu", "cpu"))
    return ForgeDiffusionEngine(unet, clip)
