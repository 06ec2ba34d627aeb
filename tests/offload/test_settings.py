from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sdquant import backends, offload
from sdquant.compat import check
from sdquant.errors import IncompatibleError, SettingsError, UnknownOffloadError
from sdquant.offload import group_hooks
from sdquant.utils import byte_sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6_000_000_000),
        ("6 gb", 6_000_000_000),
        ("512MB", 512_000_000),
        ("512MiB", 512 * 2**20),
        ("1.5g", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        (".5k", 500),
        ("2T", 2_000_000_000_000),
        ("100", 100),
        ("100B", 100),
        (123, 123),
        (6e9, 6_000_000_000),
        (np.int64(123), 123),
        (None, None),
    ],
)
def test_budget_is_bytes(text: str | int | None, size: int | None) -> None:
    assert byte_sizes.parse_budget(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", 0, -5, "6 bananas", "1e9", "6GB 5", True, 2.5, "nan"])
def test_nonsense_is_no_budget(text: Any) -> None:
    with pytest.raises(SettingsError, match="not a size") as error:
        byte_sizes.parse_budget(text)
    assert "6GB" in error.value.fix


def test_every_mode_has_its_file_and_no_file_is_forgotten() -> None:
    folder = Path(offload.__file__).parent
    assert {"none", "model", "sequential", "balanced", "group"} == {row.name for row in offload.MODES}
    assert all((folder / f"{row.name}.py").exists() and row.summary for row in offload.MODES)
    assert len({row.order for row in offload.MODES}) == len(offload.MODES)


def test_the_package_is_there_without_torch() -> None:
    code = "import sys, sdquant.offload as o; o.parse_budget('6GB'); o.MODES; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("mode", "near"), [("balance", "balanced"), ("Model", "model"), ("xyzzy", "Use one of")])
def test_unknown_mode(mode: str, near: str) -> None:
    with pytest.raises(UnknownOffloadError) as error:
        offload.apply(nn.Linear(2, 2), mode, device="cpu")
    assert near in error.value.fix
    assert "sequential" in error.value.why


@pytest.mark.parametrize("mode", [row.name for row in offload.MODES if row.name != "balanced"])
def test_a_budget_belongs_to_balanced(mode: str) -> None:
    with pytest.raises(SettingsError, match="only balanced offload keeps to a budget"):
        offload.apply(nn.Linear(2, 2), mode, device="cpu", budget="6GB")


def test_a_second_mode_wants_the_first_removed(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)
    handle = offload.apply(layer, "model", device="cpu", folder=tmp_path)
    with pytest.raises(SettingsError, match="already offloaded"):
        offload.apply(layer, "sequential", device="cpu", folder=tmp_path)
    handle.remove()
    handle.remove()  # twice is as good as once
    second = offload.apply(layer, offload.mode_named("sequential"), device="cpu", folder=tmp_path)
    assert layer(torch.ones(8)).shape == (8,)
    second.remove()
    assert not list(tmp_path.iterdir())


class Blocks(nn.Module):
    """Two blocks of 272 bytes: 4 * (8 * 8 + 8) each, rounded up to what a region takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("mode", ["model", "sequential", "balanced", "group"])
def test_a_folder_that_cannot_be_used_is_said_and_leaves_the_model_alone(mode: str, tmp_path: Path) -> None:
    model = Blocks()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SettingsError, match="no folder can be created there") as error:
        offload.apply(
            model, mode, device="cpu", folder=tmp_path / "nowhere", budget=400 if mode == "balanced" else None
        )
    assert "folder=" in error.value.fix
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not set(model.__dict__) & {"forward", "_hf_hook", "_sdquant_offload"}


FULL_DISK = """
import resource, sys, torch
from tests.offload.test_settings import Blocks
from sdquant import backends, offload
from sdquant.compat import check
from sdquant.errors import SettingsError
model = Blocks()
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
# No file may grow beyond 300 bytes: like a full disk, writing fails half-way.
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
try:
    budget = 400 if sys.argv[1] == "balanced" else None
    offload.apply(model, sys.argv[1], device="cpu", folder=sys.argv[2], budget=budget)
except SettingsError as error:
    assert "cannot be written" in error.why, error
    assert "Free space" in error.fix
else:
    sys.exit("nothing was raised")
assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
assert not set(model.__dict__) & {"forward", "_hf_hook", "_sdquant_offload"}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
@pytest.mark.parametrize(
    "mode", ["model", "balanced", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sequential", "group"))]
)
def test_a_full_disk_is_said_and_leaves_the_model_alone(mode: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, mode, str(tmp_path)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", ["nf4", "bnb-int8", "qint8"])
def test_group_offload_to_a_card_of_a_librarys_layers_is_refused(scheme: str) -> None:
    """bitsandbytes' kernels would read the CPU's memory: seen on an H200."""
    handle = offload.OffloadHandle("group", "cuda", 0)
    spec, linear = backends.parse(scheme), nn.Linear(64, 64)
    packed = backends.of_scheme(spec.scheme.name).encode(linear.weight.data, spec)
    layer = backends.of_scheme(spec.scheme.name).to_library(linear, packed, spec)
    with pytest.raises(IncompatibleError, match=r"^Cannot use offload='group' for the unet: 0.weight.* belongs to"):
        group_hooks.offload_groups("unet", nn.Sequential(layer), handle, torch.device("cuda"), None)
    handle.undo.close()


@pytest.mark.parametrize("scheme", ["nf4", "bnb-int8"])
def test_the_matrix_says_so_before_weights_are_read(scheme: str) -> None:
    with pytest.raises(IncompatibleError, match="illegal memory access"):
        check(scheme, "group", runtime="library", device="cuda")
