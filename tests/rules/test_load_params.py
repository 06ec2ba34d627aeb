"""`load_params` keeps one float weight in memory at a time: what the C library keeps of freed ones is given back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdquant.utils import malloc_trim

COUNT, SIZE = 48, 1024
FLOAT = 4 * SIZE * SIZE  # bytes of a weight
QUANTIZED = COUNT * FLOAT // 4
# In a process of its own: what others have freed before would be taken for what is kept here.
PROGRAM = f"""
import json, sys, threading, time, torch
from torch import nn
from sdquant.utils import malloc_trim
from sdquant.rules import PtqProvider, QuantizationRule, load_params, quantize_model

provider = PtqProvider([QuantizationRule(weight_qtype="int8")])
quantize_model(nn.Linear(8, 8), provider)  # imports
with torch.device("meta"):
    empty = nn.Sequential(*(nn.Linear({SIZE}, {SIZE}, bias=False) for _ in range({COUNT})))
template = quantize_model(empty, provider)
seen, going = [], True

def watch():
    while going:
        seen.append(malloc_trim.anonymous_bytes())
        time.sleep(0.0005)

before = malloc_trim.anonymous_bytes()
watcher = threading.Thread(target=watch)
watcher.start()
load_params(template, [sys.argv[1]])
going = False
watcher.join()
print(json.dumps([max(seen) - before, malloc_trim.anonymous_bytes() - before]))
"""


@pytest.mark.skipif(malloc_trim.anonymous_bytes() == 0, reason="this system does not say what a process holds")
def test_the_peak_is_that_of_what_is_quantized_and_little_more(tmp_path: Path) -> None:
    file = tmp_path / "floats.safetensors"
    save_file({f"{n}.weight": torch.randn(SIZE, SIZE) for n in range(COUNT)}, file)
    words = [sys.executable, "-c", PROGRAM, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    peak, held = json.loads(done.stdout)
    assert QUANTIZED < peak < QUANTIZED + 10 * FLOAT < COUNT * FLOAT
    assert held < QUANTIZED + 2 * FLOAT
