"""Lay out a component for a single file that other tools read: the original tensor names, layers fused as there.

Shared by `export_gguf` and `export_single_file`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import LONE, MAIN, dtype_name
from ..errors import ConflictError, IncompatibleError, MissingComponentError, SettingsError, UnsupportedFileError
from ..formats import model_families, refused_files
from ..models import OutputTensor, convert, original_names
from ..planning import is_quantized_by_default, rounded_twice, statistics_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import QuantSpec
    from ..formats import Checkpoint, TensorFile
    from ..models import Detected, RoundingLoss
    from ..planning import Request

log = logging.getLogger(__name__)


def chosen(detected: Detected, named: tuple[str, ...] | None, *, single: bool) -> dict[str, Checkpoint]:
    """Return the components to quantize, by name.

    Args:
        named: names from the caller; None for the default ones, or for the main one if a `single` file is written.
    """
    if detected.component == "lora":
        refused_files.refuse_lora(detected.path, detected.sources[LONE].names)
    if set(detected.sources) == {LONE}:
        return {LONE: main_only(detected.sources[LONE])}
    unknown = [name for name in named or () if name not in detected.sources]
    if unknown:
        raise SettingsError(
            f"Unknown component {unknown[0]!r}",
            f"{detected.path} has {', '.join(detected.sources)}",
            "Name one of them",
        )
    names = named or [name for name in detected.sources if is_quantized_by_default(name)]
    if single and named is None:
        names = [name for name in MAIN if name in detected.sources][:1]
    if single and len(names) != 1:
        raise SettingsError(
            f"Cannot write {' and '.join(names)} to one file" if names else f"Cannot write {detected.path} to one file",
            "one file holds exactly one component",
            "Name the component to write",
        )
    if not names:
        raise MissingComponentError(
            f"Cannot quantize {detected.path}", "none of its components is quantized by default", "Name a component"
        )
    return {name: detected.sources[name] for name in names}


def floats_to_quantize(
    detected: Detected, request: Request, *, single: bool, floats: Callable[[Checkpoint], Checkpoint]
) -> dict[str, Checkpoint]:
    """Return the components to quantize as `floats` makes them, by name; see `chosen`.

    Raises:
        SettingsError: the request's statistics are those of other weights.
    """
    sources = {name: floats(src) for name, src in chosen(detected, request.components, single=single).items()}
    warn_of(*statistics_arguments.refuse_other_weights(request.quant_stats, sources))
    return sources


def main_only(src: Checkpoint) -> Checkpoint:
    """Reduce a checkpoint of several models, which GGUF readers reject, to its UNet or transformer; others stay."""
    row = model_families.recognise(src.names)
    if row is None or row.component != "checkpoint":
        return src
    quantized = {name: weight for name, weight in src.prequantized.items() if name.startswith(convert.LDM)}
    others = (weight for name, weight in src.prequantized.items() if name not in quantized)
    theirs = {key for weight in others for key in (*weight.keys.values(), *weight.extra)}
    tensors = {key: info for key, info in src.tensors.items() if key.startswith(convert.LDM) and key not in theirs}
    # What is about the whole file, such as a marker, is carried by the first weight, wherever it stands.
    quantized = {
        name: replace(weight, extra=tuple(key for key in weight.extra if key in tensors))
        for name, weight in quantized.items()
    }
    return replace(src, tensors=tensors, home={key: src.home[key] for key in tensors}, prequantized=quantized)


def as_floats(src: Checkpoint, dtype: str | None = None) -> Checkpoint:
    """Return a component with float weights, and warn if that dequantizes them.

    Args:
        dtype: of the floats, if they are dequantized; see `models.with_float_weights`.
    """
    from ..models import with_float_weights

    if not src.prequantized:
        return src
    log.warning("%s", rounded_twice(src.path, sorted({weight.scheme for weight in src.prequantized.values()})))
    return with_float_weights(src, dtype)


def warn_of(*lines: RoundingLoss | str) -> None:
    """Log what the second rounding of converted weights has cost, and other sentences."""
    for line in lines:
        if str(line):
            log.warning("%s", line)


def refuse_quantized(src: Checkpoint, spec: QuantSpec) -> None:
    """Raise ConflictError if weights of the component are already quantized."""
    if src.prequantized:
        raise ConflictError(
            f"Cannot quantize {src.path} to {spec}",
            "its weights are already quantized",
            "Start from float weights",
        )


def refuse_unchanged(src: Checkpoint, spec: QuantSpec, changed: bool) -> None:
    """Raise IncompatibleError unless weights of the component will be quantized."""
    if not changed:
        raise IncompatibleError(
            f"Cannot quantize {src.path} to {spec}",
            "it has no weight that would be quantized",
            "Check that it is a model with float weights",
        )


def names(src: Checkpoint, alone: bool) -> tuple[list[OutputTensor], model_families.Family | None]:
    """Return the tensors to write, and the model family that uses their names."""
    row = model_families.recognise(src.names)
    model = row is not None and row.draws
    prefix = convert.prefix_of(src.names) if model else ""
    keys = {key.removeprefix(prefix): key for key in src.tensors}
    bare = [OutputTensor(name, (key,)) for name, key in keys.items()]
    if row is not None and row.foreign:
        return bare, model_families.recognise(keys) or row
    kind = src.class_name or (row.class_name if row else None)
    parts = _authors(src, kind, keys) if alone else None
    if parts is not None:
        return parts, model_families.recognise([one.name for one in parts])
    if alone and (model or (row is None and src.library == "diffusers")):
        log.warning(
            "%s: the tensor names that other tools use for this %s are unknown; its file has diffusers' names",
            src.path, kind,
        )  # fmt: skip
    return bare, row


def _authors(src: Checkpoint, class_name: str | None, keys: Mapping[str, str]) -> list[OutputTensor] | None:
    """Return the component under the original names; None if diffusers could not convert them back.

    Args:
        keys: the file's key of each tensor, by diffusers' name.
    """
    shapes = {name: src.tensors[key].shape for name, key in keys.items()}
    parts = original_names.written(class_name, shapes)
    if parts is None:
        return None
    there = {
        one.name: replace(src.tensors[keys[one.sources[0]]], shape=original_names.shape_of(one, shapes))
        for one in parts
    }
    file = replace(src, tensors=there, home={name: src.files[0] for name in there})
    try:
        back = convert.convert(file, "transformer", replace(src, class_name=class_name))
    except UnsupportedFileError:
        return None
    if back is None or {name: info.shape for name, info in back.tensors.items()} != shapes:
        return None
    return [replace(one, sources=tuple(keys[source] for source in one.sources)) for one in parts]


def describe_component(part: OutputTensor) -> str:
    """Return the tensor's name for messages: its name in the source, if it has only one, so that users can skip it."""
    return part.sources[0] if len(part.sources) == 1 else part.name


def dtype_of(part: OutputTensor, src: Checkpoint) -> str:
    """Return the dtype of the tensor that `read` returns."""
    import torch

    dtypes = {src.tensors[source].dtype for source in part.sources}
    if len(dtypes) == 1:
        return dtypes.pop()
    wide = reduce(torch.promote_types, (getattr(torch, dtype) for dtype in dtypes))
    return dtype_name(wide)


def read(part: OutputTensor, src: Checkpoint, files: Mapping[Path, TensorFile], *, exact: bool = False) -> Tensor:
    """Read a tensor to write from the opened files of `src`. exact: see `Checkpoint.read`."""
    import torch

    tensors = [src.read(files, source, exact=exact) for source in part.sources]
    tensor: Tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if part.swapped:
        tensor = torch.cat(tensor.chunk(2)[::-1])
    return tensor if part.shape is None else tensor.reshape(part.shape)
