"""What is quantized in a way that nobody knows here is refused by name, and each way to look at a model says the same.

Loaded as floats, codes would be taken for weights, or a scale be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import demo
from sdquant.errors import BadFileError, ConflictError, SdquantError, UnsupportedFileError

from . import hub_formats
from .entry_points import copied, one_answer
from .foreign import WEIGHTS
from .malformed import FORMATS, NAME, OTHER, Model, line, tiny

Change = Callable[[Model], None]
BITS = {"bits": 4, "group_size": 64}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.read(tiny(tmp_path_factory.mktemp("floats")))


def _config(**values: Any) -> Change:
    return lambda model: model.files["config.json"].update(values)


def _file(name: str, values: Any) -> Change:
    return lambda model: model.files.update({f"{name}.json": values})


def _metadata(**values: Any) -> Change:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return lambda model: model.metadata.update(texts)


def _mlx(model: Model) -> None:
    model.tensors[NAME] = torch.zeros(256, 8, dtype=torch.uint32)
    model.tensors |= {NAME.replace("weight", word): torch.zeros(256, 1).bfloat16() for word in ("scales", "biases")}


def _beside(word: str) -> Change:
    return lambda model: model.tensors.update({NAME.replace("weight", word): torch.zeros(4, dtype=torch.uint8)})


def _experts(dtype: torch.dtype, codes: str = "gate_up_proj", scale: str | None = "gate_up_proj_scale") -> Change:
    """Parameters of no layer, as mixtures of experts have them, without any marker."""
    tensors = {f"experts.{codes}": torch.ones(4, 8, 8).to(dtype)}
    tensors |= {} if scale is None else {f"experts.{scale}": torch.ones(4, 8, 1)}
    return lambda model: model.tensors.update(tensors)


CASES: dict[str, tuple[Change, type[SdquantError], str]] = {
    "a method": (_config(quantization_config={"quant_method": "dream"}), UnsupportedFileError, "'dream'"),
    "in a part": (_config(text={"quantization_config": {"quant_method": "dream"}}), UnsupportedFileError, "'dream'"),
    "no method": (_config(quantization_config=BITS), UnsupportedFileError, "without its quant_method"),
    "only a name": (_config(compression_config="dream"), UnsupportedFileError, "'dream'"),
    "compression": (_config(compression_config={"format": "x"}), BadFileError, "compressed-tensors"),
    "MLX's config": (_config(quantization=BITS), UnsupportedFileError, "MLX"),
    "MLX's tensors": (_mlx, UnsupportedFileError, "MLX"),
    "a file": (_file("quantization_config", {"quant_method": "dream"}), UnsupportedFileError, "'dream'"),
    "a file without": (_file("quantization_config", BITS), UnsupportedFileError, "without its quant_method"),
    "a map": (_file("quantization_map", {"x": {"weights": "qint8"}}), BadFileError, "optimum-quanto"),
    "metadata": (_metadata(quantization_config={"quant_method": "dream"}), UnsupportedFileError, "'dream'"),
    "metadata without": (_metadata(quantization_config=BITS), UnsupportedFileError, "without its quant_method"),
    "metadata's word": (_metadata(quantization_config="dream"), UnsupportedFileError, "'dream'"),
    "metadata's name": (_metadata(quant_method="dream"), UnsupportedFileError, "'dream'"),
    "in no table": (_config(quant_method="dream"), UnsupportedFileError, "'dream'"),
    "MLX's key": (_config(quantization={"quant_method": "dream"}), UnsupportedFileError, "'dream'"),
    "its other words": (_config(quantization={"mode": "dream"}), UnsupportedFileError, "'dream'"),
    "metadata's table": (_metadata(quantization={"method": "dream"}), UnsupportedFileError, "'dream'"),
    "metadata's config": (
        _metadata(config={"text": {"quantization_config": {"quant_method": "dream"}}}), UnsupportedFileError, "'dream'"
    ),
    "a marker": (_beside("dream_quant"), BadFileError, "dream_quant"),
    "zeros": (_beside("qzeros"), BadFileError, "qzeros"),
    "long codes": (
        lambda model: model.tensors.update({NAME: torch.zeros(256, 64, dtype=torch.int64)}),
        UnsupportedFileError, "codes of an unknown quantization",
    ),
    "lone experts": (_experts(torch.int8), UnsupportedFileError, "gate_up_proj' is int8 [4, 8, 8], with scales"),
    "lone experts in words": (
        _experts(torch.int32, "down_proj_packed", "down_proj_zeros"), UnsupportedFileError, "'experts.down_proj_zeros'"
    ),
    "lone experts in blocks": (
        _experts(torch.uint8, "down_proj_blocks", "down_proj_scales"), UnsupportedFileError, "down_proj_scales"
    ),
    "lone experts in float8": (
        _experts(torch.float8_e5m2, scale="gate_up_proj.absmax"), UnsupportedFileError, "gate_up_proj.absmax"
    ),
    "lone integers": (_experts(torch.int8, scale=None), UnsupportedFileError, "nothing tells its scales"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(name: str, floats: Model, tmp_path: Path) -> None:
    change, kind, says = CASES[name]
    model = floats.copy()
    change(model)
    file = model.write(tmp_path / "model")
    one_answer(file.parent, kind, says)
    if "metadata" in name or "lone" in name or name in ("MLX's tensors", "long codes"):
        lone = model.write(tmp_path / "lone", lone=True)
        for ask in (sdquant.detect, sdquant.verify, sdquant.plan, sdquant.dequantize):
            with pytest.raises(kind, match=re.escape(says)):
                ask(lone)


def test_integers_that_are_no_codes(floats: Model, tmp_path: Path) -> None:
    """Positions, counts, masks, a tokenizer."""
    file = tmp_path / "model.safetensors"
    tensors = {"position_ids": torch.arange(8)[None], "norm.num_batches_tracked": torch.tensor(3)}
    tensors |= {
        "mask": torch.ones(4, 4).bool(),
        "spiece_model": torch.ones(9).byte(),
        "relative_position_scale": torch.ones(2),
        "attn.einsum0_rhs_scale": torch.ones(8, 1),  # a range of activations that `rules` keeps
        "attn.einsum0_rhs_zero_point": torch.zeros(8, 1).char(),
    }
    save_file({**floats.tensors, **tensors}, file)
    assert not sdquant.verify(file).prequantized


def test_settings_that_say_nothing_are_no_quantization(floats: Model, tmp_path: Path) -> None:
    """The control: an empty table, and bitsandbytes' old one of a model that it did not quantize."""
    for table in (
        {}, {"load_in_4bit": False, "load_in_8bit": False}, {"modules_to_not_convert": ["proj_out"], "ignore": None},
        {"quant_method": "", "bits": None},
    ):  # fmt: skip
        model = floats.copy()
        _config(quantization_config=table)(model)
        _metadata(quantization_config=table, format="pt")(model)
        sdquant.verify(model.write(tmp_path / "model").parent)
        sdquant.load_model(tmp_path / "model", progress=False)


@pytest.mark.parametrize("word", ["", "none", "Unknown", "fp16"])
def test_a_name_in_metadata_that_means_floats(word: str, floats: Model, tmp_path: Path) -> None:
    model = floats.copy()
    _metadata(quant_method=word, quantization_method=word)(model)
    assert not sdquant.verify(model.write(tmp_path / "lone", lone=True)).warnings


@pytest.mark.parametrize(
    ("form", "key", "word"),
    [
        ("fp8 weight_scale", "quantization_method", "fp8_scaled"),
        ("fp8 scale_weight", "quant_method", "convert_to_quant"),
        ("comfy mxfp8", "quant_method", "convrot"),
    ],
)
def test_a_free_name_in_metadata_is_told(form: str, key: str, word: str, tmp_path: Path) -> None:
    """The weights are all recognised, whatever the tool that wrote them calls that."""
    model = FORMATS[form].make(tiny(tmp_path / "float"), tmp_path / "made")
    _metadata(**{key: word})(model)
    file = model.write(tmp_path / "lone", lone=True)
    assert [text for text in sdquant.verify(file).warnings if repr(word) in text and key in text]
    model.tensors["__nncf_hooks.x"] = torch.zeros(4)  # of which one cannot say that
    with pytest.raises(UnsupportedFileError, match="NNCF"):
        sdquant.detect(model.write(tmp_path / "other", lone=True))


def _index(folder: Path, **rows: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | rows))


@pytest.mark.parametrize(
    "rows",
    [
        {"quantization_config": {"quant_method": "dream"}}, {"unet": ["os", "system"]},
        {"scheduler": ["os", "system"]}, {"tokenizer": ["os", "system"]}, {"_class_name": "system"},
        {"unet": ["diffusers", "load_image"]},
    ],
    ids=lambda row: f"{row}"[:40],
)  # fmt: skip
def test_a_pipelines_index(rows: dict[str, Any], tmp_path: Path) -> None:
    """Its classes are those of diffusers and transformers, whoever looks, and no other function of any module."""
    folder = copied(demo.path("digits-sd"), tmp_path / "pipe")
    _index(folder, **rows)
    word = next(iter(rows))
    one_answer(folder, UnsupportedFileError, "dream" if word.startswith("quant") else "class of")


def test_a_pipelines_index_that_is_no_config(tmp_path: Path) -> None:
    folder = copied(demo.path("digits-sd"), tmp_path / "pipe")
    _index(folder, quantization_config={"quant_method": 7})
    with pytest.raises(BadFileError, match=r"model_index\.json has 7") as caught:
        sdquant.detect(folder)
    assert "Get the model_index.json" in caught.value.fix


@pytest.mark.parametrize(
    "algorithm",
    [
        "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "fp8_pb_wo", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A16_AWQ", "W4A8_AWQ",
        "W8A16", "W8A8_SQ_PER_CHANNEL", "W4A8_MXFP4_FP8", "MXFP8", "MIXED_PRECISION", "INT8",
    ],
)  # fmt: skip
def test_an_algorithm_without_a_method_is_modelopts(algorithm: str, tmp_path: Path) -> None:
    """Also in the file of its own that ModelOpt's export writes beside a config.json that names the method."""
    model = FORMATS["fp8 weight_scale"].make(tiny(tmp_path / "float"), tmp_path / "made")
    model.files["config.json"]["quantization_config"] = {"quant_algo": algorithm}
    folder = model.write(tmp_path / "model").parent
    assert sdquant.detect(folder).quant == "fp8"
    said = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": {"quant_algo": algorithm}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert sdquant.detect(folder).quant == "fp8"
    (folder / "hf_quant_config.json").write_text(json.dumps(said | {"quantization": {"quant_algo": "dream"}}))
    with pytest.raises(UnsupportedFileError, match="'dream'"):
        sdquant.detect(folder)


def _drop(part: str) -> Change:
    def change(model: Model) -> None:
        del model.tensors[part]

    return change


def _marked_alone(model: Model) -> None:
    for key in [key for key in model.tensors if "scale_" in key]:
        del model.tensors[key]


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("fp8 weight_scale", _drop(FORMATS["fp8 weight_scale"].parts["scale"])),
        ("fp8 scale_weight", _drop(FORMATS["fp8 scale_weight"].parts["scale"])),
        ("fp8 scale_weight", _marked_alone),
        ("qint8", _drop(FORMATS["qint8"].parts["scale"])),
    ],
    ids=["ComfyUI's layer", "one of several", "all of a marked file", "quanto's"],
)
def test_a_layer_without_its_scale(form: str, change: Change, tmp_path: Path) -> None:
    source = tiny(tmp_path / "float")
    model = FORMATS[form].make(source, tmp_path / "made")
    change(model)
    one_answer(model.write(tmp_path / "model").parent, BadFileError, "scale" if form != "qint8" else NAME)


def test_a_config_that_contradicts_the_tensors(tmp_path: Path) -> None:
    """The tensors say themselves what they are: they are read, with a warning that names both."""
    model = FORMATS["nf4"].make(tiny(tmp_path / "float"), tmp_path / "made")
    model.files["config.json"]["quantization_config"] = {"quant_method": "quanto", "weights_dtype": "int8"}
    folder = model.write(tmp_path / "model").parent
    for look in (sdquant.detect, sdquant.verify):
        (said,) = [text for text in look(folder).warnings if "optimum-quanto" in text]
        assert "nf4" in said and said in sdquant.plan(folder).warnings


@pytest.mark.parametrize(
    ("form", "table", "words"),
    [
        ("hub", {"bits": 4, "scheme": "W8A16"}, "4 bits (bits=4) and 8 bits (scheme='W8A16')"),
        ("hub", {"bits": 8}, "8 bits (bits=8)"),
        ("hub", {"bits": 4, "scheme": "W4A16", "data_type": "int", "act_bits": 16}, None),
        ("hub", {"bits": 8, "dynamic": {"+:proj": {"bits": 4}}}, None),
        (
            "hub",
            {"config_groups": {"a": {"weights": {"num_bits": 8}, "format": "nvfp4-pack-quantized"}}},
            "4 bits (format=",
        ),
        ("hub", {"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}}}, None),
        ("nf4", {"load_in_4bit": True, "load_in_8bit": True}, "4 bits (load_in_4bit=True) and 8 bits"),
        ("nf4", {"load_in_4bit": False, "load_in_8bit": True}, "8 bits (load_in_8bit=True)"),
        ("nf4", {"load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}, None),
        ("fp8 weight_scale", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "4 bits (quant_algo='NVFP4')"),
        ("fp8 weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, None),
    ],
)
def test_a_config_that_contradicts_itself(form: str, table: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    """In bits, by its other words or by the tensors: they are read as they are, and it is said."""
    if form == "hub":  # GPTQ's order has the bits in its shapes
        tensors, _ = hub_formats.KINDS["gptq"].make(torch.randn(64, 64))
        files = {f"proj.{key}": tensor for key, tensor in tensors.items()}
        table = {"quant_method": "gptq", "checkpoint_format": "gptq", **table}
        save_file({key: tensor.contiguous() for key, tensor in files.items()}, tmp_path / "model.safetensors")
        seen = sdquant.detect(tmp_path / "model.safetensors", config=table)
    else:
        model = FORMATS[form].make(tiny(tmp_path / "float"), tmp_path / "made")
        model.files["config.json"]["quantization_config"] = {"quant_method": "bitsandbytes", **table}
        seen = sdquant.detect(model.write(tmp_path / "model").parent)
    said = [text for text in seen.warnings if " bits (" in text]
    assert [words in text and "are read as such" in text for text in said] == ([] if words is None else [True]), seen


def test_two_libraries_in_one_file(tmp_path: Path) -> None:
    """Half nf4, half optimum-quanto: each line of the evidence says how many, and both are loaded as they are."""
    source = tiny(tmp_path / "float")
    one, other = (FORMATS[form].make(source, tmp_path / form) for form in ("nf4", "qint8"))
    for key in [key for key in one.tensors if key.startswith(OTHER)]:
        del one.tensors[key]
    one.tensors |= {key: tensor for key, tensor in other.tensors.items() if key.startswith(OTHER)}
    one.files["config.json"].pop("quantization_config", None)
    folder = one.write(tmp_path / "model").parent
    seen = sdquant.verify(folder)
    assert sum("(1 weights)" in text for text in seen.evidence) == 2
    assert {row.scheme for row in seen.sources["model"].prequantized.values()} == {"nf4", "qint8"}
    sdquant.load_model(folder, progress=False)


def test_a_config_from_the_caller_and_one_beside_the_weights(tmp_path: Path) -> None:
    """As SDNQ writes it, in a file of its own: neither wins without a word."""
    model = FORMATS["sdnq-uint4"].make(tiny(tmp_path / "float"), tmp_path / "made")
    table = model.files["config.json"].pop("quantization_config")
    model.files["quantization_config.json"] = table
    folder = model.write(tmp_path / "model").parent
    same = dict(sdquant.dequantize(folder, config={"quantization_config": table}))
    assert same.keys() == load_file(tiny(tmp_path / "again") / WEIGHTS).keys()
    with pytest.raises(ConflictError, match=r"quantization_config\.json has another"):
        sdquant.dequantize(folder, config={"quantization_config": {**table, "weights_dtype": "int8"}})


def test_a_shard_that_says_it(floats: Model, tmp_path: Path) -> None:
    """The metadata of any file counts, not only that of the first."""
    folder = floats.write(tmp_path / "model").parent
    (folder / WEIGHTS).unlink()
    names = sorted(floats.tensors)
    shards = {1: names[::2], 2: names[1::2]}
    files = {number: f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in shards}
    for number, keys in shards.items():
        said = {"format": "pt"} | ({"quant_method": "dream"} if number == 2 else {})
        save_file({key: floats.tensors[key].contiguous() for key in keys}, folder / files[number], said)
    index = {"weight_map": {key: files[number] for number, keys in shards.items() for key in keys}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    one_answer(folder, UnsupportedFileError, "'dream'")


def test_a_marker_without_a_format(floats: Model, tmp_path: Path) -> None:
    model = floats.copy()
    model.tensors[f"{NAME.removesuffix('weight')}comfy_quant"] = line({"format": "dream4"})
    one_answer(model.write(tmp_path / "model").parent, UnsupportedFileError, "dream4")
