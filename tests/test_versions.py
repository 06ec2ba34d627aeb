"""sdquant's core runs on the oldest packages that pyproject.toml allows, and on the newest of everything.

Each in an environment of its own, which pip fills: gigabytes, and minutes. SDQUANT_TEST_TORCH=here takes the torch of
this environment in both, where an older one is not to be had.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import torch
from packaging.requirements import Requirement

from . import torch_names

ROOT = Path(__file__).parents[1]
_TORCH = ("torch", "torchgen", "functorch", f"torch-{torch.__version__}.dist-info")

CORE = """
EXTRAS = ("gradio", "gradio_client", "peft", "matplotlib", "nncf", "openvino", "bitsandbytes", "optimum", "gguf",
          "libgguf", "sdnq", "triton", "comfy_kitchen", "sklearn", "torchao")
import importlib, pkgutil, sys, tempfile
import torch, diffusers, transformers, accelerate
print(torch.__version__, diffusers.__version__, transformers.__version__, accelerate.__version__)
import diffusers.models.modeling_utils
import sdquant
for row in pkgutil.walk_packages(sdquant.__path__, "sdquant."):
    if row.name.startswith(("sdquant.hosts.comfy", "sdquant.hosts.webui", "sdquant.__main__")):
        continue  # they run in a web UI
    if row.name == "sdquant.integrations.transformers_quantizer" and transformers.__version__ < "5":
        continue  # which is left out where transformers is older than 5
    try:
        importlib.import_module(row.name)
    except ModuleNotFoundError as error:  # of an extra
        assert error.name.partition(".")[0] in EXTRAS, error
from sdquant.models.generate import draw
for part in ("digits-sd/unet", "digits-flux/transformer"):
    model = sdquant.load_model(sdquant.demo.path(part.split("/")[0]) / part.split("/")[1], "int8_row", progress=False)
    folder = tempfile.mkdtemp()
    sdquant.save(model, folder + "/saved")
    sdquant.load_model(folder + "/saved", progress=False)
for name, quant in (("digits-sd", "fp8"), ("digits-flux", "int8_row")):
    pipe = sdquant.load_model(sdquant.demo.path(name), quant, progress=False)
    draw(pipe, ["a photo of the digit 7"], seeds=[3], steps=1)
    folder = tempfile.mkdtemp()
    sdquant.save(pipe, folder + "/saved")
    draw(sdquant.load_model(folder + "/saved", progress=False), ["a photo of the digit 7"], seeds=[3], steps=1)
config = sdquant.Config("int8_row")
folder = sdquant.demo.path("digits-flux") / "transformer"
diffusers.FluxTransformer2DModel.from_pretrained(folder, quantization_config=config)
"""


def _declared() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["dependencies"]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_the_core_runs(which: str, tmp_path: Path) -> None:
    """Every module is imported, every name of torch is there, and a model loads, draws, and is saved and loaded."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    rows = [row.split("#")[0].strip() for row in _declared()]
    if os.environ.get("SDQUANT_TEST_TORCH") == "here":
        rows = [row for row in rows if Requirement(row).name != "torch"]
        for name in _TORCH:
            place = Path(torch.__file__).parents[1] / name
            if place.exists():
                (packages / name).symlink_to(place)
    wanted = [row.replace(">=", "==") if which == "oldest" else Requirement(row).name for row in rows]
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *wanted, "pillow"]
    environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    subprocess.run(install, check=True, env=environment)
    temporary = tmp_path / "temporary"  # pytest removes it, with what CORE saves there
    temporary.mkdir()
    run = {
        **environment,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(temporary),
    }
    names = [str(python), str(ROOT / "tests" / "torch_names.py"), str(ROOT / "sdquant")]
    assert subprocess.run(names, env=run, check=True, capture_output=True, text=True).stdout.strip() == ""
    out = subprocess.run(
        [str(python), "-W", "ignore", "-c", CORE], env=run, cwd=tmp_path, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stdout + out.stderr[-3000:]


def test_every_name_of_torch_is_there() -> None:
    """And one that torch may lack is asked for in one place: by `getattr` in core, or in the table of these names."""
    assert torch_names.lacks(ROOT / "sdquant") == []
    asked = [
        path.relative_to(ROOT / "sdquant").as_posix()
        for path in (ROOT / "sdquant").rglob("*.py")
        if 'getattr(torch, "float' in path.read_text(encoding="utf-8")
    ]
    assert asked == ["core/torch_dtypes.py"]
