"""nf4 and fp4: four bits a weight, a scale for each block of weights in memory order.

On the CPU weights are encoded by `_bnb_arithmetic`, which gives the same bits in a tenth of the time, and decoded by
bitsandbytes' kernel where it is installed, which is faster; without bitsandbytes both are done in plain torch.

The packing is bitsandbytes' own: two codes a byte, the first in the high half; `absmax` is the largest magnitude of
each block; with double quantization it is stored as 8-bit codes of its difference from its mean, in blocks of 256.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..core import (
    COMPUTE_DTYPES,
    OFFSET,
    Packed,
    PackedLayout,
    PackedSpec,
    PrequantizedWeight,
    TensorSpec,
    Unfit,
    code_tables,
    dtype_name,
    registry,
    torch_dtypes,
)
from ..kernels import dispatch_guard
from ..utils.tensors import put_parameter
from ._bnb_arithmetic import decode_bytes, decode_fourbit, encode_fourbit
from ._bnb_codec import Codec, bad, require, scales
from ._bnb_find import STATE
from ._bnb_fourbit_file import NESTED_BLOCK, as_bytes, check_table, claims
from ._bnb_library import apply_to_layer, installed, library, on_library, tile

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core import QuantSpec

_COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# bitsandbytes' AVX512 kernel rounds differently above this, and bitsandbytes leaves it for a compiled fallback.
_KERNEL_BLOCK = 1024


class FourBit(Codec):
    """The codec of nf4 and fp4. Parts: codes uint8 [ceil(n/2), 1]; absmax float32 [blocks], or with double
    quantization absmax uint8 [blocks] and nested_absmax float32 [ceil(blocks/256)], the offset in the details."""

    def layout(self, spec: QuantSpec, shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
        if dtype not in COMPUTE_DTYPES:
            raise Unfit(f"bitsandbytes can only quantize {', '.join(COMPUTE_DTYPES)}, but the weight is {dtype}")
        size = math.prod(shape)
        blocks = math.ceil(size / spec["block_size"])
        parts = {"codes": TensorSpec(dtype="uint8", shape=(math.ceil(size / 2), 1))}
        if not spec["double_quant"]:
            return parts | {"absmax": TensorSpec(dtype="float32", shape=(blocks,))}
        return parts | {
            "absmax": TensorSpec(dtype="uint8", shape=(blocks,)),
            "nested_absmax": TensorSpec(dtype="float32", shape=(math.ceil(blocks / NESTED_BLOCK),)),
        }

    def encode(self, weight: Tensor, spec: QuantSpec) -> Packed:
        dtype = dtype_name(weight.dtype)
        self.layout(spec, tuple(weight.shape), dtype)
        shape, weight = tuple(weight.shape), weight.detach()
        if on_library("quantize_4bit", weight.device):
            codes, state = library().functional.quantize_4bit(
                weight,
                blocksize=spec["block_size"],
                compress_statistics=spec["double_quant"],
                quant_type=spec.scheme.name,
                quant_storage=torch.uint8,
            )
            return _packed(codes, state, shape, dtype)
        codes, absmax = encode_fourbit(weight, spec.scheme.name, spec["block_size"])
        parts, details = {"codes": codes, "absmax": absmax}, {"block_size": spec["block_size"]}
        if spec["double_quant"]:
            offset = absmax.mean()
            inner, outer = library().functional.quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCK)
            # bitsandbytes overlooks NaN in what it quantizes; it is to show in a scale, as everywhere.
            nested = outer.absmax if bool(torch.isfinite(offset)) else torch.full_like(outer.absmax, torch.nan)
            parts |= {"absmax": inner, "nested_absmax": nested}
            details[OFFSET] = offset.item()  # float32, which a Python float holds exactly
        return Packed(spec=PackedSpec(scheme=spec.scheme, shape=shape, dtype=dtype, details=details), parts=parts)

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        codes, absmax = packed.parts["codes"].view(-1), _absmax(packed)
        block: int = packed.spec.details["block_size"]
        if block > _KERNEL_BLOCK:
            absmax, block = absmax.repeat_interleave(block // _KERNEL_BLOCK), _KERNEL_BLOCK
        flat, kind = out.view(-1), packed.spec.scheme.name
        theirs = installed() if out.device.type == "cpu" else on_library("dequantize_4bit", out.device)
        whole = flat.numel() // block * block if theirs else 0
        step = tile(out.device, whole)
        for start in range(0, whole, step):
            stop = min(start + step, whole)
            _decode_blocks(
                codes[start // 2 : stop // 2, None],
                absmax[start // block : stop // block],
                kind,
                flat[start:stop].view(-1, block),
            )
        if whole < flat.numel():  # without its kernel all of it, else the last block, if it is not full
            decode_fourbit(codes[whole // 2 :], absmax[whole // block :], kind, block, flat[whole:])

    def form(self, packed: Packed) -> PackedLayout:
        spec, nested = packed.spec, "nested_absmax" in packed.parts
        return PackedLayout(
            rows=spec.shape[0],
            columns=math.prod(spec.shape[1:]),
            codes="codes",
            packing="nibbles-high",
            group=spec.details["block_size"],
            table=spec.scheme.name,
            scale="absmax",
            nested="nested_absmax" if nested else "",
            offset=spec.details[OFFSET] if nested else 0.0,
        )

    def by_row(self, packed: Packed) -> bool:
        blocks_of_rows: bool = math.prod(packed.spec.shape[1:]) % packed.spec.details["block_size"] == 0
        return blocks_of_rows and "nested_absmax" not in packed.parts

    def cuttable(self, packed: Packed) -> Packed:
        """Undo double quantization, whose blocks of 256 scales and common offset span the whole weight."""
        if "nested_absmax" not in packed.parts:
            return packed
        details = {key: value for key, value in packed.spec.details.items() if key != OFFSET}
        parts = {"codes": packed.parts["codes"], "absmax": _absmax(packed)}
        return Packed(spec=replace(packed.spec, details=details), parts=parts)

    def to_library(self, module: nn.Module, packed: Packed, spec: QuantSpec | None) -> nn.Module:
        from ..kernels import flop_counts, ops

        flop_counts.declare_of_library(library().__name__)
        rows, columns = packed.spec.shape
        state, block = _state(packed), packed.spec.details["block_size"]
        nested = state.nested
        exact = columns % block == 0 and block <= _KERNEL_BLOCK
        dtype = _COMPUTE.get(spec["compute_dtype"]) if spec is not None else None
        layer: Any = _linear4bit()(
            columns,
            rows,
            bias=False,
            compute_dtype=dtype,
            compress_statistics=nested,
            quant_type=packed.spec.scheme.name,
            device="meta",
        )
        weight = library().nn.Params4bit(
            packed.parts["codes"],
            requires_grad=False,
            quant_state=state,
            blocksize=block,
            compress_statistics=nested,
            quant_type=packed.spec.scheme.name,
            quant_storage=torch.uint8,
            module=layer,
            bnb_quantized=True,
        )
        put_parameter(layer, "weight", weight)
        layer.quant_state = state
        layer.is_exact = exact
        layer.encoded_offset = packed.spec.details.get(OFFSET)
        layer.described = ops.described(packed.spec, ("codes", "absmax", *(["nested_absmax"] if nested else [])))
        put_parameter(layer, "bias", module._parameters.get("bias"))
        # On CPUs with AVX512-BF16 a forward would repack the weight in place and round its scales to bfloat16, and stop
        # with an AssertionError for a number of rows that 32 does not divide.
        layer.support_avx512bf16_for_cpu = False
        # Else the first activations would fix the dtype for all later ones, and half precision would log a warning.
        layer.compute_type_is_set = True
        assert isinstance(layer, nn.Module)
        return layer.train(module.training)

    def from_library(self, module: nn.Module) -> Packed | None:
        if "bitsandbytes" not in sys.modules or not isinstance(module, library().nn.Linear4bit):
            return None
        layer: Any = module
        state = getattr(layer.weight, "quant_state", None) or layer.quant_state
        if state is None:  # a float weight that waits for its first move
            return None
        codes = layer.weight.data
        if getattr(state, "packing_format_for_cpu", False):
            codes, state = _undo_cpu_packing(codes, state)
        shape, dtype = tuple(state.shape), dtype_name(state.dtype)
        offset = getattr(layer, "encoded_offset", None)
        return _packed(codes.view(torch.uint8).view(-1, 1), state, shape, dtype, offset)

    def write(self, name: str, packed: Packed) -> dict[str, Tensor]:
        """Return the tensors of bitsandbytes' `QuantState.as_dict(packed=True)`."""
        details, absmax = packed.spec.details, packed.parts["absmax"]
        says = {
            "quant_type": packed.spec.scheme.name,
            "blocksize": details["block_size"],
            "dtype": packed.spec.dtype,
            "shape": list(packed.spec.shape),
        }
        tensors = {
            name: packed.parts["codes"],
            f"{name}.absmax": absmax,
            f"{name}.quant_map": code_tables.fourbit_code(packed.spec.scheme.name, absmax.device).clone(),
        }
        if "nested_absmax" in packed.parts:
            tensors[f"{name}.nested_absmax"] = packed.parts["nested_absmax"]
            tensors[f"{name}.nested_quant_map"] = code_tables.dynamic_code(absmax.device).clone()
            says |= {
                "nested_blocksize": NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": details[OFFSET],
            }
        line = json.dumps(says).encode()
        tensors[f"{name}{STATE}{packed.spec.scheme}"] = torch.tensor(list(line), dtype=torch.uint8, device="cpu")
        return {key: tensor.contiguous() for key, tensor in tensors.items()}

    def read(self, detected: PrequantizedWeight, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]) -> Packed:
        nested = "nested_absmax" in detected.keys
        metadata = claims(detected, shape, nested, get)
        shape = tuple(metadata["shape"])
        block, size = metadata["blocksize"], math.prod(shape)
        key, codes = require(detected, "codes", get)
        codes = as_bytes(key, codes)
        if codes.numel() != math.ceil(size / 2):
            raise bad(key, f"it has {codes.numel()} bytes, but {size} weights take {math.ceil(size / 2)}")
        check_table(detected, ".quant_map", code_tables.fourbit_code(detected.scheme, torch.device("cpu")), get)
        details: dict[str, Any] = {"block_size": block}
        key, absmax = require(detected, "absmax", get)
        if absmax.dtype == torch.bfloat16 and len(shape) == 2 and absmax.shape == (shape[1] // block, shape[0]):
            # Saved by bitsandbytes after a forward on a CPU with AVX512-BF16, which leaves the scales like this.
            absmax = absmax.T.reshape(-1)
        if absmax.shape != (math.ceil(size / block),):
            raise bad(
                key, f"it has shape {list(absmax.shape)}, but {size} weights make {math.ceil(size / block)} blocks"
            )
        parts = {"codes": codes.view(-1, 1), "absmax": absmax}
        if nested:
            if absmax.dtype != torch.uint8:
                raise bad(key, f"doubly quantized scales must be uint8, but these are {absmax.dtype}")
            check_table(detected, ".nested_quant_map", code_tables.dynamic_code(torch.device("cpu")), get)
            key, outer = require(detected, "nested_absmax", get)
            if outer.shape != (math.ceil(absmax.numel() / NESTED_BLOCK),):
                raise bad(key, f"it has shape {list(outer.shape)}, but {absmax.numel()} scales come in blocks of 256")
            parts["nested_absmax"] = scales(key, outer)
            details[OFFSET] = torch.tensor(metadata["nested_offset"], dtype=torch.float32, device="cpu").item()
        else:
            parts["absmax"] = scales(key, absmax)
        scheme = registry.scheme(detected.scheme)
        spec = PackedSpec(scheme=scheme, shape=shape, dtype=metadata["dtype"], details=details)
        return Packed(spec=spec, parts=parts)

    def config(self, spec: QuantSpec, dtype: str) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": spec.scheme.name,
            "bnb_4bit_use_double_quant": spec["double_quant"],
            "bnb_4bit_compute_dtype": spec["compute_dtype"] or dtype,
            "bnb_4bit_quant_storage": "uint8",
        }


def _packed(codes: Tensor, state: Any, shape: tuple[int, ...], dtype: str, offset: float | None = None) -> Packed:
    """Return the packed weight of a QuantState. `offset`: its value, if known, for a state on the meta device."""
    parts = {"codes": codes, "absmax": state.absmax}
    details: dict[str, Any] = {"block_size": state.blocksize}
    if state.nested:
        parts["nested_absmax"] = state.state2.absmax
        # A float32, which a Python float holds exactly.
        details[OFFSET] = offset if state.offset.is_meta else state.offset.item()
    spec = PackedSpec(scheme=registry.scheme(state.quant_type), shape=shape, dtype=dtype, details=details)
    return Packed(spec=spec, parts=parts)


def _state(packed: Packed) -> Any:
    """Return bitsandbytes' QuantState over the same tensors, with its own copies of the code tables: safetensors does
    not save shared tensors, and a tool that writes into a shared table would corrupt all later weights."""
    absmax, details = packed.parts["absmax"], packed.spec.details
    new = library().functional.QuantState
    nested: dict[str, Any] = {}
    if "nested_absmax" in packed.parts:
        code = code_tables.dynamic_code(absmax.device).clone()
        outer = new(packed.parts["nested_absmax"], blocksize=NESTED_BLOCK, code=code, dtype=torch.float32)
        nested = {"offset": torch.tensor(details[OFFSET], dtype=torch.float32, device=absmax.device), "state2": outer}
    return new(
        absmax,
        shape=torch.Size(packed.spec.shape),
        code=code_tables.fourbit_code(packed.spec.scheme.name, absmax.device).clone(),
        blocksize=details["block_size"],
        quant_type=packed.spec.scheme.name,
        dtype=_COMPUTE[packed.spec.dtype],
        **nested,
    )


def _absmax(packed: Packed) -> Tensor:
    """Return the scale of each block: float32 [blocks]."""
    absmax = packed.parts["absmax"]
    if "nested_absmax" not in packed.parts:
        return absmax
    inner = torch.empty(absmax.shape, dtype=torch.float32, device=absmax.device)
    decode_bytes(absmax, packed.parts["nested_absmax"], code_tables.dynamic_code(absmax.device), NESTED_BLOCK, inner)
    return inner.add_(packed.spec.details[OFFSET])


def _decode_blocks(codes: Tensor, absmax: Tensor, kind: str, out: Tensor) -> None:
    """Dequantize whole blocks, one per row of `out` [blocks, block], with bitsandbytes' kernel.

    Rows must be whole blocks: otherwise its AVX512 kernel uses the scales of other blocks (bitsandbytes 0.50.2, weights
    [64, 288] with blocks of 64), and for a row of odd length it compiles a fallback for a minute.
    """
    functional = library().functional
    dtype = out.dtype if out.dtype in torch_dtypes.COMPUTE_DTYPES else torch.float32
    state = functional.QuantState(absmax, shape=out.shape, blocksize=out.shape[1], quant_type=kind, dtype=dtype)
    if out.device.type == "cuda" and out.dtype == dtype:
        functional.dequantize_4bit(codes, state, out=out)
    else:
        out.copy_(functional.dequantize_4bit(codes, state))


def _weight_in_graph(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the float weight of a `Linear4bit` as the result of one custom op, for use under torch.compile or a
    functional transform, which cannot trace the kernel dispatch."""
    from ..kernels import ops

    state = layer.weight.quant_state
    parts = [layer.weight, state.absmax, *([state.state2.absmax] if state.nested else ())]
    weight: Tensor = ops.weight(parts, layer.described, dtype)
    return weight


@lru_cache(maxsize=1)
def _linear4bit() -> type[nn.Module]:
    """Return a `Linear4bit` whose input can also be passed by torch's name `input`, that can move to the meta device,
    and that supports rows that are not whole blocks, which bitsandbytes computes wrongly on CPUs (see above)."""
    base: Any = library().nn.Linear4bit

    class Linear4bit(base):  # type: ignore[misc]  # the base is only known at run time
        is_exact = False  # whether bitsandbytes computes it rightly on CPUs
        encoded_offset: float | None = None  # that of double quantization, which on the meta device its state has lost
        described = ""  # the packed weight but its tensors, for compiled graphs

        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            of_torch = super()._apply
            apply_to_layer(self, fn, lambda: of_torch(fn, recurse))
            return self

        def forward(self, input: Tensor) -> Tensor:
            carried = dispatch_guard.transformed()  # which bitsandbytes' functions lose without a word
            if not carried and (self.is_exact or input.device.type != "cpu"):
                out: Tensor = super().forward(input)
                return out
            dtype = self.compute_dtype or input.dtype
            if carried or is_compiling():
                weight = _weight_in_graph(self, dtype)
            else:
                codec = FourBit()
                packed = codec.from_library(self)
                assert packed is not None
                weight = torch.empty(packed.spec.shape, dtype=dtype, device="cpu")
                codec.decode_into(packed, weight)
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(input.to(dtype), weight, bias).to(input.dtype)

    Linear4bit.__qualname__ = _OURS
    return Linear4bit


_OURS = "Linear4bit"


def __getattr__(name: str) -> Any:
    """Return the class that is created once bitsandbytes is imported, so that pickle finds it by name."""
    if name == _OURS:
        return _linear4bit()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _undo_cpu_packing(codes: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Return codes and state, in the usual order, of a module repacked by a forward on an AVX512-BF16 CPU.

    The scales keep the rounding of that repacking.
    """
    flat = state.absmax.T.reshape(-1).float()  # it holds them as bfloat16 [columns/block, rows]
    undone, state = library().functional._convert_weight_packed_for_cpu_inverse(codes, copy.copy(state))
    if not state.nested:
        state.absmax = flat
    return undone, state
