"""Files of quantization methods that are not read here: detect, verify, plan and load refuse them by the same name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant import backends
from sdquant.cli import main
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.nn.weights import quantized

from ..entry_points import answers, copied, one_answer
from ..malformed import NAME, OTHER, tiny
from ..malformed import WEIGHTS as FILE


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("floats") / "model")


def _configured(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


# By the word in the config: what people call it.
NAMED = {
    "aqlm": "AQLM", "eetq": "EETQ", "modelopt": "ModelOpt", "svdquant": "Nunchaku",
    "nunchaku_lite": "Nunchaku", "bfl": "Black Forest Labs", "vptq": "VPTQ", "higgs": "HIGGS", "spqr": "SpQR",
    "mxfp4": "MXFP4", "bitnet": "BitNet", "nobody-has-this": "'nobody-has-this'", "FP8-of-tomorrow": "FP8-of-tomorrow",
}  # fmt: skip


class TestConfigs:
    @pytest.mark.parametrize("word", NAMED)
    def test_a_method_is_named(self, word: str, floats: Path, tmp_path: Path) -> None:
        folder = _configured(copied(floats, tmp_path / "model"), {"quantization_config": {"quant_method": word}})
        one_answer(folder, UnsupportedFileError, "config.json", NAMED[word])

    @pytest.mark.parametrize(
        "values",
        [
            {"text_config": {"quantization_config": {"quant_method": "eetq", "bits": 4}}},
            {"compression_config": {"quant_method": "eetq"}},
            {"vision_config": {"tower": {"quantization_config": {"quant_method": "eetq"}}}},
        ],
        ids=["text_config", "compression_config", "deeper"],
    )
    def test_wherever_it_stands(self, values: dict[str, Any], floats: Path, tmp_path: Path) -> None:
        one_answer(_configured(copied(floats, tmp_path / "model"), values), UnsupportedFileError, "EETQ")

    @pytest.mark.parametrize(
        ("name", "values", "says"),
        [
            ("quantization_config", {"quant_method": "eetq"}, "EETQ"),
            ("hf_quant_config", {"producer": {"name": "modelopt"}}, "ModelOpt"),
        ],
    )
    def test_in_a_file_beside_it(
        self, name: str, values: dict[str, Any], says: str, floats: Path, tmp_path: Path
    ) -> None:
        folder = copied(floats, tmp_path / "model")
        (folder / f"{name}.json").write_text(json.dumps(values))
        one_answer(folder, UnsupportedFileError, f"{name}.json", says)

    @pytest.mark.parametrize("word", [7, ["gptq"], {"a": 1}, True])
    def test_a_method_that_is_no_name(self, word: Any, floats: Path, tmp_path: Path) -> None:
        folder = _configured(copied(floats, tmp_path / "model"), {"quantization_config": {"quant_method": word}})
        one_answer(folder, BadFileError, "quant_method")

    @pytest.mark.parametrize(
        "said",
        [
            {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"load_in_8bit": True}, {"quant_method": "quanto"},
            {"quant_method": "fp8"}, {"quant_method": "sdquant", "quant": "int8"},
            {"quant_method": "sdnq", "weights_dtype": "int8"}, {"quant_method": "gptq"}, {"quant_method": "awq"},
            {"quant_method": "auto-round"}, {"quant_method": "hqq"}, {"quant_method": "compressed-tensors"},
        ],
        ids=str,
    )  # fmt: skip
    def test_floats_that_are_said_to_be_quantized(self, said: dict[str, Any], floats: Path, tmp_path: Path) -> None:
        """They were loaded as if nothing were said."""
        folder = _configured(copied(floats, tmp_path / "model"), {"quantization_config": said})
        assert "remove quantization_config" in one_answer(folder, BadFileError, "none of its").fix

    def test_nothing_said(self, floats: Path, tmp_path: Path) -> None:
        folder = _configured(copied(floats, tmp_path / "model"), {"quantization_config": {}})
        assert set(answers(folder).values()) == {None}

    def test_on_the_command_line(self, floats: Path, tmp_path: Path, capsys: Any) -> None:
        folder = _configured(copied(floats, tmp_path / "model"), {"quantization_config": {"quant_method": "eetq"}})
        for words in (["inspect"], ["inspect", "--verify"], ["plan"]):
            assert main([*words, str(folder)]) == 2
            said = capsys.readouterr().err
            assert "EETQ" in said and "why:" in said and "fix:" in said

    def test_in_a_pipeline(self, tmp_path: Path) -> None:
        folder = copied(Path(sdquant.demo.path("digits-sd")), tmp_path / "pipe")
        _configured(folder / "unet", {"quantization_config": {"quant_method": "eetq"}})
        said = answers(folder)
        assert {type(error) for error in said.values()} == {UnsupportedFileError}
        assert all("EETQ" in str(error) and str(folder / "unet") in str(error) for error in said.values())


def _codes(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=dtype)


I32, U8, I8, E4M3 = torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn
STEM = NAME.removesuffix("weight")
# What stands in the place of a weight: the method that is named.
LAYERS: dict[str, tuple[str, dict[str, Tensor]]] = {
    "gptq": ("GPTQ", {
        "qweight": _codes(I32, 8, 256), "qzeros": _codes(I32, 1, 32), "scales": torch.ones(1, 256),
        "g_idx": _codes(I32, 64),
    }),
    "compressed-tensors": ("compressed-tensors", {
        "weight_packed": _codes(I32, 256, 8), "weight_scale": torch.ones(256, 1), "weight_shape": torch.tensor([256]),
    }),
    "compressed-tensors marlin": ("marlin-24", {
        "weight_packed": _codes(I32, 4, 512), "scale_packed": torch.ones(1, 256), "meta": _codes(torch.int16, 64, 8),
    }),
    "gptq for a kernel": ("in one for a kernel", {
        "qweight": _codes(I32, 4, 512), "qzeros": _codes(I32, 1, 32), "scales": torch.ones(1, 256),
    }),
    "torchao": ("torchao", {"_weight_qdata": _codes(I8, 256, 64), "_weight_scale": torch.ones(256, 1)}),
    "hqq": ("HQQ", {"W_q": _codes(U8, 32, 256), "scale": torch.ones(1, 256), "zero": torch.ones(1, 256)}),
    "modelopt": ("ModelOpt", {"weight": torch.ones(256, 64), "weight_quantizer._amax": torch.ones(())}),
    "modelopt w4a8": ("is in a variant of NVIDIA ModelOpt that sdquant does not read, as", {
        "weight": _codes(U8, 128, 64), "weight_scale": torch.ones(256, 1), "weight_scale_2": torch.tensor(1.0),
        "input_scale": torch.tensor(1.0),
    }),
    "nvfp4": ("the order of the NVFP4", {
        "weight": _codes(U8, 256, 32), "weight_scale": torch.ones(256, 4).to(E4M3), "weight_scale_2": torch.tensor(1.0),
    }),
    "int8": ("8-bit integers", {"weight": _codes(I8, 256, 64), "weight_scale": torch.ones(256, 1)}),
    "4 bits": ("4 bits", {"weight": _codes(U8, 256, 32), "weight_scale": torch.ones(256, 2)}),
    "eetq": ("EETQ", {"weight": _codes(I8, 64, 256), "weight_scales": torch.ones(256)}),
    "codes alone": ("int8", {"weight": _codes(I8, 256, 64)}),
    "a scale of somebody's": ("scale", {"weight": torch.ones(256, 64).to(E4M3), "scale": torch.ones(256, 1)}),
}  # fmt: skip


class TestTensors:
    @pytest.mark.parametrize("kind", LAYERS)
    @pytest.mark.parametrize("lone", [False, True], ids=["folder", "lone"])
    def test_a_method_shows(self, kind: str, lone: bool, floats: Path, tmp_path: Path) -> None:
        """Whole, good files: nobody is sent to download them again."""
        says, layer = LAYERS[kind]
        folder = copied(floats, tmp_path / "model")
        tensors = load_file(folder / FILE)
        del tensors[NAME]
        save_file(tensors | {STEM + key: tensor.clone() for key, tensor in layer.items()}, folder / FILE)
        if lone:
            (folder / "config.json").unlink()
        error = one_answer(folder / FILE if lone else folder, UnsupportedFileError, says)
        assert "ownload" not in error.fix and ("sdquant matrix" in error.fix or "config=" in error.fix)

    def test_a_variant_of_what_is_read(self, floats: Path, tmp_path: Path) -> None:
        folder = copied(floats, tmp_path / "model")
        tensors = load_file(folder / FILE)
        del tensors[NAME]
        save_file(tensors | {STEM + key: one for key, one in LAYERS["modelopt w4a8"][1].items()}, folder / FILE)
        _configured(folder, {"quantization_config": {"quant_method": "modelopt", "quant_type": "W4A8"}})
        words = f"NVIDIA ModelOpt, and its layer {STEM[:-1]!r} is in a variant of it that sdquant does not read"
        one_answer(folder, UnsupportedFileError, words)

    def test_metadata_name_it(self, floats: Path, tmp_path: Path) -> None:
        file = tmp_path / "svdq.safetensors"
        metadata = {"quantization_config": json.dumps({"method": "svdquant"}), "model_class": "NunchakuFlux"}
        save_file(load_file(floats / FILE), file, metadata=metadata)
        one_answer(file, UnsupportedFileError, "metadata", "Nunchaku")

    @pytest.mark.parametrize("method", ["compressed-tensors", "modelopt", "fbgemm_fp8", "bfl"])
    def test_float8_with_scales_is_read_whoever_wrote_it(self, method: str, floats: Path, tmp_path: Path) -> None:
        folder, codes, scale = _float8(copied(floats, tmp_path / "model"))
        _configured(folder, {"quantization_config": {"quant_method": method}})
        assert set(answers(folder).values()) == {None}
        ((name, packed),) = quantized(sdquant.load_model(folder, runtime="plain", progress=False))
        assert name == NAME
        assert torch.equal(backends.get("bnb").decode(packed, torch.float32), codes.float() * scale)


def _float8(folder: Path) -> tuple[Path, Tensor, Tensor]:
    """A folder with one weight in float8, the weight's codes, and the scales of its rows."""
    tensors = load_file(folder / FILE)
    wide = tensors[NAME].float()
    scale = wide.abs().amax(dim=1, keepdim=True) / 448
    codes = (wide / scale).to(E4M3)
    save_file(tensors | {NAME: codes, f"{STEM}weight_scale": scale}, folder / FILE)
    return folder, codes, scale


def _rotated(*locations: str) -> dict[str, Any]:
    """A transform_config as compressed-tensors writes it."""
    rows = [{"targets": ["Linear"], "location": one, "inverse": i % 2 == 1} for i, one in enumerate(locations)]
    return {"config_groups": {"u": {"type": "hadamard", "apply": rows, "randomize": False, "head_dim": 64}}}


class TestTransforms:
    """What compressed-tensors' configs want done with activations: whoever reads the weights alone draws noise."""

    @pytest.mark.parametrize(
        ("said", "words"),
        [
            ({"transform_config": _rotated("weight_input", "input")}, ("hadamard at input", "transform_config")),
            ({"transform_config": _rotated("output")}, ("hadamard at output",)),
            ({"transform_config": _rotated("weight_output", "k_cache")}, ("k_cache",)),
            ({"transform_config": {"config_groups": {"u": {"type": "of tomorrow"}}}}, ("unknown place",)),
            ({"transform_config": ["hadamard"]}, ("unknown place",)),
            ({"rotation_config": {"hadamard_type": "hadamard", "block_size": 32}}, ("rotate", "rotation_config")),
            ({"sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparse-24-bitmask", "sparsity_config")),
        ],
        ids=["input", "output", "keys", "another form", "no table", "AutoRound's", "sparse"],
    )
    @pytest.mark.parametrize("where", ["config", "text_config", "metadata"])
    def test_those_of_activations_are_refused(
        self, said: dict[str, Any], words: tuple[str, ...], where: str, floats: Path, tmp_path: Path
    ) -> None:
        folder = _float8(copied(floats, tmp_path / "model"))[0]
        table = {"quant_method": "compressed-tensors", **said}
        if where == "metadata":
            save_file(load_file(folder / FILE), folder / FILE, metadata={"quantization_config": json.dumps(table)})
        else:
            values = {"quantization_config": table}
            _configured(folder, values if where == "config" else {where: values})
        one_answer(folder, UnsupportedFileError, "metadata" if where == "metadata" else "config.json", *words)

    @pytest.mark.parametrize(
        "said",
        [
            {"transform_config": _rotated("weight_input", "weight_output")},
            {"transform_config": {"config_groups": {}}},
            {"transform_config": {}},
            {"transform_config": None, "sparsity_config": {"format": "dense"}},
        ],
        ids=["weights", "no groups", "empty", "none"],
    )
    def test_those_of_weights_are_in_the_weights(self, said: dict[str, Any], floats: Path, tmp_path: Path) -> None:
        folder, codes, scale = _float8(copied(floats, tmp_path / "model"))
        _configured(folder, {"quantization_config": {"quant_method": "compressed-tensors", **said}})
        assert set(answers(folder).values()) == {None}
        ((_, packed),) = quantized(sdquant.load_model(folder, runtime="plain", progress=False))
        assert torch.equal(backends.get("bnb").decode(packed, torch.float32), codes.float() * scale)


class TestScales:
    """A weight of a format that is read, without its scale: known from the header."""

    @pytest.fixture
    def folder(self, floats: Path, tmp_path: Path) -> Path:
        """Two float8 weights, each with a scale."""
        folder = copied(floats, tmp_path / "model")
        tensors = load_file(folder / FILE)
        for name in (NAME, OTHER):
            tensors[name] = tensors[name].to(E4M3)
            tensors[name.removesuffix("weight") + "weight_scale"] = torch.ones(())
        save_file(tensors, folder / FILE)
        return folder

    def _change(self, folder: Path, key: str, tensor: Tensor | None = None) -> Path:
        tensors = load_file(folder / FILE)
        tensors.pop(key, None)
        save_file(tensors | ({} if tensor is None else {key: tensor}), folder / FILE)
        return folder

    def test_both_are_there(self, folder: Path) -> None:
        assert set(answers(folder).values()) == {None}

    def test_one_of_two_has_none(self, folder: Path) -> None:
        """It was multiplied by one, and drew noise."""
        one_answer(self._change(folder, f"{STEM}weight_scale"), BadFileError, NAME, "without a scale")

    def test_none_has_one(self, folder: Path) -> None:
        """Plain float8 is whole as it is."""
        self._change(folder, f"{STEM}weight_scale")
        self._change(folder, OTHER.removesuffix("weight") + "weight_scale")
        assert set(answers(folder).values()) == {None}

    @pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8_tensorwise"])
    def test_a_layer_of_comfyui_has_none(self, kind: str, floats: Path, tmp_path: Path) -> None:
        folder = copied(floats, tmp_path / "model")
        dtype = I8 if kind == "int8_tensorwise" else E4M3
        self._change(folder, NAME, load_file(folder / FILE)[NAME].to(dtype))
        marker = torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=U8)
        self._change(folder, f"{STEM}comfy_quant", marker)
        one_answer(folder, BadFileError, NAME, f"{STEM}weight_scale")

    @pytest.mark.parametrize("word", ["comfy_quant", "comfy-quants", "comfy_kitchen"])
    def test_layers_of_comfyui_under_the_name_of_a_library(self, word: str, floats: Path, tmp_path: Path) -> None:
        """Markers say what each layer is, whatever a config calls all of them: without any it is refused."""
        folder = copied(floats, tmp_path / "model")
        _configured(folder, {"quantization_config": {"quant_method": word, "quant_format": "int8"}})
        self._change(folder, NAME, torch.ones_like(load_file(folder / FILE)[NAME], dtype=I8))
        self._change(folder, f"{STEM}weight_scale", torch.tensor(0.5))
        one_answer(folder, UnsupportedFileError, "config.json", "ComfyUI", STEM.rstrip("."))
        marker = torch.tensor(list(json.dumps({"format": "int8_tensorwise"}).encode()), dtype=U8)
        self._change(folder, f"{STEM}comfy_quant", marker)
        assert set(answers(folder).values()) == {None}
        assert sdquant.detect(folder).quant == "int8_tensor"

    @pytest.mark.parametrize("scheme", ["nf4", "nf4,double_quant", "bnb-int8", "qint8", "qint4"])
    def test_a_part_of_a_weight_is_not_there(self, scheme: str, floats: Path, tmp_path: Path) -> None:
        model = sdquant.load_model(floats, scheme, runtime="plain", progress=False)
        sdquant.save(model, tmp_path / "model")
        tensors = load_file(tmp_path / "model" / FILE)
        part = {"nf4": "absmax", "nf4,double_quant": "nested_quant_map", "bnb-int8": "SCB"}.get(scheme, "weight._scale")
        key = next(key for key in sorted(tensors) if key.endswith(part) and key.startswith(STEM))
        del tensors[key]
        save_file(tensors, tmp_path / "model" / FILE)
        one_answer(tmp_path / "model", BadFileError, key if scheme != "bnb-int8" else NAME)
