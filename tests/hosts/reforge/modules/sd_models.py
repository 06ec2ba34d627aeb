"""reForge 3b56b268 (2026-03-11), modules/sd_models.py: keeps models by their files, and loads one anew if told to."""

import types

from modules import script_callbacks, shared
from modules_forge import forge_loader


class SdModelData:
    def __init__(self):
        self.sd_model = None
        self.loaded_sd_models = []


model_data = SdModelData()


def select_checkpoint():
    return types.SimpleNamespace(filename=shared.opts.data["sd_model_checkpoint"])


def load_model(checkpoint_info=None, already_loaded_state_dict=None, forced_reload=False):
    checkpoint_info = checkpoint_info or select_checkpoint()
    for loaded_model in list(model_data.loaded_sd_models):
        if loaded_model.filename == checkpoint_info.filename:
            model_data.loaded_sd_models.remove(loaded_model)
            if not forced_reload:
                model_data.loaded_sd_models.insert(0, loaded_model)
                model_data.sd_model = loaded_model
                return loaded_model
    while len(model_data.loaded_sd_models) >= shared.opts.data.get("sd_checkpoints_limit", 1):
        model_data.loaded_sd_models.pop(-1)
    sd_model = forge_loader.load_model_for_a1111(timer=None, checkpoint_info=checkpoint_info, state_dict={})
    sd_model.filename = checkpoint_info.filename
    model_data.loaded_sd_models.insert(0, sd_model)
    model_data.sd_model = sd_model
    script_callbacks.model_loaded_callback(sd_model)
    return sd_model


def reload_model_weights(sd_model=None, info=None, forced_reload=False):
    return load_model(info, forced_reload=forced_reload)
