"""What runs the same format elsewhere: the libraries' own layers, and torch's kernels for packed weights.

Each function gets the float layer [out, in] without a bias and gives a callable on activations [m, in], or None where
the library is not installed or does not take the format on this machine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.repeated import repeated
from sdquant import backends

if TYPE_CHECKING:
    from sdquant.core.backend import Packed

Run = Callable[[Tensor], Tensor]
Peer = Callable[[nn.Linear, str], "Run | None"]


# Types of GGUF that take minutes to encode for one layer, of which it is some blocks, which repeat (`bench.repeated`).
SLOW_TO_ENCODE = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")
SOME = 64


def packed(floats: nn.Linear, scheme: str) -> Packed:
    """The weight in sdquant's packed form."""
    spec = backends.parse(scheme)
    with repeated(SOME) if scheme in SLOW_TO_ENCODE else nullcontext():
        return backends.get(spec.scheme.backend).encode(floats.weight.data, spec)


def library_layer(floats: nn.Linear, scheme: str) -> Run:
    """bitsandbytes' or quanto's own module with the same codes, as runtime="library" has it."""
    spec = backends.parse(scheme)
    module: Run = backends.get(spec.scheme.backend).to_library(floats, packed(floats, scheme), spec)
    return module


def bitsandbytes_as_is(floats: nn.Linear, scheme: str) -> Run:
    """`Linear4bit` as bitsandbytes itself runs it: where the CPU has AVX512-BF16, repacked at the first call."""
    module: Any = library_layer(floats, scheme)
    from bitsandbytes.nn.modules import has_avx512bf16

    module.support_avx512bf16_for_cpu = has_avx512bf16()
    run: Run = module
    return run


def bitsandbytes_blockwise(floats: nn.Linear, scheme: str) -> Run:
    """bitsandbytes has no layer for its 8-bit floats: its kernel for decoding, then the product."""
    from bitsandbytes import functional

    from sdquant.core.code_tables import e4m3_code

    weight = floats.weight.data
    codes, state = functional.quantize_blockwise(weight, code=e4m3_code(weight.device), blocksize=256)
    return lambda x: F.linear(x, functional.dequantize_blockwise(codes, state).to(x.dtype))


def int8pack(floats: nn.Linear, scheme: str) -> Run:
    """torch's kernel for few rows and int8 weights with a scale for each row."""
    held = packed(floats, scheme)
    names = {"qint8": ("data", "scale"), "bnb-int8": ("codes", "scb"), "int8_sym": ("codes", "scale")}[scheme]
    codes, scale = (held.parts[name] for name in names)
    factor = 1 / 127 if scheme == "bnb-int8" else 1.0
    scale = (scale.float().view(-1) * factor).to(floats.weight.dtype)
    return lambda x: torch._weight_int8pack_mm(x, codes, scale)


def int4pack(floats: nn.Linear, scheme: str) -> Run | None:
    """torch's kernel for 4-bit codes in groups, with a scale and a middle for each; bfloat16 only."""
    if floats.weight.dtype != torch.bfloat16:
        return None
    group = backends.parse(scheme).scheme.group or 64
    rows, columns = floats.weight.shape
    grouped = floats.weight.data.float().view(rows, columns // group, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / 15).clamp(min=1e-6)
    codes = ((grouped - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.int32).view(rows, columns)
    held = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    pairs = torch.stack([scale, low + 8 * scale], -1).transpose(0, 1).contiguous().to(torch.bfloat16)
    return lambda x: torch._weight_int4pack_mm_for_cpu(x, held, group, pairs)


def in_torch(floats: nn.Linear, scheme: str) -> Run:
    """sdquant's own arithmetic in torch: rules have no other library for torch that runs them."""
    held = packed(floats, scheme)
    backend = held.spec.scheme.codec
    if backend.computes(held.spec):
        return lambda x: backend.linear(held, x)
    return lambda x: F.linear(x, backend.decode(held, x.dtype))


def diffusers_gguf(floats: nn.Linear, scheme: str) -> Run | None:
    """diffusers' layer over a GGUF weight; None for the types that it cannot decode."""
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, dequantize_functions

    if gguf.GGMLQuantizationType[scheme.upper()] not in dequantize_functions:
        return None
    rows, columns = floats.weight.shape
    module = GGUFLinear(columns, rows, bias=False, compute_dtype=floats.weight.dtype)
    blocks = packed(floats, scheme).parts["blocks"].view(rows, -1)
    module.weight = GGUFParameter(blocks, quant_type=gguf.GGMLQuantizationType[scheme.upper()])
    run: Run = module
    return run


def libgguf_decoded(floats: nn.Linear, scheme: str) -> Run | None:
    """ggml's own decoding, by libgguf, to float32; then a cast and the product."""
    if importlib.util.find_spec("libgguf") is None:
        return None
    import libgguf

    from sdquant.core.gguf_types import TYPES

    rows, columns = floats.weight.shape
    blocks, kind = packed(floats, scheme).parts["blocks"].view(rows, -1).numpy(), TYPES[scheme].id
    return lambda x: F.linear(x, torch.from_numpy(libgguf.dequantize_rows(blocks, kind, columns)).to(x.dtype))


def nncf_layer(floats: nn.Linear, scheme: str) -> Run:
    """NNCF's own module: a decompressor before each call, as `nncf.compress_weights` leaves it."""
    import copy
    import logging

    import nncf

    logging.getLogger("nncf").setLevel(logging.ERROR)
    from sdquant.backends.nncf import MODES

    example = nncf.Dataset([torch.zeros(1, floats.in_features, dtype=floats.weight.dtype)])
    four = {"group_size": 64, "all_layers": True} if scheme.startswith("int4") else {}
    mode = nncf.CompressWeightsMode[MODES[scheme]]
    run: Run = nncf.compress_weights(_Holder(copy.deepcopy(floats)), mode=mode, dataset=example, **four)
    return run


class _Holder(nn.Module):
    """NNCF adds modules to the one it is given, which an `nn.Sequential` would run."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """What the layer does."""
        done: Tensor = self.layer(x)
        return done


def sdnq_layer(floats: nn.Linear, scheme: str, matmul: bool = False) -> Run:
    """SDNQ's own layer, without its torch.compile."""
    import copy

    from sdnq import SDNQConfig, sdnq_quantize_layer

    from sdquant.backends.sdnq import _settings

    settings = _settings(backends.parse(scheme)) | {"use_quantized_matmul": matmul}
    layer, _ = sdnq_quantize_layer(
        copy.deepcopy(floats), SDNQConfig(**settings), torch_dtype=floats.weight.dtype, param_name="weight"
    )
    run: Run = layer
    return run


def sdnq_matmul(floats: nn.Linear, scheme: str) -> Run:
    """SDNQ's own layer with its int8 product."""
    return sdnq_layer(floats, scheme, matmul=True)


def torchao_layer(floats: nn.Linear, dynamic: bool) -> Run | None:
    """torchao's int8, weight-only or with dynamic activations, without torch.compile."""
    if importlib.util.find_spec("torchao") is None:
        return None
    import copy

    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(copy.deepcopy(floats))
    quantize_(model, Int8DynamicActivationInt8WeightConfig() if dynamic else Int8WeightOnlyConfig())
    run: Run = model
    return run


@dataclass(frozen=True)
class Family:
    """A scheme, and what else runs its format."""

    scheme: str
    peers: Mapping[str, Peer]


_GGUF: Mapping[str, Peer] = {"diffusers": diffusers_gguf, "libgguf": libgguf_decoded}
_FOUR: Mapping[str, Peer] = {"bitsandbytes": bitsandbytes_as_is, "bitsandbytes decoded": library_layer}
_NNCF: Mapping[str, Peer] = {"nncf": nncf_layer}
_SDNQ: Mapping[str, Peer] = {"sdnq": sdnq_layer}

# comfy-kitchen's layout of each scheme, and its options there.
_COMFY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "int8_convrot": ("TensorWiseINT8Layout", {"per_channel": True, "convrot": True, "convrot_groupsize": 256}),
    "int8_row": ("TensorWiseINT8Layout", {"per_channel": True}),
    "int8_tensor": ("TensorWiseINT8Layout", {"per_channel": False}),
    "mxfp8": ("TensorCoreMXFP8Layout", {}),
    "comfy:nvfp4": ("TensorCoreNVFP4Layout", {}),
    "w4a8": ("AsymW4A8Int8Layout", {}),
    "w6a8": ("AsymW4A8Int8Layout", {"bits": 6}),
    "w4a4": ("TensorCoreConvRotW4A4Layout", {}),
}


def comfy_kitchen(floats: nn.Linear, scheme: str) -> Run | None:
    """comfy-kitchen's own product, with activations quantized as the format has it."""
    if importlib.util.find_spec("comfy_kitchen") is None:
        return None
    from comfy_kitchen.tensor import QuantizedTensor

    layout, options = _COMFY[scheme]
    weight = QuantizedTensor.from_float(floats.weight.data, layout, **options)
    return lambda x: F.linear(x, weight)


def comfy_kitchen_svdquant(held: Packed) -> Run | None:
    """comfy-kitchen's product with the same codes and branch, and activations of 4 bits."""
    if held.spec.scheme.name != "svdquant_w4a4" or importlib.util.find_spec("comfy_kitchen") is None:
        return None
    from comfy_kitchen.tensor import QuantizedTensor, TensorCoreSVDQuantW4A4Layout

    codes, scale, smooth, down, up, _ = held.spec.scheme.codec.export("proj.weight", held).values()
    params = TensorCoreSVDQuantW4A4Layout.Params(
        scale=scale, orig_dtype=torch.bfloat16, orig_shape=held.spec.shape, proj_down=down, proj_up=up,
        smooth_factor=smooth,
    )  # fmt: skip
    weight = QuantizedTensor(codes, "TensorCoreSVDQuantW4A4Layout", params)
    return lambda x: F.linear(x, weight)


FAMILIES: tuple[Family, ...] = (
    Family("nf4", _FOUR),
    Family("nf4,double_quant", _FOUR),
    Family("fp4", _FOUR),
    Family("bnb-int8", {"bitsandbytes": library_layer, "torch int8pack": int8pack}),
    Family("fp8", {"bitsandbytes decoded": bitsandbytes_blockwise}),
    Family("qint8", {"quanto": library_layer, "torch int8pack": int8pack}),
    Family("qint4", {"quanto": library_layer, "torch int4pack": int4pack}),
    Family("qint2", {"quanto": library_layer}),
    Family("qint3", {}),
    Family("qfloat8", {"quanto": library_layer}),
    Family("int8", _NNCF),
    Family("int8_sym", {**_NNCF, "torch int8pack": int8pack}),
    Family("int4", {**_NNCF, "torch int4pack": int4pack}),
    Family("int4_sym", {**_NNCF, "torch int4pack": int4pack}),
    *(Family(kind, _GGUF) for kind in (
        "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "q3_k", "q2_k", "iq4_nl", "iq4_xs",
        "tq2_0", "tq1_0", "mxfp4", "nvfp4", *SLOW_TO_ENCODE,
    )),
    *(Family(scheme, {"comfy-kitchen": comfy_kitchen}) for scheme in _COMFY),
    *(Family(f"sdnq-{kind}", _SDNQ) for kind in ("int8", "fp8", "int6", "int4", "uint4", "uint3")),
)  # fmt: skip

# Types by rules, in files of their own (`bench.linear --rules`).
_TORCH: Mapping[str, Peer] = {"torch": in_torch}
RULES: tuple[Family, ...] = tuple(Family(f"rules{options}", _TORCH) for options in (
    "", ",tile_size=128", ",weight_qtype=int4", ",weight_qtype=int3", ",weight_qtype=nf4,tile_size=64",
    ",weight_qtype=float8_e4m3fn", ",weight_qtype=mxfp8,tile_size=32", ",weight_qtype=mxfp4,tile_size=32",
    ",weight_qtype=nvfp4,tile_size=16", ",act_qtype=int8", ",act_qtype=int8,tile_size=128",
    ",weight_qtype=int4,act_qtype=int8", ",weight_qtype=nf4,tile_size=64,act_qtype=int8",
    ",weight_qtype=float8_e4m3fn,act_qtype=float8_e4m3fn",
))  # fmt: skip
# Their low-rank branch has no place among products that differ in the codes alone (`bench.pairs` measures it).
SVDQUANT = (
    Family("svdq-int4", {"comfy-kitchen": lambda floats, scheme: comfy_kitchen_svdquant(packed(floats, scheme))}),
    Family("svdq-nvfp4", {}),
)
OF_SDNQ = tuple(
    Family(scheme, _SDNQ)
    for scheme in ("sdnq-int8,hadamard", "sdnq-uint4,hadamard", "sdnq-uint4,svd", "sdnq-uint4,svd,hadamard")
)
