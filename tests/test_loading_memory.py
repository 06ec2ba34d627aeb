"""Loading holds one weight at a time: the full-precision model is never in memory, and nothing is kept afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MAKE = """
import sys, torch
from diffusers import FluxTransformer2DModel
torch.manual_seed(0)
model = FluxTransformer2DModel(
    patch_size=1, in_channels=16, num_layers=3, num_single_layers=6, attention_head_dim=64, num_attention_heads=16,
    joint_attention_dim=256, pooled_projection_dim=256, guidance_embeds=False, axes_dims_rope=(8, 28, 28),
).to(torch.bfloat16)
model.save_pretrained(sys.argv[1])
"""

# RssAnon is what a process has to itself; pages of the mapped file are not in it, the system takes them back at will.
LOAD = """
import json, sys, threading, time

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

import torch
torch.set_num_threads(1)
import sdquant
from sdquant.models.pipelines import weight_bytes
from sdquant import backends
path, scheme, mode = sys.argv[1:]
backends.of_scheme(scheme).encode(torch.randn(64, 64).bfloat16(), backends.parse(scheme))  # imports, once
import diffusers, transformers
diffusers.FluxTransformer2DModel
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
model = sdquant.load_model(path, scheme, mode=mode, progress=False)
done.set()
watcher.join()
largest = max(weight.bytes_bf16 for weight in model.sdquant.plan.components[0].weights)
print(json.dumps({"peak": peak - before, "end": anonymous() - before, "packed": weight_bytes(model),
                  "bf16": model.sdquant.plan.components[0].bytes_bf16, "largest": largest}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flux") / "transformer"
    subprocess.run([sys.executable, "-c", MAKE, str(path)], check=True, capture_output=True)
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from Linux' /proc")
@pytest.mark.xdist_group("memory")  # they share a model that takes long to make
@pytest.mark.parametrize("mode", ["pre", pytest.param("post", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", ["nf4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "qint4"))])
def test_the_full_model_is_never_held(scheme: str, mode: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), scheme, mode], check=True, capture_output=True, text=True
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    # What a library takes for the one weight at hand (bitsandbytes: 24 bytes a weight), and the heap's slack.
    slack = 12 * seen["largest"] + 40e6
    assert seen["peak"] < seen["packed"] + slack < seen["bf16"]
    assert seen["end"] < seen["packed"] + 20e6
