"""`torch.save` of a whole model, as people do it who do not know of `sdquant.save`."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sdquant
from sdquant import backends
from sdquant.core.backend import PackedSpec
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


@pytest.mark.parametrize("scheme", backends.schemes(), ids=str)
def test_a_scheme_is_the_same_object_in_every_copy(scheme: backends.Scheme) -> None:
    assert scheme.codec is backends.get(scheme.backend)
    assert copy.deepcopy(scheme) is scheme and pickle.loads(pickle.dumps(scheme)) is scheme
    assert str(scheme) == scheme.name


def test_a_description_is_unpickled_with_the_file_of_its_backend_alone() -> None:
    spec = PackedSpec(scheme=backends.scheme("nf4"), shape=(4, 64), dtype="float32", details={"block_size": 64})
    code = (
        "import pickle, sys\n"
        "spec = pickle.load(sys.stdin.buffer)\n"
        "assert {'torch', 'sdquant.backends.quanto', 'sdquant.rules'}.isdisjoint(sys.modules)\n"
        "from sdquant import backends\n"
        "assert spec.scheme is backends.scheme('nf4') and spec.scheme.codec is backends.get('bnb')\n"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(spec), check=True)
