"""SD.Next 058a7f0cf, modules/model_quant.py: the two places where its loaders ask for quantization."""

import re

from modules import devices, shared


def get_quant_type(args):
    return type(args["quantization_config"]).__name__ if args and "quantization_config" in args else None


def dont_quant():
    return shared.sd_model_type.lower() in re.split(r"[ ,]+", shared.opts.models_not_to_quant.lower())


def create_config(kwargs=None, allow=True, module="Model", modules_to_not_convert=None, modules_dtype_dict=None):
    return {} if kwargs is None else kwargs


def get_dit_args(
    load_config=None,
    module=None,
    device_map=False,
    allow_quant=True,
    modules_to_not_convert=None,
    modules_dtype_dict=None,
):
    config = {} if load_config is None else load_config.copy()
    config.setdefault("torch_dtype", devices.dtype)
    if device_map and config.get("low_cpu_mem_usage", False) and module in {"Model", "TE", "LLM"}:
        config["device_map"] = "cpu"
    if not allow_quant:
        return config, {}
    return config, create_config(
        module=module, modules_to_not_convert=modules_to_not_convert, modules_dtype_dict=modules_dtype_dict
    )


def do_post_load_quant(sd_model, allow=True):
    return sd_model
