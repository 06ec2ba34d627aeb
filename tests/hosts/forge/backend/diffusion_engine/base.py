"""Forge dfdcbab6, backend/diffusion_engine/base.py: what a loaded model is, and how it is saved again."""


class ForgeDiffusionEngine:
    def __init__(self, forge_objects, pipe):
        self.forge_objects, self.pipe = forge_objects, pipe

    def save_unet(self, filename):
        return filename

    def save_checkpoint(self, filename):
        return filename
