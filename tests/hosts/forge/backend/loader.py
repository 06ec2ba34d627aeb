"""Forge dfdcbab6, backend/loader.py and backend/diffusion_engine: a file becomes an engine with movers' handles.

The networks are real ones, whose layers are Forge's, as when Forge builds them.
"""

import types

import torch
from backend.diffusion_engine.base import ForgeDiffusionEngine
from backend.operations import ForgeOperations
from backend.patcher.base import ModelPatcher


class KModel(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.diffusion_model = model


def with_forge_layers(model):
    for path, old in [*model.named_modules()]:
        if type(old) is torch.nn.Linear:
            new = ForgeOperations.Linear(old.in_features, old.out_features)
            new.weight = torch.nn.Parameter(old.weight.data, requires_grad=False)
            new.bias = None if old.bias is None else torch.nn.Parameter(old.bias.data, requires_grad=False)
        elif type(old) is torch.nn.Conv2d:
            bias = old.bias is not None
            new = ForgeOperations.Conv2d(
                old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding, bias=bias
            )
            new.load_state_dict(old.state_dict())
        else:
            continue
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
    return model.requires_grad_(False)


def forge_loader(sd, additional_state_dicts=None):
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(sd).to(torch.float32)
    unet = ModelPatcher(KModel(with_forge_layers(pipe.unet)))
    encoder = torch.nn.ModuleDict({"clip_l": with_forge_layers(pipe.text_encoder)})
    clip = types.SimpleNamespace(cond_stage_model=encoder, patcher=ModelPatcher(encoder))
    objects = types.SimpleNamespace(unet=unet, clip=clip, vae=None, clipvision=None)
    return ForgeDiffusionEngine(objects, pipe)
