"""Write a quantized model so that it reloads bit for bit: `sdquant.save(pipe, "folder")`.

Weights are written under the key names of their ecosystem (bitsandbytes', quanto's, ...). In addition, the file's
metadata holds under "sdquant", as JSON, all that is needed to reload exactly:

    {"format": 1, "config": {...}, "weights": {name: {scheme, shape, dtype, details, parts: [...], extra: [keys]}},
     "rules": [...]}

"rules" is present if the model was quantized by rules (`rules.rules_of_model`).

Everything is written beside the target and renamed at the end, so that a target is complete or absent.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import LONE, METHOD
from ..errors import SettingsError
from ..formats import FORMAT_VERSION, METADATA_KEY, safetensors_writer
from ..models import is_of_transformers, key_names, peft_hooks, weight_bytes
from ..nn import plain, quantized
from ..utils.arguments import answered
from ..utils.atomic_write import place_of, whole_folder
from . import comfyui_refusal
from .file_layout import reordered
from .portable import decoded
from .quantization_config import library_config, said_rules

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core import Packed, PackedSpec
    from .library_format import LibraryFormat

log = logging.getLogger(__name__)

_MODELS = ("model_index.json", "config.json")  # one of these is in every model's folder


@answered
def save(model: Any, path: str | Path, *, overwrite: bool = False, portable: bool | str = False) -> Path:
    """Save a pipeline (folder) or component (folder, or one file if `path` ends in .safetensors).

    Args:
        overwrite: replace what is at `path`; the old model is deleted only when the new one is complete.
        portable: write a folder that diffusers loads without sdquant: weights that it cannot read quantized are
            written as floats, and SVDQuant's as its `nunchaku_lite` has them. A warning names what the libraries
            refuse only on this machine. Or a format that diffusers reads with another library or from a file alone:
            "torchao" (a folder, of `int8_row`, `int8_tensor`, `fp8,packing=float8`, `mxfp8` and `comfy:nvfp4`, which
            transformers reads too), "bfl" (one file, of `fp8,packing=float8` and `comfy:nvfp4`) or "nunchaku_lite".

    Returns:
        The path.

    Raises:
        SettingsError: the path already exists, or does not suit the model or the format.
        ConflictError: `portable`, and diffusers has no reader for the scheme; or a LoRA is on the model.
    """
    from ..models import pipelines
    from . import library_formats
    from .portable import advice, not_here, of_model, refuse

    target, form = Path(path), library_formats.find_format(portable)
    refuse_existing(target, overwrite)
    whole = pipelines.is_pipeline(model)
    if whole and target.suffix == ".safetensors":
        raise SettingsError(
            f"Cannot write {target}",
            "a pipeline is saved as a folder of several files",
            "Name a folder, or save one component",
        )
    if pipelines.is_modular(model):
        raise SettingsError(
            f"Cannot save a {type(model).__name__}",
            "it is a modular pipeline, whose index diffusers writes",
            "Call its save_pretrained(folder), which keeps quantized components so, or save one component",
        )
    parts = pipelines.weight_parts(model)
    for name, part in parts.items():
        peft_hooks.refuse_adapted(name, part, "saved")
    if form is not None:
        library_formats.refuse_target(form, target)
    elif portable and target.suffix == ".safetensors":
        refuse_portable_file(target)
    with offload_suspended(model):
        for name, part in parts.items():
            _refuse_empty(name, part)
        if portable:
            refuse(model, form)  # which looks at values
        unread = of_model(model, form)
        if target.suffix == ".safetensors":
            names = unread[0].names if unread and form is not None else frozenset()
            _write_weights(model, target, names, guard=None if form is None else False, form=form)
            return target
        if unread and not portable:
            log.warning("%s", advice(unread))
        floats = {row.component: row.names for row in unread} if portable else {}
        more = sum(row.nbytes for row in unread) if portable else 0
        for line in not_here(model, floats, form) if portable else ():
            log.warning("%s", line)
        with whole_folder(target, weight_bytes(model) + more) as folder:
            if whole:
                _write_pipeline(model, folder, floats, form, portable=bool(portable))
            else:
                _write_component(model, folder, floats.get(LONE, frozenset()), form, portable=bool(portable))
    return target


def _refuse_empty(name: str, model: nn.Module) -> None:
    """Raise SettingsError if weights of a model with suspended offloading are on the meta device."""
    from ..models import components

    empty = components.missing_parameters(model)
    if empty:
        raise SettingsError(
            f"Cannot save the {name}",
            f"{len(empty)} of its weights (such as {empty[0]!r}) are on the meta device, where they have no values",
            "Load its weights first, or remove the hooks of the tool that keeps them elsewhere",
        )


def refuse_portable_file(target: Path) -> None:
    """Raise SettingsError: only a folder is portable."""
    raise SettingsError(
        f"Cannot write {target} for diffusers without sdquant (portable)",
        "diffusers loads quantized weights only from folders, by their config.json",
        "Name a folder, or leave portable out",
    )


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Raise SettingsError if `target` exists and must not be replaced: anything without `overwrite`, and in any case a
    folder that is not a model's, such as one that holds all of a user's models. See also `place_of`."""
    if not place_of(target).exists():
        return
    if not overwrite:
        raise SettingsError(f"Cannot write {target}", "it already exists", "Choose another path, or allow overwriting")
    if target.is_dir() and not any((target / name).exists() for name in _MODELS) and any(target.iterdir()):
        why = f"it is a folder without {' or '.join(_MODELS)}, so not a model's, and its contents would be deleted"
        raise SettingsError(f"Cannot write {target}", why, "Choose another path")


def refuse_nested(source: Path, target: Path) -> None:
    """Raise SettingsError if one of the source and target folders is inside the other: the output would be read as
    input, or the source deleted. They may be the same folder, which is then replaced."""
    if "\0" in f"{source}{target}":  # not a valid path: opening it fails with an error
        return
    one, other = (Path(os.path.realpath(path)) for path in (source, target))  # which does not mind circles
    if other in one.parents:
        why = f"it contains the source model {source}, which would be deleted"
    elif one in other.parents and one.is_dir() and target.suffix not in (".safetensors", ".gguf"):
        why = f"it is inside the model's own folder {source}"
    else:
        return
    raise SettingsError(f"Cannot write {target}", why, "Choose another path")


@contextmanager
def offload_suspended(model: Any) -> Iterator[None]:
    """Hold the model's weights in ordinary memory, whatever its offload mode; afterwards the mode is restored."""
    from .. import offload
    from ..models import pipelines

    with offload.suspended(*pipelines.components_of(model).values()):
        yield


def _write_pipeline(
    pipe: Any, folder: Path, floats: Mapping[str, frozenset[str]], form: LibraryFormat | None, *, portable: bool
) -> None:
    from ..models import pipelines

    write_rest(pipe, folder)
    for name, part in pipelines.weight_parts(pipe).items():
        (folder / name).mkdir()
        _write_component(part, folder / name, floats.get(name, frozenset()), form, portable=portable)


def write_rest(pipe: Any, folder: Path) -> None:
    """Write what a pipeline has besides its models: model_index.json, schedulers, tokenizers."""
    from ..models import pipelines

    pipe.save_config(folder)
    parts = pipelines.weight_parts(pipe)
    for name, part in pipe.components.items():
        if name not in parts and hasattr(part, "save_pretrained"):
            part.save_pretrained(folder / name)


def _write_component(
    model: nn.Module, folder: Path, floats: frozenset[str], form: LibraryFormat | None, *, portable: bool
) -> None:
    """Write config and weights. `floats`: quantized weights to write as floats, so that the libraries read the rest."""
    from . import library_formats

    stem, guard = write_config(model, folder, floats, form, portable=portable)
    used = library_formats.format_of(form, model)[0] if portable else None
    _write_weights(model, folder / f"{stem}.safetensors", floats, guard=guard, form=used)


def write_config(
    model: nn.Module,
    folder: Path,
    floats: frozenset[str] = frozenset(),
    form: LibraryFormat | None = None,
    *,
    portable: bool = False,
) -> tuple[str, bool]:
    """Write a component's config.json. See `library_config`.

    Returns:
        The name of the weights file without its suffix, and whether it has to be `guarded`.
    """
    from .portable import config_entries

    config = config_of(model)
    extra = config_entries(model, floats, form) if portable else library_config(model, floats)
    (folder / "config.json").write_text(json.dumps({**config, **extra}, indent=2, sort_keys=True) + "\n")
    name = "diffusion_pytorch_model" if "_class_name" in config else "model"
    ours = extra.get("quantization_config", {}).get("quant_method") == METHOD
    return name, ours and name == "model"


def _write_weights(
    model: nn.Module,
    path: Path,
    floats: frozenset[str] = frozenset(),
    *,
    guard: bool | None = False,
    form: LibraryFormat | None = None,
) -> None:
    """Write the file. `guard`: write it as `guarded` does; None for a file that ComfyUI's own loader may be given."""
    from . import library_formats

    stored = library_formats.store_weights(form, model) if form is not None else {}
    without = floats | stored.keys()
    tensors, metadata = contents(model, without, empty=True)
    keys = keys_of(model)
    if guard or (guard is None and _is_taken_for_floats(model, tensors, keys)):
        tensors = guarded(model, tensors)
    later = {keys.get(name, name): one for name, one in decoded(model, floats).items()}
    later |= reordered(model, without, keys)
    others = {key: one.form for key, one in later.items()}
    rows = {keys.get(name, name): one for name, one in stored.items()}
    if form is not None and stored:
        metadata = form.metadata(rows, [*tensors, *others])
        others |= library_formats.join_tensors({key: one for key, one in rows.items() if one.create is not None})
        tensors |= library_formats.join_tensors({key: one for key, one in rows.items() if one.create is None})
    tensors = {key: tensor for key, tensor in tensors.items() if key not in others}
    created = chain(({key: one.make()} for key, one in later.items()), library_formats.create_tensors(rows))
    parts = {key: safetensors_writer.part_of(tensor) for key, tensor in {**tensors, **others}.items()}
    safetensors_writer.write_parts(path, parts, chain([tensors], created), {"format": "pt", **metadata})


def contents(
    model: nn.Module, without: Container[str] = (), *, empty: bool = False, own_names: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by key and the metadata of a component's file.

    Args:
        without: quantized weights to leave out. empty: put those of `file_layout.reordered` on the meta device.
        own_names: use the model's names as keys, not those that its library uses in files.
    """
    from ..kernels import prepack

    packs, floats = dict(quantized(model)), plain(model)
    mapped = (
        key_names.Mapped({name: name for name in (*floats, *packs)}) if own_names else _mapped(model, floats, packs)
    )
    keys = {name: key for key, name in mapped.names.items()}
    named = ((keys[name], packed) for name, packed in packs.items() if name not in without)
    rows = ((key, prepack.file_shape(packed) if empty else packed) for key, packed in named)
    tensors = {keys[name]: tensor for name, tensor in floats.items() if name in keys}
    for group in mapped.groups:
        tensors |= key_names.converted(group, floats)
    later = [keys[name] for name in packs if name in without]
    return written(rows, tensors, config_of(model), said_rules(model), later)


def keys_of(model: nn.Module) -> dict[str, str]:
    """Return the keys in a model's file by tensor name, except for tensors that the file has in another form."""
    return {name: key for key, name in _mapped(model, plain(model), dict(quantized(model))).names.items()}


def _mapped(model: nn.Module, floats: Mapping[str, Tensor], packs: Mapping[str, Packed]) -> key_names.Mapped:
    from ..core import is_range

    ranges = [name for name in floats if is_range(name)]  # which no library knows
    mapped = key_names.to_file(model, [*(floats.keys() - set(ranges)), *packs], packs.keys())
    return replace(mapped, names={**mapped.names, **{name: name for name in ranges}})


def written(
    rows: Iterable[tuple[str, Packed]],
    floats: Mapping[str, Tensor],
    config: Mapping[str, Any],
    rules: Mapping[str, Any] | None = None,
    later: Iterable[str] = (),
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of a file with these quantized weights, other tensors, config and rules.

    Args:
        later: names of weights that the file will have besides, as floats or in another form.
    """
    from ..kernels import prepack

    tensors: dict[str, Tensor] = {}
    weights: dict[str, Any] = {}
    specs: dict[str, PackedSpec] = {}
    for name, weight in rows:
        packed = prepack.as_filed(weight)
        backend = packed.spec.scheme.codec
        mine = backend.write(name, packed)
        tensors |= mine
        specs[name] = packed.spec
        keys = {backend.key(name, part, packed.spec) for part in packed.parts}
        weights[name] = packed.spec.to_dict() | {"parts": list(packed.parts), "extra": sorted(set(mine) - keys)}
    own = {"format": FORMAT_VERSION, "config": config, "weights": weights, **(rules or {})}
    is_text_encoder = "architectures" in config  # of transformers
    refusal = comfyui_refusal.refusal(specs, [*floats, *later], tensors, is_text_encoder=is_text_encoder)
    return tensors | dict(floats), {METADATA_KEY: json.dumps(own, sort_keys=True), **refusal}


def guarded(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Change the tensors of a text encoder's file so that transformers without sdquant refuses to load it, and ComfyUI.

    It only warns about an unknown `quant_method`, and would load quantized codes as weights. So the vector of one norm
    is written as a matrix of one row, which sdquant reads as the vector and transformers refuses for its shape.
    """
    keys = keys_of(model)
    guards = [keys.get(name, name) for name in guard_of(model)]
    return {**tensors, **{key: tensors[key][None] for key in guards}}


def _is_taken_for_floats(model: nn.Module, tensors: Mapping[str, Tensor], keys: Mapping[str, str]) -> bool:
    """Return whether ComfyUI would take the codes in a text encoder's file for weights, whatever its metadata says."""
    rows = {keys.get(name, name): packed.spec for name, packed in quantized(model)}
    return is_of_transformers(model) and comfyui_refusal.is_silent(rows, tensors)


def guard_of(model: nn.Module) -> list[str]:
    """Return the name of the norm that `guarded` writes in another shape as a list, empty if there is none."""
    norms = [name for name, tensor in plain(model).items() if tensor.ndim == 1 and name.endswith(".weight")]
    return sorted(norms)[:1]


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's config as JSON values, as its library writes it, without `quantization_config`."""
    config: Any = model.config
    if hasattr(config, "to_json_string"):  # transformers
        values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        values["architectures"] = [type(model).__name__]
    else:
        diffusers_model: Any = model
        values = json.loads(diffusers_model.to_json_string())
    values.pop("quantization_config", None)
    return {key: value for key, value in values.items() if key not in ("_name_or_path", "_commit_hash")}
