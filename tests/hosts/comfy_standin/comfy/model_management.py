"""Devices, sizes and casts, as in `comfy/model_management.py`."""

import torch

LOADED = []


def get_torch_device():
    return torch.device("cpu")


def unet_offload_device():
    return torch.device("cpu")


def is_device_cpu(device):
    return torch.device(device).type == "cpu"


def is_device_cuda(device):
    return torch.device(device).type == "cuda"


def module_size(module):
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def cast_to(weight, dtype=None, device=None, non_blocking=False, copy=False, stream=None, r=None):
    if device is None or weight.device == device:
        if not copy and (dtype is None or weight.dtype == dtype):
            return weight
        return weight.to(dtype=dtype, copy=copy)
    r = torch.empty_like(weight, dtype=dtype, device=device)
    r.copy_(weight, non_blocking=non_blocking)
    return r


def cast_to_device(tensor, device, dtype, copy=False):
    return cast_to(tensor, dtype=dtype, device=device, copy=copy)


def lora_compute_dtype(device):
    return torch.float32


def unet_dtype(
    device=None, model_params=0, supported_dtypes=(torch.float16, torch.bfloat16, torch.float32), weight_dtype=None
):
    return weight_dtype if weight_dtype in supported_dtypes else torch.float32


def unet_manual_cast(weight_dtype, inference_device, supported_dtypes=(torch.float16, torch.bfloat16, torch.float32)):
    return None if weight_dtype in (None, torch.float32) else torch.float32  # a CPU computes in float32


def archive_model_dtypes(model):
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, f"{name}_comfy_model_dtype", parameter.dtype)


def pin_memory(tensor):
    return False


def unpin_memory(tensor):
    return False


def load_models_gpu(
    models, memory_required=0, force_patch_weights=False, minimum_memory_required=None, force_full_load=False
):
    for model in models:
        for other in [other for other in LOADED if other.is_clone(model)]:
            LOADED.remove(other)
            other.detach(unpatch_all=False)
        model.partially_load(model.load_device, 1e32, force_patch_weights=force_patch_weights)
        LOADED.append(model)


def text_encoder_device():
    return get_torch_device()
