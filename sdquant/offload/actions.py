"""Classify the methods of an offloaded model: tables of names, and the default for other names.

A mode divides a model into units when it is applied. So calls that change the model's structure, or that read, write
or return weights outside of the model's own computation, run with the mode suspended: all weights are in ordinary
memory meanwhile, and the mode is applied again to the changed model afterwards. The same holds for public methods that
are not classified, such as those of a newer diffusers. `SAFE` lists the methods that touch no weight. Methods that the
call of a pipeline or component uses itself belong to that call, and are found in its code.
"""

from __future__ import annotations

import functools
import inspect
from enum import Enum
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from ..models import call_hooks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class CallTreatment(Enum):
    """Treatment of a call."""

    SAFE = "called unchanged"
    MOVES = "suspended; a move to the mode's compute device does nothing"
    SUSPENDED = "the mode is removed for the call, and applied again"
    UNKNOWN = "suspended, unless the pipeline itself is being called"
    REFUSED = "refused by name"


# Reading other things than weights, settings, and registering: `state_guards` detects new modules, parameters and
# buffers itself. A parameter that is read through one of these may be offloaded; see `OffloadHandle.suspended`.
_READ = """
    active_adapters buffers children config_class extra_repr get_active_adapters get_buffer get_compiled_call
    get_correct_attn_implementation get_correct_experts_implementation get_decoder get_encoder
    get_expanded_tied_weights_keys get_experts_implementation get_extra_state get_input_embeddings get_list_adapters
    get_memory_footprint get_output_embeddings get_parameter get_parameter_or_buffer get_position_embeddings
    get_processor get_submodule modules named_buffers named_children named_modules named_non_persistent_buffers
    named_parameters num_parameters parameters retrieve_modules_from_names should_save_on_this_rank
    to_json_file to_json_string save_config register_to_config add_model_tags
"""
_SETTINGS = """
    activation_checkpointing_disable activation_checkpointing_enable cache_context compile compile_repeated_blocks
    disable_adapters disable_attention_slicing disable_freeu disable_gradient_checkpointing disable_input_require_grads
    disable_lora disable_slicing disable_tiling enable_adapters enable_attention_slicing enable_freeu
    enable_gradient_checkpointing enable_input_require_grads enable_lora enable_slicing enable_tiling eval
    gradient_checkpointing_disable gradient_checkpointing_enable mark_tied_weights_as_initialized
    maybe_convert_prompt maybe_free_model_hooks progress_bar requires_grad_ reset_attention_backend set_adapter
    set_adapters set_attention_backend set_attention_slice set_ip_adapter_scale set_progress_bar_config train
    warn_if_padding_and_no_attention_mask zero_grad
"""
_REGISTERING = """
    add_module register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
    register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_modules register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook
"""
_COMPUTING = """
    adjust_generation_fn batch_to_head_dim compute_transition_scores continuous_batching_context_manager
    destroy_cached_continuous_batching_manager encode_prompt encode_image generate_batch get_attention_scores
    head_to_batch_dim heal_tokens init_continuous_batching norm_encoder_hidden_states prepare_attention_mask
    prepare_inputs_for_generation prepare_latents
"""
SAFE = frozenset(" ".join((_READ, _SETTINGS, _REGISTERING, _COMPUTING, *call_hooks.ENTRIES)).split())

MOVES = frozenset({"to", "cuda", "cpu", "xpu", "ipu", "mtia"})

_SUSPENDED = """
    bfloat16 double float half type apply state_dict load_state_dict set_extra_state set_submodule
    add_adapter delete_adapter delete_adapters dequantize disable_cache
    disable_npu_flash_attention disable_xformers_memory_efficient_attention disable_xla_flash_attention
    enable_cache enable_lora_hotswap enable_npu_flash_attention enable_peft_hotswap
    enable_xformers_memory_efficient_attention enable_xla_flash_attention fuse_lora
    fuse_projections fuse_qkv_projections gather_sharded_state_dict_for_save
    get_adapter_state_dict init_weights initialize_weights load_adapter load_attn_procs
    load_custom_generate load_ip_adapter load_lora_adapter load_lora_weights load_textual_inversion post_init
    push_to_hub reset_device_map resize_position_embeddings resize_token_embeddings save_attn_procs
    save_lora_adapter save_pretrained set_attn_implementation set_attn_processor set_decoder set_default_attn_processor
    set_encoder set_experts_implementation set_input_embeddings set_lora_device set_output_embeddings set_processor
    set_use_kernels set_use_memory_efficient_attention_xformers set_use_npu_flash_attention set_use_xla_flash_attention
    smart_apply tie_weights unfuse_lora unfuse_projections unfuse_qkv_projections unload_ip_adapter unload_lora
    unload_lora_weights unload_textual_inversion upcast_vae
"""
SUSPENDED = frozenset(_SUSPENDED.split())

_TWO_MODES = "that mode already moves its weights, and two mechanisms that move them would lose them"
_DISTRIBUTED = "weights distributed over processes cannot be moved"
# By method: why it is refused.
REFUSED = {
    "enable_model_cpu_offload": _TWO_MODES,
    "enable_sequential_cpu_offload": _TWO_MODES,
    "enable_group_offload": _TWO_MODES,
    "remove_all_hooks": "the weights that are offloaded would not come back",
    "enable_layerwise_casting": "casting replaces the weights that the mode moves, at every call",
    "enable_parallelism": _DISTRIBUTED,
    "init_parallel_plans": _DISTRIBUTED,
    "barrier_after_gathered_checkpoint_save": _DISTRIBUTED,
    "save_distributed_checkpoint": _DISTRIBUTED,
    "share_memory": "its weights are moved elsewhere as soon as they are not needed",
    "to_empty": "its weights would be lost, and the mode would bring back the ones it has stored",
}

# Methods to guard on each module inside a component, besides casts and moves, which all go through `_apply`.
INSIDE = ("state_dict", "load_state_dict", "apply", "share_memory", "to_empty")


def kind(name: str, used: frozenset[str]) -> CallTreatment:
    """Return the treatment of a public method of a pipeline or component.

    Args:
        used: names that its calls use, see `used_by`.
    """
    if name in REFUSED:
        return CallTreatment.REFUSED
    if name in MOVES:
        return CallTreatment.MOVES
    if name in SUSPENDED:
        return CallTreatment.SUSPENDED
    return CallTreatment.SAFE if name in SAFE or name in used else CallTreatment.UNKNOWN


def methods(owner: type) -> Iterator[str]:
    """Yield the public instance methods of a class. Class and static methods have no model to change."""
    for name in dir(owner):
        if not name.startswith("_") and isinstance(inspect.getattr_static(owner, name), FunctionType):
            yield name


def used_by(owner: Any, entries: tuple[str, ...] = call_hooks.ENTRIES) -> frozenset[str]:
    """Return the names that the entry methods of a class, and the methods that they use, look up on any object."""
    return _used_by(owner, entries)


@functools.cache
def _used_by(owner: Any, entries: tuple[str, ...]) -> frozenset[str]:
    used: set[str] = set()
    waiting = [name for name in entries if hasattr(owner, name)]
    done = set(waiting)
    while waiting:
        function = inspect.unwrap(inspect.getattr_static(owner, waiting.pop()))
        names = set(_names(getattr(function, "__code__", None)))
        used |= names
        fresh = {name for name in names - done if isinstance(inspect.getattr_static(owner, name, None), FunctionType)}
        done |= fresh
        waiting += fresh
    return frozenset(used)


def _names(code: CodeType | None) -> Iterable[str]:
    if code is None:
        return
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def destination(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the target device of a call of one of `MOVES` (or None), and the call's other arguments."""
    import torch

    if name != "to":
        index = args[0] if args else kwargs.get("device")
        return (torch.device(name, index) if isinstance(index, int) else torch.device(index or name)), (), {}
    rest = dict(kwargs)
    where: Any = rest.pop("device", None)
    if args and isinstance(args[0], torch.Tensor):
        where, args = args[0].device, (args[0].dtype, *args[1:])
    elif args and (args[0] is None or isinstance(args[0], str | int | torch.device)):
        where, args = (where if args[0] is None else args[0]), args[1:]
    return None if where is None else torch.device(where), args, rest
