"""Every mode draws the same bits as no offloading, and leaves nothing behind."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sdquant import backends, offload
from sdquant.core.backend import Unfit
from sdquant.errors import SettingsError
from sdquant.models import pipelines
from sdquant.nn import kind_of, quantized_layer

from .conftest import draw, hooked, made, same_state, state_of

if TYPE_CHECKING:
    from pathlib import Path

MODES = [row.name for row in offload.MODES]


def settings(mode: str, pipe: Any, folder: Path) -> dict[str, Any]:
    """A folder to look into, and for balanced a budget that is too small for the largest component."""
    parts = pipelines.components_of(pipe).values()
    largest = max(offload.weight_bytes(part) for part in parts)
    return {"device": "cpu", "folder": folder, "budget": int(0.85 * largest) if mode == "balanced" else None}


def quantize(pipe: Any, scheme: str, *, library: bool = False) -> Any:
    """The denoiser's and the first text encoder's quantizable layers, in place."""
    spec, backend = backends.parse(scheme), backends.of_scheme(scheme.partition(",")[0])
    for part in (getattr(pipe, "unet", None) or pipe.transformer, pipe.text_encoder):
        for name, module in list(part.named_modules()):
            if kind_of(module) is None or (library and not isinstance(module, torch.nn.Linear)):
                continue
            weight: Any = module.weight
            try:
                packed = backend.encode(weight.data, spec)
            except Unfit:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of libraries, at their import
                layer = backend.to_library(module, packed, spec) if library else quantized_layer(module, packed)
            parent, _, child = name.rpartition(".")
            setattr(part.get_submodule(parent), child, layer.eval())
    return pipe


@pytest.mark.parametrize("mode", MODES)
def test_same_bits_and_nothing_left(mode: str, pipeline: Any, tmp_path: Path) -> None:
    expected, before = draw(pipeline), state_of(pipeline)
    names = [name for part in pipelines.components_of(pipeline).values() for name, _ in part.named_parameters()]

    handle = offload.apply(pipeline, mode, **settings(mode, pipeline, tmp_path))
    assert (draw(pipeline) == expected).all()
    assert (draw(pipeline) == expected).all()  # a second run starts from what the first left
    assert hooked(pipeline)
    assert bool(list(tmp_path.iterdir())) == (mode != "none")
    report = handle.report()
    assert report["mode"] == mode and report["active"]
    assert report["components"].keys() == pipelines.components_of(pipeline).keys()

    handle.remove()
    assert not hooked(pipeline) and not list(tmp_path.iterdir()) and not handle.report()["active"]
    assert same_state(pipeline, before)
    assert names == [name for part in pipelines.components_of(pipeline).values() for name, _ in part.named_parameters()]
    assert (draw(pipeline) == expected).all()


@pytest.mark.parametrize("mode", MODES)
def test_the_pipeline_says_where_it_computes(mode: str, pipeline: Any, tmp_path: Path) -> None:
    handle = offload.apply(pipeline, mode, **settings(mode, pipeline, tmp_path))
    assert pipeline._execution_device == torch.device("cpu")
    handle.remove()
    assert pipeline.device == torch.device("cpu")


@pytest.mark.parametrize("mode", MODES)
def test_tied_weights_are_tied_afterwards(mode: str, tmp_path: Path) -> None:
    pipe = made("flux")
    encoder = pipe.text_encoder_2
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    handle = offload.apply(pipe, mode, **settings(mode, pipe, tmp_path))
    draw(pipe)
    handle.remove()
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
def test_a_model_made_in_inference_mode(mode: str, tmp_path: Path) -> None:
    """Its tensors cannot be moved, so that copies that can be take their places; what was tied is tied."""
    x = torch.randn(2, 16)
    with torch.inference_mode():
        net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        net[3].weight = net[0].weight
        net.register_buffer("table", torch.ones(3))
        expected = net(x)
    handle = offload.apply(net, mode, device="cpu", folder=tmp_path)
    with torch.no_grad():
        assert torch.equal(net(x), expected)
    handle.remove()
    assert net[3].weight is net[0].weight
    assert not any(tensor.is_inference() for tensor in net.state_dict(keep_vars=True).values())
    assert torch.equal(net(x).detach(), expected)


def test_a_library_s_tensors_made_in_inference_mode_are_refused(tmp_path: Path) -> None:
    class Own(torch.nn.Parameter):
        pass

    with torch.inference_mode():
        net = torch.nn.Sequential(torch.nn.Linear(16, 16))
        net[0].weight = Own(net[0].weight.data)
    with pytest.raises(SettingsError, match=r"^Cannot move weight 0\.weight: it is a Own"):
        offload.apply(net, "model", device="cpu", folder=tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_a_vae_is_used_through_its_methods(mode: str, tmp_path: Path) -> None:
    vae: Any = made("sd").vae
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def there_and_back() -> torch.Tensor:
        with torch.no_grad():
            latents = vae.encode(image).latent_dist.mean
            decoded: torch.Tensor = vae.decode(latents).sample
            return decoded.add(vae(image).sample)

    expected = there_and_back()
    budget = int(0.6 * offload.weight_bytes(vae)) if mode == "balanced" else None
    handle = offload.apply(vae, mode, device="cpu", folder=tmp_path, budget=budget)
    assert torch.equal(there_and_back(), expected)
    assert torch.equal(there_and_back(), expected)
    handle.remove()
    assert torch.equal(there_and_back(), expected) and not hooked(vae)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_on_the_way_leaves_the_mode_working(mode: str, tmp_path: Path) -> None:
    pipe = made("sd")
    expected = draw(pipe)
    handle = offload.apply(pipe, mode, **settings(mode, pipe, tmp_path))
    with pytest.raises(RuntimeError), torch.no_grad():  # text embeddings of the wrong width, deep inside the UNet
        pipe.unet(torch.zeros(1, 4, 8, 8), 1, encoder_hidden_states=torch.zeros(1, 77, 3))
    assert (draw(pipe) == expected).all()
    handle.remove()
    assert (draw(pipe) == expected).all() and not hooked(pipe)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow  # tests/test_matrix.py has plain layers in every mode
@pytest.mark.parametrize("scheme", ["int8", "q8_0", "nf4", "int4"])
def test_plain_layers_run_in_every_mode(scheme: str, mode: str, pipeline: Any, tmp_path: Path) -> None:
    quantize(pipeline, scheme)
    expected, before = draw(pipeline), state_of(pipeline)
    handle = offload.apply(pipeline, mode, **settings(mode, pipeline, tmp_path))
    assert (draw(pipeline) == expected).all()
    handle.remove()
    assert same_state(pipeline, before) and not hooked(pipeline)
    assert (draw(pipeline) == expected).all()


@pytest.mark.parametrize("mode", ["none", "model", "balanced", "group"])
@pytest.mark.parametrize(
    "scheme", ["nf4,double_quant", "bnb-int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nf4", "fp4"))]
)
def test_bitsandbytes_modules(scheme: str, mode: str, tmp_path: Path) -> None:
    """Also the first run, in which bitsandbytes repacks 4-bit weights on some CPUs, and moves parts of 8-bit ones."""
    pipe = quantize(made("flux"), scheme, library=True)
    expected = draw(quantize(made("flux"), scheme, library=True))
    handle = offload.apply(pipe, mode, **settings(mode, pipe, tmp_path))
    for _ in range(3):
        assert (draw(pipe) == expected).all()
    handle.remove()
    assert (draw(pipe) == expected).all() and not hooked(pipe) and not list(tmp_path.iterdir())


def test_8_bit_bitsandbytes_modules_run_leaf_by_leaf(tmp_path: Path) -> None:
    """accelerate knows them, and throws their scales away afterwards; `remove` brings them back."""
    pipe = quantize(made("flux"), "bnb-int8", library=True)
    expected = draw(pipe)
    handle = offload.apply(pipe, "sequential", device="cpu", folder=tmp_path)
    for _ in range(2):
        assert (draw(pipe) == expected).all()
    handle.remove()
    assert (draw(pipe) == expected).all() and not hooked(pipe)


@pytest.mark.parametrize("mode", ["none", "model", "group"])
@pytest.mark.parametrize("scheme", ["qint8", "qint4"])
def test_quanto_modules(scheme: str, mode: str, tmp_path: Path) -> None:
    pipe = quantize(made("flux"), scheme, library=True)
    expected = draw(pipe)
    handle = offload.apply(pipe, mode, **settings(mode, pipe, tmp_path))
    for _ in range(2):
        assert (draw(pipe) == expected).all()
    handle.remove()
    assert (draw(pipe) == expected).all() and not hooked(pipe)


# What the matrix refuses beforehand really breaks when nobody does, and the model is whole again afterwards.
REAL_BREAKS = [
    ("nf4", "sequential", NotImplementedError, "Cannot copy out of meta tensor"),
    ("fp4", "sequential", NotImplementedError, "Cannot copy out of meta tensor"),
    ("qint8", "sequential", TypeError, r"WeightQBytesTensor.__new__\(\) missing"),
    ("qint4", "sequential", TypeError, r"WeightQBitsTensor.__new__\(\) missing"),
    ("qint8", "balanced", RuntimeError, "Attempted to access the data pointer on an invalid python storage"),
    ("qint4", "balanced", RuntimeError, "Attempted to access the data pointer on an invalid python storage"),
]


@pytest.mark.parametrize(("scheme", "mode", "error", "words"), REAL_BREAKS)
def test_what_is_refused_really_breaks(
    scheme: str, mode: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    pipe = quantize(made("flux"), scheme, library=True)
    expected = draw(pipe)
    with pytest.raises(error, match=words):
        handle = offload.apply(pipe, mode, **settings(mode, pipe, tmp_path))
        try:
            draw(pipe)
        finally:
            handle.remove()
    assert (draw(pipe) == expected).all() and not hooked(pipe) and not list(tmp_path.iterdir())
