"""Bad input, end to end: each a typed error with what, why and fix, and none of them after a weight was read."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import backends
from sdquant.compat import IncompatibleWarning, hardware
from sdquant.core import registry
from sdquant.errors import (
    BackendUnavailableError,
    BadFileError,
    ConflictError,
    IncompatibleError,
    MissingComponentError,
    RefusedFileError,
    SdquantError,
    SettingsError,
    UnknownOffloadError,
    UnknownQuantError,
    UnsupportedFileError,
)
from sdquant.formats import safetensors
from sdquant.formats.gguf import file as gguf
from sdquant.formats.gguf.writer import write_gguf
from sdquant.loading import loader
from sdquant.models.generate import draw
from sdquant.utils.install import install_extra

from .conftest import headers_only
from .foreign import WEIGHTS

QUANTO = ("qint8", "qint4", "qint2", "qfloat8")  # those with modules of the library


def _refused(kind: type[SdquantError], path: Any, *args: Any, **values: Any) -> SdquantError:
    """The error that `load_model` raises; of exactly this kind, and complete."""
    with pytest.raises(kind) as caught:
        sdquant.load_model(path, *args, progress=False, **values)
    error = caught.value
    assert type(error) is kind
    for text in (error.what, error.why, error.fix):
        assert len(text.strip()) > 3
        assert text.strip()[0] not in ".,;:" and "None" not in text and "\n" not in text
    return error


class TestNames:
    def test_an_unknown_scheme(self, sd: Path) -> None:
        error = _refused(UnknownQuantError, sd, "nf44")
        assert "'nf44'" in error.what and "Did you mean 'nf4'" in error.fix and "sdquant matrix" in error.fix

    @pytest.mark.parametrize(
        ("loose", "scheme"),
        [("4bit", "nf4"), ("4-bit", "nf4"), ("8bit", "int8"), ("load_in_8bit", "int8"), ("bnb 4bit", "nf4"),
         ("int3", "qint3"), ("int2", "qint2"), ("llm.int8", "bnb-int8"), ("float8", "fp8"), ("quanto", "qint8"),
         ("q8", "q8_0"), ("int8_wo", "int8")],
    )  # fmt: skip
    def test_a_loose_word(self, loose: str, scheme: str, sd: Path) -> None:
        """The usual scheme first, and not the one that is spelled most like it."""
        assert _refused(UnknownQuantError, sd, loose).fix.startswith(f"Did you mean {scheme!r}")

    def test_loose_words_are_no_schemes(self) -> None:
        for word, schemes in registry.LOOSE.items():
            assert [backends.scheme(name).name for name in schemes] == list(schemes)
            with pytest.raises(UnknownQuantError):
                backends.scheme(word)

    def test_a_dtype_is_no_scheme(self, sd: Path) -> None:
        for word, dtype in (("fp16", "float16"), ("bfloat16", "bfloat16"), ("fp32", "float32")):
            assert f"dtype={dtype!r}" in _refused(UnknownQuantError, sd, word).fix

    def test_a_scheme_of_another_backend(self, sd: Path) -> None:
        assert "'bnb'" in _refused(UnknownQuantError, sd, "quanto:nf4").why

    def test_an_unknown_option(self, sd: Path) -> None:
        assert "block_size" in _refused(SettingsError, sd, "nf4,blocksize=64").fix

    def test_an_unknown_offload(self, sd: Path) -> None:
        assert "'balanced'" in _refused(UnknownOffloadError, sd, "nf4", "balaned").fix

    @pytest.mark.parametrize("values", [{"components": ["unett"]}, {"quant": {"unett": "nf4"}}])
    def test_an_unknown_component(self, values: dict[str, Any], sd: Path) -> None:
        error = _refused(SettingsError, sd, **({"quant": "nf4"} | values))
        assert "'unett'" in error.what and "'unet'" in error.fix

    def test_an_unknown_device(self, sd: Path) -> None:
        assert "'gpu'" in _refused(SettingsError, sd, device="gpu").what

    def test_a_device_that_is_not_here(self, sd: Path) -> None:
        kinds = hardware.probe().kinds
        absent = next(kind for kind in ("xpu", "mps", "cuda") if kind not in kinds)
        assert absent in _refused(BackendUnavailableError, sd, device=absent).what


class TestPaths:
    def test_nothing_there(self, tmp_path: Path) -> None:
        for path in (
            tmp_path / "model",
            "./model",
            "/no/such/model",
            "no-such-model",
            "a/b/c",
            "~/no/such/model",
            "~nobody-here/model",
        ):
            assert "no such file or folder" in _refused(MissingComponentError, path).why

    @pytest.mark.parametrize("name", ["nobody-has-this/model", "nobody-has-this/model.safetensors"])
    def test_a_hub_id_without_a_network(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        error = _refused(MissingComponentError, name)
        assert name in error.what and "hub" in error.why

    @pytest.mark.parametrize("name", ["..//model", "a/b\0", "who is/this model", "-/-"])
    def test_what_could_be_neither(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(SdquantError):
            sdquant.load_model(name, progress=False)

    def test_a_name_longer_than_the_system_allows(self) -> None:
        with pytest.raises(SdquantError):
            sdquant.load_model("m" * 300, progress=False)

    def test_a_folder_without_weights(self, tmp_path: Path) -> None:
        assert "no weights" in _refused(MissingComponentError, tmp_path).why
        (tmp_path / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
        assert "no weights" in _refused(MissingComponentError, tmp_path, "nf4", "balanced").why

    def test_a_pipeline_without_a_component(self, sd: Path, tmp_path: Path) -> None:
        pipe = Path(shutil.copytree(sd, tmp_path / "pipe"))
        (pipe / "unet" / WEIGHTS).unlink()
        assert str(pipe / "unet") in _refused(MissingComponentError, pipe).what
        shutil.rmtree(pipe / "unet")
        assert "unet" in _refused(MissingComponentError, pipe).why

    def test_a_pickle(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(1)}, tmp_path / "model.ckpt")
        assert "pickle" in _refused(UnsupportedFileError, tmp_path / "model.ckpt").why

    def test_weights_without_a_config(self, sd: Path, tmp_path: Path) -> None:
        shutil.copy(sd / "unet" / WEIGHTS, tmp_path / "lone.safetensors")
        error = _refused(MissingComponentError, tmp_path / "lone.safetensors")
        assert "sd unet" in error.why and "base=" in error.fix
        save_file({"a": torch.ones(2)}, tmp_path / "strange.safetensors")
        assert "those of no known model" in _refused(MissingComponentError, tmp_path / "strange.safetensors").why

    def test_a_foreign_layout(self, tmp_path: Path) -> None:
        names = ("input_blocks.0.0.weight", "time_embed.0.weight")
        save_file({f"model.diffusion_model.{name}": torch.ones(2) for name in names}, tmp_path / "v1-5.safetensors")
        error = _refused(MissingComponentError, tmp_path / "v1-5.safetensors")
        assert "ldm layout" in error.why and "base=" in error.fix


class TestDamagedFiles:
    @pytest.mark.parametrize("short", [1, 4096])
    @pytest.mark.parametrize("quant", [None, "nf4"])
    def test_a_truncated_file_says_how_many_bytes_are_missing(
        self, quant: str | None, short: int, sd: Path, tmp_path: Path
    ) -> None:
        pipe = Path(shutil.copytree(sd, tmp_path / "pipe"))
        path = pipe / "unet" / WEIGHTS
        os.truncate(path, path.stat().st_size - short)
        error = _refused(BadFileError, pipe, quant)
        assert str(path) in error.what and f"{short} bytes short" in error.why

    def test_a_truncated_gguf(self, saved: Callable[..., Path], tmp_path: Path) -> None:
        path = Path(shutil.copy(saved("q8_0") / "unet" / "model.gguf", tmp_path))
        os.truncate(path, path.stat().st_size - 100)
        error = _refused(BadFileError, path)
        assert str(path) in error.what and "100 bytes short" in error.why

    def test_weights_of_another_model(self, sd: Path, flux: Path, tmp_path: Path) -> None:
        pipe = Path(shutil.copytree(sd, tmp_path / "pipe"))
        shutil.copy(flux / "transformer" / WEIGHTS, pipe / "unet")
        with pytest.raises(BadFileError, match=r"it lacks .* of the model's tensors"):
            sdquant.load_model(pipe, progress=False)

    def test_a_tensor_of_another_shape(self, sd: Path, tmp_path: Path) -> None:
        unet = Path(shutil.copytree(sd / "unet", tmp_path / "unet"))
        tensors = load_file(unet / WEIGHTS)
        tensors["conv_norm_out.bias"] = torch.cat([tensors["conv_norm_out.bias"]] * 2)
        save_file(tensors, unet / WEIGHTS)
        assert "'conv_norm_out.bias'" in _refused(BadFileError, unet).what

    @pytest.mark.parametrize("mode", ["pre", "post"])
    @pytest.mark.parametrize("cut", [lambda weight: weight[:-1], lambda weight: weight.flatten(1)])
    def test_a_weight_of_another_shape_is_not_quantized(self, cut: Any, mode: str, sd: Path, tmp_path: Path) -> None:
        """It would be run as it is: a convolution of a channel less, or one that is no convolution."""
        unet = Path(shutil.copytree(sd / "unet", tmp_path / "unet"))
        tensors = load_file(unet / WEIGHTS)
        tensors["conv_in.weight"] = cut(tensors["conv_in.weight"]).contiguous()
        save_file(tensors, unet / WEIGHTS)
        error = _refused(BadFileError, unet, "int8", mode=mode)
        assert (
            "'conv_in.weight'" in error.what and str(unet / WEIGHTS) in error.what and "the model expects" in error.why
        )

    def test_a_config_that_does_not_fit_its_class(self, sd: Path, tmp_path: Path) -> None:
        unet = Path(shutil.copytree(sd / "unet", tmp_path / "unet"))
        (unet / "config.json").write_text('{"_class_name": "UNet2DConditionModel", "block_out_channels": "many"}')
        assert "config" in _refused(BadFileError, unet).why

    @pytest.mark.parametrize("name", ["os", "ModelMixin_", "__loader__", "UNet.2D", "DiffusionPipeline", "load_model"])
    def test_a_class_that_is_no_model_is_never_looked_up(self, name: str, sd: Path, tmp_path: Path) -> None:
        unet = Path(shutil.copytree(sd / "unet", tmp_path / "unet"))
        (unet / "config.json").write_text(f'{{"_class_name": "{name}"}}')
        assert repr(name) in _refused(UnsupportedFileError, unet).why


class TestNamesInPipelines:
    """What a model_index.json names is looked up in diffusers and transformers, and never imported."""

    @pytest.mark.parametrize(
        ("name", "row"),
        [
            ("_class_name", "NoSuchPipeline"),
            ("_class_name", 5),
            ("_class_name", ["spy", "Pipeline"]),
            ("unet", ["spy", "UNet2DConditionModel"]),
            ("unet", ["spy.inner", "UNet2DConditionModel"]),
            ("unet", ["diffusers", 5]),
            ("unet", [1, 2]),
            ("unet", ["diffusers", "utils"]),
            ("scheduler", ["spy", "Popen"]),
            ("scheduler", ["__init__", "DDIMScheduler"]),
            ("tokenizer", ["transformers", "logging"]),
            ("tokenizer", ["transformers"]),
        ],
        ids=str,
    )
    def test_what_is_no_class_of_theirs(
        self, name: str, row: Any, sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "spy.py").write_text("raise SystemExit('a module was imported that a file names')")
        monkeypatch.syspath_prepend(tmp_path)
        pipe = self._with(Path(shutil.copytree(sd, tmp_path / "pipe")), "model_index.json", {name: row})
        monkeypatch.setattr(loader, "build", lambda *_: pytest.fail("weights were read"))
        for path, base in ((pipe, None), (sd / "unet", pipe)):
            assert name.strip("_").split("_")[0] in _refused(UnsupportedFileError, path, base=base).why

    @pytest.mark.parametrize(
        ("file", "values"),
        [
            ("scheduler/scheduler_config.json", {"num_train_timesteps": 10**10}),
            ("scheduler/scheduler_config.json", {"beta_schedule": "no such"}),
            ("tokenizer/tokenizer_config.json", []),
        ],
        ids=str,
    )
    def test_what_their_classes_cannot_take(self, file: str, values: Any, sd: Path, tmp_path: Path) -> None:
        pipe = self._with(Path(shutil.copytree(sd, tmp_path / "pipe")), file, values)
        with pytest.raises(SdquantError):
            sdquant.load_model(pipe, progress=False)

    def test_a_class_that_was_renamed(self, sd: Path, tmp_path: Path) -> None:
        """As many a folder of Stable Diffusion 1.5 has it: diffusers knows what it is called today."""
        pipe = self._with(
            Path(shutil.copytree(sd, tmp_path / "pipe")),
            "model_index.json",
            {"feature_extractor": ["transformers", "CLIPFeatureExtractor"]},
        )
        (pipe / "feature_extractor").mkdir()
        (pipe / "feature_extractor" / "preprocessor_config.json").write_text("{}")
        assert sdquant.load_model(pipe, progress=False).feature_extractor is not None

    def test_links_out_of_the_folder(self, sd: Path, tmp_path: Path) -> None:
        for name in ("unet", "tokenizer"):
            pipe = Path(shutil.copytree(sd, tmp_path / f"pipe-{name}"))
            shutil.move(pipe / name, tmp_path / name)
            (pipe / name).symlink_to(tmp_path / name)
            assert "outside its folder" in _refused(BadFileError, pipe).why
        pipe = Path(shutil.copytree(sd, tmp_path / "pipe"))
        (tmp_path / "secret").write_text("{}")
        (pipe / "tokenizer" / "more.json").symlink_to(tmp_path / "secret")
        assert "outside its folder" in _refused(BadFileError, pipe).why

    @staticmethod
    def _with(pipe: Path, file: str, values: Any) -> Path:
        path = pipe / file
        path.write_text(json.dumps(values if isinstance(values, list) else json.loads(path.read_text()) | values))
        return pipe


class TestPrompt:
    def test_a_component_cannot_draw(self, sd: Path) -> None:
        unet = sdquant.load_model(sd / "unet", "int8", progress=False)
        with pytest.raises(SettingsError) as caught:
            draw(unet, ["a handwritten seven"], seeds=[0], steps=1)
        error = caught.value
        assert "prompt" in error.what and "UNet2DConditionModel" in error.what
        assert "component" in error.why and "base=" in error.fix

    def test_a_prompt_that_is_no_text(self, loaded: Callable[..., Any]) -> None:
        with pytest.raises(SettingsError, match="prompts must be strings"):
            draw(loaded("nf4", "digits-sd", "plain"), [7], seeds=[0], steps=1)  # type: ignore[list-item]

    def test_on_the_command_line(self, sd: Path, capsys: Any, tmp_path: Path) -> None:
        from sdquant.cli import main

        assert main(["generate", str(sd / "unet"), "a handwritten seven", "-o", str(tmp_path / "a.png")]) == 2
        said = capsys.readouterr().err
        assert "why:" in said and "fix:" in said and "Traceback" not in said
        assert not (tmp_path / "a.png").exists()


class TestMissingPackages:
    @pytest.fixture
    def without(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        real = hardware.versions()

        def forget(package: str, version: str | None = None) -> None:
            left = {name: value for name, value in real.items() if name != package}
            monkeypatch.setattr(hardware, "versions", lambda: left | ({package: version} if version else {}))

        return forget

    ROWS = tuple(
        (backends.get(name).requires, next(row.name for row in backends.get(name).schemes if row.on_the_fly))
        for name in backends.names()
        if backends.get(name).requires is not None
    )

    @pytest.mark.parametrize(("needed", "scheme"), ROWS, ids=lambda row: str(getattr(row, "package", row)))
    def test_the_pip_line_is_named(
        self, needed: Any, scheme: str, without: Callable[..., None], sd: Path, tmp_path: Path
    ) -> None:
        path = headers_only(sd, tmp_path / "model")
        without(needed.package)
        error = _refused(BackendUnavailableError, path, scheme)
        assert needed.package in error.why and install_extra(needed.extra) in error.fix
        without(needed.package, "0.0.1")
        error = _refused(BackendUnavailableError, path, scheme)
        assert "0.0.1" in error.why and needed.minimum in error.why

    def test_it_is_not_allowed_either(self, without: Callable[..., None], sd: Path) -> None:
        without("bitsandbytes")
        _refused(BackendUnavailableError, sd, "nf4", allow_incompatible=True)

    def test_what_is_quantized_already_needs_it_for_the_librarys_modules_only(
        self, without: Callable[..., None], saved: Callable[..., Path]
    ) -> None:
        folder = saved("nf4")  # made while bitsandbytes is there
        without("bitsandbytes")
        assert "bitsandbytes" in _refused(BackendUnavailableError, folder, runtime="library").why
        assert sdquant.plan(folder).components[0].runtime == "plain"
        # The matrix speaks of what the scheme does by default, whatever is installed.
        assert 'runtime="plain"' in _refused(IncompatibleError, folder, offload="sequential").fix


class TestEndlessConfigs:
    @pytest.mark.parametrize("value", [10**9, 1e9, [10**9, 2], [1] * 20_000], ids=lambda value: str(value)[:12])
    @pytest.mark.parametrize("key", ["num_layers", "num_single_layers"])
    def test_layers_without_end(self, key: str, value: Any, flux: Path, tmp_path: Path) -> None:
        shutil.copytree(flux / "transformer", tmp_path / "model")
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
        begin = time.perf_counter()
        assert key in _refused(BadFileError, tmp_path / "model").why
        assert time.perf_counter() - begin < 30  # not a measurement: it would take hours

    def test_positions_without_end(self, sd: Path, tmp_path: Path) -> None:
        """CLIP makes a table of them, eight bytes each."""
        shutil.copytree(sd / "text_encoder", tmp_path / "model")
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 10**9}))
        assert "max_position_embeddings" in _refused(BadFileError, tmp_path / "model").why


class TestBase:
    def test_it_is_for_a_lone_component(self, sd: Path) -> None:
        error = _refused(MissingComponentError, sd, base=sd)
        assert "single component" in error.why and "Remove base" in error.fix

    def test_it_is_a_pipeline(self, sd: Path) -> None:
        assert "model_index.json" in _refused(MissingComponentError, sd / "unet", base=sd / "vae").fix

    def test_it_is_there(self, sd: Path, tmp_path: Path) -> None:
        assert "no such file" in _refused(MissingComponentError, sd / "unet", base=tmp_path / "base").why

    def test_it_is_of_the_same_model(self, sd: Path, flux: Path) -> None:
        error = _refused(MissingComponentError, sd / "unet", base=flux)
        assert "unet" in error.why and "transformer" in error.why


class TestConflicts:
    def test_quantized_to_something_else_already(self, saved: Callable[..., Path]) -> None:
        assert "nf4" in _refused(ConflictError, saved("nf4"), "int8").why

    def test_before_a_weight_is_read(self, saved: Callable[..., Path], tmp_path: Path) -> None:
        for scheme in ("nf4", "q8_0"):
            path = headers_only(saved(scheme), tmp_path / scheme)
            assert scheme in _refused(ConflictError, path, "int8").why

    def test_quantizing_twice(self, sd: Path) -> None:
        unet = sdquant.load_model(sd / "unet", "int8", progress=False)
        with pytest.raises(ConflictError) as caught:
            sdquant.quantize(unet, "int4", progress=False)
        assert "int8" in caught.value.why and caught.value.fix

    def test_quantizing_what_has_no_values(self, sd: Path) -> None:
        unet = sdquant.load_model(sd / "unet", progress=False).to("meta")
        for scheme in ("int8", "nf4", "qint8", "sdnq-int8"):
            with pytest.raises(IncompatibleError, match="meta device") as caught:
                sdquant.quantize(unet, scheme, progress=False)
            assert ".weight'" in caught.value.why
            assert "load_model" in caught.value.fix

    @pytest.mark.parametrize("quant", [None, "int8"])
    def test_saving_what_has_no_values(self, quant: str | None, sd: Path, tmp_path: Path) -> None:
        pipe = sdquant.load_model(sd, quant, progress=False)
        pipe.unet.to("meta")
        for target in (pipe, pipe.unet):
            with pytest.raises(SettingsError, match="meta device"):
                sdquant.save(target, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


@pytest.fixture(scope="module")
def floats(sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model without the data of its weights."""
    return headers_only(sd, tmp_path_factory.mktemp("floats") / "headers")


class TestRefusalsOfTheDesign:
    """DESIGN section 5, the table: each is raised although there is not a byte of any weight in the files.

    The copies end where their headers do, so that whoever reads further, or only looks at their size, fails otherwise.
    """

    @pytest.fixture
    def found(self, saved: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
        """The model saved in a scheme, as its library's modules hold it; headers only."""
        return lambda scheme: headers_only(saved(scheme, "digits-flux"), tmp_path / scheme / "headers")

    @pytest.fixture(autouse=True)
    def _nothing_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for kind in (safetensors.SafetensorsFile, gguf.GGUFFile):

            def get(self: Any, key: str, real: Any = kind.get) -> Any:
                assert "headers" not in self.path.parts, f"{key} of {self.path} was read"
                return real(self, key)

            monkeypatch.setattr(kind, "get", get)

    def test_the_files_are_as_bad_as_is_said(self, floats: Path, found: Callable[[str], Path]) -> None:
        for path in (floats, found("q8_0")):
            with pytest.raises(BadFileError, match="bytes short"):
                sdquant.load_model(path, progress=False)
        with pytest.raises(BadFileError, match="bytes short"):
            sdquant.load_model(floats, "nf4", "balanced", progress=False)

    @pytest.mark.parametrize("scheme", ["nf4", "fp4", "nf4,double_quant", "bnb:nf4"])
    @pytest.mark.parametrize("mode", ["auto", "pre", "post"])
    def test_four_bit_and_sequential(self, scheme: str, mode: str, floats: Path) -> None:
        error = _refused(IncompatibleError, floats, scheme, "sequential", mode=mode)
        assert "Blockwise quantization only supports 16/32-bit floats" in error.why
        assert "balanced" in error.fix and "plain" in error.fix

    @pytest.mark.parametrize("scheme", QUANTO)
    def test_quanto_and_balanced(self, scheme: str, floats: Path) -> None:
        error = _refused(IncompatibleError, floats, scheme, "balanced")
        assert "QBytesTensor.new() missing 5 required positional arguments" in error.why and "plain" in error.fix

    @pytest.mark.parametrize("scheme", QUANTO)
    def test_quanto_and_sequential(self, scheme: str, floats: Path) -> None:
        error = _refused(IncompatibleError, floats, scheme, "sequential")
        assert "Expected all tensors to be on the same device" in error.why and "plain" in error.fix

    @pytest.mark.parametrize("scheme", ["q8_0", "q4_k", "q4_k_m"])
    def test_gguf_and_model_offload(self, scheme: str, floats: Path, found: Callable[[str], Path]) -> None:
        error = _refused(IncompatibleError, found(scheme), None, "model")
        assert "moving the model would trigger de-quantization" in error.why and "balanced" in error.fix
        assert "de-quantization" in _refused(IncompatibleError, floats, scheme, "model").why

    @pytest.mark.parametrize("scheme", ["q8_0", "q4_k", "q4_k_m", "bf16"])
    @pytest.mark.parametrize("mode", ["auto", "pre", "post"])
    def test_gguf_on_float_weights(self, scheme: str, mode: str, floats: Path) -> None:
        error = _refused(IncompatibleError, floats, scheme, mode=mode)
        assert "models cannot be quantized to GGUF at load time" in error.why
        assert "sdquant quantize" in error.why + error.fix

    def test_gguf_all_in_one(self, tmp_path: Path) -> None:
        names = ("model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.decoder.conv_in.weight")
        write_gguf(
            tmp_path / "sd.gguf",
            [(name, (4, 32), "f32", lambda: torch.zeros(4, 32)) for name in names],
            {"general.architecture": "sd1"},
        )
        os.truncate(tmp_path / "sd.gguf", gguf.read_header(tmp_path / "sd.gguf").data_offset)
        with pytest.raises(RefusedFileError, match="only the UNet/transformer is supported in GGUF") as caught:
            sdquant.load_model(tmp_path / "sd.gguf", progress=False)
        assert isinstance(caught.value, IncompatibleError) and isinstance(caught.value, UnsupportedFileError)

    def test_a_missing_backend(self, floats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        left = {name: value for name, value in hardware.versions().items() if name != "nncf"}
        monkeypatch.setattr(hardware, "versions", lambda: left)
        assert "pip install" in _refused(BackendUnavailableError, floats, "int8").fix

    @pytest.mark.parametrize(
        ("scheme", "offload", "why"),
        [
            ("nf4", "sequential", "Blockwise"), ("fp4", "sequential", "Blockwise"),
            ("qint8", "balanced", "QBytesTensor"), ("qint4", "sequential", "same device"),
            ("q8_0", "model", "de-quantization"),
        ],
    )  # fmt: skip
    def test_the_same_for_weights_that_are_quantized_already(
        self, scheme: str, offload: str, why: str, found: Callable[[str], Path]
    ) -> None:
        path = found(scheme)
        assert why in _refused(IncompatibleError, path, None, offload).why
        part = path / "transformer"
        assert why in _refused(IncompatibleError, part, None, offload).why

    @pytest.mark.parametrize(("scheme", "offload"), [("nf4", "sequential"), ("qint8", "balanced"), ("q8_0", "model")])
    def test_even_where_there_is_no_file(self, scheme: str, offload: str) -> None:
        """What the request alone decides is said before its path is looked at."""
        _refused(IncompatibleError, "/no/such/model", scheme, offload)

    @pytest.mark.parametrize(
        ("scheme", "offload"), [("nf4", "sequential"), ("qint8", "balanced"), ("qint4", "sequential")]
    )
    def test_plain_layers_are_the_way_past(self, scheme: str, offload: str, floats: Path) -> None:
        with pytest.raises(BadFileError, match="bytes short"):
            sdquant.load_model(floats, scheme, offload, runtime="plain", progress=False)

    @pytest.mark.parametrize(("scheme", "offload"), [("nf4", "sequential"), ("qint8", "balanced")])
    def test_allowed_it_is_a_warning(self, scheme: str, offload: str, floats: Path) -> None:
        with pytest.warns(IncompatibleWarning, match="refuses"), pytest.raises(BadFileError, match="bytes short"):
            sdquant.load_model(floats, scheme, offload, allow_incompatible=True, progress=False)

    def test_check_says_the_same_without_a_file(self) -> None:
        for scheme, offload in (("nf4", "sequential"), ("qint8", "balanced"), ("q8_0", "model")):
            with pytest.raises(IncompatibleError):
                sdquant.check(scheme, offload)
        with pytest.raises(IncompatibleError):
            sdquant.check("q8_0", "none", mode="pre")
        sdquant.check("q8_0", "none")


@pytest.mark.parametrize("scheme", ["int4", "nf4", "qint8", "fp8"])
def test_parts_of_another_size_are_not_loaded(scheme: str, saved: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = tmp_path / "broken"
    shutil.copytree(saved(scheme) / "unet", folder)
    file = next(folder.glob("*.safetensors"))
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    name, found = next(iter(sdquant.detect(folder).sources["model"].prequantized.items()))
    key = next(iter(found.keys.values()))
    tensors[key] = torch.cat([tensors[key], tensors[key][:1]])
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(BadFileError, match=re.escape(name)) as caught:
        sdquant.load_model(folder, progress=False)
    assert str(file) in caught.value.what
