"""State dicts and attributes by dotted names, as in `comfy/utils.py`."""

import torch

PROGRESS = []  # (done, total) of every bar's last update


class ProgressBar:
    def __init__(self, total, node_id=None):
        self.total, self.current = total, 0

    def update_absolute(self, value, total=None, preview=None):
        self.current = min(value, self.total)
        PROGRESS.append((self.current, self.total))

    def update(self, value):
        self.update_absolute(self.current + value)


def calculate_parameters(sd, prefix=""):
    return sum(value.nelement() for key, value in sd.items() if key.startswith(prefix))


def weight_dtype(sd, prefix=""):
    counts = {}
    for key, value in sd.items():
        if key.startswith(prefix):
            counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    return max(counts, key=counts.get) if counts else None


def state_dict_prefix_replace(state_dict, replace_prefix, filter_keys=False):
    out = {} if filter_keys else state_dict
    for old, new in replace_prefix.items():
        for key in [key for key in state_dict if key.startswith(old)]:
            out[new + key[len(old) :]] = state_dict.pop(key)
    return out


def resolve_attr(obj, attr):
    *path, name = attr.split(".")
    for step in path:
        obj = getattr(obj, step)
    return obj, name


def get_attr(obj, attr):
    for step in attr.split("."):
        obj = getattr(obj, step)
    return obj


def set_attr(obj, attr, value):
    owner, name = resolve_attr(obj, attr)
    previous = getattr(owner, name)
    setattr(owner, name, value)
    return previous


def set_attr_param(obj, attr, value):
    return set_attr(obj, attr, torch.nn.Parameter(value, requires_grad=False))


def copy_to_param(obj, attr, value):
    owner, name = resolve_attr(obj, attr)
    getattr(owner, name).data.copy_(value)
