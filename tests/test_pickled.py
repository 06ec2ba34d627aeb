"""`torch.save` of a whole model, as people do it who do not know of `sdquant.save`."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch

import sdquant
from sdquant.errors import SettingsError

# Each class of layer once: bitsandbytes' own two, quanto's, sdquant's, and what OpenVINO runs.
CASES = [
    ("none", None), ("nf4", "library"), ("bnb-int8", "library"), ("qint4", "library"), ("qint3", "plain"),
    ("int8", "openvino"),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "runtime"), CASES)
def test_a_pickled_pipeline_computes_the_same(scheme: str, runtime: str | None, sd: Path) -> None:
    pipe = sdquant.load_model(sd, scheme, runtime=runtime, components="unet", progress=False)
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    given = torch.randn(1, 4, 8, 8).to(pipe.dtype), 10, torch.randn(1, 77, 128).to(pipe.dtype)
    with torch.no_grad():
        assert torch.equal(other.unet(*given).sample, pipe.unet(*given).sample)
    assert other.sdquant.plan == pipe.sdquant.plan


def test_an_offloaded_model_is_refused_until_it_is_not(sd: Path) -> None:
    pipe = sdquant.load_model(sd, "int8", "balanced", device="cpu", progress=False)
    with pytest.raises(SettingsError, match=r"^Cannot pickle a model with offload='balanced'.*remove\(\)"):
        torch.save(pipe.unet, io.BytesIO())
    with pytest.raises(SettingsError, match=r"^Cannot copy a model with offload='balanced'"):
        copy.deepcopy(pipe.unet)
    assert copy.copy(pipe).unet is pipe.unet  # a shallow copy shares all
    pipe.sdquant.offload.remove()
    torch.save(pipe.unet, io.BytesIO())


@pytest.mark.parametrize("offload", ["none", "group", "sequential"])
def test_a_state_dict_is_pickled_without_its_model(offload: str, sd: Path) -> None:
    pipe = sdquant.load_model(sd, "nf4,double_quant", offload, runtime="plain", components="unet", progress=False)
    state = pipe.unet.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for other in (saved, copy.deepcopy(state)):
        assert list(other) == list(state) and all(torch.equal(other[name], state[name]) for name in state)
    assert saved._metadata == state._metadata and not hasattr(saved, "owner")
