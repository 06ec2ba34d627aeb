"""Quantized files load and draw without the packages that made them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sdquant import demo
from sdquant.loading.loader import load_model
from sdquant.models.generate import draw
from sdquant.saving.model_files import save

SCHEMES = {
    "bitsandbytes": ("nf4,double_quant", "fp4", "fp8", "bnb-int8"),
    "optimum-quanto": ("qint8", "qfloat8", "qint4", "qint3", "qint2"),
    "nncf": ("int8", "int4_sym"),
    "sdnq": ("sdnq-int8", "sdnq-uint3"),
}
# Import names of the packages, and what their metadata begins with.
GONE = ("bitsandbytes", "optimum", "nncf", "sdnq", "gguf", "libgguf")

DRAW = """
import sys
import torch
from pathlib import Path
import sdquant
from sdquant.compat import hardware
from sdquant.models.generate import draw

assert not {"bitsandbytes", "optimum-quanto", "nncf", "sdnq", "gguf", "libgguf"} & set(hardware.versions())
for folder in sorted(Path(sys.argv[1]).iterdir()):
    pipe = sdquant.load_model(folder, progress=False)
    assert all(part.runtime == "plain" for part in pipe.sdquant.plan.components if part.weights), folder
    draw(pipe, ["a photo of the digit 7"], seeds=[3], steps=2)[0].save(Path(sys.argv[2]) / f"{folder.name}.png")
    sdquant.save(pipe, Path(sys.argv[2]) / folder.name)
try:
    sdquant.load_model(sys.argv[3], "nf4", progress=False)
except sdquant.BackendUnavailableError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to all installed packages but these."""
    here = tmp_path_factory.mktemp("packages")
    for place in dict.fromkeys(path for path in sys.path if path.endswith("site-packages")):
        for entry in Path(place).iterdir():
            if not entry.name.lower().replace("-", "_").startswith(GONE) and not (here / entry.name).exists():
                (here / entry.name).symlink_to(entry)
    return here


@pytest.mark.slow
def test_every_format_draws_the_same_picture_without_its_package(without: Path, tmp_path: Path) -> None:
    from PIL import Image, ImageChops

    model = demo.path("digits-flux")
    folders, drawn = tmp_path / "folders", tmp_path / "drawn"
    drawn.mkdir()
    for quant in (name for names in SCHEMES.values() for name in names):
        pipe = load_model(model, quant, runtime="plain", progress=False)
        save(pipe, folders / quant)
        draw(pipe, ["a photo of the digit 7"], seeds=[3], steps=2)[0].save(tmp_path / f"{quant}.png")
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", DRAW, str(folders), str(drawn), str(model)],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{without}", "PYTHONNOUSERSITE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "bitsandbytes" in done.stdout and "pip install" in done.stdout
    for folder in folders.iterdir():
        with Image.open(tmp_path / f"{folder.name}.png") as ours, Image.open(drawn / f"{folder.name}.png") as theirs:
            assert ImageChops.difference(ours, theirs).getbbox() is None, folder.name
        for file in folder.rglob("*.safetensors"):  # saved again, without the package
            with safe_open(file, "pt") as ours, safe_open(drawn / file.relative_to(folders), "pt") as theirs:
                assert ours.metadata() == theirs.metadata()
                assert set(ours.keys()) == set(theirs.keys())
                assert all(torch.equal(ours.get_tensor(key), theirs.get_tensor(key)) for key in ours.keys())  # noqa: SIM118
