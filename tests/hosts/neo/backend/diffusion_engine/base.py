"""Forge Neo 2.26, 5692d2d (2026-08-17), backend/diffusion_engine/base.py."""

import types


class ForgeDiffusionEngine:
    def __init__(self, unet, clip):
        self.forge_objects = types.SimpleNamespace(unet=unet, clip=clip, vae=None, clipvision=None)

    def save_unet(self, filename):
        return filename

    def save_checkpoint(self, filename):
        return filename
