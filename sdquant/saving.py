"""Write a quantized model so that it reloads bit for bit: `sdquant.save(pipe, "folder")`.

Weights go out under the key names of their ecosystem (bitsandbytes', quanto's, ...). Beside that, the file's metadata
holds under "sdquant" what is needed to reload exactly, as JSON:

    {"format": 1, "config": {...}, "weights": {name: {scheme, shape, dtype, details, parts: [...], extra: [keys]}}}

Everything is written beside the target and renamed at the end: a target is whole or not there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import backends
from .errors import SettingsError
from .formats import safetensors
from .formats.source import FORMAT_VERSION, METADATA_KEY
from .weights import plain, quantized, weight_bytes
from .writing import whole_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .backends.base import QuantSpec


def save(model: Any, path: str | Path, *, overwrite: bool = False) -> Path:
    """Save a pipeline (folder) or component (folder, or one file if `path` ends in .safetensors).

    Args:
        overwrite: replace what is at `path`; the old is gone only when the new is complete.

    Returns:
        The path.

    Raises:
        SettingsError: something is there already, or the path does not suit the model.
    """
    from . import components

    target = Path(path)
    refuse_existing(target, overwrite)
    whole = components.is_pipeline(model)
    if whole and target.suffix == ".safetensors":
        raise SettingsError(
            f"{target} was to be written", "a pipeline is a folder of several files", "Give a folder, or one component"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with offload_suspended(model):
        if target.suffix == ".safetensors":
            _write_weights(model, target)
        else:
            with whole_folder(target, weight_bytes(model)) as folder:
                if whole:
                    _write_pipeline(model, folder)
                else:
                    _write_component(model, folder)
    return target


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Raise SettingsError if something is at `target` that may not be replaced."""
    if target.exists() and not overwrite:
        raise SettingsError(f"{target} was to be written", "it exists", "Choose another path, or allow overwriting")


def refuse_nested(source: Path, target: Path) -> None:
    """Raise SettingsError if a folder that is read and one that is written lie in each other: what is written would be
    read, or the source be gone. They may be one and the same, where replacing it was asked for."""
    one, other = source.resolve(), target.resolve()
    if other in one.parents:
        why = f"the model is in it, in {source}, and would be gone"
    elif one in other.parents and one.is_dir() and target.suffix not in (".safetensors", ".gguf"):
        why = f"it is inside the model's own folder {source}"
    else:
        return
    raise SettingsError(f"{target} was to be written", why, "Choose another path")


@contextmanager
def offload_suspended(model: Any) -> Iterator[None]:
    """The model's weights in ordinary memory, whatever its offload mode; afterwards the mode is as before."""
    from . import offload

    done = getattr(model, "sdquant", None)
    if done is None or not done.offload.active or done.plan.offload == "none":
        yield
        return
    done.offload.remove()
    try:
        yield
    finally:
        handle = offload.apply(model, done.plan.offload, device=done.plan.device, budget=done.plan.budget)
        model.sdquant = replace(done, offload=handle)


def _write_pipeline(pipe: Any, folder: Path) -> None:
    from . import components

    pipe.save_config(folder)
    parts = components.weight_parts(pipe)
    for name, part in pipe.components.items():
        if name in parts:
            (folder / name).mkdir()
            _write_component(part, folder / name)
        elif hasattr(part, "save_pretrained"):
            part.save_pretrained(folder / name)


def _write_component(model: nn.Module, folder: Path) -> None:
    config = config_of(model)
    extra = _library_config(model)
    (folder / "config.json").write_text(json.dumps({**config, **extra}, indent=2, sort_keys=True) + "\n")
    name = "diffusion_pytorch_model" if "_class_name" in config else "model"
    _write_weights(model, folder / f"{name}.safetensors")


def _write_weights(model: nn.Module, path: Path) -> None:
    tensors, metadata = contents(model)
    safetensors.write(path, tensors, {"format": "pt", **metadata})


def contents(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What a component's file holds: tensors by key, and metadata."""
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Any] = {}
    for name, packed in quantized(model):
        written = backends.of_scheme(packed.spec.scheme).write(name, packed)
        tensors |= written
        backend = backends.of_scheme(packed.spec.scheme)
        keys = {backend.key(name, part, packed.spec) for part in packed.parts}
        weights[name] = packed.spec.to_dict() | {"parts": list(packed.parts), "extra": sorted(set(written) - keys)}
    tensors |= plain(model)
    own = {"format": FORMAT_VERSION, "config": config_of(model), "weights": weights}
    return tensors, {METADATA_KEY: json.dumps(own, sort_keys=True)}


def config_of(model: nn.Module) -> dict[str, Any]:
    """The model's config as JSON values, as its library writes it, without a quantization of its own."""
    config: Any = model.config
    if hasattr(config, "to_json_string"):  # transformers
        values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        values["architectures"] = [type(model).__name__]
    else:
        made: Any = model
        values = json.loads(made.to_json_string())
    values.pop("quantization_config", None)
    return {key: value for key, value in values.items() if key not in ("_name_or_path", "_commit_hash")}


def _library_config(model: nn.Module) -> Mapping[str, Any]:
    """The `quantization_config` that lets diffusers and transformers read the folder too.

    By themselves they can where every quantized weight is of one scheme with one set of details, and belongs to a
    linear layer. Else it names sdquant: diffusers reads the folder after `import sdquant`, and without it both say so
    instead of taking codes for weights.
    """
    from torch import nn

    rows = list(quantized(model))
    specs = [packed.spec for _, packed in rows]
    tables = any(isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding) for name, _ in rows)
    if not specs:
        return {}
    most = Counter(spec.scheme for spec in specs).most_common(1)[0][0]
    ours = {"quantization_config": {"quant_method": "sdquant", "quant": most, "skip": []}}
    if tables or any(len(spec.shape) != 2 for spec in specs) or len({spec.scheme for spec in specs}) != 1:
        return ours
    backend = backends.of_scheme(specs[0].scheme)
    config = backend.config(_asked(specs[0].scheme, specs[0].details), specs[0].dtype)
    if not config:
        return ours
    for key in ("modules_to_not_convert", "llm_int8_skip_modules"):
        if key in config:
            config[key] = [*(config[key] or ()), *_kept(model, names=key == "modules_to_not_convert")]
    return {"quantization_config": config}


def _kept(model: nn.Module, *, names: bool) -> list[str]:
    """The layers that could hold a quantized weight and do not: full weight names, or module paths."""
    from .layers import kind_of, packed_of

    paths = [
        path
        for path, module in model.named_modules()
        if kind_of(module) in ("linear", "conv") and packed_of(module) is None
    ]
    return [f"{path}.weight" for path in paths] if names else paths


def _asked(scheme: str, details: Mapping[str, Any]) -> QuantSpec:
    row = backends.scheme(scheme)
    return backends.QuantSpec(row, tuple(sorted((k, details[k]) for k in row.options if k in details)))
