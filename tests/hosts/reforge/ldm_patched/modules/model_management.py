"""reForge 3b56b268 (2026-03-11), ldm_patched/modules/model_management.py: how its mover counts."""


def module_size(module):
    return sum(t.nelement() * t.element_size() for t in module.state_dict().values())
