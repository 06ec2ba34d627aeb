"""What SVDQuant leaves for 4 bits, held to libraries bit for bit: comfy-kitchen's blocks, and DeepCompressor's rounding
and packing. (comfy-kitchen makes no SVDQuant, and DeepCompressor's own searches need a card.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comfy_kitchen.tensor import TensorCoreNVFP4Layout, TensorCoreSVDQuantW4A4Layout
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdquant import backends
from sdquant.backends._comfy_svdquant import SvdQuant
from sdquant.backends._svdquant import Branch
from sdquant.core import Packed

from .. import libraries

COMFY = backends.get("comfy")
DTYPES = [torch.bfloat16, torch.float16]


def _made(scheme: str, dtype: torch.dtype) -> tuple[Packed, Tensor]:
    """A weight of heavy tails, and what its branch leaves of it: float32 [out, in]."""
    torch.manual_seed(3)
    weight = (torch.distributions.StudentT(4.0).sample((256, 384)) * 0.014).to(dtype)
    packed = COMFY.encode(weight, backends.parse(scheme))
    return packed, Branch(**{name: packed.parts[name] for name in ("smooth", "down", "up")}).left_of(weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_comfy_kitchens(dtype: torch.dtype) -> None:
    """With the factor of the scales, which has to fit 16 bits here."""
    packed, left = _made("svdq-nvfp4", dtype)
    factor = packed.spec.details["factor"]
    codes, four = TensorCoreNVFP4Layout.quantize(left, scale=torch.tensor(factor))
    assert torch.equal(packed.parts["codes"], codes << 4 | codes >> 4)  # the even column in the high half
    blocks = TensorCoreNVFP4Layout.dequantize(torch.full_like(codes, 0x22), four) / factor  # of ones: the scales
    assert torch.equal(packed.parts["scale"].float(), blocks[:, ::16])


@pytest.mark.parametrize("dtype", DTYPES)
def test_comfy_kitchen_dequantizes_it_alike(dtype: torch.dtype) -> None:
    packed, _ = _made("svdq-int4", dtype)
    written = backends.comfy.BACKEND.export("x.weight", packed)
    file = {name.removeprefix("x."): one.float() if one.is_floating_point() else one for name, one in written.items()}
    params = TensorCoreSVDQuantW4A4Layout.Params(
        scale=file["weight_scale"], orig_dtype=torch.float32, orig_shape=packed.spec.shape,
        proj_down=file["proj_down"], proj_up=file["proj_up"], smooth_factor=file["smooth_factor"],
    )  # fmt: skip
    theirs = TensorCoreSVDQuantW4A4Layout.dequantize(file["weight"], params)
    assert (COMFY.decode(packed, torch.float32) - theirs).norm() <= 1e-5 * theirs.norm()


@libraries.needs("deepcompressor")
@pytest.mark.parametrize("scheme", ["svdq-int4", "svdq-nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_and_packed_as_by_deepcompressor(dtype: torch.dtype, scheme: str, tmp_path: Path) -> None:
    """Its packer gets what is left, and gives the bytes of nunchaku_lite's tensors."""
    packed, left = _made(scheme, dtype)
    parts, floats = dict(packed.parts), {}
    if scheme == "svdq-int4":  # it takes what is left in 16 bits, and refuses what the scales that were chosen clip
        left = left.to(dtype).float()
        parts |= SvdQuant().encode_left(left, COMFY.layout(backends.parse(scheme), (256, 384), str(dtype)[6:]))[0]
        each = parts["scale"].float().repeat_interleave(64, dim=1)
        left = torch.minimum(torch.maximum(left, -8 * each), 7 * each)
    else:  # it rounds ties and small negative numbers otherwise: it gets the values of codes, without negative zeros
        codes = parts["codes"]
        zeros = (codes & 15 == 8).to(torch.uint8) << 3 | (codes >> 4 == 8).to(torch.uint8) << 7
        parts["codes"] = codes ^ zeros
        floats["factor"] = torch.tensor([packed.spec.details["factor"]], dtype=dtype)
        left = _values(parts["codes"], parts["scale"].float()) * packed.spec.details["factor"]
    made = Packed(spec=packed.spec, parts=parts)
    bias = torch.randn(256, generator=torch.Generator().manual_seed(1)).to(dtype)
    mine = backends.nunchaku_lite(made, str(dtype).removeprefix("torch."), bias)
    layer = {"left": left.to(dtype), "scale": parts["scale"], "bias": bias, **floats}
    layer |= {name: parts[name] for name in ("smooth", "down", "up")}
    save_file({name: tensor.contiguous() for name, tensor in layer.items()}, tmp_path / "layer.safetensors")
    names = [str(tmp_path / f"{name}.safetensors") for name in ("layer", "packed")]
    assert {"qweight", "wscales"} <= set(libraries.run_script("nunchaku_packer.py", *names))
    theirs = load_file(tmp_path / "packed.safetensors")
    assert mine.keys() - {"wcscales"} == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == mine[name].dtype and torch.equal(_bytes(tensor), _bytes(mine[name])), name


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    """E2M1 codes, the even column in the low half, times the scales of blocks: float32 [out, in]."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = torch.stack((levels[codes.int() & 15], levels[codes.int() >> 4]), dim=-1).flatten(1)
    return values * scale.repeat_interleave(16, dim=1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
