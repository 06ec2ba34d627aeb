"""SD.Next 058a7f0cf (2026-07-23), modules/lora/lora_common.py: the networks of now and of before."""

import types

loaded_networks = []
previously_loaded_networks = []
extra_network_lora = types.SimpleNamespace(errors={})
