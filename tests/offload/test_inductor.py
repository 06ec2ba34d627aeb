"""torch.compile with its default backend: quantized layers of every backend, in every mode, as they are without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sdquant
from sdquant import backends, offload
from sdquant.compat import check, hardware
from sdquant.errors import BudgetError, SdquantError
from sdquant.loading.quantizer import quantize_module

from .conftest import made
from .test_balanced import Net
from .test_threads import MOVING

pytestmark = [
    pytest.mark.skipif(not hardware.probe().has_compiler, reason="inductor needs a C++ compiler on the CPU"),
    # What the compiler does with the autograd functions of libraries, and with what torch itself has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MODES = ["none", *MOVING]
HOWS = ["function", "method", "blocks"]
# Of the largest number. Inductor sums floats in another order; where activations are quantized, one that lies between
# two codes falls to the other.
CLOSE, CODED = 1e-5, 0.05

# scheme, runtime, compute.
PLAIN = [
    ("nf4", "plain", None), ("fp8", "plain", None), ("bnb-int8", "plain", None), ("qint8", "plain", None),
    ("qint4", "plain", None), ("int8", "plain", None), ("q8_0", "plain", None), ("q4_0", "plain", None),
    ("sdnq-uint4", "plain", None), ("int8_row", "plain", None), ("rules,weight_qtype=int8", "plain", None),
    ("rules,weight_qtype=int8,act_qtype=int8", "plain", None), ("int8", "plain", "int8"), ("nf4", "plain", "int8"),
]  # fmt: skip
LIBRARY = [("nf4", "library", None), ("bnb-int8", "library", None), ("qint8", "library", None)]


def refused(scheme: str, runtime: str, mode: str) -> bool:
    """Whether the matrix refuses it, as load_model does before there is a model."""
    try:
        check(scheme.partition(",")[0], mode, runtime=runtime, device="cpu")
    except SdquantError:
        return True
    return False


def quantized(net: nn.Module, scheme: str, runtime: str, compute: str | None) -> nn.Module:
    """The network with its linear layers in the scheme."""
    spec = backends.parse(scheme)
    if spec.scheme.backend == "gguf":  # which is not quantized to where it is loaded
        names = {f"{name}.weight" for name, module in net.named_modules() if type(module) is nn.Linear}
        fits = {name for name in names if net.get_parameter(name).shape[1] % 32 == 0}
        quantize_module(net, spec, runtime=runtime, only=fits)
        return net
    sdquant.quantize(net, scheme, runtime=runtime, compute=compute, progress=False)
    return net


def called(net: Any, size: int) -> Tensor:
    """What the network of a pipeline makes of size x size latents; a Net, of so many rows."""
    drawn = torch.Generator().manual_seed(size)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn)

    config = getattr(net, "config", None)
    with torch.no_grad():
        if config is None:
            made: Tensor = net(noise(size, 64))
        elif "guidance_embeds" in config:
            count = size * size
            made = net(
                hidden_states=noise(1, count, 16), encoder_hidden_states=noise(1, 7, 128),
                pooled_projections=noise(1, 128), timestep=torch.tensor([0.5]), guidance=torch.tensor([3.5]),
                txt_ids=torch.zeros(7, 3), img_ids=torch.zeros(count, 3), return_dict=False,
            )[0]  # fmt: skip
        else:
            made = net(noise(1, 4, size, size), torch.tensor(10), noise(1, 7, 128), return_dict=False)[0]
    return made


def tight(net: nn.Module, mode: str, folder: Path) -> offload.OffloadHandle:
    """The mode on the network; balanced has too little room for all of it, where there is a block that can go."""
    if mode != "balanced":
        return offload.apply(net, mode, device="cpu", folder=folder)
    total = offload.weight_bytes(net)
    try:
        return offload.apply(net, mode, device="cpu", folder=folder, budget=int(0.95 * total))
    except BudgetError as error:
        least = re.search(r"at least (\d+) bytes", error.fix)
        assert least is not None
        return offload.apply(net, mode, device="cpu", folder=folder, budget=int(least[1]))


def check_compiled(net: Any, kind: tuple[str, str, str | None], mode: str, how: str, folder: Path) -> None:
    """Two sizes, each as without the compiler and the mode, and one of them again."""
    net = quantized(net.eval(), *kind)
    sizes = (8, 4, 8)
    wanted = [called(net, size) for size in sizes]
    handle = tight(net, mode, folder)
    torch._dynamo.reset()
    whole = mode in ("none", "model")  # where no block takes its turn inside of the call
    if how == "function":
        fast: Any = torch.compile(net, fullgraph=whole)
    elif how == "method":
        net.compile(fullgraph=whole)
        fast = net
    else:
        blocks = [net] if hasattr(net, "compile_repeated_blocks") else list(net.blocks)
        for block in blocks:
            (getattr(block, "compile_repeated_blocks", None) or block.compile)(fullgraph=whole)
        fast = net
    bound = CODED if "act_qtype" in kind[0] or kind[2] else CLOSE
    for size, known in zip(sizes, wanted, strict=True):
        assert float((called(fast, size) - known).abs().max() / known.abs().max()) < bound
    assert handle.active
    handle.remove()


@pytest.mark.parametrize(
    ("kind", "mode", "how"),
    [
        (PLAIN[0], "balanced", "function"),
        (PLAIN[5], "model", "method"),
        (PLAIN[6], "sequential", "function"),
        (PLAIN[11], "group", "blocks"),
    ],
)
def test_a_small_network(kind: tuple[str, str, str | None], mode: str, how: str, tmp_path: Path) -> None:
    check_compiled(Net(), kind, mode, how, tmp_path)


def _cells() -> list[Any]:
    """Every kind of layers in every mode, and ways and networks by turns: each way is met in each mode, and with each
    kind of layers."""
    cells = []
    for number, (kind, mode) in enumerate((kind, mode) for kind in PLAIN + LIBRARY for mode in MODES):
        scheme, runtime, compute = kind
        if refused(scheme, runtime, mode):
            continue
        how = HOWS[(number + number // len(MODES)) % len(HOWS)]
        name = "sd" if number % 7 == 3 else "flux"
        cells.append(pytest.param(name, kind, mode, how, id=f"{name}-{scheme}-{compute or runtime}-{mode}-{how}"))
    return cells


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "mode", "how"), _cells())
def test_a_pipeline_s_network(
    name: str, kind: tuple[str, str, str | None], mode: str, how: str, tmp_path: Path
) -> None:
    pipe = made(name)
    check_compiled(pipe.transformer if name == "flux" else pipe.unet, kind, mode, how, tmp_path)
