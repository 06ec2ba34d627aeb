"""SD.Next 058a7f0cf, modules/devices.py."""

import torch

cpu = device = torch.device("cpu")
dtype = torch.float32
