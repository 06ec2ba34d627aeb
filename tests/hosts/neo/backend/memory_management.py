"""Forge Neo 2.26, 5692d2d (2026-08-17), backend/memory_management.py: how its mover counts."""


def module_size(module):
    return sum(t.nelement() * t.element_size() for t in module.state_dict().values())
