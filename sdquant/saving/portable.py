"""Folders that diffusers and transformers load without sdquant: `save(..., portable=True)`.

Weights that they cannot read quantized are written as floats: dequantized to the compute dtype of the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core import QuantSpec, registry
from ..errors import ConflictError
from ..models import is_of_transformers, weight_parts
from ..nn import quantized
from . import library_formats
from .library_formats import compute_dtype
from .quantization_config import library_config, readable, reading, refused_here, said_rules

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core import Packed, Scheme
    from .library_format import LibraryFormat


@dataclass(frozen=True)
class Later:
    """A tensor that is created only when it is written, one at a time.

    Attributes:
        form: a tensor on the meta device of its shape and dtype. make: creates it.
    """

    form: Tensor
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class FloatWeights:
    """The weights of a component that have to be written as floats.

    Attributes:
        component: its name; "model" if it is saved alone.
        schemes: of these weights.
        names: of the weights. nbytes: additional bytes that they take as floats.
    """

    component: str
    schemes: tuple[str, ...]
    names: frozenset[str]
    nbytes: int

    def __str__(self) -> str:
        several = "s" if len(self.names) > 1 else ""
        return f"{self.component} ({len(self.names)} weight{several} in {' and '.join(self.schemes)})"


def of_model(model: Any, form: LibraryFormat | None = None) -> tuple[FloatWeights, ...]:
    """Return the weights that the libraries cannot read although they know the scheme; () if they read all.

    Args:
        form: a format that a component may be written in, if it has weights for it.
    """
    rows = (_of_component(name, part, form) for name, part in weight_parts(model).items())
    return tuple(one for one in rows if one is not None)


def refuse(model: Any, form: LibraryFormat | None = None) -> None:
    """Raise ConflictError if a component is quantized to a scheme that the libraries cannot read at all, or most of its
    weights are: the folder would hold nearly a float model."""
    for name, part in weight_parts(model).items():
        schemes = Counter(packed.spec.scheme for _, packed in quantized(part))
        if schemes and form is not None and library_formats.store_weights(form, part):
            continue
        most = schemes.most_common(1)[0][0] if schemes else None
        if most is not None and ((form is not None and form.file) or not readable(most)):
            if form is not None:
                library_formats.refuse_component(form, part, most, f"the {name}")
            refuse_scheme(most, f"the {name}")
        if most is not None and most.name in library_formats.FORMATS["nunchaku_lite"].schemes:
            _require_lite(part, most, f"the {name}")
        if not schemes and said_rules(part):
            refuse_scheme(registry.scheme("rules"), f"the {name}")


def _require_lite(model: nn.Module, scheme: Scheme, what: str) -> None:
    """Raise ConflictError for a model of diffusers in SVDQuant without a layer that diffusers reads: it reads those of
    some sizes and factors only."""
    lite = library_formats.FORMATS["nunchaku_lite"]
    if not is_of_transformers(model) and not library_formats.store_weights(lite, model):
        library_formats.refuse_component(lite, model, scheme, what)


def refuse_scheme(scheme: Scheme, what: str = "a model") -> None:
    """Raise ConflictError if weights in this scheme cannot be read without sdquant."""
    if readable(scheme):
        return
    config = scheme.codec.config(QuantSpec(scheme), "bfloat16")
    names = [name for name, form in library_formats.FORMATS.items() if scheme.name in form.schemes]
    others = "".join(f"use portable={name!r} (--portable-as {name}), " for name in names)
    package = f" without the package {config['quant_method']}" if config else ""
    raise ConflictError(
        f"Cannot save {what} in {scheme} for diffusers without sdquant (portable)",
        f"diffusers and transformers cannot read {scheme}{package}",
        f"Leave portable out, {others}or quantize to nf4, fp4, bnb-int8, qint8, qfloat8, qint4 or qint2",
    )


def decoded(model: nn.Module, names: Container[str]) -> dict[str, Later]:
    """Return the named weights as floats, each dequantized only when it is written."""
    import torch

    def later(name: str, packed: Packed) -> Later:
        dtype = compute_dtype(model, name, packed)
        form = torch.empty(packed.spec.shape, dtype=dtype, device="meta")
        return Later(form, lambda: packed.spec.scheme.codec.decode(packed, dtype))

    return {name: later(name, packed) for name, packed in quantized(model) if name in names}


def said(floats: Iterable[FloatWeights], size: str) -> str:
    """Return the message after saving: the weights that were written as floats."""
    return f"Written as floats, so that diffusers reads it without sdquant: {', '.join(map(str, floats))}; {size} more"


def advice(floats: Iterable[FloatWeights]) -> str:
    """Return the message that suggests `portable` for a folder saved without it."""
    what = f"diffusers needs sdquant to load {', '.join(map(str, floats))} as saved"
    return f"{what}: portable=True (--portable) writes it as floats, which need no sdquant"


def config_entries(model: nn.Module, floats: Collection[str], form: LibraryFormat | None) -> dict[str, Any]:
    """Return the entries of a component's config.json that describe its quantization in a portable folder.

    Args:
        floats: the quantized weights that are written as floats.
    """
    used, stored = library_formats.format_of(form, model)
    return library_config(model, floats) if used is None else library_formats.config_entries(used, model, stored)


def not_here(model: Any, floats: Mapping[str, Collection[str]], form: LibraryFormat | None = None) -> list[str]:
    """Return a line for each component that its library reads elsewhere, and refuses on this machine.

    Args:
        floats: by component, the quantized weights that are written as floats. form: a format that was asked for,
            of which the user knows what reads it.
    """
    lines = []
    for name, part in weight_parts(model).items():
        is_asked = form is not None and library_formats.format_of(form, part)[0] is form
        entries = {} if is_asked else config_entries(part, frozenset(floats.get(name, ())), form)
        why = refused_here(part, entries)
        if why:
            library = "transformers" if is_of_transformers(part) else "diffusers"
            lines.append(
                f"{library} will not load the {name} on this machine ({why.strip().rstrip('.')}): load the folder with "
                "sdquant.load_model here"
            )
    return lines


def _of_component(name: str, part: nn.Module, form: LibraryFormat | None) -> FloatWeights | None:
    packed = dict(quantized(part))
    _, stored = library_formats.format_of(form, part)
    if not stored and not any(readable(row.spec.scheme) for row in packed.values()):
        return None
    names = frozenset(packed) - stored.keys() if stored else reading(part).floats
    if not names:
        return None
    schemes = tuple(dict.fromkeys(packed[weight].spec.scheme.name for weight in sorted(names)))
    forms = decoded(part, names)
    more = sum(row.form.numel() * row.form.itemsize - packed[weight].nbytes for weight, row in forms.items())
    return FloatWeights(name, schemes, names, more)
