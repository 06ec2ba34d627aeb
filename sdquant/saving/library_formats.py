"""Weights in the formats of other libraries' quantizers, `save(..., portable="torchao")`: which, and what is refused.

What is written has the values of the packed weights, bit for bit: nothing is quantized again. A weight that the format
cannot represent is written as floats, and a component with none that it can is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import QuantSpec, Unfit, dtype_name, dtype_named
from ..errors import ConflictError, SettingsError
from ..models import is_of_transformers, matched
from ..nn import quantized
from ..utils.suggestions import did_you_mean
from . import bfl_format, nunchaku_lite, torchao_format
from .quantization_config import float_linears, readable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..core import Packed, Scheme
    from .library_format import LibraryFormat, StoredWeight

FORMATS = {one.name: one for one in (torchao_format.FORMAT, bfl_format.FORMAT, nunchaku_lite.FORMAT)}
_CODES = frozenset({"codes", "scale"})  # the parts of a weight that a format can have


def find_format(portable: bool | str) -> LibraryFormat | None:
    """Return the format that `portable` names; None for True and False.

    Raises:
        SettingsError: it names none. ConflictError: it names one that is not written here.
    """
    if isinstance(portable, bool):
        return None
    if portable == "modelopt":
        raise ConflictError(
            "Cannot write a model for NVIDIA ModelOpt",
            "diffusers restores ModelOpt's layers from a pickle beside the weights (modelopt_state.pth), and sdquant "
            "writes none",
            "Use portable='bfl', whose NVFP4 is the same, or portable='torchao'",
        )
    known = FORMATS.get(portable) if isinstance(portable, str) else None
    if known is None:
        names = ", ".join(FORMATS)
        raise SettingsError(
            f"Unknown format portable={portable!r}",
            f"weights are written for {names}, or with portable=True for diffusers and transformers alone",
            did_you_mean(str(portable).lower(), FORMATS, f"Use one of {names}"),
        )
    return known


def refuse_target(form: LibraryFormat, target: Path) -> None:
    """Raise SettingsError if the format is not that of a folder, or file, as `target` is."""
    if form.file == (target.suffix == ".safetensors"):
        return
    why, fix = "its config.json", "Name a folder"
    if form.file:
        why, fix = "one file, with from_single_file", "Save one component to a file ending in .safetensors"
    raise SettingsError(f"Cannot write {target} for {form.title}", f"diffusers reads them by {why}", fix)


def refuse_spec(form: LibraryFormat, spec: QuantSpec, what: str = "a model") -> None:
    """Raise ConflictError if weights in this scheme, with these options, are none of the format's, nor of those that
    diffusers reads without it, beside others in a folder."""
    if not form.file and readable(spec.scheme):
        return
    if spec.scheme.name not in form.schemes:
        raise _other_scheme(form, spec.scheme, what)
    try:
        parts = spec.scheme.codec.layout(spec, (1024, 1024), "bfloat16")
    except Unfit:
        return
    if not parts.keys() <= _CODES:
        raise _in_blocks(form, spec.scheme, what)


def refuse_component(form: LibraryFormat, model: nn.Module, scheme: Scheme, what: str) -> None:
    """Raise ConflictError for a component, mostly in this scheme, that has no weight for the format."""
    from ..kernels import prepack

    if scheme.name not in form.schemes:
        raise _other_scheme(form, scheme, what)
    weights = (prepack.file_shape(packed) for _, packed in quantized(model) if packed.spec.scheme == scheme)
    if any("scale" not in packed.parts for packed in weights):
        raise _in_blocks(form, scheme, what)
    raise ConflictError(
        f"Cannot save {what} in {scheme} for {form.title}",
        "transformers does not read them" if is_of_transformers(model) and not form.encoders else
        "it has them in linear layers of whole blocks, with scales and factors that fit its dtypes, of which there are "
        "none",
        "Leave portable out",
    )  # fmt: skip


def _in_blocks(form: LibraryFormat, scheme: Scheme, what: str) -> ConflictError:
    return ConflictError(
        f"Cannot save {what} in {scheme} for {form.title}",
        f"its blocks of {scheme.group} weights are bitsandbytes' own",
        f"Quantize to {scheme},packing=float8, with a scale for each row",
    )


def _other_scheme(form: LibraryFormat, scheme: Scheme, what: str) -> ConflictError:
    return ConflictError(
        f"Cannot save {what} in {scheme} for {form.title}",
        f"what sdquant writes for {form.title} is {', '.join(map(_typed, form.schemes))}",
        f"Quantize to {_typed(next(iter(form.schemes)))}, or leave portable out",
    )


def store_weights(form: LibraryFormat, model: nn.Module) -> dict[str, StoredWeight]:
    """Return the quantized weights of a component, by name, that the format can have: those of linear layers that the
    model's class does not keep in float32."""
    if is_of_transformers(model) and not form.encoders:
        return {}
    stored = {name: _stored(form, model, name, packed) for name, packed in quantized(model)}
    return dict(form.choose({name: one for name, one in stored.items() if one is not None}))


def format_of(form: LibraryFormat | None, model: nn.Module) -> tuple[LibraryFormat | None, dict[str, StoredWeight]]:
    """Return the format that a component of a portable folder is written in, and the weights that are in it: `form`,
    else the one that diffusers reads by itself, if most of what it reads is of this; (None, {}) if neither has any."""
    if form is not None and (stored := store_weights(form, model)):
        return form, stored
    counts = Counter(packed.spec.scheme for _, packed in quantized(model) if readable(packed.spec.scheme))
    lite = nunchaku_lite.FORMAT
    is_most = bool(counts) and counts.most_common(1)[0][0].name in lite.schemes
    return (lite, stored) if is_most and (stored := store_weights(lite, model)) else (None, {})


def _stored(form: LibraryFormat, model: nn.Module, name: str, packed: Packed) -> StoredWeight | None:
    from torch import nn

    from ..kernels import prepack

    spec, path = packed.spec, name.rpartition(".")[0]
    writer, layer = form.schemes.get(spec.scheme.name), model.get_submodule(path)
    table = isinstance(layer, nn.Embedding)
    is_float32 = matched(path, getattr(model, "_keep_in_fp32_modules", None) or ())
    if writer is None or table or is_float32 or len(spec.shape) != 2:
        return None
    bias = getattr(layer, "bias", None)
    computing = dtype_name(compute_dtype(model, name, packed))
    has_codes = "codes" in prepack.file_shape(packed).parts
    return writer(packed, computing, None if bias is None else bias.detach()) if has_codes else None


def config_entries(form: LibraryFormat, model: nn.Module, stored: Mapping[str, StoredWeight]) -> dict[str, Any]:
    """Return the entries of config.json for a component with these weights, by name, in the format."""
    config = form.config(stored, float_linears(model, stored))
    return {"quantization_config": config} if config else {}


def join_tensors(stored: Mapping[str, StoredWeight]) -> dict[str, Tensor]:
    """Return the tensors of stored weights, given by their keys, by their own keys."""
    return {name: tensor for key, one in stored.items() for name, tensor in _under(key, one.tensors).items()}


def create_tensors(stored: Mapping[str, StoredWeight]) -> Iterator[dict[str, Tensor]]:
    """Yield those that are created only now, a weight's at a time."""
    for key, one in stored.items():
        if one.create is not None:
            yield _under(key, one.create())


def _under(key: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{key.rpartition('.')[0]}.{last}": tensor for last, tensor in tensors.items()}


def compute_dtype(model: nn.Module, name: str, packed: Packed) -> torch.dtype:
    """Return the dtype that the layer of a quantized weight computes in: a plain layer may have been cast."""
    from ..nn import QuantizedLayer

    layer = model.get_submodule(name.rpartition(".")[0])
    return layer.compute_dtype if isinstance(layer, QuantizedLayer) else dtype_named(packed.spec.dtype)


def _typed(scheme: str) -> str:
    return "fp8,packing=float8" if scheme == "fp8" else scheme
