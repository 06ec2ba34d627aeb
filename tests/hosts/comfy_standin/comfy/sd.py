"""From a state dict to a model, as in `comfy/sd.py`; the one model that is known is Flux."""

import enum
import logging

import safetensors.torch
import torch

import comfy.flux
import comfy.model_management as model_management
import comfy.model_patcher
import comfy.utils

SEEN = {}  # metadata of the last call


class ModelType(enum.Enum):
    EPS = 1
    V_PREDICTION = 2


class Sampling(torch.nn.Module):
    zsnr = False


class BaseModel(torch.nn.Module):
    def __init__(self, config, dtype, manual_cast_dtype, operations):
        super().__init__()
        self.manual_cast_dtype = manual_cast_dtype
        self.diffusion_model = comfy.flux.Flux(**config, dtype=dtype, operations=operations)
        self.diffusion_model.requires_grad_(False)
        self.diffusion_model.eval()
        model_management.archive_model_dtypes(self.diffusion_model)
        self.model_type, self.model_sampling = ModelType.EPS, Sampling()

    def get_dtype(self):
        return self.diffusion_model.dtype

    def load_model_weights(self, sd, unet_prefix="", assign=False):
        taken = {key[len(unet_prefix) :]: sd.pop(key) for key in list(sd) if key.startswith(unet_prefix)}
        missing, unexpected = self.diffusion_model.load_state_dict(taken, strict=False, assign=assign)
        if missing:
            logging.warning("unet missing: %s", missing)
        if unexpected:
            logging.warning("unet unexpected: %s", unexpected)
        return self

    def state_dict_for_saving(self, clip_state_dict=None, vae_state_dict=None, clip_vision_state_dict=None):
        return {f"model.{name}": tensor for name, tensor in self.state_dict().items()}


def save_checkpoint(output_path, model, clip=None, vae=None, clip_vision=None, metadata=None, extra_keys={}):  # noqa: B006
    model_management.load_models_gpu([model], force_patch_weights=True)
    sd = model.model.state_dict_for_saving(None, None, None)
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in sd.items()}, output_path)


def load_diffusion_model_state_dict(sd, model_options={}, metadata=None, disable_dynamic=False):  # noqa: B006
    SEEN["metadata"] = metadata
    if any(key.startswith("model.diffusion_model.") for key in sd):
        sd = comfy.utils.state_dict_prefix_replace(sd, {"model.diffusion_model.": ""}, filter_keys=True)
    parameters, weight_dtype = comfy.utils.calculate_parameters(sd), comfy.utils.weight_dtype(sd)
    config = comfy.flux.detected(sd)
    if config is None:
        return None
    load_device, offload_device = model_management.get_torch_device(), model_management.unet_offload_device()
    dtype = model_options.get("dtype") or model_management.unet_dtype(
        model_params=parameters, weight_dtype=weight_dtype
    )
    cast = model_management.unet_manual_cast(dtype, load_device)
    model = BaseModel(config, dtype, cast, model_options["custom_operations"])
    if "v_pred" in sd:
        model.model_type, model.model_sampling.zsnr = ModelType.V_PREDICTION, "ztsnr" in sd
    kind = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    for value in sd.values():  # which disk it came from
        value.untyped_storage()
    patcher = kind(model, load_device=load_device, offload_device=offload_device)
    model.load_model_weights(sd, "", assign=patcher.is_dynamic())
    return patcher


class CLIPType(enum.Enum):
    STABLE_DIFFUSION = 1
    SD3 = 3
    FLUX = 6


class _Encoder(torch.nn.Module):
    """A text encoder: a module by each name, matrices in Linear layers, and T5's first block for a forward."""

    def __init__(self, sd, operations):
        super().__init__()
        for name, tensor in sd.items():
            *path, leaf = name.split(".")
            if leaf == "bias":
                continue
            linear = tensor.ndim == 2 and "relative" not in name and "shared" not in name and "embed" not in name
            made = torch.nn.Module()
            if linear:
                made = operations.Linear(
                    tensor.shape[1], tensor.shape[0], bias=f"{name[:-6]}bias" in sd, dtype=torch.float32
                )
            else:
                made.weight = torch.nn.Parameter(torch.zeros(tensor.shape))
                if f"{name[:-6]}bias" in sd:
                    made.bias = torch.nn.Parameter(torch.zeros(tensor.shape[:1]))
            owner = self
            for step in path[:-1]:
                if step not in owner._modules:
                    owner.add_module(step, torch.nn.Module())
                owner = owner._modules[step]
            owner.add_module(path[-1], made)

    def forward(self, x):
        layer = self.get_submodule("encoder.block.0.layer.0.SelfAttention")
        return layer.o(layer.v(x))


class CLIP:
    def __init__(self, model, load_device, offload_device, kind):
        self.cond_stage_model = model
        self.patcher = kind(model, load_device=load_device, offload_device=offload_device)
        self.patcher.is_clip = True


def load_text_encoder_state_dicts(
    state_dicts=[],  # noqa: B006
    embedding_directory=None,
    clip_type=CLIPType.STABLE_DIFFUSION,
    model_options={},  # noqa: B006
    disable_dynamic=False,
):
    model = torch.nn.Module()
    for number, sd in enumerate(state_dicts):
        known = "t5xxl" if "encoder.block.0.layer.0.SelfAttention.k.weight" in sd else None
        known = "clip_l" if "text_model.encoder.layers.0.mlp.fc1.weight" in sd else known
        if known is None:
            sd = {}
        encoder = _Encoder(sd, model_options["custom_operations"])
        encoder.load_state_dict(sd, strict=False)
        model.add_module(known or f"unknown{number}", encoder)
    model.requires_grad_(False)
    device = model_management.get_torch_device()
    kind = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    SEEN["clip"] = (embedding_directory, clip_type)
    return CLIP(model, device, model_management.unet_offload_device(), kind)
