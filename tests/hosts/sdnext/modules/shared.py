"""SD.Next 058a7f0cf, modules/shared.py: opts, state and flags, as far as extensions use them."""

import types

from modules.options import OptionInfo, Options

state = types.SimpleNamespace(textinfo=None)
cmd_opts = types.SimpleNamespace(ckpt=None, models_dir=None, ckpt_dir=None)
opts = Options(
    {
        "diffusers_offload_mode": OptionInfo("none", "Model offload mode", section=("offload", "Model Offloading")),
        "lora_fuse_native": OptionInfo(True, "LoRA native fuse with model", section=("lora", "LoRA")),
        "models_not_to_quant": OptionInfo("", "Model types not to quantize", section=("quantization", "Quantization")),
        "te_shared_te": OptionInfo(True, "Use shared instance of text encoder", section=("sd", "Models")),
        "sdnq_quantize_weights": OptionInfo([], "Quantization enabled", section=("quantization", "Quantization")),
    },
    {},
)
sd_model_type = "sd"
