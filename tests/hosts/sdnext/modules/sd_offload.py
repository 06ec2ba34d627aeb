"""SD.Next 058a7f0cf, modules/sd_offload.py: its modes by the same functions of accelerate, here with a CPU alone."""

from modules import devices, shared

no_split_module_classes = ["Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "SDNQLinear", "WanTransformerBlock"]


def set_diffuser_offload(sd_model, op="model", quiet=False, force=False):
    from accelerate import cpu_offload

    if shared.opts.diffusers_offload_mode == "none":
        sd_model.to(devices.device)
    if shared.opts.diffusers_offload_mode == "sequential":
        for part in (sd_model.unet, sd_model.text_encoder, sd_model.vae):
            cpu_offload(part, devices.device, offload_buffers=len(part._parameters) > 0)
