"""Layers that a library's runtime has no module for stay floats, and the plan says so before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sdquant
from sdquant import backends
from sdquant.nn.weights import quantized

# Of libraries with layers of their own.
LIBRARY = [row.name for row in backends.schemes() if row.on_the_fly and row.runtimes[0] == "library"]


class Layers(nn.Module):
    """One of each kind that can be quantized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(128, 128)
        self.conv1d, self.conv2d, self.conv3d = nn.Conv1d(128, 128, 3), nn.Conv2d(128, 128, 3), nn.Conv3d(128, 128, 3)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [128]."""
        wide = x.view(1, 128, 1).expand(1, 128, 3)
        flat = wide.unsqueeze(-1).expand(1, 128, 3, 3)
        deep = flat.unsqueeze(-1).expand(1, 128, 3, 3, 3)
        return [self.linear(x), self.conv1d(wide), self.conv2d(flat.contiguous()), self.conv3d(deep.contiguous())]


@pytest.mark.parametrize("runtime", ["library", "plain"])
@pytest.mark.parametrize("scheme", LIBRARY)
def test_every_kind_of_layer(scheme: str, runtime: str) -> None:
    model = Layers().bfloat16().requires_grad_(False)
    x = torch.randn(128).bfloat16()
    with torch.no_grad():
        wanted = model(x)
        sdquant.quantize(model, scheme, runtime=runtime, progress=False)
        found = model(x)
    names = {name.split(".")[0] for name, _ in quantized(model)}
    on_library = {"linear", "conv2d"} if backends.scheme(scheme).backend == "quanto" else {"linear"}
    assert names == (on_library if runtime == "library" else {"linear", "conv1d", "conv2d", "conv3d"})
    for one, other in zip(found, wanted, strict=True):
        assert torch.nn.functional.cosine_similarity(one.float().flatten(), other.float().flatten(), dim=0) > 0.8


def test_the_plan_says_it(tmp_path: Path) -> None:
    import diffusers

    from .test_keep_in_fp32 import wan

    name, values = wan()
    getattr(diffusers, name)(**values | {"in_channels": 32}).bfloat16().save_pretrained(tmp_path)
    (part,) = sdquant.plan(tmp_path, "qint8", runtime="library").components
    assert "no module for Conv3d layers" in part.kept["patch_embedding.weight"]
    assert "runtime=plain" in part.kept["patch_embedding.weight"]
    for mode in ("pre", "post"):
        model = sdquant.load_model(tmp_path, "qint8", runtime="library", mode=mode, progress=False)
        assert {name for name, _ in quantized(model)} == {weight.name for weight in part.weights}
        assert type(model.patch_embedding) is nn.Conv3d
    (plain,) = sdquant.plan(tmp_path, "qint8", runtime="plain").components
    assert {weight.name for weight in plain.weights} - {weight.name for weight in part.weights} == {
        "patch_embedding.weight"
    }


def test_found_on_disk_they_run_in_plain_layers(tmp_path: Path) -> None:
    """A file may hold more than the library runs."""
    import diffusers

    from .test_keep_in_fp32 import run_wan, wan

    name, values = wan()
    values |= {"in_channels": 32}
    getattr(diffusers, name)(**values).bfloat16().save_pretrained(tmp_path / "float")
    model = sdquant.load_model(tmp_path / "float", "qint8", runtime="plain", progress=False)
    sdquant.save(model, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", runtime="library", progress=False)
    assert {name for name, _ in quantized(again)} == {name for name, _ in quantized(model)}
    assert bool(run_wan(again).isfinite().all())


def test_layerwise_casting_is_refused(sd: Path) -> None:
    """Nothing of the UNet would be quantized, and the pipeline would pass for a quantized one."""
    pipe: Any = sdquant.load_model(sd, progress=False)
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    for given in ({}, {"components": ["unet"]}):
        with pytest.raises(sdquant.IncompatibleError, match="unet") as caught:
            sdquant.quantize(pipe, "int8", progress=False, **given)
        assert "layerwise casting" in caught.value.why and "enable_layerwise_casting" in caught.value.fix
    assert not list(quantized(pipe.text_encoder))
    with pytest.raises(sdquant.IncompatibleError, match="layerwise casting"):
        sdquant.quantize(pipe.unet, "int8", progress=False)
    sdquant.quantize(pipe, "int8", components="text_encoder", progress=False)
    assert list(quantized(pipe.text_encoder))
