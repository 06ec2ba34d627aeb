"""Forge dfdcbab6, backend/memory_management.py: how its mover counts, and what it does to single layers."""

import torch


def module_size(module, return_split=False):
    whole = sum(p.data.nelement() * p.data.element_size() for p in module.parameters())
    weight = sum(p.data.nelement() * p.data.element_size() for k, p in module.named_parameters() if k == "weight")
    return (whole, weight, whole - weight) if return_split else whole


def build_module_profile(model, budget):
    """Modules on the GPU, modules with all but their weight on the GPU, modules that stay in RAM."""
    swappable, legacy, used = [], [], 0
    for m in model.modules():
        if hasattr(m, "parameters_manual_cast"):
            m.total_mem, m.weight_mem, m.extra_mem = module_size(m, return_split=True)
            swappable.append(m)
        elif hasattr(m, "weight"):
            m.total_mem, m.weight_mem, m.extra_mem = module_size(m, return_split=True)
            legacy.append(m)
    gpu, extras, used = list(legacy), [], sum(m.total_mem for m in legacy)
    for m in sorted(swappable, key=lambda x: x.extra_mem):
        if used + m.extra_mem < budget:
            extras.append(m)
            used += m.extra_mem
    cpu = [m for m in swappable if all(m is not other for other in extras)]
    for m in sorted(extras, key=lambda x: x.weight_mem):
        if used + m.weight_mem < budget:
            gpu.append(m)
            used += m.weight_mem
    return gpu, [m for m in extras if all(m is not other for other in gpu)], cpu


def model_load(model, device, offload_device, budget, pin=False):
    """What LoadedModel.model_load does where the model does not fit."""
    gpu, extras, cpu = build_module_profile(model, budget)
    for m in gpu:
        m.to(device)
    for m in cpu:
        m.prev_parameters_manual_cast, m.parameters_manual_cast = m.parameters_manual_cast, True
        m.to(offload_device)
        if pin:
            m._apply(lambda x: x.pin_memory())
    for m in extras:
        m.prev_parameters_manual_cast, m.parameters_manual_cast = m.parameters_manual_cast, True
        for k, p in m.named_parameters(recurse=False):
            if k != "weight":
                setattr(m, k, torch.nn.Parameter(p.to(device=device), requires_grad=False))
        m.weight = torch.nn.Parameter(m.weight.to(offload_device), requires_grad=False)
    return gpu, extras, cpu
