"""One path, three ways: while loading, after loading, and as found on disk. The packed bits are the same in all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sdquant
from sdquant import backends
from sdquant.demo import MODELS
from sdquant.errors import ConflictError, IncompatibleError, MissingComponentError
from sdquant.models.generate import draw
from sdquant.models.pipelines import is_pipeline, main_part, weight_bytes, weight_parts
from sdquant.nn.weights import plain, quantized
from sdquant.training import digits

from .alternating_models import by_turns
from .foreign import ROWS as FOREIGN

FLY = [row.name for row in backends.schemes() if row.on_the_fly]
# Nunchaku's kernels are for NVIDIA's cards alone.
WAYS = [
    (row.name, turn, runtime)
    for row in backends.schemes() if row.on_the_fly
    for turn, runtime in enumerate(row.runtimes)
    if (row.name, runtime) != ("svdquant_nvfp4", "library")
]  # fmt: skip
# OpenVINO compiles for seconds: one of its schemes in the default run.
RUNTIMES = [
    pytest.param(name, runtime, marks=[pytest.mark.slow] if runtime == "openvino" and name != "int8" else [])
    for name, _, runtime in WAYS
]
TURNS = [FLY.index(name) + turn for name, turn, _ in WAYS]
# One scheme of each backend in the default run.
EMBEDDED = [
    pytest.param(name, marks=[] if name in ("nf4", "int8", "qint3", "sdnq-uint4") else pytest.mark.slow) for name in FLY
]
USUAL = ("q8_0", "q4_0", "q5_1", "q3_k", "q4_k", "q6_k", "iq4_xs", "q4_k_m", "mxfp4", "bf16")
MAIN = [("digits-sd", "unet"), ("digits-flux", "transformer")]
# Types of each kind of block, and a mix, in the default run.
GGUF = [
    pytest.param(row.name, marks=[] if row.name in USUAL else [pytest.mark.slow])
    for row in backends.get("gguf").schemes
]


def _parts(model: Any) -> dict[str, Any]:
    return weight_parts(model) if is_pipeline(model) else {"model": model}


def _packed(model: Any) -> dict[tuple[str, str], Any]:
    return {(part, name): packed for part, module in _parts(model).items() for name, packed in quantized(module)}


def same_bits(one: Any, other: Any) -> None:
    """Both hold the same quantized weights, the same bits and descriptions, and the same plain tensors."""
    a, b = _packed(one), _packed(other)
    assert a and a.keys() == b.keys()
    for key, packed in a.items():
        assert packed.spec == b[key].spec, key
        assert packed.parts.keys() == b[key].parts.keys()
        for name, part in packed.parts.items():
            assert torch.equal(part.reshape(-1).view(torch.uint8), b[key].parts[name].reshape(-1).view(torch.uint8)), (
                key,
                name,
            )
    for part, module in _parts(one).items():
        others = plain(_parts(other)[part])
        for name, tensor in plain(module).items():
            assert torch.equal(tensor, others[name]), (part, name)


def images(pipe: Any, count: int = 2) -> Any:
    """`count` digits in two steps, as one array."""
    pictures = draw(pipe, [digits.prompt(d) for d in range(count)], seeds=range(count), steps=2)
    return np.stack([np.asarray(picture) for picture in pictures])


@pytest.mark.parametrize(("scheme", "runtime", "model"), by_turns(RUNTIMES, TURNS))
def test_pre_post_and_quantize_give_the_same_bits(
    scheme: str, runtime: str, model: str, loaded: Callable[..., Any]
) -> None:
    path = sdquant.demo.path(model)
    pre = loaded(scheme, model, runtime)
    post = sdquant.load_model(path, scheme, mode="post", runtime=runtime, progress=False)
    same_bits(pre, post)
    after = sdquant.load_model(path, progress=False)
    assert sdquant.quantize(after, scheme, runtime=runtime, progress=False) is after
    same_bits(pre, after)


@pytest.mark.parametrize(("scheme", "runtime", "model"), by_turns(RUNTIMES, TURNS))
def test_saved_and_reloaded_is_the_same(scheme: str, runtime: str, model: str, loaded: Any, saved: Any) -> None:
    pre = loaded(scheme, model, runtime)
    folder = saved(scheme, model, runtime)
    back = sdquant.load_model(folder, runtime=runtime, progress=False)
    same_bits(pre, back)
    seen = sdquant.detect(folder)
    assert seen.quant == scheme and seen.prequantized
    assert seen.bytes == weight_bytes(back) == weight_bytes(pre) == pre.sdquant.plan.bytes == back.sdquant.plan.bytes
    if model == "digits-sd":
        assert np.array_equal(images(pre), images(back))


@pytest.mark.parametrize(("scheme", "model"), by_turns(EMBEDDED))
def test_embeddings_are_quantized_when_asked_for(scheme: str, model: str, loaded: Any, tmp_path: Path) -> None:
    path, asked = sdquant.demo.path(model), f"{scheme},embeddings"
    pre = sdquant.load_model(path, asked, progress=False)
    added = set(_packed(pre)) - set(_packed(loaded(scheme, model)))
    assert added  # T5's table is tied to another: one of the two names counts
    for part, name in added:
        module = weight_parts(pre)[part].get_submodule(name.removesuffix(".weight"))
        assert isinstance(module, torch.nn.Embedding), name
    assert ("text_encoder_2", "shared.weight") in added or model != "digits-flux"
    assert [part.dtype for part in weight_parts(pre).values()] == [torch.bfloat16] * len(weight_parts(pre))
    same_bits(pre, sdquant.quantize(sdquant.load_model(path, progress=False), asked, progress=False))
    sdquant.save(pre, tmp_path / "out")
    back = sdquant.load_model(tmp_path / "out", progress=False)
    same_bits(pre, back)
    assert sdquant.detect(tmp_path / "out").bytes == weight_bytes(pre) == pre.sdquant.plan.bytes
    assert np.array_equal(images(pre), images(back))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scheme", ["q8_0", "q4_k", "iq4_xs"])
def test_what_gguf_files_hold_is_saved_too(scheme: str, model: str, saved: Any, tmp_path: Path) -> None:
    """`save` writes safetensors, whatever the weights were read from."""
    pipe = sdquant.load_model(saved(scheme, model), progress=False)
    sdquant.save(pipe, tmp_path / "out")
    assert sdquant.verify(tmp_path / "out").quant == scheme
    same_bits(pipe, sdquant.load_model(tmp_path / "out", progress=False))


def test_embeddings_of_a_gguf_file_stay_packed(tmp_path: Path, flux: Path) -> None:
    from sdquant.saving.export_gguf import quantize_file

    quantize_file(flux, "q8_0,embeddings", tmp_path / "out", progress=False)
    pipe = sdquant.load_model(tmp_path / "out", progress=False)
    table = pipe.text_encoder_2.shared
    assert type(table).__name__ == "QuantizedEmbedding" and table.spec.scheme.name == "q8_0"
    assert pipe.text_encoder_2.encoder.embed_tokens is table
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes
    assert np.isfinite(images(pipe)).all()


@pytest.mark.parametrize("words", ["double_quant", "block_size=128", "double_quant,block_size=32"])
def test_options_of_nf4_reach_the_bits(words: str, sd: Path, tmp_path: Path) -> None:
    scheme = f"nf4,{words}"
    pre = sdquant.load_model(sd, scheme, progress=False)
    assert len({str(packed.spec.details) for packed in _packed(pre).values()}) >= 1
    default = sdquant.load_model(sd, "nf4", progress=False)
    assert weight_bytes(pre) != weight_bytes(default)
    sdquant.save(pre, tmp_path / "out")
    same_bits(pre, sdquant.load_model(tmp_path / "out", progress=False))


def test_compute_dtype_of_nf4(sd: Path) -> None:
    pipe = sdquant.load_model(sd, "nf4,compute_dtype=float32", progress=False)
    modules = [module for module in pipe.unet.modules() if type(module).__name__ == "Linear4bit"]  # by that option
    assert modules and all(module.compute_dtype == torch.float32 for module in modules)
    assert np.isfinite(images(pipe)).all()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if number % 2 else []) for number, name in enumerate(FOREIGN)],
)
def test_what_others_wrote_is_saved_again(name: str, foreign: Callable[[str], Path], tmp_path: Path) -> None:
    base = sdquant.demo.path("digits-sd" if "quanto q" in name or "lone q" in name else "digits-flux")
    pipe = sdquant.load_model(foreign(name), base=base, progress=False)
    main = main_part(pipe)
    folder = sdquant.save(main, tmp_path / "again")
    assert sdquant.verify(folder).quant == FOREIGN[name].quant
    same_bits(pipe, sdquant.load_model(folder, base=base, progress=False))


@pytest.mark.parametrize(
    ("scheme", "model", "component"),
    by_turns(["nf4", "fp4", "fp8", "fp8,packing=float8", "qint8", "qint4", "qint3", "int4", "sdnq-uint4"], models=MAIN),
)
def test_single_files(scheme: str, model: str, component: str, tmp_path: Path) -> None:
    path = sdquant.demo.path(model)
    pipe = sdquant.load_model(path, scheme, components=[component], progress=False)
    assert {part for part, _ in _packed(pipe)} == {component}
    file = sdquant.save(main_part(pipe), tmp_path / f"model-{scheme.partition(',')[0]}.safetensors")
    assert sdquant.detect(file).quant == backends.parse(scheme).scheme.name
    assert sdquant.detect(file).warnings == []
    alone = sdquant.load_model(file, progress=False)
    assert type(alone) is type(main_part(pipe))
    whole = sdquant.load_model(file, base=path, progress=False)
    same_bits(pipe, whole)
    with pytest.raises(ConflictError):
        sdquant.load_model(file, "int8", base=path, progress=False)


@pytest.mark.parametrize(("scheme", "model", "component"), by_turns(GGUF, models=MAIN))
def test_gguf_files(scheme: str, model: str, component: str, tmp_path: Path) -> None:
    from sdquant.saving.export_gguf import quantize_file

    path = sdquant.demo.path(model)
    file = quantize_file(path, scheme, tmp_path / f"{model}-{scheme}.gguf", progress=False)
    seen = sdquant.verify(file)
    whole = sdquant.load_model(file, base=path, progress=False)
    kinds = {type(module).__name__ for _, module in main_part(whole).named_modules()}
    if backends.scheme(scheme).bits < 16:
        assert seen.quant == scheme and seen.backend == "gguf"
        assert "QuantizedLinear" in kinds
        assert ("QuantizedConv2d" in kinds) is (model == "digits-sd")
    else:
        assert not seen.prequantized
    assert weight_bytes(whole) == whole.sdquant.plan.bytes
    picture = images(whole)
    assert np.isfinite(picture).all()
    if backends.scheme(scheme).bits >= 8:
        reference = images(sdquant.load_model(path, progress=False))
        assert np.abs(picture.astype(int) - reference.astype(int)).mean() < 6


def test_gguf_is_not_for_float_weights(sd: Path) -> None:
    for mode in ("auto", "pre", "post"):
        with pytest.raises(IncompatibleError, match="sdquant quantize"):
            sdquant.load_model(sd, "q8_0", mode=mode, progress=False)
    with pytest.raises(IncompatibleError, match="sdquant quantize"):
        sdquant.quantize(sdquant.load_model(sd, progress=False), "q8_0", progress=False)


def test_quantized_twice_is_a_conflict(loaded: Any, saved: Any) -> None:
    with pytest.raises(ConflictError):
        sdquant.quantize(loaded("int8"), "int8", progress=False)
    with pytest.raises(ConflictError):
        sdquant.load_model(saved("int8"), "nf4", progress=False)
    with pytest.raises(ConflictError):
        sdquant.load_model(saved("int8"), "none", progress=False)
    assert sdquant.load_model(saved("int8"), "int8", progress=False).sdquant.plan.components


def test_components_and_dicts(sd: Path) -> None:
    pipe = sdquant.load_model(sd, {"unet": "int8", "text_encoder": "int4", "vae": "none"}, progress=False)
    schemes = {(part, packed.spec.scheme.name) for (part, _), packed in _packed(pipe).items()}
    assert schemes == {("unet", "int8"), ("text_encoder", "int4")}
    pipe = sdquant.load_model(sd, "int8", components="vae", progress=False)
    assert {part for part, _ in _packed(pipe)} == {"vae"}


def test_skip_leaves_modules_as_they_are(sd: Path) -> None:
    pipe = sdquant.load_model(sd, "int8", components="unet", skip=("mid_block", "*.to_q"), progress=False)
    names = {name for _, name in _packed(pipe)}
    assert names and not any(name.startswith("mid_block") or name.endswith("to_q.weight") for name in names)


def test_a_lone_component(sd: Path) -> None:
    unet = sdquant.load_model(sd / "unet", "int8", progress=False)
    assert type(unet).__name__ == "UNet2DConditionModel"
    assert weight_bytes(unet) == unet.sdquant.plan.bytes


def test_base_of_another_model(sd: Path, flux: Path) -> None:
    with pytest.raises(MissingComponentError):
        sdquant.load_model(sd / "unet", base=flux, progress=False)


def test_t5_reads_its_text(flux: Path) -> None:
    # Its feed-forward casts activations to the dtype of a weight, which is uint8 in bitsandbytes' module.
    plainly = sdquant.load_model(flux / "text_encoder_2", progress=False)
    quantized4 = sdquant.load_model(flux / "text_encoder_2", "nf4", progress=False)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        one, other = plainly(ids)[0].float(), quantized4(ids)[0].float()
    assert (one - other).norm() / one.norm() < 0.3


@pytest.mark.parametrize("scheme", ["int8", "fp8", "qint3", "sdnq-int8"])
def test_plain_layers_are_copied_cast_and_stored(scheme: str, loaded: Any) -> None:
    pipe = loaded(scheme)
    unet = copy.deepcopy(pipe.unet)
    before = {name: packed.nbytes for name, packed in quantized(unet)}
    unet.to(torch.float32)
    after = dict(quantized(unet))
    assert {name: packed.nbytes for name, packed in after.items()} == before  # scales keep their dtype
    sample, states = torch.zeros(1, 4, 8, 8), torch.zeros(1, 77, 128)
    with torch.no_grad():
        assert unet(sample, 10, states).sample.dtype == torch.float32
    fresh = copy.deepcopy(unet)
    fresh.load_state_dict(unet.state_dict())
    meta = copy.deepcopy(unet).to("meta")
    assert all(parameter.device.type == "meta" for parameter in meta.parameters())


def test_nothing_is_left_of_a_failed_save(sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = sdquant.load_model(sd, "int8", progress=False)
    from sdquant.saving import model_files

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_files.safetensors_writer, "write_parts", full)
    with pytest.raises(sdquant.DiskSpaceError, match="are free there"):
        sdquant.save(pipe, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_saving_an_offloaded_model(sd: Path, tmp_path: Path) -> None:
    pipe = sdquant.load_model(sd, "int8", "sequential", progress=False)
    before = images(pipe)
    sdquant.save(pipe, tmp_path / "out")
    assert pipe.sdquant.offload.active
    assert np.array_equal(before, images(pipe))
    back = sdquant.load_model(tmp_path / "out", progress=False)
    assert np.array_equal(before, images(back))
