"""reForge 3b56b268 (2026-03-11), ldm_patched/modules/sd.py."""


def save_checkpoint(output_path, model, clip=None, vae=None, clip_vision=None, metadata=None, extra_keys={}):  # noqa: B006 - reForge's own
    return output_path
