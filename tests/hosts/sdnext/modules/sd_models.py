"""SD.Next 058a7f0cf, modules/sd_models.py: what a load does and in which order, and that it catches all errors.

`checkpoint_info.whole` stands for how SD.Next loads a family: in one piece, or component by component.
"""

import json
import os
import types

from modules import devices, errors, model_quant, script_callbacks
from modules.sd_offload import set_diffuser_offload

allow_post_quant = True
model_data = types.SimpleNamespace(sd_model=None, sd_refiner=None)


def load_sdnq_module(fn, module_name, load_method):
    path = os.path.join(fn, module_name, "config.json")
    if os.path.exists(path):
        with open(path) as file:
            if "quantization_config" in json.load(file):
                errors.display(ValueError(f"this is not SDNQ's: {path}"), "Load")
    return None, module_name, 0


def load_sdnq_model(checkpoint_info, pipeline, diffusers_load_config, op):
    parts = {}
    for module_name in os.listdir(checkpoint_info.path):
        if os.path.isdir(os.path.join(checkpoint_info.path, module_name)):
            module, name, _ = load_sdnq_module(checkpoint_info.path, module_name, load_method="safetensors")
            if module is not None:
                parts[name] = module
    return pipeline.from_pretrained(checkpoint_info.path, **parts, **diffusers_load_config)


def load_diffuser_force(checkpoint_info, diffusers_load_config):
    global allow_post_quant
    import diffusers
    import transformers

    shown = {key: value for key, value in diffusers_load_config.items() if key == "low_cpu_mem_usage"}
    load_args, quant_args = model_quant.get_dit_args(
        shown, module="Model", device_map=True, modules_to_not_convert=[".conv_in"]
    )
    unet = diffusers.UNet2DConditionModel.from_pretrained(
        checkpoint_info.path, subfolder="unet", **load_args, **quant_args
    )
    load_args, quant_args = model_quant.get_dit_args(shown, module="TE", device_map=True)
    load_args["dtype"] = load_args.pop("torch_dtype")
    text_encoder = transformers.CLIPTextModel.from_pretrained(
        checkpoint_info.path, subfolder="text_encoder", **load_args, **quant_args
    )
    allow_post_quant = False
    return diffusers.DiffusionPipeline.from_pretrained(
        checkpoint_info.path, unet=unet, text_encoder=text_encoder, torch_dtype=devices.dtype
    )


def load_diffuser(checkpoint_info=None, op="model", revision=None):
    global allow_post_quant
    import diffusers

    allow_post_quant = True
    sd_model = None
    diffusers_load_config = {"low_cpu_mem_usage": True, "torch_dtype": devices.dtype}
    try:
        if checkpoint_info.whole == "sdnq":
            sd_model = load_sdnq_model(checkpoint_info, diffusers.DiffusionPipeline, diffusers_load_config, op)
        elif checkpoint_info.whole:
            sd_model = diffusers.DiffusionPipeline.from_pretrained(checkpoint_info.path, **diffusers_load_config)
        else:
            sd_model = load_diffuser_force(checkpoint_info, diffusers_load_config)
        sd_model.sd_checkpoint_info = checkpoint_info
        model_data.sd_model = sd_model
        sd_model = model_quant.do_post_load_quant(sd_model, allow=allow_post_quant)
        set_diffuser_offload(sd_model, op)
    except Exception as error:
        errors.display(error, "Model")
    if sd_model is not None:
        script_callbacks.model_loaded_callback(sd_model)


def unload_model_weights(op="model"):
    model_data.sd_model = None


def select_checkpoint(op="model", sd_model_checkpoint=None):
    return None  # no model is chosen in the settings


def reload_model_weights(sd_model=None, info=None, op="model", force=False, revision=None):
    checkpoint_info = info or select_checkpoint(op=op)
    if checkpoint_info is None:
        unload_model_weights(op=op)
        return None
    sd_model = sd_model or model_data.sd_model
    if sd_model is not None:
        if sd_model.sd_checkpoint_info.filename == checkpoint_info.filename and not force:
            return None
        unload_model_weights(op=op)
    load_diffuser(checkpoint_info, op=op, revision=revision)
    return model_data.sd_model
