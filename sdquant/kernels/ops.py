"""Products with packed weights as operators of torch, so that torch.compile takes a quantized layer whole.

What a packed weight is, beyond its tensors, goes in as text: operators take tensors, numbers and texts. Compiled graphs
hold one call for a layer; inside, the choice of kernels is made as it is without torch.compile.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import registry
from ..core.backend import Geometry, Packed, PackedSpec
from . import dispatch, scheme_activations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.backend import Backend
    from ..core.packed_layout import Form


def described(spec: PackedSpec, names: Sequence[str]) -> str:
    """The text for the operators: the description of a packed weight, and the names of its parts in their order."""
    return json.dumps([spec.to_dict(), list(names)], sort_keys=True)


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[Backend, PackedSpec, tuple[str, ...]]:
    spec, names = json.loads(text)
    return registry.of_scheme(spec["scheme"]), PackedSpec.from_dict(spec), tuple(names)


def _packed(text: str, parts: Sequence[Tensor]) -> tuple[Backend, Packed, Form | None]:
    backend, spec, names = _read(text)
    packed = Packed(spec=spec, parts=dict(zip(names, parts, strict=True)))
    return backend, packed, backend.form(packed)


# No argument has a default: torch takes arguments that equal theirs away, and then misses their gradients.
@torch.library.custom_op("sdquant::linear", mutates_args=())
def linear(x: Tensor, parts: list[Tensor], bias: Tensor | None, text: str, compute: str) -> Tensor:
    """x [..., in] times the transposed weight, and the bias: [..., out] in x's dtype; compute as in `choice.linear`."""
    backend, packed, form = _packed(text, parts)
    if backend.computes(packed.spec):
        return scheme_activations.linear(backend, packed, form, backend.activations(packed), x, bias)
    return dispatch.linear(backend, packed, form, x, bias, compute)


@linear.register_fake
def _(x: Tensor, parts: list[Tensor], bias: Tensor | None, text: str, compute: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], _read(text)[1].shape[0])


@torch.library.custom_op("sdquant::weight", mutates_args=())
def weight(parts: list[Tensor], text: str, dtype: torch.dtype) -> Tensor:
    """The float weight, in memory of its own."""
    backend, packed, form = _packed(text, parts)
    out = torch.empty(packed.spec.shape, dtype=dtype, device=packed.device)
    dispatch.decode_into(backend, packed, form, out)
    return out


@weight.register_fake
def _(parts: list[Tensor], text: str, dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(_read(text)[1].shape, dtype=dtype)


@torch.library.custom_op("sdquant::embedding", mutates_args=())
def embedding(indices: Tensor, parts: list[Tensor], text: str, dtype: torch.dtype) -> Tensor:
    """The rows of a table, float: [*indices.shape, width]."""
    return dispatch.embedding(*_packed(text, parts), indices, dtype)


@embedding.register_fake
def _(indices: Tensor, parts: list[Tensor], text: str, dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(*indices.shape, _read(text)[1].shape[1], dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor], Tensor | None, str, str], output: Tensor) -> None:
    x, parts, bias, ctx.text, _ = inputs
    ctx.dtype, ctx.biased = x.dtype, bias is not None
    ctx.save_for_backward(*parts)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, list[None], Tensor | None, None, None]:
    """The weight is decoded again: kept, the weights of all layers would be in memory as floats."""
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = grad @ weight(list(ctx.saved_tensors), ctx.text, ctx.dtype)
    if ctx.biased and ctx.needs_input_grad[2]:
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return of_x, [None] * len(ctx.saved_tensors), of_bias, None, None


linear.register_autograd(_gradient, setup_context=_keep)


@torch.library.custom_op("sdquant::convolve", mutates_args=())
def _convolve(
    x: Tensor,
    parts: list[Tensor],
    bias: Tensor | None,
    text: str,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    compute: str,
) -> Tensor:
    """x [b, in, ...] convolved with the weight, and the bias: [b, out, ...]; compute as in `choice.linear`."""
    how = Geometry(stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation), groups=1)
    backend, packed, form = _packed(text, parts)
    if backend.computes(packed.spec):
        return scheme_activations.convolution(
            backend, packed, form, backend.activations(packed), x, bias, how
        ).contiguous()
    return dispatch.convolve(backend, packed, form, x, bias, how, compute).contiguous()


@_convolve.register_fake
def _(
    x: Tensor,
    parts: list[Tensor],
    bias: Tensor | None,
    text: str,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    compute: str,
) -> Tensor:
    like = x.new_empty(_read(text)[1].shape)
    done: Tensor = dispatch.CONVOLUTIONS[len(stride) - 1](x, like, None, stride, padding, dilation)
    return done.contiguous()


def convolved(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, text: str, how: Geometry, compute: str | None
) -> Tensor:
    """x [b, in, ...] convolved with the weight, and the bias, in a compiled graph; as `choice.convolve` does it where
    nothing needs a gradient."""
    gradient = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    done: Tensor
    if not gradient and how.groups == 1 and not isinstance(how.padding, str):
        sizes = list(how.stride), list(how.padding), list(how.dilation)
        done = _convolve(x, parts, bias, text, *sizes, compute or "")
    else:
        of = weight(parts, text, x.dtype)
        conv = dispatch.CONVOLUTIONS[len(how.stride) - 1]
        done = conv(x, of, bias, how.stride, how.padding, how.dilation, how.groups)
    return done
