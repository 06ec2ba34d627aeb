"""LoRA files on the shipped models, by diffusers' own calls: the effect, all offload modes, what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import sdquant
import sdquant.nn.weights
from sdquant import backends
from sdquant.errors import ConflictError, IncompatibleError, SettingsError
from sdquant.models.components import quiet
from sdquant.models.pipelines import main_part
from sdquant.nn.quantized_layers import QuantizedLinear
from sdquant.rules import QuantizationRule
from sdquant.saving.export_gguf import quantize_file

from ..file_only import FORMATS, quantized_folder
from .conftest import load, out, peft, put_on

Files = Callable[..., Path]
Effect = Callable[..., torch.Tensor]

# The least cosine, by bits, of what a LoRA changes in a scheme and what it changes unquantized, and how far the lengths
# may differ. A LoRA adds the same to each layer, but what follows works on other numbers: the fewer the bits, the more
# so; at two bits little is left of these small models. The LoRA here is random, which is harder than a trained one;
# bench/results/lora.json has figures for one of those.
COSINE = {8: 0.97, 6: 0.97, 5: 0.95, 4: 0.75, 3: 0.5}
LENGTH = {8: 0.05, 6: 0.05, 5: 0.08, 4: 0.2, 3: 0.4}
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "lora.json"
SCHEMES = [row.name for row in backends.schemes() if 3 <= row.bits < 16 and row.name != "rules"] + [*FORMATS]


def held(found: torch.Tensor, wanted: torch.Tensor, bits: float) -> None:
    cosine = torch.nn.functional.cosine_similarity(found, wanted, 0)
    ratio = found.norm() / wanted.norm()
    assert cosine >= COSINE[int(bits)] and abs(ratio - 1) <= LENGTH[int(bits)], (float(cosine), float(ratio))


@pytest.mark.parametrize(
    ("model", "scheme", "runtime", "text", "kohya"),
    [
        ("digits-sd", "int8", None, False, False),
        ("digits-sd", "nf4", "library", False, True),
        pytest.param("digits-sd", "qint8", "library", True, False, marks=pytest.mark.slow),
        pytest.param("digits-flux", "int8", None, True, False, marks=pytest.mark.slow),
        pytest.param("digits-flux", "qint8", "library", False, True, marks=pytest.mark.slow),
        pytest.param("digits-sd", "bnb-int8", "library", True, True, marks=pytest.mark.slow),
        pytest.param("digits-flux", "nf4", "plain", True, True, marks=pytest.mark.slow),
    ],
)
def test_effect(
    model: str, scheme: str, runtime: str | None, text: bool, kohya: bool, lora_file: Files, float_effect: Effect
) -> None:
    pipe = load(model, scheme, runtime=runtime)
    before = out(pipe)
    put_on(pipe, lora_file(model, text, kohya))
    held(out(pipe) - before, float_effect(model, text, kohya), backends.scheme(scheme).bits)
    with quiet():
        pipe.unload_lora_weights()
    assert torch.equal(out(pipe), before)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["digits-sd", "digits-flux"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_effect_of_every_scheme(
    model: str, scheme: str, tmp_path: Path, lora_file: Files, float_effect: Effect
) -> None:
    row = backends.scheme(FORMATS.get(scheme, scheme))
    if row.on_the_fly and scheme not in FORMATS:
        pipe = load(model, scheme)
    else:
        if scheme not in FORMATS and backends.scheme(scheme).backend == "gguf":
            folder = quantize_file(sdquant.demo.path(model), scheme, tmp_path / "quantized", progress=False)
        else:
            folder = quantized_folder(model, scheme, tmp_path / "quantized")
        pipe = sdquant.load_model(folder, dtype="float32", progress=False)
    before = out(pipe)
    put_on(pipe, lora_file(model))
    held(out(pipe) - before, float_effect(model), min(row.bits, 4) if scheme in FORMATS else row.bits)
    with quiet():
        pipe.unload_lora_weights()
    assert torch.equal(out(pipe), before)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_trained_on(name: str, tmp_path: Path) -> None:
    """By a LoRA, which leaves the packed weights; layers compile into one graph, and threads do not disturb them."""
    pipe = sdquant.load_model(
        quantized_folder("digits-flux", name, tmp_path / "model"), dtype="float32", progress=False
    )
    model, before = pipe.transformer, out(pipe)
    packs = dict(sdquant.nn.weights.quantized(copy.deepcopy(model)))
    model.requires_grad_(False)
    for layer in {
        type(one).__name__ + str(one.part_names) + str(one.spec.scheme): one for one in layers_of(model)
    }.values():
        torch.compiler.reset()
        x = torch.randn(9, layer.in_features, generator=torch.Generator().manual_seed(1))
        y = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), y), layer
        with ThreadPoolExecutor(2) as threads:  # of layers: tokenizers of transformers are not safe with threads
            assert all(torch.equal(found, y) for found in threads.map(layer, [x] * 20)), layer
    torch.manual_seed(0)  # peft draws the first factors
    with quiet():
        model.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_v", "proj_mlp", "proj_out"]))
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = (out(pipe, gradient=True) - before * 1.1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses) < 0.8 * losses[0], losses
    with quiet():
        model.unload_lora()
    assert torch.equal(out(pipe), before)
    for key, packed in sdquant.nn.weights.quantized(model):
        assert all(torch.equal(packed.parts[part], tensor) for part, tensor in packs[key].parts.items())


def layers_of(model: Any) -> list[Any]:
    return [one for one in model.modules() if isinstance(one, QuantizedLinear)]


def test_rules(lora_file: Files, float_effect: Effect) -> None:
    pipe = load("digits-sd", None, rules=[QuantizationRule(weight_qtype="int8", act_qtype="int8")])
    before = out(pipe)
    put_on(pipe, lora_file("digits-sd"))
    held(out(pipe) - before, float_effect("digits-sd"), 5)  # activations are rounded, too


@pytest.mark.parametrize(
    ("scheme", "offload", "budget"),
    [
        ("int8", "sequential", None),
        ("nf4", "balanced", "1.5MB"),
        pytest.param("int8", "balanced", "1.5MB", marks=pytest.mark.slow),
        pytest.param("int8", "model", None, marks=pytest.mark.slow),
        pytest.param("int8", "group", None, marks=pytest.mark.slow),
        pytest.param("qint8", "model", None, marks=pytest.mark.slow),
        pytest.param("nf4", "model", None, marks=pytest.mark.slow),
    ],
)
def test_offloaded(scheme: str, offload: str, budget: str | None, lora_file: Files, tmp_path: Path) -> None:
    """The same numbers as without offload: with one LoRA, with two, when one is deleted, when all are gone."""
    path = lora_file("digits-sd", text=True)
    plainly = load("digits-sd", scheme)
    before = out(plainly)
    put_on(plainly, path)
    with_it = out(plainly)

    pipe = load("digits-sd", scheme, offload, budget=budget)
    assert torch.equal(out(pipe), before)
    put_on(pipe, path)
    handle = pipe.sdquant.offload
    assert handle.active and torch.equal(out(pipe), with_it)
    assert handle.report()["bytes"] > plainly.sdquant.offload.report()["bytes"]  # which was counted before its LoRA
    put_on(pipe, path, "two")
    pipe.set_adapters(["one", "two"], [1.0, 0.0])
    assert torch.equal(out(pipe), with_it)
    pipe.set_adapters(["one", "two"], [0.5, 0.5])
    torch.testing.assert_close(out(pipe), with_it, atol=1e-4, rtol=1e-4)
    pipe.delete_adapters("two")
    pipe.set_adapters("one")
    assert torch.equal(out(pipe), with_it)
    sdquant.lora.save_lora(pipe, tmp_path / "again.safetensors", name="one")
    assert handle.active and torch.equal(out(pipe), with_it)
    pipe.disable_lora()
    assert torch.equal(out(pipe), before)
    pipe.enable_lora()
    with quiet():
        pipe.unload_lora_weights()
    assert handle.active and torch.equal(out(pipe), before)
    put_on(pipe, tmp_path / "again.safetensors")
    torch.testing.assert_close(out(pipe), with_it, atol=1e-5, rtol=1e-5)
    handle.remove()
    assert "load_lora_weights" not in pipe.__dict__ and "load_lora_adapter" not in pipe.unet.__dict__
    torch.testing.assert_close(out(pipe), with_it, atol=1e-5, rtol=1e-5)


def test_scale_of_a_call(lora_file: Files) -> None:
    unet = load("digits-sd", "int8").unet
    unet.load_lora_adapter(str(lora_file("digits-sd")), prefix="unet")
    inputs = (torch.randn(1, 4, 8, 8), 500, torch.randn(1, 77, 128))
    with torch.no_grad():
        off = unet(*inputs, cross_attention_kwargs={"scale": 0.0}).sample
        unet.disable_adapters()
        assert torch.equal(unet(*inputs).sample, off)


@pytest.mark.parametrize(("scheme", "runtime"), [("qint8", "library"), ("nf4", "library")])
def test_fusing_is_refused_before_the_first_layer(scheme: str, runtime: str | None, lora_file: Files) -> None:
    pipe = load("digits-sd", scheme, runtime=runtime)
    put_on(pipe, lora_file("digits-sd"))
    before = out(pipe)
    for fuse in (lambda: pipe.fuse_lora(components=["unet"]), pipe.unet.fuse_lora):
        with pytest.raises(IncompatibleError, match=f"is quantized to {scheme}"):
            fuse()
    assert torch.equal(out(pipe), before) and not pipe.num_fused_loras


def test_a_copy_refuses_for_itself(lora_file: Files) -> None:
    pipe = load("digits-sd", "int8")
    put_on(pipe, lora_file("digits-sd"))
    other = copy.deepcopy(pipe.unet)
    other.__dict__.pop("_sdquant_offload")  # which the copy shares, and which cannot be pickled
    again = pickle.loads(pickle.dumps(other))
    for one in (other, again):
        with pytest.raises(IncompatibleError):
            one.fuse_lora()
    other.unload_lora()
    other.fuse_lora()  # the copy has none any more, and the refusal is the copy's own
    with pytest.raises(IncompatibleError):
        pipe.unet.fuse_lora()


def test_fusing_into_float_layers_works(lora_file: Files) -> None:
    pipe = load("digits-sd", "int8", components=["text_encoder"])
    put_on(pipe, lora_file("digits-sd"))
    before = out(pipe)
    pipe.fuse_lora(components=["unet"])
    assert pipe.num_fused_loras
    torch.testing.assert_close(out(pipe), before, atol=1e-4, rtol=1e-4)


def test_a_model_with_a_lora_is_not_saved(lora_file: Files, tmp_path: Path) -> None:
    pipe = load("digits-sd", "int8")
    put_on(pipe, lora_file("digits-sd"))
    for model in (pipe, pipe.unet):
        with pytest.raises(ConflictError, match="unload_lora_weights"):
            sdquant.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_peft_itself(tmp_path: Path) -> None:
    """`get_peft_model`, `save_pretrained` and back, on another base of the same scheme."""
    bases = [load("digits-sd", "int8").unet for _ in range(2)]
    inputs = (torch.randn(1, 4, 8, 8), 500, torch.randn(1, 77, 128))
    torch.manual_seed(0)
    model = peft.get_peft_model(
        bases[0], peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "conv1"], use_dora=True)
    )
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(bases[1], tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(model(*inputs).sample, again(*inputs).sample)
        with model.disable_adapter():
            assert not torch.equal(model(*inputs).sample, again(*inputs).sample)


class TestTraining:
    """`add_lora` and `save_lora` on quantized bases."""

    @pytest.mark.parametrize(
        ("scheme", "runtime"),
        [
            ("nf4", "library"),
            pytest.param("int8", None, marks=pytest.mark.slow),
            pytest.param("nf4", "plain", marks=pytest.mark.slow),
            pytest.param("qint8", "library", marks=pytest.mark.slow),
            pytest.param("bnb-int8", "library", marks=pytest.mark.slow),
            pytest.param("sdnq-int8", None, marks=pytest.mark.slow),
            pytest.param("rules", None, marks=pytest.mark.slow),
        ],
    )
    def test_it_learns(self, scheme: str, runtime: str | None, tmp_path: Path) -> None:
        rules = [QuantizationRule(weight_qtype="int8", act_qtype="int8")] if scheme == "rules" else None
        named = None if rules else scheme
        pipe = load("digits-sd", named, runtime=runtime, rules=rules)
        base = {name: packed.parts for name, packed in sdquant.nn.weights.quantized(pipe.unet)}
        base = {name: {key: part.clone() for key, part in parts.items()} for name, parts in base.items()}
        losses = _train(pipe, tmp_path / "it.safetensors")
        assert losses[-1] < 0.8 * losses[0]
        trained = out(pipe)
        with quiet():
            pipe.unload_lora_weights()
        for name, packed in sdquant.nn.weights.quantized(pipe.unet):
            assert all(torch.equal(part, base[name][key]) for key, part in packed.parts.items())
        before = out(pipe)
        put_on(pipe, tmp_path / "it.safetensors")
        torch.testing.assert_close(out(pipe), trained, atol=1e-5, rtol=1e-5)
        floats = load("digits-sd", None)
        unchanged = out(floats)
        put_on(floats, tmp_path / "it.safetensors")
        held(trained - before, out(floats) - unchanged, 4)

    def test_alpha_is_in_the_file(self, tmp_path: Path) -> None:
        """Readers that know no alpha give it its strength all the same; set_adapters' weight is not saved."""
        unet = load("digits-sd", "int8").unet
        for parameter in sdquant.lora.add_lora(unet, rank=2, alpha=6, target_modules="to_q", name="strong"):
            torch.nn.init.normal_(parameter, std=0.1)
        inputs = (torch.randn(1, 4, 8, 8), 500, torch.randn(1, 77, 128))
        with torch.no_grad():
            wanted = unet(*inputs).sample
            unet.set_adapters("strong", 0.25)
            path = sdquant.lora.save_lora(unet, tmp_path, name="strong")
            unet.unload_lora()
            unet.load_lora_adapter(str(path), prefix="unet")
            torch.testing.assert_close(unet(*inputs).sample, wanted, atol=1e-5, rtol=1e-5)

    def test_refused(self, tmp_path: Path) -> None:
        unet = load("digits-sd", "int8").unet
        for wrong in ({"rank": 0}, {"dropout": 1.0}, {"target_modules": "nowhere"}):
            with pytest.raises(SettingsError):
                sdquant.lora.add_lora(unet, **wrong)
        with pytest.raises(SettingsError, match="the model has none"):
            sdquant.lora.save_lora(unet, tmp_path / "x.safetensors")
        sdquant.lora.add_lora(unet)
        with pytest.raises(SettingsError, match="of that name"):
            sdquant.lora.add_lora(unet)


def _train(pipe: Any, path: Path, steps: int = 8) -> list[float]:
    """Towards the negative of what the UNet puts out, on random inputs."""
    unet, make = pipe.unet, torch.Generator().manual_seed(0)
    inputs = (torch.randn(4, 4, 8, 8, generator=make), torch.randint(0, 1000, (4,)), torch.randn(4, 77, 128))
    with torch.no_grad():
        goal = -unet(*inputs).sample
    torch.manual_seed(0)
    parameters = sdquant.lora.add_lora(unet, rank=4, target_modules="all")
    assert parameters and {p.dtype for p in parameters} == {torch.float32}
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    losses = []
    for _ in range(steps):
        loss = (unet(*inputs).sample - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert {name for name, p in unet.named_parameters() if p.requires_grad} == {
        name for name, _ in unet.named_parameters() if "lora_" in name
    }
    sdquant.lora.save_lora(pipe, path)
    return losses


def test_measured() -> None:
    """What `python -m bench.lora` found: a trained LoRA has its effect in every scheme of four bits and more."""
    rows = json.loads(RESULTS.read_text())["rows"]
    for row in rows:
        bits = 16 if row["scheme"] is None else backends.parse(row["scheme"]).scheme.bits
        if bits >= 4:
            assert row["cosine"] > 0.9 and abs(row["ratio"] - 1) < 0.15, row
            assert row["threes_with"] >= 0.8 * row["images"] and not row["threes_without"], row
    assert {row["model"] for row in rows} == {"digits-sd", "digits-flux"}


def test_main_part_is_prepared_by_quantize(lora_file: Files, float_effect: Effect) -> None:
    """A float pipeline of diffusers' own, quantized after it is loaded."""
    pipe = load("digits-flux", None)
    sdquant.quantize(pipe, "int8", progress=False)
    before = out(pipe)
    put_on(pipe, lora_file("digits-flux"))
    held(out(pipe) - before, float_effect("digits-flux"), 8)
    assert type(main_part(pipe).state_dict()["x_embedder.weight"].clone()) is torch.Tensor
