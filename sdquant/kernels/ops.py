"""Products with packed weights as custom ops, so that torch.compile captures a quantized layer without a graph break.

Custom ops take tensors, numbers and strings, so the description of a packed weight is passed as JSON. Compiled graphs
contain one call per layer; inside it, kernels are dispatched as without torch.compile.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import Geometry, Packed, PackedSpec, registry
from . import dispatch, flop_counts, hadamard, scheme_activations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core import Backend, PackedLayout


def described(spec: PackedSpec, names: Sequence[str]) -> str:
    """Return the JSON text for the ops: the description of a packed weight and the ordered names of its parts."""
    return json.dumps([spec.to_dict(), list(names)], sort_keys=True)


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[Backend, PackedSpec, tuple[str, ...]]:
    values, names = json.loads(text)
    spec = registry.packed_spec(values)
    return spec.scheme.codec, spec, tuple(names)


@lru_cache(maxsize=4096)
def _without_rotation(text: str) -> str:
    """Return the text of the rotated weight; see `Packed.without_rotation`."""
    _, spec, names = _read(text)
    return described(spec.without_rotation, names)


def _packed(text: str, parts: Sequence[Tensor]) -> tuple[Backend, Packed, PackedLayout | None]:
    backend, spec, names = _read(text)
    packed = Packed(spec=spec, parts=dict(zip(names, parts, strict=True)))
    return backend, packed, backend.form(packed)


# Written out, since torch 2.6 makes none of `list[Tensor]`.
_SCHEMAS = {
    "linear": "(Tensor x, Tensor[] parts, Tensor? bias, str text, str compute) -> Tensor",
    "weight": "(Tensor[] parts, str text, ScalarType dtype) -> Tensor",
    "embedding": "(Tensor indices, Tensor[] parts, str text, ScalarType dtype) -> Tensor",
    "rotate": "(Tensor x, SymInt group) -> Tensor",
    "convolve": "(Tensor x, Tensor[] parts, Tensor? bias, str text, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, str compute) -> Tensor",
}


# No argument has a default: torch drops arguments that equal their default, and then misses their gradients.
@torch.library.custom_op("sdquant::linear", mutates_args=(), schema=_SCHEMAS["linear"])
def linear(x: Tensor, parts: list[Tensor], bias: Tensor | None, text: str, compute: str) -> Tensor:
    """Multiply x [..., in] by the transposed weight and add the bias: [..., out]; compute as in `dispatch.linear`."""
    backend, packed, form = _packed(text, parts)
    if backend.computes(packed.spec):
        return scheme_activations.linear(backend, packed, form, backend.activations(packed), x, bias)
    return dispatch.linear(backend, packed, form, x, bias, compute)


@linear.register_fake
def _(x: Tensor, parts: list[Tensor], bias: Tensor | None, text: str, compute: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], _read(text)[1].shape[0])


@torch.library.custom_op("sdquant::weight", mutates_args=(), schema=_SCHEMAS["weight"])
def weight(parts: list[Tensor], text: str, dtype: torch.dtype) -> Tensor:
    """Dequantize the weight into a new tensor of `dtype`."""
    backend, packed, form = _packed(text, parts)
    out = torch.empty(packed.spec.shape, dtype=dtype, device=packed.device)
    dispatch.decode_into(backend, packed, form, out)
    return out


@weight.register_fake
def _(parts: list[Tensor], text: str, dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(_read(text)[1].shape, dtype=dtype)


@torch.library.custom_op("sdquant::embedding", mutates_args=(), schema=_SCHEMAS["embedding"])
def embedding(indices: Tensor, parts: list[Tensor], text: str, dtype: torch.dtype) -> Tensor:
    """Look up rows of an embedding table, dequantized to `dtype`: [*indices.shape, width]."""
    return dispatch.embedding(*_packed(text, parts), indices, dtype)


@embedding.register_fake
def _(indices: Tensor, parts: list[Tensor], text: str, dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(*indices.shape, _read(text)[1].shape[1], dtype=dtype)


@torch.library.custom_op("sdquant::rotate", mutates_args=(), schema=_SCHEMAS["rotate"])
def rotate(x: Tensor, group: int) -> Tensor:
    """Rotate runs of `group` columns of x; see `hadamard`."""
    return hadamard.rotate(x, group).clone()


@rotate.register_fake
def _(x: Tensor, group: int) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep_group(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.group = inputs[1]


def _rotation_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return rotate(grad, ctx.group), None


rotate.register_autograd(_rotation_gradient, setup_context=_keep_group)


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor], Tensor | None, str, str], output: Tensor) -> None:
    x, parts, bias, ctx.text, _ = inputs
    ctx.dtype, ctx.biased = x.dtype, bias is not None
    ctx.save_for_backward(*parts)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, list[None], Tensor | None, None, None]:
    """Compute gradients. The weight is dequantized again: saving it would keep all layers' float weights in memory."""
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = grad @ weight(list(ctx.saved_tensors), _without_rotation(ctx.text), ctx.dtype)
        rotation = _read(ctx.text)[1].rotation
        of_x = rotate(of_x, rotation) if rotation else of_x
    if ctx.biased and ctx.needs_input_grad[2]:
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return of_x, [None] * len(ctx.saved_tensors), of_bias, None, None


linear.register_autograd(_gradient, setup_context=_keep)


@torch.library.custom_op("sdquant::convolve", mutates_args=(), schema=_SCHEMAS["convolve"])
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
    """Convolve x [b, in, ...] with the weight and add the bias: [b, out, ...]; compute as in `dispatch.linear`."""
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


def _flops(x: Tensor, parts: Any, bias: Any, text: str, *how: Any, out_val: Tensor) -> int:
    """Return the operations of a product: for each row or patch, a multiplication and an addition for each weight. As
    torch counts, without the bias."""
    shape = _read(text)[1].shape
    return 2 * (out_val.numel() // shape[0]) * math.prod(shape)


flop_counts.declare(torch.ops.sdquant.linear, _flops)
flop_counts.declare(torch.ops.sdquant.convolve, _flops)


def convolved(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, text: str, how: Geometry, compute: str | None
) -> Tensor:
    """Convolve x [b, in, ...] with the weight and add the bias, in a compiled graph; as `dispatch.convolve` if nothing
    needs a gradient."""
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
