"""A1111 82a973c0 and Forge dfdcbab6, modules/shared.py: opts, state and flags, as far as extensions use them."""

import types

from modules import options

OptionInfo = options.OptionInfo
state = types.SimpleNamespace(textinfo=None)
cmd_opts = types.SimpleNamespace(ckpt_dir=None, models_dir=None, lowvram=False, medvram=False, medvram_sdxl=False)
opts = options.Options({}, set())
