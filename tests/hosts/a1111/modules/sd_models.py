"""A1111 1.10, modules/sd_models.py: a first load, and one into the model that is there already.

The model is that of LDM as far as A1111 uses it; the network in it is a real one.
"""

import types

import torch
from modules import devices, errors, script_callbacks

model_data = types.SimpleNamespace(sd_model=None, was_loaded_at_least_once=False)


class LatentDiffusion(torch.nn.Module):
    def __init__(self, diffusion_model):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.diffusion_model = diffusion_model
        self.lowvram = False


def load_model_weights(model, checkpoint_info, state_dict, timer):
    if state_dict is None:
        state_dict = checkpoint_info.state_dict
    model.load_state_dict(state_dict, strict=False)
    model.sd_checkpoint_info = checkpoint_info
    model.sd_model_checkpoint = checkpoint_info.filename


def load_model(checkpoint_info=None, already_loaded_state_dict=None):
    model_data.sd_model = None
    try:
        sd_model = LatentDiffusion(checkpoint_info.network())
        load_model_weights(sd_model, checkpoint_info, checkpoint_info.state_dict, None)
    except Exception as error:
        errors.display(error, "loading stable diffusion model", full_traceback=True)
        return None
    sd_model.to(devices.device)
    model_data.sd_model = sd_model
    script_callbacks.model_loaded_callback(sd_model)
    return sd_model


def reload_model_weights(sd_model=None, info=None):
    sd_model = sd_model or model_data.sd_model
    current = sd_model.sd_checkpoint_info
    sd_model.to(devices.cpu)
    try:
        load_model_weights(sd_model, info, info.state_dict, None)
    except Exception:
        load_model_weights(sd_model, current, None, None)
        raise
    finally:
        script_callbacks.model_loaded_callback(sd_model)
        sd_model.to(devices.device)
    model_data.sd_model = sd_model
    return sd_model
