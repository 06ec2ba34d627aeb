"""What libraries say while they are imported does not reach people who load a model; sdquant's own warnings do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from sdquant.errors import SdquantWarning
from sdquant.utils.quiet_imports import quiet_imports

# Speaks when one of these is looked for, as torch does of pynvml, transformers of torchvision, diffusers of `kernels`.
NOISE = """
import logging, sys, warnings
SPEAKERS = {"torch.cuda", "transformers.modeling_utils", "diffusers.models.modeling_utils", "bitsandbytes",
            "torchvision", "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion"}
heard = set()
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in SPEAKERS and name not in heard:
            heard.add(name)
            warnings.warn(f"{name} is deprecated", FutureWarning)
            warnings.warn(f"{name} misses something", UserWarning)
            for logger in ("transformers", "diffusers", "kernels"):
                logging.getLogger(logger).warning("%s was not found", name)
sys.meta_path.insert(0, Finder())
"""
LOAD = """
import logging
logging.getLogger().setLevel("INFO")  # as programs have it; the libraries' own stay at their WARNING
import sdquant, sitecustomize
for name in ("digits-sd", "digits-flux"):
    sdquant.load_model(sdquant.demo.path(name), "int8_row", progress=False)
assert len(sitecustomize.heard) > 3, sitecustomize.heard
import transformers.utils.logging, diffusers.utils.logging
assert transformers.utils.logging.get_verbosity() == diffusers.utils.logging.get_verbosity() == 30
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-c", LOAD], id="load_model"),
        pytest.param(["-m", "sdquant", "plan", "digits-sd", "--quant", "fp8"], id="cli", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_said(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOISE)
    root = Path(__file__).parents[1]
    path = os.pathsep.join((str(tmp_path), str(root)))
    out = subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": path}, cwd=root, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    assert out.stderr == ""


def test_errors_and_what_comes_later_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    with quiet_imports():
        warnings.warn("not heard", FutureWarning, stacklevel=1)
        logging.getLogger("diffusers").warning("not heard")
        logging.getLogger("diffusers").error("an error")
    with pytest.warns(SdquantWarning, match="later"):
        warnings.warn("later", SdquantWarning, stacklevel=1)
    assert caplog.messages == ["an error"]
