"""Hints for arguments named as in other loaders, instead of a TypeError."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from ..errors import SettingsError
from .suggestions import nearest

# The arguments of `load_model`, for calls that have fewer. A test holds them against `Request`.
LOAD_MODEL_ARGUMENTS = frozenset({
    "path", "quant", "offload", "mode", "components", "skip", "rules", "base", "runtime", "device", "dtype", "budget",
    "allow_incompatible", "allow_pickle", "cache", "cache_limit", "progress", "parts", "variant", "quant_stats",
    "compute", "size", "quality", "revision", "subfolder", "token", "config",
})  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ArgumentHint:
    """The hint for an argument that does not exist here.

    Attributes:
        why: a sentence about it. fix: an imperative.
        use: the argument here with the same meaning; "" if there is none. Functions without it do not give the hint.
    """

    why: str
    fix: str
    use: str = ""


def _renamed(use: str, fix: str = "") -> ArgumentHint:
    return ArgumentHint(f"it is called {use}= here", fix or f"Use {use}=", use)


_SCHEME = "sdquant takes the name of a scheme"
_FILES = "the format of a file is detected from its contents"
_AFTER = "it is part of the pipeline, which is loaded as a whole"

ANSWERS: Mapping[str, ArgumentHint] = {
    # dtypes and devices
    **dict.fromkeys(("torch_dtype", "precision", "weight_dtype"), _renamed("dtype")),
    "device_map": ArgumentHint(
        "device= and offload= decide where the weights are placed",
        'Use device="cuda", and offload="balanced" if the model is larger than the memory',
        "device",
    ),
    **dict.fromkeys(
        ("low_cpu_mem_usage", "offload_state_dict"),
        ArgumentHint("weights are always read one at a time", "Leave it out"),
    ),
    "max_memory": _renamed("budget", 'Use offload="balanced" with budget="6GB", say'),
    "offload_mode": _renamed("offload"),
    "offload_folder": ArgumentHint(
        "sdquant chooses where offloaded weights are: in RAM or temporary files", 'Use offload="balanced"', "offload"
    ),
    "enable_model_cpu_offload": _renamed("offload", 'Use offload="model"'),
    "enable_sequential_cpu_offload": _renamed("offload", 'Use offload="sequential"'),
    "enable_group_offload": _renamed("offload", 'Use offload="group"'),
    # quantization
    "quantization_config": ArgumentHint(_SCHEME, 'Use quant="nf4", say, or quant={"transformer": "nf4"}', "quant"),
    **dict.fromkeys(("quantization", "quantize", "qtype", "scheme", "weights_dtype"), _renamed("quant")),
    "bits": ArgumentHint(_SCHEME, 'Use quant="nf4" for 4 bits or quant="int8" for 8', "quant"),
    "load_in_4bit": ArgumentHint(_SCHEME, 'Use quant="nf4"', "quant"),
    "load_in_8bit": ArgumentHint(_SCHEME, 'Use quant="bnb-int8", or quant="int8"', "quant"),
    "bnb_4bit_quant_type": ArgumentHint(_SCHEME, 'Use quant="nf4" or quant="fp4"', "quant"),
    "bnb_4bit_use_double_quant": ArgumentHint("it is an option of the scheme", 'Use quant="nf4,double_quant"', "quant"),
    "bnb_4bit_compute_dtype": ArgumentHint(
        "it is an option of the scheme", 'Use quant="nf4,compute_dtype=bfloat16", or dtype=', "quant"
    ),
    "llm_int8_threshold": ArgumentHint("the schemes have no such option", 'Use quant="bnb-int8"', "quant"),
    **dict.fromkeys(
        ("llm_int8_skip_modules", "modules_to_not_convert", "exclude", "exclude_modules"), _renamed("skip")
    ),
    "weights": _renamed("quant", 'Use quant="qint8", say'),
    # files and the hub
    **dict.fromkeys(
        ("pretrained_model_name_or_path", "pretrained_model_link_or_path", "model", "model_id", "repo_id"),
        _renamed("path", "Pass it as the first argument"),
    ),
    "filename": ArgumentHint("a file of a repository is part of the path", 'Use "owner/name/file.safetensors"', "path"),
    "gguf_file": ArgumentHint("a file of a repository is part of the path", 'Use "owner/name/file.gguf"', "path"),
    "use_auth_token": _renamed("token"),
    "local_files_only": ArgumentHint(
        "files in the hub's cache are used without a connection", "Set HF_HUB_OFFLINE=1 in the environment"
    ),
    "cache_dir": ArgumentHint(
        "repositories are in huggingface_hub's own cache (cache= is for quantized weights)",
        "Set HF_HUB_CACHE in the environment",
    ),
    "force_download": ArgumentHint("huggingface_hub detects changed files itself", "Remove the file from its cache"),
    "proxies": ArgumentHint("huggingface_hub reads them from the environment", "Set HTTPS_PROXY in the environment"),
    "mirror": ArgumentHint("huggingface_hub reads it from the environment", "Set HF_ENDPOINT in the environment"),
    "use_safetensors": ArgumentHint(f"{_FILES}, and pickles are read only with allow_pickle=True", "Leave it out"),
    "use_onnx": ArgumentHint(_FILES, "Leave it out"),
    "from_flax": ArgumentHint("sdquant cannot read Flax weights", "Leave it out"),
    "ignore_mismatched_sizes": ArgumentHint("weights that do not fit are always refused", "Leave it out"),
    "trust_remote_code": ArgumentHint("sdquant never runs code that comes with a model", "Leave it out"),
    "custom_pipeline": ArgumentHint(
        "sdquant never runs code that comes with a model",
        "Load the model, and pass its components to your pipeline: YourPipeline(**pipe.components)",
    ),
    **dict.fromkeys(
        ("original_config", "original_config_file"),
        _renamed("base", "Use base=<pipeline folder of the same model>"),
    ),
    # components
    "safety_checker": ArgumentHint(_AFTER, "Set it after loading: pipe.safety_checker = None"),
    "requires_safety_checker": ArgumentHint(_AFTER, "Leave it out, and set pipe.safety_checker after loading"),
    "feature_extractor": ArgumentHint(_AFTER, "Set it after loading: pipe.feature_extractor = ..."),
    "scheduler": ArgumentHint(_AFTER, "Set it after loading: pipe.scheduler = ..."),
    "tokenizer": ArgumentHint(_AFTER, "Set it after loading: pipe.tokenizer = ..."),
    **{
        name: ArgumentHint(
            "components are passed as files", f'Use parts={{"{name}": file}}, or set it after loading', "parts"
        )
        for name in ("unet", "transformer", "text_encoder", "vae")
    },
    "controlnet": ArgumentHint(
        "it is a model of its own",
        "Load it with load_model, then call Pipeline.from_pipe(pipe, controlnet=...) of a class that takes one",
    ),
    **dict.fromkeys(
        ("lora", "adapter"),
        ArgumentHint("a LoRA is loaded onto the pipeline", "Use pipe.load_lora_weights(file) after loading"),
    ),
    # saving
    "safe_serialization": ArgumentHint("sdquant always writes safetensors", "Leave it out"),
    "max_shard_size": ArgumentHint("a component is one file", "Leave it out"),
    "push_to_hub": ArgumentHint("sdquant writes to disk", "Use `hf upload` afterwards"),
    **dict.fromkeys(("exist_ok", "force"), _renamed("overwrite")),
    "save_directory": _renamed("path", "Pass it as the second argument"),
    # others
    **dict.fromkeys(("verbose", "show_progress"), _renamed("progress")),
}  # fmt: skip


def answered(call: Callable[P, R]) -> Callable[P, R]:
    """Decorator: raise a SettingsError with a hint for arguments that the function does not have."""
    known = [name for name, row in inspect.signature(call).parameters.items() if name != "self"]
    name = call.__qualname__.removesuffix(".__init__")

    @functools.wraps(call)
    def answering(*args: P.args, **kwargs: P.kwargs) -> R:
        for argument in kwargs:
            if argument not in known:
                raise unknown(argument, known, name)
        return call(*args, **kwargs)

    return answering


def unknown(argument: str, known: Collection[str], call: str) -> SettingsError:
    """Return the error for an argument that a function does not have.

    Args:
        known: the arguments that it has. call: its name.
    """
    what = f"{argument}= is not an argument of {call}"
    answer, all_of_them = ANSWERS.get(argument), f"its arguments are {', '.join(known)}"
    if answer is not None and (not answer.use or answer.use in known):
        return SettingsError(what, answer.why, answer.fix)
    near = nearest(argument.lower(), known)
    if near:
        return SettingsError(what, all_of_them, f"Did you mean {near}=?")
    loading = answer.use if answer is not None else argument
    if loading in LOAD_MODEL_ARGUMENTS:
        return SettingsError(what, all_of_them, f"Use load_model, which has {loading}=")
    return SettingsError(what, all_of_them, "Leave it out")
