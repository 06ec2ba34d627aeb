"""Forge dfdcbab6, modules/sd_models.py: the model is loaded anew when what it is to be loaded with has changed."""

from backend.loader import forge_loader
from modules import script_callbacks


class SdModelData:
    def __init__(self):
        self.sd_model = None
        self.forge_loading_parameters = {}
        self.forge_hash = ""


model_data = SdModelData()


def forge_model_reload():
    current_hash = str(model_data.forge_loading_parameters)
    if model_data.forge_hash == current_hash:
        return model_data.sd_model, False
    model_data.sd_model = None
    checkpoint = model_data.forge_loading_parameters["checkpoint_info"]
    sd_model = forge_loader(checkpoint, additional_state_dicts=[])
    model_data.sd_model = sd_model
    script_callbacks.model_loaded_callback(sd_model)
    model_data.forge_hash = current_hash
    return sd_model, True
