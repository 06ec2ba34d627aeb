"""A1111 1.10 and Forge dfdcbab6, modules/devices.py."""

import torch

cpu = device = torch.device("cpu")
dtype = torch.float32
