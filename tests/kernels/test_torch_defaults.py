"""torch's defaults belong to the user: kernels get memory of the kind and on the device that they need."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
import torch
from torch import nn
from sdquant import backends
from sdquant.kernels import workspace
from sdquant.nn import quantized_layer

def check(text, compute, dtype):
    workspace.release()
    spec = backends.parse(text)
    torch.manual_seed(0)
    modules = (nn.Linear(256, 64), nn.Conv2d(64, 80, 3, padding=1))
    shapes = ((1, 256), (40, 256), (300, 256)), ((1, 64, 4, 4), (1, 64, 20, 20))
    made = []
    for module in modules:
        packed = backends.get(spec.scheme.backend).encode(module.weight.to(dtype), spec)
        made.append(quantized_layer(module, packed, compute=compute or None).to(dtype))
    inputs = [[torch.randn(shape).to(dtype) for shape in some] for some in shapes]

    def run():
        return [layer(x) for layer, some in zip(made, inputs) for x in some]
    with torch.device("meta"):  # where a kernel would find no memory; the first calls, checks and all
        on_meta = run()
    torch.set_default_dtype(torch.bfloat16)
    for layer in made:
        layer._prepared = layer._prepared_for = None
    in_half = run()
    torch.set_default_dtype(torch.float32)
    for one, other, wanted in zip(on_meta, in_half, run()):
        assert one.device.type == "cpu" and one.dtype == wanted.dtype == dtype
        assert torch.equal(one, wanted) and torch.equal(other, wanted)

dtype = getattr(torch, sys.argv[1])
with torch.no_grad():
    for one in sys.argv[2:]:
        text, compute = one.split(" ") if " " in one else (one, "")
        check(text, compute, dtype)
        print(one, flush=True)
"""


# Schemes, and what they compute in: every kind of kernel. Each is the first in its process to need what it needs.
KINDS = (
    "int8", "int8 int8", "nf4", "q4_k int8", "qint4", "sdnq-uint4 int8", "rules,act_qtype=int8",
    "rules,weight_qtype=nf4,tile_size=64,act_qtype=int8", "rules,weight_qtype=float8_e4m3fn,act_qtype=float8_e4m3fn",
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kinds", [pytest.param(KINDS[:2], id="few"), pytest.param(KINDS, id="all")])
def test_another_default_device_and_dtype(kinds: tuple[str, ...], dtype: str) -> None:
    """In a process of its own, which a fault would end. No kind finds buffers of the one before."""
    ran = subprocess.run([sys.executable, "-c", CODE, dtype, *kinds], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.splitlines()) == (0, list(kinds)), ran.stderr[-2000:]
    assert "not used" not in ran.stderr
