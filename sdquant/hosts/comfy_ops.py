"""ComfyUI's layers, with weights that may be packed: its `custom_operations`.

ComfyUI builds a model from the classes of an operations class, and then loads a state dict into it. One of our layers
that loads a `ComfyPackedTensor` becomes a `ComfyPackedLayer`: its packed tensors are ordinary parameters, which
ComfyUI moves, pins and offloads. Its forward dequantizes them on the input's device and applies ComfyUI's weight
functions, which add LoRAs. All other layers, and weights that are not packed, behave as in ComfyUI's `manual_cast`.

ComfyUI detects the model of a state dict by its shapes, counts its parameters, renames them, and for some models
rewrites weights. So a packed weight is passed as a tensor of the float weight's shape and dtype. Any other use of its
values dequantizes it first, which is correct but takes more memory. Writing into it is an error.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import dispatch, ops, scratch
from ..nn import LIKE_KEY, QuantizedLayer, packed_tensor
from ..utils.malloc_trim import look_beside


class ComfyPackedTensor(packed_tensor.PackedTensor):
    """Packed weight in a state dict, with error texts for ComfyUI."""

    way_out: ClassVar[str] = (
        "Remove the node that changes weights (such as a LoRA by hooks), or load the model without sdquant"
    )
    way_out_of_fusing: ClassVar[str] = way_out


class Counted(ComfyPackedTensor):
    """Packed weight in a layer's state dict, which reports its packed size in bytes: ComfyUI plans its offload by that.

    (ComfyUI reads `nbytes`; before 2026, `nelement() * element_size()`.)
    """

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the size of the packed tensors in bytes."""
        return self.packed.nbytes

    def nelement(self) -> int:
        """Return a number of elements whose size is at least that of the packed tensors."""
        return -(-self.packed.nbytes // self.element_size())


_CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")


class Loading(nn.Module):
    """Mixin of our layers until a weight is loaded. Precedes ComfyUI's class in their bases."""

    packed_class: Any  # the PackedLayer that it becomes

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        weight = state_dict.get(f"{prefix}weight")
        self._allocate(packed=isinstance(weight, ComfyPackedTensor))
        rest = state_dict
        if isinstance(weight, ComfyPackedTensor):
            expected = self._weight_shape()
            if tuple(weight.shape) != expected:
                error_msgs.append(
                    f"{prefix}weight is {list(weight.shape)} in the file, the model expects {list(expected)}"
                )
                return
            rest = {key: value for key, value in state_dict.items() if key != f"{prefix}weight"}
            self._parameters["weight"] = None  # so that nobody misses it
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if isinstance(weight, ComfyPackedTensor):
            import comfy.model_management  # type: ignore[import-not-found]

            self.__class__ = self.packed_class
            self._adopt(self, weight.packed, weight.dtype)  # type: ignore[operator]
            self.lay_out(str(comfy.model_management.get_torch_device()))  # type: ignore[operator]
            self._parameters.pop(LIKE_KEY, None)  # a tensor without memory is nothing to pin
            self.shown_dtype = weight.dtype

    def _allocate(self, *, packed: bool) -> None:
        """Allocate the tensors that a state dict is copied into, if `__init__` did not."""

    def _weight_shape(self) -> tuple[int, ...]:
        raise NotImplementedError


class _Linear(Loading):
    """Linear layer that allocates its weight only if a float one is loaded: Windows commits memory on allocation."""

    in_features: int
    out_features: int

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.made_with = (bias, dtype)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    def _allocate(self, *, packed: bool) -> None:
        bias, dtype = self.made_with
        shapes = {"weight": None if packed else self._weight_shape(), "bias": (self.out_features,) if bias else None}
        for name, shape in shapes.items():
            if shape is not None and self._parameters.get(name) is None:
                setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def _weight_shape(self) -> tuple[int, ...]:
        return self.out_features, self.in_features


class _Convolution(Loading):
    def _weight_shape(self) -> tuple[int, ...]:
        weight = self._parameters["weight"]
        assert weight is not None
        return tuple(weight.shape)


class ComfyPackedLayer(QuantizedLayer):
    """ComfyUI layer whose weight is packed. `weight` is a `PackedTensor`."""

    shown_dtype: torch.dtype
    weight_function: list[Any]
    bias_function: list[Any]

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            return ComfyPackedTensor(self.packed, self.shown_dtype)
        return super().__getattr__(name)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype that `weight` reports; the layer computes in the dtype of its input."""
        return self.shown_dtype

    def forward_comfy_cast_weights(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer with its dequantized weight; called by ComfyUI's forward."""
        if not torch.compiler.is_compiling():
            look_beside(x)
        weight = self.decoded(x.dtype, x.device, fresh=torch.is_grad_enabled() and x.requires_grad)
        for function in self.weight_function:
            weight = function(weight)
        bias = self._parameters.get("bias")
        if bias is not None:
            bias = bias.to(device=x.device, dtype=x.dtype, copy=bool(self.bias_function))  # type: ignore[assignment]
            for function in self.bias_function:
                bias = function(bias)
        return self._run(x, weight, bias, *args, **kwargs)

    def decoded(self, dtype: torch.dtype, device: torch.device, *, fresh: bool = True) -> Tensor:
        """Dequantize the weight, into new memory if `fresh`, else into the workspace, which the next call reuses."""
        if torch.compiler.is_compiling():  # one node of the graph, for whatever scheme
            parts = [part.to(device) for part in self._part_tensors()]
            return cast("Tensor", ops.weight(parts, self._text, dtype))
        packed = self.packed.to(device)
        shape = self.spec.shape
        out = torch.empty(shape, dtype=dtype, device=device) if fresh else scratch(shape, dtype, device)
        dispatch.decode_into(self._backend, packed, self._form, out)
        return out

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save under the names of the float weights: ComfyUI looks them up for LoRAs, and sums up their bytes."""
        destination[f"{prefix}weight"] = Counted(self.packed, self.shown_dtype)
        bias = self._parameters.get("bias")
        if bias is not None:
            destination[f"{prefix}bias"] = bias if keep_vars else bias.detach()


class _PackedLinear(ComfyPackedLayer):
    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        return F.linear(x, weight, bias)


class _PackedConvolution(ComfyPackedLayer):
    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        done: Tensor = self._conv_forward(x, weight, bias, *args, **kwargs)
        return done


@cache
def operations() -> type:
    """Return the operations class, derived from that of the running ComfyUI."""
    import comfy.ops  # type: ignore[import-not-found]

    base = comfy.ops.manual_cast
    layers = {"Linear": _made("Linear", base.Linear, _Linear, _PackedLinear)}
    layers |= {name: _made(name, getattr(base, name), _Convolution, _PackedConvolution) for name in _CONVOLUTIONS}
    return type("SdquantOps", (base,), layers)


def _made(name: str, theirs: type, loading: type[Loading], packed: type[ComfyPackedLayer]) -> type:
    layer = type(name, (loading, theirs), {})
    layer.packed_class = type(f"Packed{name}", (packed, layer), {})  # type: ignore[attr-defined]
    return layer
