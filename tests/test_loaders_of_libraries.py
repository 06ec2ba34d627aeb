"""What README says of the folders that sdquant writes, and of diffusers' and transformers' own loaders, on a CPU.

Each scheme loads in all three with the same bits, or is refused by the error that is named here. What is refused today
is expected to be refused: the day a library takes it, a test fails, and the sentence in README can go.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sdquant
from sdquant import backends
from sdquant.models.components import quiet
from sdquant.models.pipelines import weight_parts
from sdquant.nn.weights import plain, quantized

FLUX = {"transformer": "FluxTransformer2DModel", "text_encoder": "CLIPTextModel", "text_encoder_2": "T5EncoderModel"}
CLASSES = {"digits-flux": FLUX, "digits-sd": {"unet": "UNet2DConditionModel", "text_encoder": "CLIPTextModel"}}
SCHEMES = [row.name for row in backends.schemes() if row.on_the_fly]
FILES = [row.name for row in backends.get("gguf").schemes]
USUAL = {"nf4", "bnb-int8", "int8", "qint8", "qint3", "fp8", "sdnq-uint4", "q8_0"}
# By the backend whose folders diffusers refuses where it sees no GPU.
REFUSED = {scheme for scheme in SCHEMES if backends.scheme(scheme).backend == "bnb"} - {"fp8"}
NO_GPU = "No GPU found. A GPU is needed for quantization."

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="diffusers sees a GPU: what is refused here is not there"),
    pytest.mark.filterwarnings("ignore:.*Quanto:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
]


def of_library(name: str) -> Any:
    """A component's class, of its own library."""
    import diffusers
    import transformers

    return getattr(transformers if name.startswith(("CLIP", "T5")) else diffusers, name)


def refused(folder: Path, name: str) -> bool:
    """Whether a component's folder is one that diffusers refuses without a GPU, by what its config says."""
    said = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    return said.get("quant_method") == "bitsandbytes" and of_library(name).__module__.startswith("diffusers.")


def decoded(model: nn.Module) -> dict[str, Tensor]:
    """Every quantized weight as floats, in whosever layers it is."""
    found = {name: packed.spec.scheme.codec.decode(packed, torch.bfloat16) for name, packed in quantized(model)}
    for path, layer in model.named_modules():
        ask: Any = getattr(layer, "sdnq_dequantizer", None)  # the sdnq package's
        if ask is not None:
            parts = {
                name: getattr(layer, name, None) for name in ("weight", "scale", "zero_point", "svd_up", "svd_down")
            }
            found[f"{path}.weight"] = ask(**parts, dtype=torch.bfloat16, skip_compile=True)
    return found


def assert_same(one: Any, other: Any) -> None:
    """The same quantized weights, and the same floats, bit for bit."""
    mine, wanted = decoded(one), decoded(other)
    assert mine.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(mine[name], wanted[name])] == []
    state, floats = one.state_dict(), plain(other)
    assert floats and [name for name, tensor in floats.items() if not torch.equal(state[name], tensor)] == []


def cells() -> Iterator[Any]:
    """A model and a scheme: in CI the usual ones."""
    for model, scheme in itertools.product(CLASSES, (*SCHEMES, *FILES)):
        usual = scheme in (USUAL if model == "digits-flux" else ("nf4", "int8"))
        yield pytest.param(model, scheme, id=f"{model}-{scheme}", marks=() if usual else pytest.mark.slow)


@pytest.mark.parametrize(("model", "scheme"), [*cells()])
def test_every_scheme_in_all_three(
    model: str, scheme: str, loaded: Callable[..., Any], saved: Callable[..., Path], tmp_path: Path
) -> None:
    """As `save` writes it, and `save_pretrained` alike (`test_save_pretrained`); GGUF's after they were loaded."""
    from diffusers import DiffusionPipeline

    if scheme in SCHEMES:
        ours, folder = loaded(scheme, model, "plain"), saved(scheme, model)
    else:
        ours = sdquant.load_model(saved(scheme, model), progress=False)
        folder = sdquant.save(ours, tmp_path / "saved")
    parts = CLASSES[model]
    again = weight_parts(sdquant.load_model(folder, progress=False))
    for part in parts:
        assert_same(again[part], getattr(ours, part))
    left_out = [part for part, name in parts.items() if refused(folder / part, name)]
    if model == "digits-flux":  # in which every layer is one that bitsandbytes has
        assert left_out == (["transformer"] if scheme in REFUSED else [])
    if left_out:
        with pytest.raises(RuntimeError, match=f"^{NO_GPU}"):
            DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    with quiet():
        whole = {} if left_out else weight_parts(DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16))
    for part, name in parts.items():
        if part in left_out:
            with pytest.raises(RuntimeError, match=f"^{NO_GPU}"):
                of_library(name).from_pretrained(folder / part, dtype=torch.bfloat16)
            continue
        with quiet():
            theirs = whole.get(part) or of_library(name).from_pretrained(folder / part, dtype=torch.bfloat16)
        assert_same(theirs, getattr(ours, part))


@pytest.mark.parametrize("scheme", sorted(REFUSED))
def test_quantized_by_diffusers_they_load_on_cpus_too(scheme: str, flux: Path, tmp_path: Path) -> None:
    """The way that README names: a folder of diffusers' own `save_pretrained` names sdquant."""
    kind = of_library(FLUX["transformer"])
    given = {"torch_dtype": torch.bfloat16, "quantization_config": sdquant.Config(scheme)}
    model = kind.from_pretrained(flux / "transformer", **given)
    model.save_pretrained(tmp_path)
    assert_same(kind.from_pretrained(tmp_path, torch_dtype=torch.bfloat16), model)
    assert_same(sdquant.load_model(tmp_path, runtime="plain", progress=False), model)


def test_a_folder_of_gguf_files_is_for_load_model(saved: Callable[..., Path]) -> None:
    """As `sdquant quantize` writes it: both libraries look for other files, and never start from random weights."""
    folder = saved("q8_0", "digits-flux")
    for part, name in FLUX.items():
        assert list((folder / part).glob("*.gguf"))
        with pytest.raises(OSError, match=r"Error no file named .*found in directory"):
            of_library(name).from_pretrained(folder / part)


def test_a_whole_folder_without_a_dtype(saved: Callable[..., Path]) -> None:
    """README: then diffusers' own models are in float32, in float16 where bitsandbytes' are, and transformers' in what
    their files say. With one, all are in that."""
    from diffusers import BitsAndBytesConfig, DiffusionPipeline
    from diffusers.quantizers import auto

    for scheme in ("int8", "qint8"):
        for asked, wanted in (({}, torch.float32), ({"dtype": torch.bfloat16}, torch.bfloat16)):
            pipe = DiffusionPipeline.from_pretrained(saved(scheme, "digits-flux"), **asked)
            assert {pipe.vae.dtype, pipe.transformer.norm_out.linear.bias.dtype} == {wanted}
            assert {tensor.dtype for tensor in plain(pipe.text_encoder).values()} == {torch.bfloat16}
    for bits in ({"load_in_4bit": True}, {"load_in_8bit": True}):
        made = auto.DiffusersAutoQuantizer.from_config(BitsAndBytesConfig(**bits), pre_quantized=True)
        assert made.update_torch_dtype(None) == torch.float16


@pytest.mark.parametrize("scheme", sorted(REFUSED))
def test_portable_says_what_diffusers_refuses_here(
    scheme: str, loaded: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In diffusers' own words, and what loads it here; of the text encoders there is nothing to say."""
    sdquant.save(loaded(scheme, "digits-flux", "plain"), tmp_path / "out", portable=True)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "diffusers will not load the transformer on this machine" in said
    assert NO_GPU.rstrip(".") in said and "sdquant.load_model" in said
    caplog.clear()
    sdquant.save(loaded(scheme, "digits-flux", "plain"), tmp_path / "whole")
    assert not caplog.records
