"""A1111 1.10.1 (82a973c0), modules/lowvram.py."""

from modules import shared


def is_needed(sd_model):
    flags = shared.cmd_opts
    return flags.lowvram or flags.medvram or (flags.medvram_sdxl and hasattr(sd_model, "conditioner"))
