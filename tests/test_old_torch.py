"""torch 2.6, the oldest that pyproject.toml allows, has no float8_e8m0fnu: only what is in it is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .backends.comfy_layers import GOLDEN

CODE = """
import torch
import torch._inductor.utils  # a newer torch itself needs what is deleted here
del torch.float8_e8m0fnu
import sdquant
from sdquant import backends
from sdquant.errors import BackendUnavailableError
from sdquant.kernels.cpu import cpu_kernels
from sdquant.kernels import dispatch
from sdquant.nn import quantized_layer

for name in ("nf4", "comfy:nvfp4", "int8_row", "mxfp8"):
    spec = backends.parse(name)
    weight = torch.randn(32, 64)
    try:
        packed = spec.scheme.codec.encode(weight, spec)
        quantized_layer(torch.nn.Linear(64, 32), packed)(torch.randn(2, 64))
        print(name, "runs")
    except BackendUnavailableError as error:
        print(name, error.fix)
print(sdquant.detect(FILE).quant)
try:
    sdquant.verify(FILE)
except BackendUnavailableError as error:
    print("file", error.fix)
"""


def test_one_dtype_less() -> None:
    file = GOLDEN / "comfy_mxfp8.safetensors"
    code = f"FILE = {str(file)!r}\n{CODE}"
    root = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    fix = "Install torch 2.7 or newer, or use a model in another format"
    assert lines == ["nf4 runs", "comfy:nvfp4 runs", "int8_row runs", f"mxfp8 {fix}", "mxfp8", f"file {fix}"], (
        run.stderr
    )
