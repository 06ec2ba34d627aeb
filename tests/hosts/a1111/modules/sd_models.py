"""A1111 1.10.1 (82a973c0), modules/sd_models.py: a first load, one into the model that is there, and kept models.

The model is that of LDM as far as A1111 uses it; the network in it is a real one.

The extension has been run in A1111's own modules of that commit too (options, shared, shared_options, shared_init,
script_callbacks, script_loading, ui_settings, devices, lowvram, sd_models, sd_models_config, sd_hijack, sd_vae,
sd_unet, sd_disable_initialization), with the network of LDM that ComfyUI carries; what they need of other repositories
(ldm, sgm, k-diffusion, ...) was empty there.
"""

import torch
from modules import devices, errors, script_callbacks, shared

checkpoints_list = {}


class SdModelData:
    def __init__(self):
        self.sd_model = None
        self.loaded_sd_models = []
        self.was_loaded_at_least_once = False

    def get_sd_model(self):
        if not self.was_loaded_at_least_once and self.sd_model is None:
            try:
                load_model()
            except Exception as error:
                errors.display(error, "loading stable diffusion model", full_traceback=True)
                self.sd_model = None
        return self.sd_model

    def set_sd_model(self, v, already_loaded=False):
        self.sd_model = v
        if v in self.loaded_sd_models:
            self.loaded_sd_models.remove(v)
        if v is not None:
            self.loaded_sd_models.insert(0, v)


model_data = SdModelData()


class LatentDiffusion(torch.nn.Module):
    def __init__(self, diffusion_model):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.diffusion_model = diffusion_model
        self.lowvram = False


def select_checkpoint():
    return checkpoints_list[shared.opts.data["sd_model_checkpoint"]]


def load_model_weights(model, checkpoint_info, state_dict, timer):
    shared.opts.data["sd_model_checkpoint"] = checkpoint_info.title
    if state_dict is None:
        state_dict = checkpoint_info.state_dict
    model.load_state_dict(state_dict, strict=False)
    if shared.opts.data.get("fp8_storage") == "Enable":
        for module in model.modules():
            if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):
                module.to(torch.float8_e4m3fn)
    model.sd_model_checkpoint = checkpoint_info.filename
    model.sd_checkpoint_info = checkpoint_info


def send_model_to_trash(m):
    m.to(device="meta")


def load_model(checkpoint_info=None, already_loaded_state_dict=None):
    checkpoint_info = checkpoint_info or select_checkpoint()
    if model_data.sd_model:
        send_model_to_trash(model_data.sd_model)
        model_data.sd_model = None
    sd_model = LatentDiffusion(checkpoint_info.network())
    load_model_weights(sd_model, checkpoint_info, already_loaded_state_dict or checkpoint_info.state_dict, None)
    sd_model.to(devices.device)
    sd_model.eval()
    model_data.set_sd_model(sd_model)
    model_data.was_loaded_at_least_once = True
    script_callbacks.model_loaded_callback(sd_model)
    return sd_model


def reuse_model_from_already_loaded(sd_model, checkpoint_info, timer):
    if sd_model is not None and sd_model.sd_checkpoint_info.filename == checkpoint_info.filename:
        return sd_model
    limit = shared.opts.data.get("sd_checkpoints_limit", 1)
    already_loaded = None
    for i in reversed(range(len(model_data.loaded_sd_models))):
        loaded_model = model_data.loaded_sd_models[i]
        if loaded_model.sd_checkpoint_info.filename == checkpoint_info.filename:
            already_loaded = loaded_model
        elif len(model_data.loaded_sd_models) > limit > 0:
            del model_data.loaded_sd_models[i]
            send_model_to_trash(loaded_model)
    if already_loaded is not None:
        model_data.set_sd_model(already_loaded, already_loaded=True)
        return model_data.sd_model
    if limit > 1 and len(model_data.loaded_sd_models) < limit:
        model_data.sd_model = None
        load_model(checkpoint_info)
        return model_data.sd_model
    if model_data.loaded_sd_models:
        model_data.sd_model = model_data.loaded_sd_models.pop()
        return model_data.sd_model
    return None


def reload_model_weights(sd_model=None, info=None, forced_reload=False):
    checkpoint_info = info or select_checkpoint()
    sd_model = sd_model or model_data.sd_model
    current = None if sd_model is None else sd_model.sd_checkpoint_info
    if sd_model is not None and sd_model.sd_model_checkpoint == checkpoint_info.filename and not forced_reload:
        return sd_model
    sd_model = reuse_model_from_already_loaded(sd_model, checkpoint_info, None)
    if not forced_reload and sd_model is not None and sd_model.sd_checkpoint_info.filename == checkpoint_info.filename:
        return sd_model
    if sd_model is None:
        load_model(checkpoint_info, already_loaded_state_dict=checkpoint_info.state_dict)
        return model_data.sd_model
    sd_model.to(devices.cpu)
    try:
        load_model_weights(sd_model, checkpoint_info, checkpoint_info.state_dict, None)
    except Exception:
        load_model_weights(sd_model, current, None, None)
        raise
    finally:
        sd_model.to(devices.device)
        script_callbacks.model_loaded_callback(sd_model)
    model_data.set_sd_model(sd_model)
    return sd_model
