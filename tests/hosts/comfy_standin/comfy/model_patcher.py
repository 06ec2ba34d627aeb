"""What patches, moves and counts a model, as in `comfy/model_patcher.py`, for one device and no streams."""

import collections
import uuid

import torch

import comfy.lora
import comfy.model_management
import comfy.utils


def create_model_options_clone(orig_model_options):
    copied = lambda value: {k: copied(v) for k, v in value.items()} if isinstance(value, dict) else value  # noqa: E731
    return copied(orig_model_options)


def wipe_lowvram_weight(m):
    if hasattr(m, "prev_comfy_cast_weights"):
        m.comfy_cast_weights = m.prev_comfy_cast_weights
        del m.prev_comfy_cast_weights
    if hasattr(m, "weight_function"):
        m.weight_function = []
    if hasattr(m, "bias_function"):
        m.bias_function = []


class LowVramPatch:
    is_lowvram_patch = True

    def __init__(self, key, patches, convert_func=None, set_func=None):
        self.key, self.patches = key, patches

    def __call__(self, weight):
        return comfy.lora.calculate_weight(self.patches[self.key], weight, self.key, intermediate_dtype=weight.dtype)


def get_key_weight(model, key):
    op = comfy.utils.get_attr(model, key.rpartition(".")[0])
    name = key.rpartition(".")[2]
    return getattr(op, name), getattr(op, f"set_{name}", None), getattr(op, f"convert_{name}", None)


class ModelPatcher:
    def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False, fast_disk=False):
        self.size, self.model = size, model
        self.load_device, self.offload_device = load_device, offload_device
        self.weight_inplace_update, self.fast_disk = weight_inplace_update, fast_disk
        self.patches, self.backup = {}, {}
        self.object_patches, self.model_options = {}, {"transformer_options": {}}
        self.weight_wrapper_patches = {}
        self.wrappers = {"apply_model": {}}
        self.hook_patches, self.hook_backup, self.current_hooks = {}, {}, None
        self.patches_uuid = uuid.uuid4()
        self.parent = None
        self.cached_patcher_init = None
        for name, value in (
            ("device", offload_device), ("model_loaded_weight_memory", 0), ("lowvram_patch_counter", 0),
            ("model_lowvram", False), ("current_weight_patches_uuid", None),
        ):  # fmt: skip
            if not hasattr(model, name):
                setattr(model, name, value)

    def is_dynamic(self):
        return False

    def model_size(self):
        if self.size <= 0:
            self.size = comfy.model_management.module_size(self.model)
        return self.size

    def loaded_size(self):
        return self.model.model_loaded_weight_memory

    def clone(self, disable_dynamic=False, model_override=None, force_deepcopy=False):
        n = self.__class__(self.model, self.load_device, self.offload_device, self.model_size())
        n.patches = {key: list(patches) for key, patches in self.patches.items()}
        n.patches_uuid, n.parent, n.backup = self.patches_uuid, self, self.backup
        n.object_patches, n.model_options = self.object_patches.copy(), create_model_options_clone(self.model_options)
        n.weight_wrapper_patches = self.weight_wrapper_patches.copy()
        n.cached_patcher_init = self.cached_patcher_init
        n.hook_patches = {hook: dict(patches) for hook, patches in self.hook_patches.items()}
        n.hook_backup, n.current_hooks = self.hook_backup, self.current_hooks
        return n

    def get_model_object(self, name):
        return self.object_patches[name] if name in self.object_patches else comfy.utils.get_attr(self.model, name)

    def is_clone(self, other):
        return self.model is other.model

    def add_weight_wrapper(self, name, function):
        self.weight_wrapper_patches[name] = [*self.weight_wrapper_patches.get(name, []), function]
        self.patches_uuid = uuid.uuid4()

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        taken, known = set(), self.model.state_dict()
        for name, patch in patches.items():
            key, offset, function = (name, None, None) if isinstance(name, str) else (*name, None, None)[:3]
            if key in known:
                taken.add(name)
                row = (strength_patch, patch, strength_model, offset, function)
                self.patches[key] = [*self.patches.get(key, []), row]
        self.patches_uuid = uuid.uuid4()
        return list(taken)

    def get_key_patches(self, filter_prefix=None):
        found = {}
        for key in self.model.state_dict():
            if filter_prefix is None or key.startswith(filter_prefix):
                weight, _, convert = get_key_weight(self.model, key)
                if key in self.backup:
                    weight = self.backup[key].weight
                found[key] = [(weight, convert or (lambda a, **kwargs: a)), *self.patches.get(key, [])]
        return found

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, force_cast=False):
        weight, _, _ = get_key_weight(self.model, key)
        if key not in self.patches and not force_cast:
            return weight
        if key not in self.backup and not return_weight:
            row = collections.namedtuple("Dimension", ["weight", "inplace_update"])
            self.backup[key] = row(weight.to(device=self.offload_device, copy=inplace_update), inplace_update)
        temporary = comfy.model_management.cast_to_device(weight, device_to, torch.float32, copy=True)
        out = comfy.lora.calculate_weight(self.patches[key], temporary, key).to(weight.dtype)
        if return_weight:
            return out
        comfy.utils.set_attr_param(self.model, key, out)
        return None

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0):
        known = self.hook_patches.setdefault(hook, {})
        for key, patch in patches.items():
            known[key] = [*known.get(key, []), (strength_patch, patch, strength_model, None, None)]
        self.patches_uuid = uuid.uuid4()

    def get_combined_hook_patches(self, hooks):
        combined = {}
        for hook in hooks or ():
            for key, patches in self.hook_patches.get(hook, {}).items():
                combined[key] = [*combined.get(key, []), *patches]
        return combined

    def patch_hooks(self, hooks):
        self.unpatch_hooks()
        combined = self.get_combined_hook_patches(hooks)
        original = self.get_key_patches() if combined else None
        for key in combined:
            self.patch_hook_weight_to_device(hooks, combined, key, original, None)
        self.current_hooks = hooks

    def patch_hook_weight_to_device(self, hooks, combined_patches, key, original_weights, memory_counter):
        weight, _, _ = get_key_weight(self.model, key)
        self.hook_backup[key] = (weight.to(device=self.offload_device, copy=True), weight.device)
        out = comfy.model_management.cast_to_device(weight, weight.device, torch.float32, copy=True)
        out = comfy.lora.calculate_weight(combined_patches[key], out, key, original_weights=original_weights)
        comfy.utils.copy_to_param(self.model, key, out.to(weight.dtype))

    def unpatch_hooks(self, whitelist_keys_set=None):
        for key in [key for key in self.hook_backup if not whitelist_keys_set or key in whitelist_keys_set]:
            comfy.utils.copy_to_param(self.model, key, self.hook_backup.pop(key)[0])
        if not whitelist_keys_set:
            self.current_hooks = None

    def pin_weight_to_device(self, key):
        comfy.model_management.pin_memory(get_key_weight(self.model, key)[0])

    def _load_list(self):
        rows = []
        for n, m in self.model.named_modules():
            params = dict(m.named_parameters(recurse=False))
            inner = any(name not in params for name, _ in m.named_parameters(recurse=True))
            if not inner and (hasattr(m, "comfy_cast_weights") or params):
                rows.append((comfy.model_management.module_size(m), n, m, params))
        return sorted(rows, key=lambda row: row[:2], reverse=True)

    def _function(self, m, n, what):
        key = f"{n}.{what}"
        if key in self.patches:
            tensor = getattr(m, what)
            if comfy.lora.calculate_shape(self.patches[key], tensor, key) != tensor.shape:
                self.patch_weight_to_device(key)
            else:
                getattr(m, f"{what}_function").append(LowVramPatch(key, self.patches))

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        self.unpatch_hooks()
        counted, whole, lowvram = 0, [], 0
        for memory, n, m, params in self._load_list():
            fits = full_load or counted + memory < lowvram_model_memory
            casts = hasattr(m, "comfy_cast_weights")
            if casts and not fits:
                lowvram += 1
                if hasattr(m, "prev_comfy_cast_weights"):
                    continue
                m.weight_function, m.bias_function = [], []
                self._function(m, n, "weight")
                self._function(m, n, "bias")
                m.prev_comfy_cast_weights, m.comfy_cast_weights = m.comfy_cast_weights, True
            elif casts:
                wipe_lowvram_weight(m)
            if fits or not casts:
                counted += memory
                whole.append((n, m, params))
            for what in ("weight", "bias"):
                more = self.weight_wrapper_patches.get(f"{n}.{what}")
                if more:
                    setattr(m, f"{what}_function", [*getattr(m, f"{what}_function"), *more])
        for n, m, params in whole:
            if getattr(m, "comfy_patched_weights", False):
                continue
            for name in params:
                self.patch_weight_to_device(f"{n}.{name}" if n else name, device_to=device_to)
            m.comfy_patched_weights = True
            m.to(device_to)
        self.model.model_lowvram = lowvram > 0
        self.model.device = device_to
        self.model.model_loaded_weight_memory = counted
        self.model.current_weight_patches_uuid = self.patches_uuid

    def patch_model(self, device_to=None, lowvram_model_memory=0, load_weights=True, force_patch_weights=False):
        if load_weights:
            self.load(device_to, lowvram_model_memory, force_patch_weights, full_load=lowvram_model_memory == 0)
        return self.model

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        if not unpatch_weights:
            return
        self.unpatch_hooks()
        if self.model.model_lowvram:
            for m in self.model.modules():
                wipe_lowvram_weight(m)
            self.model.model_lowvram = False
        for key in list(self.backup):
            comfy.utils.set_attr_param(self.model, key, self.backup.pop(key).weight)
        self.model.current_weight_patches_uuid = None
        if device_to is not None:
            self.model.to(device_to)
            self.model.device = device_to
        self.model.model_loaded_weight_memory = 0
        for m in self.model.modules():
            if hasattr(m, "comfy_patched_weights"):
                del m.comfy_patched_weights

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
        freed = 0
        for memory, n, m, params in reversed(self._load_list()):
            if freed > memory_to_free:
                break
            if not getattr(m, "comfy_patched_weights", False) or not hasattr(m, "comfy_cast_weights"):
                continue
            for name in params:
                if f"{n}.{name}" in self.backup:
                    comfy.utils.set_attr_param(self.model, f"{n}.{name}", self.backup.pop(f"{n}.{name}").weight)
            m.to(device_to)
            m.weight_function, m.bias_function = list(m.weight_function), list(m.bias_function)
            self._function(m, n, "weight")
            self._function(m, n, "bias")
            m.prev_comfy_cast_weights, m.comfy_cast_weights = m.comfy_cast_weights, True
            m.comfy_patched_weights = False
            freed += memory
        self.model.model_lowvram = True
        self.model.model_loaded_weight_memory -= freed
        return freed

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        current = self.model.current_weight_patches_uuid
        stale = current is not None and (current != self.patches_uuid or force_patch_weights)
        self.unpatch_model(self.offload_device, unpatch_weights=stale)
        if extra_memory < 0 and not stale:
            return self.partially_unload(self.offload_device, -extra_memory)
        if not self.model.model_lowvram and self.model.model_loaded_weight_memory > 0:
            return 0
        used = self.model.model_loaded_weight_memory
        self.load(
            device_to, used + extra_memory, force_patch_weights, full_load=used + extra_memory > self.model_size()
        )
        return self.model.model_loaded_weight_memory - used

    def detach(self, unpatch_all=True):
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=unpatch_all)
        return self.model

    def current_loaded_device(self):
        return self.model.device


class ModelPatcherDynamic(ModelPatcher):
    """Keeps weights in buffers of one tensor each: no module with other parameters goes through it."""

    def is_dynamic(self):
        return True


CoreModelPatcher = ModelPatcherDynamic
