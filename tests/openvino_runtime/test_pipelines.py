"""runtime="openvino" on the shipped models: the plain runtime's outputs and codes, and what else is done with it."""

from __future__ import annotations

import copy
import gc
import math
import os
import subprocess
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sdquant
from sdquant import offload
from sdquant.errors import BackendUnavailableError, IncompatibleError
from sdquant.models.pipelines import main_part
from sdquant.nn.openvino import is_served, layers
from sdquant.nn.weights import quantized
from sdquant.utils.install import install_extra
from tests.compat.machines import machine
from tests.lora.conftest import load, lora_file, out, put_on

MODELS = ("digits-sd", "digits-flux")
SCHEMES = ("int8", "int8_sym", "int4", "int4_sym")
lora_of = lora_file  # the fixture, under a name that this module uses


def _decibels(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Signal to noise."""
    wanted = wanted.double()
    return float(10 * torch.log10(wanted.pow(2).sum() / (found.double() - wanted).pow(2).sum()))


@pytest.fixture(scope="module")
def pipes() -> Callable[[str, str, str], Any]:
    """pipes(model, scheme, runtime), each loaded once."""
    made: dict[tuple[str, str, str], Any] = {}

    def get(model: str, scheme: str, runtime: str) -> Any:
        key = (model, scheme, runtime)
        if key not in made:
            made[key] = load(model, scheme, runtime=runtime)
        return made[key]

    return get


def _request(pipe: Any) -> Any:
    """OpenVINO's, of the last call."""
    return main_part(pipe).forward.ready[-1][1].request  # type: ignore[union-attr]


CASES = [
    pytest.param(model, scheme, marks=[] if (model, scheme) in FEW else [pytest.mark.slow])
    for FEW in [{("digits-sd", "int8"), ("digits-flux", "int4")}]
    for model in MODELS
    for scheme in SCHEMES
]


@pytest.mark.parametrize(("model", "scheme"), CASES)
def test_it_puts_out_what_the_plain_runtime_does(pipes: Any, model: str, scheme: str) -> None:
    """Much nearer to it than the scheme is to the floats: what is left are the roundings of float16, in which the plain
    runtime decodes (11 bits: some 66 dB for a value, more where many are summed)."""
    plain, openvino = (pipes(model, scheme, name) for name in ("plain", "openvino"))
    assert is_served(main_part(openvino)) and not is_served(main_part(plain))
    wanted, found = out(plain), out(openvino)
    lost = _decibels(wanted, out(load(model, None)))
    assert _decibels(found, wanted) > max(60, lost + 20)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "scheme"), CASES)
def test_the_codes_are_those_of_the_plain_runtime_and_stay_codes(pipes: Any, model: str, scheme: str) -> None:
    plain, openvino = (pipes(model, scheme, name) for name in ("plain", "openvino"))
    theirs = dict(quantized(main_part(openvino)))
    for name, packed in quantized(main_part(plain)):
        for part, tensor in packed.parts.items():
            assert torch.equal(theirs[name].parts[part], tensor), (name, part)
    out(openvino)
    products: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for node in _request(openvino).get_compiled_model().get_runtime_model().get_ops():
        kind = node.get_rt_info()["layerType"].astype(str)
        if kind == "FullyConnected":
            products[node.get_rt_info()["runtimePrecision"].astype(str)] += 1
        elif kind == "Const":
            shape = node.get_output_partial_shape(0)
            size = math.prod(n.get_length() for n in shape) if shape.is_static else 0
            held[node.get_output_element_type(0).get_type_name()] += size
    linear = [p.spec.shape for _, p in quantized(main_part(plain)) if len(p.spec.shape) == 2]
    codes = {"int8": "u8", "int8_sym": "i8"}.get(scheme, "u4")
    assert products[codes] == len(linear)  # each is a product with codes, not with floats made of them
    assert held[codes] >= sum(out * row for out, row in linear)


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODELS[1], pytest.param(MODELS[0], marks=pytest.mark.slow)])
def test_another_shape_is_another_trace_and_the_same_compiled_model(pipes: Any, model: str) -> None:
    plain, openvino = (main_part(pipes(model, "int8", name)) for name in ("plain", "openvino"))
    out(pipes(model, "int8", "openvino"))
    before = _request(pipes(model, "int8", "openvino"))
    make = torch.Generator().manual_seed(5)
    values: dict[str, Any]
    if model == "digits-sd":
        text = torch.randn(3, 50, 128, generator=make)
        values = {"sample": torch.randn(3, 4, 16, 8, generator=make), "timestep": 3, "encoder_hidden_states": text}
    else:
        values = {
            "hidden_states": torch.randn(2, 36, 16, generator=make),
            "encoder_hidden_states": torch.randn(2, 100, 128, generator=make),
            "pooled_projections": torch.randn(2, 128, generator=make),
            "timestep": torch.tensor([0.5, 0.25]),
            "guidance": torch.tensor([3.5, 1.0]),
            "txt_ids": torch.zeros(100, 3),
            "img_ids": torch.arange(108.0).view(36, 3),
        }
    with torch.no_grad():
        found, wanted = openvino(**values), plain(**values)
    assert type(found) is type(wanted)
    assert found.sample.dtype == torch.float32
    assert _decibels(found.sample, wanted.sample) > 60
    assert _request(pipes(model, "int8", "openvino")) is before
    with torch.no_grad():
        (again,) = openvino(**values, return_dict=False)
    assert torch.equal(again, found.sample)
    assert _request(pipes(model, "int8", "openvino")) is before


@pytest.mark.slow
def test_a_size_that_goes_another_way_through_the_model_is_compiled_anew(pipes: Any) -> None:
    """9 is not a multiple of the UNet's factor of 2: it then hands sizes to its upsamplers."""
    plain, openvino = (main_part(pipes("digits-sd", "int8", name)) for name in ("plain", "openvino"))
    out(pipes("digits-sd", "int8", "openvino"))
    before = _request(pipes("digits-sd", "int8", "openvino"))
    values = (torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(5)), 3, torch.zeros(1, 7, 128))
    with torch.no_grad():
        found, wanted = openvino(*values).sample, plain(*values).sample
    assert _request(pipes("digits-sd", "int8", "openvino")) is not before
    assert _decibels(found, wanted) > 60


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODELS[1], pytest.param(MODELS[0], marks=pytest.mark.slow)])
def test_a_lora_has_its_effect_at_its_strength_and_comes_off(pipes: Any, lora_of: Any, model: str) -> None:
    pair = [pipes(model, "int8", name) for name in ("plain", "openvino")]
    bare = [out(pipe) for pipe in pair]
    try:
        for pipe in pair:
            put_on(pipe, lora_of(model))
        for weight in (1.0, 0.3):
            for pipe in pair:
                pipe.set_adapters(["one"], [weight])
            wanted, found = (out(pipe) for pipe in pair)
            assert _decibels(wanted, bare[0]) < 40  # it changes something
            assert _decibels(found, wanted) > 60
    finally:
        for pipe in pair:
            pipe.unload_lora_weights()
    assert torch.equal(out(pair[1]), bare[1])


@pytest.mark.slow
def test_it_is_saved_copied_cast_and_freed_as_the_plain_one_is(pipes: Any, tmp_path: Path) -> None:
    pipe = pipes("digits-flux", "int8", "openvino")
    wanted = out(pipe)
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", runtime="openvino", progress=False)
    assert is_served(again.transformer) and torch.equal(out(again), wanted)
    other = copy.deepcopy(again.transformer)
    assert is_served(other) and other.forward is not again.transformer.forward
    again.transformer = other
    assert torch.equal(out(again), wanted)
    other.to(torch.bfloat16)
    assert other.dtype == torch.bfloat16
    del again
    gc.collect()
    alive = weakref.ref(other)
    gc.disable()
    try:
        del other
        assert alive() is None
    finally:
        gc.enable()


def test_in_bfloat16_it_is_as_near_to_float32_as_torch_is() -> None:
    """Both round at each step, torch here and OpenVINO there: neither is the other's reference."""
    make = torch.Generator().manual_seed(5)
    values = {
        "hidden_states": torch.randn(1, 16, 16, generator=make),
        "encoder_hidden_states": torch.randn(1, 64, 128, generator=make),
        "pooled_projections": torch.randn(1, 128, generator=make),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "txt_ids": torch.zeros(64, 3),
        "img_ids": torch.arange(48.0).view(16, 3),
    }
    found: list[torch.Tensor] = []
    for runtime in ("plain", "openvino"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what other libraries say while they are imported
            path = sdquant.demo.path("digits-flux")
            model = sdquant.load_model(path, "int8", runtime=runtime, dtype="bfloat16", progress=False).transformer
        with torch.no_grad():
            answer = model(**{name: value.bfloat16() for name, value in values.items()}).sample
        assert answer.dtype == model.dtype == torch.bfloat16
        found.append(answer.float())
        if runtime == "plain":
            with torch.no_grad():
                exact = model.float()(**values).sample
    plain, openvino = (_decibels(one, exact) for one in found)
    assert plain > 25
    assert openvino > plain - 1.5


def test_quantize_after_loading_gives_the_same(pipes: Any) -> None:
    pipe = load("digits-flux", None)
    sdquant.quantize(pipe, "int8", runtime="openvino", progress=False)
    assert is_served(pipe.transformer) and not is_served(pipe.text_encoder)
    assert torch.equal(out(pipe), out(pipes("digits-flux", "int8", "openvino")))


def test_torch_compile_leaves_it_alone(pipes: Any) -> None:
    pipe = pipes("digits-flux", "int8", "openvino")
    wanted, model = out(pipe), pipe.transformer
    try:
        pipe.transformer = torch.compile(model, backend="eager")
        assert torch.equal(out(pipe), wanted)
    finally:
        pipe.transformer = model


def test_gradients_and_moving_are_refused(pipes: Any) -> None:
    pipe = pipes("digits-sd", "int8", "openvino")
    sample = torch.zeros(1, 4, 8, 8, requires_grad=True)
    with pytest.raises(IncompatibleError, match="gradients") as caught:
        pipe.unet(sample, 1, torch.zeros(1, 7, 128))
    assert 'runtime="plain"' in caught.value.fix
    with pytest.raises(IncompatibleError, match="its inputs are on meta"):
        pipe.unet(torch.zeros(1, 4, 8, 8, device="meta"), 1, torch.zeros(1, 7, 128))
    for mode in ("model", "sequential", "balanced", "group"):
        with pytest.raises(IncompatibleError, match="OpenVINO runs the unet"):
            offload.apply(pipe, mode, device="cpu")


def test_an_offload_mode_that_is_forced_is_refused_when_it_is_applied() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sdquant.compat.IncompatibleWarning)
        with pytest.raises(IncompatibleError, match="cannot be moved"):
            load("digits-flux", "int8", "model", runtime="openvino", allow_incompatible=True)


def test_an_error_of_the_model_is_its_own_and_leaves_nothing_behind(pipes: Any) -> None:
    pipe = pipes("digits-flux", "int8", "openvino")
    wanted = out(pipe)
    with pytest.raises(TypeError, match="argument"), torch.no_grad():
        pipe.transformer(unknown=3)
    with pytest.raises(RuntimeError, match="size"), torch.no_grad():
        pipe.transformer(
            torch.zeros(1, 16, 16), torch.zeros(1, 8, 128), torch.zeros(1, 128), torch.ones(1),
            guidance=torch.ones(1), txt_ids=torch.zeros(7, 3), img_ids=torch.zeros(16, 3),
        )  # fmt: skip
    assert is_served(pipe.transformer)
    assert not any("forward" in part.__dict__ for part in pipe.transformer.modules() if part is not pipe.transformer)
    assert torch.equal(out(pipe), wanted)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError("no such operation")])
def test_what_stops_the_conversion_leaves_nothing_behind(
    pipes: Any, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    pipe = load("digits-flux", "int8", runtime="openvino")
    with monkeypatch.context() as patched:

        def broken(*args: Any) -> Any:
            raise fault

        patched.setattr(layers, "decompressed", broken)
        if fault is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                out(pipe)
        else:
            with pytest.raises(IncompatibleError, match="could not be converted") as caught:
                out(pipe)
            assert "FluxTransformer2DModel" in caught.value.what and 'runtime="plain"' in caught.value.fix
    assert not pipe.transformer.forward.ready
    assert torch.equal(out(pipe), out(pipes("digits-flux", "int8", "openvino")))


def test_a_plan_says_which_components_it_runs() -> None:
    made = sdquant.plan(sdquant.demo.path("digits-flux"), "int4", runtime="openvino")
    assert {part.name: part.runtime for part in made.components} == {
        "text_encoder": "plain", "text_encoder_2": "plain", "transformer": "openvino", "vae": "plain",
    }  # fmt: skip
    assert not made.warnings
    none = sdquant.plan(sdquant.demo.path("digits-flux"), "int4", runtime="openvino", components="text_encoder")
    assert any("runtime='openvino' has no effect" in line for line in none.warnings)


@pytest.mark.parametrize("missing", [{"without": ("openvino",)}, {"newer": {"openvino": "2024.6.0"}}])
def test_a_missing_or_old_package_names_the_pip_line(missing: dict[str, Any]) -> None:
    for mode in ("pre", "found"):
        with pytest.raises(BackendUnavailableError, match="it needs openvino") as caught:
            sdquant.check("int8", runtime="openvino", mode=mode, device="cpu", machine=machine(**missing))
        assert install_extra("openvino") in caught.value.fix
    sdquant.check("int8", device="cpu", machine=machine(**missing))


def test_other_devices_are_refused() -> None:
    for device in ("cuda", "rocm", "xpu", "mps", "directml"):
        with pytest.raises(IncompatibleError, match="CPU plugin") as caught:
            sdquant.check("int8", runtime="openvino", device=device, machine=machine())
        assert 'device="cpu"' in caught.value.fix


QUIET = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the network was asked for")
socket.getaddrinfo = socket.create_connection = refuse
import sdquant
from sdquant import backends
assert "openvino" not in sys.modules
import torch
backends.get("nncf").encode(torch.randn(8, 64), backends.parse("int4"))
assert "openvino" in sys.modules  # NNCF imports it
from sdquant.nn.openvino.library import core
core()
assert "openvino" in sys.modules and "nncf" in sys.modules
assert not [name for name in sys.modules if name.startswith("openvino_telemetry")]
"""


def test_nothing_is_reported_to_anybody(tmp_path: Path) -> None:
    """In a process of its own: OpenVINO reports when it is imported, and NNCF imports it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", QUIET],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (tmp_path / "intel").exists()  # where it keeps the number that it knows a user by
