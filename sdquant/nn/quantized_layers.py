"""Layers with packed weights, and the functions that build them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import Backend, Geometry, Packed, PackedSpec
from ..errors import IncompatibleError
from ..kernels import dispatch, dispatch_guard, ops, prepack, preparation, scheme_activations, scratch
from ..utils.autocast import is_autocast_on
from ..utils.tensors import put_parameter
from . import state_dict as states
from . import weight_functions
from .autocast import autocast_input, without_autocast
from .autograd import Computed, Decoded, convolve
from .layer_checks import require_fit, settings_of, warn_of_cast
from .packed_tensor import LayerWeight
from .scaled_embeddings import SCALE, is_scaled, scaled
from .state_dict import LIKE, PREFIX

if TYPE_CHECKING:
    from ..core import Activations, PackedLayout

_KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear", nn.Conv1d: "conv", nn.Conv2d: "conv", nn.Conv3d: "conv", nn.Embedding: "embedding"
}  # fmt: skip


def kind_of(module: nn.Module) -> str | None:
    """Return "linear", "conv" or "embedding" if the module's weight can be quantized, else None.

    Exact types and subclasses that keep the forward of `torch.nn` count, and Gemma's tables (`scaled_embeddings`);
    another subclass with its own forward would read the weight itself. An `nn.Embedding` with `max_norm` is excluded:
    it writes into its weight when it is used.
    """
    for base, kind in _KINDS.items():
        if isinstance(module, base) and (type(module).forward is base.forward or is_scaled(module)):
            return None if getattr(module, "max_norm", None) is not None else kind
    return None


class QuantizedLayer(nn.Module):
    """Base of the quantized layers. Comes before the `torch.nn` class in their bases.

    `weight` is a tensor that is dequantized when it is used; see `packed_tensor`. `dequantize()` returns the values.

    Quantized layers are built by `quantized_layer` only. Called like the `torch.nn` class, the classes build a layer of
    that class: PEFT builds the two sides of a convolution's LoRA by `type(base_layer)(...)`, and both must be floats.
    """

    spec: PackedSpec
    _backend: Backend
    _form: PackedLayout | None  # how the packed weight lies in memory, for the kernels
    _activations: Activations | None = None  # how they become integers, where the scheme says so itself
    _text: str  # all about it but its tensors, for compiled graphs
    _path: str = ""  # in its model, for errors
    # "int8", "fp8", "fp4": what products are in where that pays (`kernels.int8_linear` and so on); "library": by
    # the kernels of the scheme's library; None: with the float weight. See `set_compute`.
    compute: str | None = None
    # What changes the weight and the bias each time they are used; see `weight_functions`.
    weight_function: Sequence[weight_functions.Function] = ()
    bias_function: Sequence[weight_functions.Function] = ()
    # Products of activations of that dtype and device with all looked up that can be.
    _prepared: Any = None  # a `Prepared`; a convolution's takes x and the layer
    _prepared_for: tuple[torch.dtype, torch.device] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return next(base for base in _KINDS if issubclass(cls, base))(*args, **kwargs)
        return super().__new__(cls)

    def _adopt(self, original: nn.Module, packed: Packed, dtype: torch.dtype) -> None:
        """Take everything but the weight from `original`, and the weight from `packed`."""
        self.__dict__.update(settings_of(original))
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            getattr(self, name).update(getattr(original, name))
        self._parameters.pop("weight", None)
        self.training = original.training
        if self._parameters.get("bias") is None:
            like = torch.empty(0, dtype=dtype, device=packed.device)
            put_parameter(self, LIKE, nn.Parameter(like, requires_grad=False))
        self._hold(packed)

    def _hold(self, packed: Packed) -> None:
        for name, tensor in packed.parts.items():
            put_parameter(self, PREFIX + name, nn.Parameter(tensor, requires_grad=False))
        self._know(packed)

    def _know(self, packed: Packed) -> None:
        """Set the attributes derived from a packed weight whose parts are this layer's parameters already."""
        self.spec = packed.spec
        self._backend = packed.spec.scheme.codec
        self.part_names = tuple(packed.parts)
        self._form, self._activations = self._backend.form(packed), self._backend.activations(packed)
        self._text = ops.described(packed.spec, self.part_names)
        self._prepared = self._prepared_for = None

    def lay_out(self, device: str) -> None:
        """Convert the packed weight to the memory layout for the device that will compute with it; see
        `kernels.prepack`."""
        packed = self.packed
        converted = prepack.laid_out(packed, device, self.compute_dtype if self.compute == dispatch.LIBRARY else None)
        if converted is not packed:
            for name in self.part_names:
                del self._parameters[PREFIX + name]
            self._hold(converted)

    @property
    def packed(self) -> Packed:
        """Return the packed weight; its parts are this layer's own tensors, not copies."""
        parts = {name: self._parameters[PREFIX + name] for name in self.part_names}
        return Packed(spec=self.spec, parts={name: part.data for name, part in parts.items() if part is not None})

    def __getattr__(self, name: str) -> Any:
        if name == "weight":  # see the class
            return LayerWeight(self.packed, self.compute_dtype, self._path)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            states.put_weight(self, value)
        else:
            super().__setattr__(name, value)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype to compute in: that of the bias, else that of the weight before quantization, or that of the
        layer's last cast."""
        bias = self._parameters.get("bias")
        return self._parameters[LIKE].dtype if bias is None else bias.dtype  # type: ignore[union-attr]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantized weight, in new memory."""
        packed = self.packed
        out = torch.empty(self.spec.shape, dtype=dtype or self.compute_dtype, device=packed.device)
        dispatch.decode_into(self._backend, packed, self._form, out)
        return out

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the prepared calls: they refer to objects of the C extension, and are rebuilt at the next call."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_prepared")}

    def _packed_for(self, x: Tensor) -> Packed:
        """Return the packed weight on the device of `x`."""
        return self.packed

    def _float_weight(self, x: Tensor) -> Tensor:
        """Dequantize the weight to the dtype of `x`, into the shared workspace unless backward will need it."""
        packed = self._packed_for(x)
        fresh = _gradient_of(x, self)
        out = x.new_empty(self.spec.shape) if fresh else scratch(self.spec.shape, x.dtype, x.device)
        dispatch.decode_into(self._backend, packed, self._form, out)
        return out

    def _part_tensors(self) -> list[Tensor]:
        return [getattr(self, PREFIX + name) for name in self.part_names]

    def _bias(self, x: Tensor) -> Tensor | None:
        bias = self._parameters.get("bias")
        return None if bias is None else bias.to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Apply moves by `fn` to the packed parts, but not its casts (a scale cast to half is a wrong scale)."""
        before = self.compute_dtype
        packed = {PREFIX + name: self._parameters.pop(PREFIX + name) for name in self.part_names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, part in packed.items():
            assert part is not None
            moved = fn(part.data)
            if moved.dtype != part.dtype:
                moved = part.data.to(moved.device)
            self._parameters[name] = nn.Parameter(moved, requires_grad=False)
        if self.compute_dtype != before:
            warn_of_cast(before, self.compute_dtype)
        return self

    def set_part(self, name: str, value: Tensor) -> None:
        """Replace a part of the packed weight by a tensor of the same dtype and shape."""
        self._parameters[PREFIX + name] = nn.Parameter(value, requires_grad=False)

    def set_detail(self, name: str, value: Any) -> None:
        """Change one of the details of the packed weight (`PackedSpec.details`)."""
        packed = self.packed
        self._know(replace(packed, spec=replace(packed.spec, details={**packed.spec.details, name: value})))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        states.save_numbers(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the layer; see `state_dict`. A packed weight in another memory layout is converted to this layer's."""
        self._prepared = self._prepared_for = None  # with `assign` a part keeps the dtype that it comes in
        metadata, errors = args[0], args[-1]
        if not states.quantize_floats(self, state_dict, prefix, errors):
            states.refuse_others(self, state_dict, prefix, metadata, errors)
        states.load_numbers(self, state_dict, prefix, errors)
        prepack.bring_into_order(state_dict, prefix + PREFIX, self.packed)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        how = f", compute={self.compute}" if self.compute else ""
        bias = self._parameters.get("bias") is not None
        return f"{list(self.spec.shape)}, scheme={self.spec.scheme}, bias={bias}{how}"


class QuantizedLinear(QuantizedLayer, nn.Linear):
    """[..., in] -> [..., out]."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name: AnimateDiff's motion modules use it as a keyword
        if self.weight_function or self.bias_function:
            return weight_functions.changed_linear(self, autocast_input(input))
        x, watched = input, dispatch_guard.seen(input)
        if not watched:
            prepared = self._prepared
            if prepared is not None:
                y: Tensor | None = prepared(x, self._parameters)
                if y is not None:
                    return y
            require_fit(x, self.spec.shape)
            if is_autocast_on(x.device.type):
                return without_autocast(self.forward, x)
        x = autocast_input(x)
        if watched and dispatch_guard.transformed():
            return F.linear(x, _carried(self, x.dtype), self._bias(x))
        if watched:
            return cast("Tensor", ops.linear(x, self._part_tensors(), self._bias(x), self._text, self.compute or ""))
        if not self._backend.computes(self.spec):
            if _gradient_of(x, self):
                return cast("Tensor", Decoded.apply(x, self._bias(x), self, None))  # type: ignore[no-untyped-call]
            self._prepare(x)
            return self._linear(x, self._bias(x))
        if not _gradient_of(x, self):
            if self._prepare(x) and self._prepared is not None:
                return self.forward(x)
            backend, form, how = self._backend, self._form, self._activations
            return scheme_activations.linear(backend, self._packed_for(x), form, how, x, self._bias(x))
        return _with_bias(Computed.apply(x, self, None), self._bias(x), 0)  # type: ignore[no-untyped-call]

    def _prepare(self, x: Tensor) -> bool:
        """Look up the kernels for activations like `x`. Return whether those before were for others."""
        kind = x.dtype, x.device
        if kind == self._prepared_for:
            return False
        packed = self.packed
        if packed.device != x.device:  # it is moved for this call alone
            return False
        self._prepared_for, self._prepared = kind, None
        if self._activations is not None:
            self._prepared = scheme_activations.prepared(
                self._backend, packed, self._form, self._activations, x.dtype, PREFIX
            )
        elif not self._backend.computes(self.spec):
            self._prepared = preparation.prepared(self._backend, packed, self._form, x.dtype, self.compute, PREFIX)
        else:
            self._prepared = scheme_activations.prepared_floats(self._backend, packed, self._form, x.dtype, PREFIX)
        return True

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return dispatch.linear(self._backend, self._packed_for(x), self._form, x, bias, self.compute)


class _QuantizedConvolution(QuantizedLayer):
    def forward(self, input: Tensor) -> Tensor:
        if not dispatch_guard.seen(input) and self._prepared is not None:
            y: Tensor | None = self._prepared(input, self)
            if y is not None:
                return y
        return _convolved(self, input)

    def _prepare(self, x: Tensor) -> None:
        """Look up the kernels for activations like `x`."""
        packed, kind = self.packed, (x.dtype, x.device)
        if kind != self._prepared_for and packed.device == x.device:
            self._prepared_for = kind
            of = packed, self._form, x.dtype, self.compute, PREFIX
            self._prepared = preparation.prepared_convolution(self._backend, *of)


class QuantizedConv1d(_QuantizedConvolution, nn.Conv1d):
    """[b, in, l] -> [b, out, l']."""


class QuantizedConv2d(_QuantizedConvolution, nn.Conv2d):
    """[b, in, h, w] -> [b, out, h', w']."""


class QuantizedConv3d(_QuantizedConvolution, nn.Conv3d):
    """[b, in, d, h, w] -> [b, out, d', h', w']."""


class QuantizedEmbedding(QuantizedLayer, nn.Embedding):
    """[...] of indices -> [..., width]. Dequantizes only the rows that are looked up, if the packing allows it.

    Attributes:
        float_class: the class whose place it takes, which has a scale as well if it is Gemma's.
    """

    float_class: type[nn.Module] = nn.Embedding

    def _adopt(self, original: nn.Module, packed: Packed, dtype: torch.dtype) -> None:
        super()._adopt(original, packed, dtype)
        self.float_class = type(original)

    def lay_out(self, device: str) -> None:
        """Keep the layout: in a GPU layout each looked-up row would be spread over as many places as it has fields."""

    def forward(self, input: Tensor) -> Tensor:
        return scaled(self._looked_up(input), self._buffers.get(SCALE))

    def _looked_up(self, indices: Tensor) -> Tensor:
        dtype = self.compute_dtype
        if self.weight_function:
            return weight_functions.changed_embedding(self, indices, torch.empty(0, dtype=dtype, device=indices.device))
        if dispatch_guard.transformed():
            return F.embedding(indices, _carried(self, dtype))
        if dispatch_guard.seen(indices):
            return cast("Tensor", ops.embedding(indices, self._part_tensors(), self._text, dtype))
        return dispatch.embedding(self._backend, self.packed, self._form, indices, dtype)


def _convolved(layer: Any, x: Tensor) -> Tensor:
    if not dispatch_guard.seen(x):
        require_fit(x, layer.spec.shape, layer.groups)
    if x.ndim == len(layer.spec.shape) - 1:  # one sample without a batch
        return _convolved(layer, x[None])[0]
    padding = layer.padding
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = (0,) * len(layer.stride)
    geometry = Geometry(stride=layer.stride, padding=padding, dilation=layer.dilation, groups=layer.groups)
    # After padding, some of which autocast does in float32.
    if not dispatch_guard.seen(x) and is_autocast_on(x.device.type):
        return without_autocast(lambda x: _with_geometry(layer, x, geometry), x)
    return _with_geometry(layer, autocast_input(x), geometry)


def _with_geometry(layer: Any, x: Tensor, geometry: Geometry) -> Tensor:
    if layer.weight_function or layer.bias_function:
        return weight_functions.changed_convolution(layer, x, geometry)
    computes = layer._backend.computes(layer.spec)
    if dispatch_guard.transformed():
        run = dispatch.CONVOLUTIONS[len(geometry.stride) - 1]
        weight, bias = _carried(layer, x.dtype), layer._bias(x)
        return cast(
            "Tensor", run(x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
        )
    if not computes and dispatch_guard.seen(x):
        return ops.convolved(x, layer._part_tensors(), layer._bias(x), layer._text, geometry, layer.compute)
    if not computes and not _gradient_of(x, layer):
        layer._prepare(x)
        return convolve(layer, x, layer._bias(x), geometry)
    if not computes:
        return cast("Tensor", Decoded.apply(x, layer._bias(x), layer, geometry))  # type: ignore[no-untyped-call]
    if not dispatch_guard.seen(x) and not _gradient_of(x, layer):
        backend, form, how = layer._backend, layer._form, layer._activations
        return scheme_activations.convolution(backend, layer._packed_for(x), form, how, x, layer._bias(x), geometry)
    plain = geometry.groups == 1 and not isinstance(geometry.padding, str)
    if dispatch_guard.seen(x) and plain and not _gradient_of(x, layer):
        return ops.convolved(x, layer._part_tensors(), layer._bias(x), layer._text, geometry, None)
    y = Computed.apply(x, layer, geometry)  # type: ignore[no-untyped-call]
    return _with_bias(y, layer._bias(x), len(layer.stride))


def _carried(layer: QuantizedLayer, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight for torch's own product while torch.func or forward-mode AD transforms the layer.

    Raises:
        IncompatibleError: the layer quantizes its activations, for which torch cannot propagate a derivative.
    """
    if layer._backend.computes(layer.spec):
        raise IncompatibleError(
            f"Cannot transform {layer._path or 'a layer'!r} in {layer.spec.scheme} (torch.func, forward-mode AD)",
            "its activations are quantized, and rounding has no derivative to carry along",
            "Use backward (torch.autograd.grad), or rules without act_qtype",
        )
    return cast("Tensor", ops.weight(layer._part_tensors(), layer._text, dtype))


def _with_bias(y: Tensor, bias: Tensor | None, after: int) -> Tensor:
    """Add the bias to y; `after`: number of dimensions after that of the outputs."""
    return y if bias is None else y + bias.view(-1, *(1,) * after)


def _gradient_of(x: Tensor, layer: QuantizedLayer) -> bool:
    """Return whether a product needs a gradient: of its activations, or of the layer's bias."""
    if not torch.is_grad_enabled():
        return False
    bias = layer._parameters.get("bias")
    return x.requires_grad or (bias is not None and bias.requires_grad)
