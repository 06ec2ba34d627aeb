"""Language models that encode text, as the single files that ComfyUI's users have of them: under its names, with a
tokenizer among the tensors, and without what ComfyUI does not use."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import sdquant
from sdquant import backends
from sdquant.errors import MissingComponentError
from sdquant.models.components import quiet
from sdquant.nn import QuantizedLayer
from sdquant.nn.weights import quantized

from . import encoders
from .test_text_encoder_files import scaled

if TYPE_CHECKING:
    from .layouts import State

PIECES = {"spiece_model": torch.arange(64, dtype=torch.uint8)}
TEKKEN = {"tekken_model": torch.arange(64, dtype=torch.uint8)}
_SEES = (
    (r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."),
    (r"^model\.vision_tower\.", "vision_model."), (r"^model\.multi_modal_projector\.", "multi_modal_projector."),
)  # fmt: skip
COMFY = backends.comfy.BACKEND
_BARE = ((r"^", "model."),)


@dataclass(frozen=True)
class File:
    """A file.

    Attributes:
        pipeline, encoder: the class of a pipeline that it is for, and of the text encoder in its folder.
        family: what it is found to be. names: transformers' names, and the file's. more: what else it has.
        lacks: what of the model it has not. config: of the encoder, changed.
        class_name: of the encoder that it is loaded as. remark: what the user hears about it.
    """

    pipeline: str
    encoder: str
    family: str
    names: tuple[tuple[str, str], ...] = _SEES
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)
    lacks: str = r"^$"
    config: Mapping[str, Any] = field(default_factory=dict)
    class_name: str | None = None
    remark: str = ""


def _row(name: str) -> dict[str, Any]:
    return dict(encoders.ROWS[name].config)


_MISTRAL, _GEMMA = _row("Mistral3ForConditionalGeneration"), _row("Gemma3ForConditionalGeneration")
_GEMMA["vision_config"] = {**_GEMMA["vision_config"], "vision_use_head": False}
FILES = {
    "qwen_2.5_vl_7b": File("QwenImagePipeline", "Qwen2_5_VLForConditionalGeneration", "qwen2.5-vl"),
    "qwen_3_vl": File("BriaFibo2Pipeline", "Qwen3VLForConditionalGeneration", "qwen3-vl"),
    "mistral_3_small_flux2": File(
        "Flux2Pipeline", "Mistral3ForConditionalGeneration", "llama", more=TEKKEN, class_name="MistralModel",
        config={"text_config": {**_MISTRAL["text_config"], "num_hidden_layers": 3}},
        lacks=r"^lm_head|vision_tower|projector|language_model\.(layers\.2|norm)\.",
        remark="without its vision and its last layer:",
    ),
    "gemma_2_2b": File("Lumina2Pipeline", "Gemma2Model", "gemma2", names=_BARE, more=PIECES),
    "gemma_3_12B": File(
        "LTX2Pipeline", "Gemma3ForConditionalGeneration", "gemma3", more=PIECES, config=_GEMMA, lacks="lm_head"
    ),
    "gemma_3_12B without vision": File(
        "LTX2Pipeline", "Gemma3ForConditionalGeneration", "gemma3", more=PIECES, config=_GEMMA,
        lacks="lm_head|vision_tower|projector", class_name="Gemma3TextModel", remark="without its vision:",
    ),
    "umt5_xxl": File("WanPipeline", "UMT5EncoderModel", "umt5", names=(), more=PIECES, lacks="embed_tokens"),
    "qwen_3_4b": File("ZImagePipeline", "Qwen3Model", "qwen3", names=_BARE),
    "qwen_3_8b": File(
        "Flux2KleinPipeline", "Qwen3ForCausalLM", "qwen3", names=(), lacks="lm_head", class_name="Qwen3Model",
        config={"tie_word_embeddings": False}, remark="has no lm_head",
    ),
    "llava_llama3": File(
        "HunyuanVideoPipeline", "LlamaModel", "llama", names=_BARE, more={"lm_head.weight": torch.ones(160, 64)}
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A file's model: as transformers has it, in a pipeline folder with other weights, and in the file."""

    model: Any
    base: Path
    state: State


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    known: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in known:
            known[name] = _case(FILES[name], tmp_path_factory.mktemp("case") / "base")
        return known[name]

    return get


def _case(row: File, base: Path) -> Case:
    import inspect

    import diffusers
    import transformers

    kind = getattr(transformers, row.encoder)
    values = {"Gemma2Model": "Gemma2PreTrainedModel"}.get(row.encoder, row.encoder)
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(kind.config_class(**{**_row(values), **row.config})).eval().bfloat16()
        pipeline = getattr(diffusers, row.pipeline)
        wanted = inspect.signature(pipeline.__init__).parameters
        rest = {key: None for key, one in wanted.items() if one.default is one.empty and key != "self"}
        pipeline(**rest | {"text_encoder": model}).save_pretrained(base)
        model = kind.from_pretrained(base / "text_encoder", dtype=torch.bfloat16)  # its buffers in their own dtypes
        for parameter in model.parameters():
            parameter.requires_grad_(False).copy_(torch.randn(parameter.shape) * 0.05)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items() if not re.search(row.lacks, key)}
    for was, now in row.names:
        state = {re.sub(was, now, key): tensor for key, tensor in state.items()}
    return Case(model, base, {**state, **row.more})


def _write(state: State, path: Path, kind: str) -> Path:
    if kind == "scaled_fp8":
        state = scaled(state)
    elif kind == "comfy_quant":
        state = marked(state)
    save_file(state, path)
    return path


def marked(state: State) -> State:
    """ComfyUI's scaled float8 of today."""
    made = {}
    for key, tensor in scaled(state).items():
        if key.endswith(".scale_weight"):
            layer = key.removesuffix(".scale_weight")
            made[f"{layer}.weight_scale"] = tensor
            text = json.dumps({"format": "float8_e4m3fn"}).encode()
            made[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        elif key != "scaled_fp8":
            made[key] = tensor
    return made


def _hidden(model: Any) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        out = model(input_ids=torch.tensor([[3, 17, 5, 99]]), output_hidden_states=True)
    return tuple(out.hidden_states)


@pytest.mark.parametrize("name", FILES)
def test_it_takes_its_place(name: str, case_of: Callable[[str], Case], tmp_path: Path, caplog: Any) -> None:
    row, case = FILES[name], case_of(name)
    file = _write(case.state, tmp_path / "model.safetensors", "float")  # its name tells nothing
    seen = sdquant.detect(file)
    assert (seen.component, seen.family, seen.quant) == ("text_encoder", row.family, None)
    assert all(any(tensor in line for line in seen.evidence) for tensor in row.more if tensor != "lm_head.weight")
    pipe = sdquant.load_model(case.base, parts={"text_encoder": file}, progress=False)
    remarks = [record.getMessage() for record in caplog.records if record.name.startswith("sdquant")]
    warnings = sdquant.plan(case.base, parts={"text_encoder": file}).warnings
    for said in (remarks, warnings):
        assert len(said) == bool(row.remark) and all(row.remark in one for one in said)
    assert type(pipe.text_encoder).__name__ == (row.class_name or row.encoder)
    got, wanted = _hidden(pipe.text_encoder), _hidden(case.model)
    layers = len(got) - 1
    assert layers == len(wanted) - (2 if "last layer" in row.remark else 1)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=False))
    sdquant.save(pipe.text_encoder, tmp_path / "saved")
    with quiet():
        again = type(pipe.text_encoder).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(_hidden(again), got, strict=True))


@pytest.mark.parametrize("kind", ["scaled_fp8", "comfy_quant"])
@pytest.mark.parametrize("name", FILES)
def test_in_scaled_fp8(name: str, kind: str, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    row, case = FILES[name], case_of(name)
    file = _write(case.state, tmp_path / "model.safetensors", kind)
    assert sdquant.detect(file).quant == "fp8"
    pipe = sdquant.load_model(case.base, parts=[file], progress=False)
    values = {key: tensor for key, tensor in scaled(case.state).items() if key.endswith(".weight")}
    scales = {key: tensor for key, tensor in scaled(case.state).items() if key.endswith(".scale_weight")}
    layers = {key: layer for key, layer in pipe.text_encoder.named_modules() if isinstance(layer, QuantizedLayer)}
    assert len(layers) == len(scales) - sum(key.startswith("lm_head") for key in row.more)
    assert len(dict(quantized(pipe.text_encoder))) == len(layers)
    worth = [values[key.replace("scale_weight", "weight")].float() * scale for key, scale in scales.items()]
    for key, layer in layers.items():
        value = layer.dequantize()
        assert any(value.shape == one.shape and torch.equal(value, one.bfloat16()) for one in worth), key


def fp4_mixed(state: State) -> tuple[State, State]:
    """As Comfy-Org's files of that name: NVFP4 in feed-forward layers, float8 in attention, the rest as it was.

    Returns:
        the file's tensors, and what the NVFP4 weights are worth.
    """
    made: State = {}
    worth: State = {}
    for key, tensor in state.items():
        kind = next((_KIND[word] for word in _KIND if word in key), None) if key.endswith("weight") else None
        if kind is None:
            made[key] = tensor
        elif kind == "fp8":
            made |= marked({key: tensor})
        else:
            packed = COMFY.encode(tensor, backends.parse(kind))
            made |= COMFY.export(key, packed)
            text = json.dumps({"format": "nvfp4"}).encode()
            made[f"{key.removesuffix('.weight')}.comfy_quant"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            worth[key] = COMFY.decode(packed, torch.bfloat16)
    return made, worth


_KIND = dict.fromkeys(("up_proj", "DenseReluDense", "mlp.fc", "mlp.c_"), "comfy:nvfp4")
_KIND |= dict.fromkeys(("q_proj", "SelfAttention.q"), "fp8")


@pytest.mark.parametrize("given", ["as a part", "in the folder", "alone"])
@pytest.mark.parametrize("name", FILES)
def test_fp4_mixed(name: str, given: str, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case, base = case_of(name), tmp_path / "base"
    made, worth = fp4_mixed(case.state)
    shutil.copytree(case.base, base)
    (weights,) = (base / "text_encoder").glob("*.safetensors")
    file = _write(made, tmp_path / "model.safetensors" if given == "as a part" else weights, "float")
    seen = sdquant.verify(file if given == "as a part" else base if given == "in the folder" else base / "text_encoder")
    assert "ComfyUI's nvfp4" in " ".join(seen.evidence)
    if given == "as a part":
        assert seen.family == FILES[name].family
        encoder = sdquant.load_model(case.base, parts=[file], progress=False).text_encoder
    elif given == "in the folder":
        encoder = sdquant.load_model(base, progress=False).text_encoder
    else:
        encoder = sdquant.load_model(base / "text_encoder", progress=False)
    packs = dict(quantized(encoder))
    assert {packed.spec.scheme.name for packed in packs.values()} == {"comfy:nvfp4", "fp8"}
    read = {key: packed.spec.scheme.codec.decode(packed, torch.bfloat16) for key, packed in packs.items()}
    for key, wanted in worth.items():
        end = re.sub(r"^(model|visual|vision_model)\.", "", key)
        ends = [value for other, value in read.items() if other.endswith(end)]
        assert any(torch.equal(there, wanted) for there in ends if there.shape == wanted.shape), key


def test_what_it_is_not_is_said(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    gemma, qwen = case_of("gemma_2_2b"), case_of("qwen_2.5_vl_7b")
    file = _write(gemma.state, tmp_path / "qwen_2.5_vl.safetensors", "float")
    with pytest.raises(MissingComponentError, match="Gemma 2 text encoder of width 64 and 2 layers"):
        sdquant.plan(qwen.base, parts=[file])


def test_the_vision_that_it_lacks(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """Is that of the pipeline, as for a GGUF file."""
    case = case_of("qwen_2.5_vl_7b")
    blind = {key: tensor for key, tensor in case.state.items() if not key.startswith("visual.")}
    file = _write(blind, tmp_path / "blind.safetensors", "float")
    encoder = sdquant.load_model(case.base, parts=[file], progress=False).text_encoder
    state = encoder.state_dict()
    wanted = sdquant.load_model(case.base / "text_encoder", progress=False).state_dict()
    assert all(torch.equal(state[key], tensor) == (".visual." in key) for key, tensor in wanted.items())
