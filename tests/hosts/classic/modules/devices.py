"""A1111 82a973c0 and Forge dfdcbab6, modules/devices.py."""

import torch

cpu = device = torch.device("cpu")
dtype = torch.float32
