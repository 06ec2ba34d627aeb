"""The patcher that Forge Neo and reForge have of ComfyUI's: merges patches into weights on the device, and gives the
layers that stay behind functions. The hosts' stand-ins give it their names."""

import copy
import uuid

import torch


def classes(cast, done, module_size, merge):
    """Return LowVramPatch and ModelPatcher.

    cast: the attribute of layers that may stay behind. done: that of layers into which patches were merged.
    merge: of a patch's rows, a weight and its key.
    """
    prev = f"prev_{cast}"

    class LowVramPatch:
        def __init__(self, key, patches, *more):
            self.key, self.patches = key, patches

        def __call__(self, weight):
            return merge(self.patches[self.key], weight, self.key, weight.dtype)

    class ModelPatcher:
        def __init__(self, model, load_device, offload_device, size=0, **more):
            self.model, self.size = model, size
            self.patches, self.backup, self.weight_wrapper_patches = {}, {}, {}
            self.patches_uuid = uuid.uuid4()
            if not hasattr(model, "current_weight_patches_uuid"):
                model.current_weight_patches_uuid = None
                model.model_lowvram = False

        def model_size(self):
            self.size = self.size or module_size(self.model)
            return self.size

        def clone(self):
            n = copy.copy(self)
            n.patches = {key: list(rows) for key, rows in self.patches.items()}
            return n

        def add_patches(self, patches, strength_patch=1.0, strength_model=1.0, **more):
            there = self.model.state_dict()
            found = [key for key in patches if key in there]
            for key in found:
                self.patches.setdefault(key, []).append((strength_patch, patches[key], strength_model, None, None))
            self.patches_uuid = uuid.uuid4()
            return found

        def patch_weight_to_device(self, key, device_to=None, inplace_update=False):
            if key not in self.patches:
                return
            path, _, leaf = key.rpartition(".")
            layer = self.model.get_submodule(path)
            self.backup.setdefault(key, getattr(layer, leaf).data)
            out = merge(self.patches[key], getattr(layer, leaf).to(torch.float32, copy=True), key)
            setattr(layer, leaf, torch.nn.Parameter(out.to(getattr(layer, leaf).dtype), requires_grad=False))

        def _load_list(self):
            return [
                (module_size(m), n, m, [name for name, _ in m.named_parameters(recurse=False)])
                for n, m in self.model.named_modules()
                if hasattr(m, cast)
            ]

        def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
            used = 0
            for size, n, m, params in sorted(self._load_list(), key=lambda row: row[0], reverse=True):
                if full_load or used + size < lowvram_model_memory:
                    used += size
                    m.weight_function, m.bias_function = [], []
                    if not getattr(m, done, False):
                        for param in params:
                            self.patch_weight_to_device(f"{n}.{param}", device_to=device_to)
                        setattr(m, done, True)
                    continue
                if hasattr(m, prev):
                    continue
                m.weight_function, m.bias_function = [], []
                self._functions(n, m, force_patch_weights)
                self._bring(m)
                self.model.model_lowvram = True
            self.model.current_weight_patches_uuid = self.patches_uuid

        def _bring(self, m):
            setattr(m, prev, getattr(m, cast))
            setattr(m, cast, True)

        def _functions(self, n, m, force_patch_weights):
            for key, functions in ((f"{n}.weight", m.weight_function), (f"{n}.bias", m.bias_function)):
                if key in self.patches and force_patch_weights:
                    self.patch_weight_to_device(key)
                elif key in self.patches:
                    functions.append(LowVramPatch(key, self.patches))

        def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
            other = self.model.current_weight_patches_uuid not in (None, self.patches_uuid)
            self.unpatch_model(device_to, unpatch_weights=other or force_patch_weights)
            full = extra_memory >= self.model_size()
            self.load(device_to, extra_memory, force_patch_weights=force_patch_weights, full_load=full)

        def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
            freed = 0
            for size, n, m, params in sorted(self._load_list(), key=lambda row: row[0]):
                if freed < memory_to_free and getattr(m, done, False):
                    for param in params:
                        if f"{n}.{param}" in self.backup:
                            setattr(m, param, torch.nn.Parameter(self.backup.pop(f"{n}.{param}"), requires_grad=False))
                    self._functions(n, m, force_patch_weights)
                    self._bring(m)
                    setattr(m, done, False)
                    self.model.model_lowvram = True
                    freed += size
            return freed

        def unpatch_model(self, device_to=None, unpatch_weights=True):
            if not unpatch_weights:
                return
            for key in list(self.backup):
                path, _, leaf = key.rpartition(".")
                value = torch.nn.Parameter(self.backup.pop(key), requires_grad=False)
                setattr(self.model.get_submodule(path), leaf, value)
            for m in self.model.modules():
                m.__dict__.pop(done, None)
                if self.model.model_lowvram and hasattr(m, prev):
                    setattr(m, cast, m.__dict__.pop(prev))
                    m.weight_function, m.bias_function = [], []
            self.model.model_lowvram = False
            self.model.current_weight_patches_uuid = None

    return LowVramPatch, ModelPatcher
