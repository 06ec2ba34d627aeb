"""What a path holds, found out from names and headers: every container, every format, and no byte of weights read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import backends
from sdquant.errors import ConflictError, MissingComponentError, RefusedFileError, UnsupportedFileError
from sdquant.formats import model_families
from sdquant.formats.gguf.writer import write_gguf
from sdquant.models.promised_schemes import same_scheme

from .conftest import header_length
from .foreign import ROWS as FOREIGN

WEIGHTS = "diffusion_pytorch_model.safetensors"

# The fields that DESIGN section 4 promises.
FIELDS = {
    "path", "container", "family", "component", "quant", "backend", "prequantized", "evidence", "suffix_hint",
    "tensors", "bytes", "types",
}  # fmt: skip

HINTS: dict[str, str | None] = {
    # DESIGN section 7: *nf4.safetensors, *fp8.safetensors, *fp4*, *qint*.safetensors, *int8*, *.gguf
    "model-nf4.safetensors": "nf4",
    "fluxnf4.safetensors": "nf4",
    "model_fp8.safetensors": "fp8",
    "flux1-dev-fp8_e4m3fn.safetensors": "fp8",
    "model.float8.safetensors": "fp8",
    "model-fp4-v2.safetensors": "fp4",
    "model-qint8.safetensors": "qint8",
    "model-qint4.safetensors": "qint4",
    "model-qint3.safetensors": "qint3",
    "model-qint2.safetensors": "qint2",
    "model-qint.safetensors": "qint8",
    "model-qfloat8.safetensors": "qfloat8",
    "model-int8.safetensors": "int8",
    "model_int8_v2.safetensors": "int8",
    "model-int8_sym": "int8_sym",
    "model-int4.safetensors": "int4",
    "model-int4-sym.safetensors": "int4_sym",
    "model-bnb-int8.safetensors": "bnb-int8",
    "model-bnb_int8": "bnb-int8",
    "FLUX.1-dev-SDNQ-uint4-svd-r32": "sdnq-uint4",
    "model-sdnq-int8": "sdnq-int8",
    "model.gguf": None,
    "flux1-dev-Q4_K_S.gguf": "q4_k_s",
    "flux1-dev-Q4_K_M.gguf": "q4_k_m",
    "flux1-dev-Q3_K_L.gguf": "q3_k_l",
    "flux1-dev-UD-Q4_K_XL.gguf": "q4_k",
    "flux1-dev-Q6_K.gguf": "q6_k",
    "flux1-dev.Q5_1.gguf": "q5_1",
    "flux1-dev-Q4_0.gguf": "q4_0",
    "Q8_0.gguf": "q8_0",
    "flux1-dev-Q8_0": "q8_0",
    "flux1-dev-BF16.gguf": "bf16",
    "flux1-dev-F16.gguf": "f16",
    "flux1-dev-fp16.gguf": "f16",
    "flux1-dev-F32.gguf": "f32",
    # The mark nearest to the end counts.
    "nf4-model-fp8.safetensors": "fp8",
    "fp8-to-nf4.safetensors": "nf4",
    "flux-f16-Q5_K_M.gguf": "q5_k_m",
    "flux-nf4-Q8_0.gguf": "q8_0",
    "int8-then-qint4.safetensors": "qint4",
    # Case, folders.
    "FLUX-NF4.SAFETENSORS": "nf4",
    "Model-QInt4.SafeTensors": "qint4",
    "FLUX-q4_k_s.GGUF": "q4_k_s",
    "nf4/": "nf4",
    "models/digits-sd-fp8": "fp8",
    "nf4/model.safetensors": None,
    "/data/fp8/unet/diffusion_pytorch_model.safetensors": None,
    # Nothing that is promised here.
    "": None,
    ".": None,
    "/": None,
    "model.safetensors": None,
    "diffusion_pytorch_model.fp16.safetensors": None,
    "diffusion_pytorch_model-00001-of-00003.safetensors": None,
    "model-bf16.safetensors": None,
    "flux1-dev-IQ4_NL.gguf": "iq4_nl",
    "flux1-dev-Q1_0.gguf": None,
    "flux-nvfp4.safetensors": "comfy:nvfp4",
    "flux-mxfp4.safetensors": None,
    "flux-mxfp8.safetensors": "mxfp8",
    "model-uint8.safetensors": None,
    "model-uint4.safetensors": None,
    "printf16.gguf": None,
    "faq8_0.gguf": None,
    "sd-v1-4.safetensors": None,
    "q4.safetensors": None,
}


@pytest.mark.parametrize(("name", "hint"), HINTS.items(), ids=[name or "empty" for name in HINTS])
def test_the_name_alone(name: str, hint: str | None) -> None:
    assert sdquant.suffix_hint(name) == hint


def test_every_hint_is_a_scheme_and_every_gguf_type_and_mix_is_a_hint() -> None:
    assert {hint for hint in HINTS.values() if hint} <= {row.name for row in backends.schemes()}
    for row in backends.get("gguf").schemes:
        assert sdquant.suffix_hint(f"flux1-dev-{row.name.upper()}.gguf") == row.name
    for row in backends.schemes():
        if row.backend != "gguf" and row.name != "rules":  # an ordinary word, and no type
            assert sdquant.suffix_hint(f"digits-sd-{row.name}") == row.name


def _check(seen: sdquant.Detected, path: Path) -> None:
    """What is true of everything detected."""
    values = seen.to_dict()
    assert set(values) >= FIELDS and json.loads(json.dumps(values)) == values
    assert seen.path == str(path)
    assert seen.evidence and all(isinstance(line, str) and line for line in seen.evidence)
    assert sum(seen.types.values()) == seen.tensors > 0
    assert (seen.quant is None) == (seen.backend is None) == (not seen.prequantized)
    if seen.quant is not None:
        assert seen.backend == backends.scheme(seen.quant).backend
    assert seen.warnings == []
    for name, part in seen.parts.items():
        _check(part, Path(part.path))
        assert all(f"{name}: {line}" in seen.evidence for line in part.evidence)


def _plain_bytes(folder: Path) -> int:
    return sum(t.nbytes for path in folder.rglob("*.safetensors") for t in load_file(path).values())


class TestPlain:
    def test_digits_sd(self, sd: Path) -> None:
        seen = sdquant.detect(sd)
        _check(seen, sd)
        assert (seen.container, seen.family, seen.component) == ("pipeline", "sd", "pipeline")
        assert (seen.quant, seen.prequantized, seen.suffix_hint) == (None, False, None)
        assert {name: part.component for name, part in seen.parts.items()} == {
            "unet": "unet", "text_encoder": "text_encoder", "vae": "vae",
        }  # fmt: skip
        assert seen.bytes == _plain_bytes(sd)
        assert set(seen.types) == {"bfloat16"}

    def test_digits_flux(self, flux: Path) -> None:
        seen = sdquant.detect(flux)
        _check(seen, flux)
        assert (seen.container, seen.family) == ("pipeline", "flux")
        assert {name: part.family for name, part in seen.parts.items()} == {
            "transformer": "flux", "text_encoder": "clip", "text_encoder_2": "t5", "vae": "vae",
        }  # fmt: skip
        assert seen.parts["text_encoder_2"].class_name == "T5EncoderModel"
        assert seen.bytes == _plain_bytes(flux)

    @pytest.mark.parametrize("name", ["unet", "vae", "text_encoder"])
    def test_a_component_folder_and_its_file(self, name: str, sd: Path) -> None:
        seen = sdquant.detect(sd / name)
        _check(seen, sd / name)
        assert (seen.container, seen.component) == ("component", name)
        file = next((sd / name).glob("*.safetensors"))
        lone = sdquant.detect(str(file))
        _check(lone, file)
        assert lone.container == "safetensors"
        same = FIELDS - {"path", "container"}
        assert {k: v for k, v in seen.to_dict().items() if k in same} == {
            k: v for k, v in lone.to_dict().items() if k in same
        }

    def test_a_path_from_home(self, sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "model").symlink_to(sd)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert sdquant.detect("~/model").bytes == sdquant.detect(sd).bytes
        assert sdquant.plan(sd / "unet", base="~/model").bytes == sdquant.plan(sd).bytes

    def test_a_folder_that_is_called_as_home_is(
        self, sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "home").mkdir()
        (tmp_path / "here" / "~").mkdir(parents=True)
        (tmp_path / "here" / "~" / "model").symlink_to(sd)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path / "here")
        assert sdquant.verify("./~/model").bytes == sdquant.detect(sd).bytes
        assert sdquant.plan("./~/model/unet", base="./~/model").bytes == sdquant.plan(sd).bytes
        assert sdquant.load_model("./~/model/unet", progress=False) is not None
        assert next(iter(sdquant.dequantize("./~/model/unet"))) is not None
        with pytest.raises(sdquant.SdquantError, match="~/model"):
            sdquant.detect("~/model")

    def test_a_sharded_folder(self, sd: Path, tmp_path: Path) -> None:
        tensors = load_file(sd / "unet" / WEIGHTS)
        shutil.copy(sd / "unet" / "config.json", tmp_path)
        places: dict[str, str] = {}
        for part in range(3):
            shard = dict(list(tensors.items())[part::3])
            save_file(shard, tmp_path / f"diffusion_pytorch_model-{part + 1:05}-of-00003.safetensors")
            places |= {key: f"diffusion_pytorch_model-{part + 1:05}-of-00003.safetensors" for key in shard}
        (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        seen, whole = sdquant.detect(tmp_path), sdquant.detect(sd / "unet")
        _check(seen, tmp_path)
        assert (seen.container, seen.component, seen.tensors, seen.bytes, seen.types) == (
            "component", "unet", whole.tensors, whole.bytes, whole.types,
        )  # fmt: skip

    def test_an_fp16_variant(self, sd: Path, tmp_path: Path) -> None:
        pipe = Path(shutil.copytree(sd, tmp_path / "pipe"))
        for path in list(pipe.rglob("*.safetensors")):
            save_file({key: t.half() for key, t in load_file(path).items()}, path.with_suffix(".fp16.safetensors"))
            path.unlink()
        seen = sdquant.detect(pipe)
        _check(seen, pipe)
        assert set(seen.types) == {"float16"} and seen.bytes == _plain_bytes(sd)

    def test_the_family_of_a_file_without_config_is_in_its_shapes(self) -> None:
        key = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight"
        assert model_families.sd_version({key: (320, 768)}) == "sd1"
        assert model_families.sd_version({key: (320, 1024)}) == "sd2"
        assert model_families.sd_version({key: (320, 128)}) == model_families.sd_version({}) == "sd"

    @pytest.mark.parametrize("row", model_families.ROWS, ids=lambda row: f"{row.family}-{row.component}-{row.layout}")
    def test_every_family_is_told_by_its_names_and_shadowed_by_none(
        self, row: model_families.Family, tmp_path: Path
    ) -> None:
        save_file({name: torch.zeros(1) for name in row.names}, tmp_path / "model.safetensors")
        seen = sdquant.detect(tmp_path / "model.safetensors")
        assert seen.family == row.family and seen.component == row.component
        assert f"{row.layout} layout" in seen.evidence[0]

    def test_a_file_of_nobodys_names(self, tmp_path: Path) -> None:
        save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64)}, tmp_path / "model.safetensors")
        seen = sdquant.detect(tmp_path / "model.safetensors")
        _check(seen, tmp_path / "model.safetensors")
        assert (seen.family, seen.component, seen.class_name) == (None, None, None)
        assert seen.types == {"float32": 1, "int64": 1} and seen.bytes == 24 + 32


class TestOwn:
    """Folders that sdquant saved."""

    @pytest.mark.parametrize("model", ["digits-sd", "digits-flux"])
    @pytest.mark.parametrize("scheme", ["nf4", "fp8", "qint4", "qint3", "int4", "sdnq-uint4"])
    def test_quantized_on_the_fly(self, scheme: str, model: str, saved: Callable[..., Path]) -> None:
        path = saved(scheme, model)
        seen = sdquant.detect(path)
        _check(seen, path)
        assert (seen.container, seen.quant, seen.prequantized) == ("pipeline", scheme, True)
        assert seen.family == sdquant.detect(sdquant.demo.path(model)).family
        main = seen.parts["unet" if model == "digits-sd" else "transformer"]
        assert main.quant == scheme and any("sdquant's own metadata" in line for line in main.evidence)
        assert seen.parts["vae"].quant is None and not seen.parts["vae"].prequantized
        for part in seen.parts.values():
            if part.prequantized:
                file = next(Path(part.path).glob("*.safetensors"))
                assert sdquant.detect(file).quant == scheme

    @pytest.mark.parametrize("scheme", ["q8_0", "q4_k", "q4_k_m"])
    def test_gguf(self, scheme: str, saved: Callable[..., Path]) -> None:
        path = saved(scheme, "digits-flux")
        seen = sdquant.detect(path)
        _check(seen, path)
        assert (seen.container, seen.family, seen.quant, seen.backend) == ("pipeline", "flux", scheme, "gguf")
        file = path / "transformer" / "model.gguf"
        lone = sdquant.detect(file)
        _check(lone, file)
        assert (lone.container, lone.component, lone.quant) == ("gguf", "transformer", scheme)
        assert lone.class_name == "FluxTransformer2DModel"
        assert any("GGUF types: " in line for line in lone.evidence)

    @pytest.mark.parametrize("scheme", ["nf4", "q8_0", "int4"])
    def test_a_renamed_file_is_told_by_its_header(
        self, scheme: str, saved: Callable[..., Path], tmp_path: Path
    ) -> None:
        transformer = saved(scheme, "digits-flux") / "transformer"
        (source,) = (path for path in transformer.iterdir() if path.suffix in (".safetensors", ".gguf"))
        target = tmp_path / f"holiday-photo{source.suffix}"
        shutil.copy(source, target)
        seen = sdquant.detect(target)
        assert (seen.quant, seen.family, seen.suffix_hint, seen.warnings) == (scheme, "flux", None, [])


class TestForeign:
    @pytest.mark.parametrize("name", FOREIGN)
    def test_what_others_wrote(self, name: str, foreign: Callable[[str], Path]) -> None:
        row, path = FOREIGN[name], foreign(name)
        seen = sdquant.detect(path)
        _check(seen, path)
        assert seen.quant == row.quant and seen.prequantized
        assert any(row.evidence in line for line in seen.evidence)
        assert seen.family == ("sd" if "unet" in seen.evidence[0] else "flux")
        assert (seen.container == "component") is path.is_dir()
        assert not any("sdquant" in line for line in seen.evidence)

    def test_what_is_quantized_and_what_is_not(self, foreign: Callable[[str], Path]) -> None:
        src = sdquant.detect(foreign("lone nf4")).sources["model"]
        shapes = {
            key: tuple(t.shape)
            for key, t in load_file(sdquant.demo.path("digits-flux") / "transformer" / WEIGHTS).items()
        }
        assert set(src.prequantized) == {key for key, shape in shapes.items() if len(shape) == 2}
        assert set(src.plain) == {key for key, shape in shapes.items() if len(shape) == 1}
        assert src.names == set(shapes)

    def test_gguf_of_other_kinds_is_refused(self, tmp_path: Path) -> None:
        name = "model.diffusion_model.input_blocks.0.0.weight"
        rows = [
            (key, (4, 32), "f32", lambda: torch.zeros(4, 32))
            for key in (name, "first_stage_model.decoder.conv_in.weight")
        ]
        write_gguf(tmp_path / "all.gguf", rows, {"general.architecture": "sd1"})
        with pytest.raises(RefusedFileError, match="only the UNet/transformer"):
            sdquant.detect(tmp_path / "all.gguf")
        rows = [("blk.0.attn_q.weight", (4, 32), "f32", lambda: torch.zeros(4, 32))]
        write_gguf(tmp_path / "llm.gguf", rows, {"general.architecture": "llama"})
        with pytest.raises(UnsupportedFileError, match="language model"):
            sdquant.detect(tmp_path / "llm.gguf")


class TestNamesThatLie:
    @pytest.fixture
    def nf4_by_name(self, sd: Path, tmp_path: Path) -> Path:
        return Path(shutil.copy(sd / "unet" / WEIGHTS, tmp_path / "unet-nf4.safetensors"))

    def test_a_promise_that_the_header_denies_is_a_warning(self, nf4_by_name: Path) -> None:
        seen = sdquant.detect(nf4_by_name)
        assert (seen.suffix_hint, seen.quant) == ("nf4", None)
        (line,) = seen.warnings
        assert "unet-nf4.safetensors" in line and "promises nf4" in line and "no quantization" in line
        assert seen.to_dict()["warnings"] == [line]

    def test_so_is_another_quantization_than_promised(self, saved: Callable[..., Path], tmp_path: Path) -> None:
        target = tmp_path / "transformer-Q8_0.safetensors"
        shutil.copy(saved("nf4", "digits-flux") / "transformer" / WEIGHTS, target)
        (line,) = sdquant.detect(target).warnings
        assert "promises q8_0" in line and "shows nf4" in line

    def test_the_name_of_a_folder_counts_too(self, sd: Path, tmp_path: Path) -> None:
        pipe = tmp_path / "digits-sd-fp8"
        shutil.copytree(sd, pipe)
        assert "digits-sd-fp8 promises fp8" in sdquant.detect(pipe).warnings[0]
        (pipe / "unet").rename(tmp_path / "unet-qint4")
        seen = sdquant.detect(tmp_path / "unet-qint4")
        assert seen.suffix_hint == "qint4" and "unet-qint4 promises qint4" in seen.warnings[0]

    def test_the_plan_says_it_too(self, sd: Path, tmp_path: Path) -> None:
        pipe = tmp_path / "digits-sd-fp8"
        shutil.copytree(sd, pipe)
        assert any("promises fp8" in line for line in sdquant.plan(pipe).warnings)

    @pytest.mark.parametrize(
        ("scheme", "name"),
        [
            ("nf4", "a-nf4"), ("qint8", "a-int8"), ("bnb-int8", "a-int8"), ("q4_k_m", "a-Q4_K"), ("q4_k", "a-q4_k_m"),
            ("qfloat8", "a-fp8"), ("sdnq-uint4", "a-int4"), ("nf4", "a"),
        ],
    )  # fmt: skip
    def test_a_name_that_is_as_good_as_true_is_no_lie(
        self, scheme: str, name: str, saved: Callable[..., Path], tmp_path: Path
    ) -> None:
        target = tmp_path / name
        shutil.copytree(saved(scheme), target)
        assert sdquant.detect(target).warnings == []

    @pytest.mark.parametrize(("held", "asked"), [("nf4", "fp4"), ("nf4", "none"), ("int4", "int8"), ("q8_0", "q4_0")])
    def test_asking_for_another_scheme_is_a_conflict(self, held: str, asked: str, saved: Callable[..., Path]) -> None:
        for path in (saved(held, "digits-flux"), saved(held, "digits-flux") / "transformer"):
            with pytest.raises(ConflictError) as caught:
                sdquant.load_model(path, asked, progress=False)
            assert held in caught.value.why and held in caught.value.fix
            if asked != "none":
                assert asked in caught.value.what

    @pytest.mark.parametrize("name", ["lone nf4", "fp8 scale_weight", "diffusers quanto int8"])
    def test_the_same_for_what_others_wrote(self, name: str, foreign: Callable[[str], Path], flux: Path) -> None:
        path = foreign(name)
        with pytest.raises(ConflictError, match=FOREIGN[name].quant):
            sdquant.load_model(path, "int8", base=None if FOREIGN[name].config else flux, progress=False)

    def test_asking_for_what_is_there_is_none(self, saved: Callable[..., Path]) -> None:
        assert sdquant.plan(saved("nf4"), "nf4").components[0].action == "found"
        assert sdquant.plan(saved("q4_k_m", "digits-flux"), "q4_k_m").bytes
        assert sdquant.plan(saved("q4_k_m", "digits-flux"), "q4_k").bytes

    def test_a_mix_is_its_main_type_and_nothing_else_is_like_another(self) -> None:
        assert same_scheme("q4_k", "q4_k_m") and same_scheme("q4_k_s", "q4_k_m")
        assert not same_scheme("q4_k", "q5_k_m") and not same_scheme("nf4", "fp4") and not same_scheme("nf4", None)


class TestHeadersOnly:
    """With the data of the files replaced by a hole of many gigabytes, the answer is the same, and comes at once."""

    HUGE = 1 << 40

    @staticmethod
    def _holes(source: Path, target: Path) -> Path:
        """A copy whose largest tensors are enormous: same header but for one tensor of a terabyte, and no data."""
        shutil.copytree(source, target)
        for path in target.rglob("*.safetensors"):
            with path.open("r+b") as file:
                start = header_length(path)
                header = json.loads(path.read_bytes()[8:start])
                end = max(row["data_offsets"][1] for key, row in header.items() if key != "__metadata__")
                header["hole"] = {
                    "dtype": "U8", "shape": [TestHeadersOnly.HUGE], "data_offsets": [end, end + TestHeadersOnly.HUGE],
                }  # fmt: skip
                raw = json.dumps(header).encode()
                file.truncate(0)
                file.write(len(raw).to_bytes(8, "little") + raw)
                file.truncate(8 + len(raw) + end + TestHeadersOnly.HUGE)
        return target

    @pytest.mark.parametrize("scheme", [None, "nf4", "fp8", "qint4", "int4", "sdnq-uint4"])
    def test_terabytes(self, scheme: str | None, sd: Path, saved: Callable[..., Path], tmp_path: Path) -> None:
        source = sd if scheme is None else saved(scheme)
        path = self._holes(source, tmp_path / "model")
        whole, seen = sdquant.detect(source), sdquant.detect(path)
        assert (seen.quant, seen.family, seen.tensors) == (whole.quant, whole.family, whole.tensors + 3)
        assert seen.bytes == whole.bytes + 3 * self.HUGE

    def test_a_foreign_terabyte(self, foreign: Callable[[str], Path], tmp_path: Path) -> None:
        for name in ("lone nf4", "fp8 scale_weight", "lone qint4"):
            folder = tmp_path / name
            folder.mkdir()
            shutil.copy(foreign(name), folder)
            path = self._holes(folder, tmp_path / f"{name} hole")
            seen = sdquant.detect(next(path.glob("*.safetensors")))
            assert seen.quant == FOREIGN[name].quant and seen.bytes > self.HUGE

    def test_bytes_read_are_those_of_the_headers(
        self, saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, sd: Path
    ) -> None:
        """Counted at the system's own door: what the process read meanwhile."""

        def read() -> int:
            return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

        for path in (sd, saved("nf4"), saved("q8_0")):
            sdquant.detect(path)  # imports what it needs
            files = [p for p in path.rglob("*") if p.suffix in (".safetensors", ".gguf")]
            data = sum(p.stat().st_size for p in files)
            headers = sum(header_length(p) for p in files if p.suffix == ".safetensors")
            headers += sum(p.stat().st_size for p in path.rglob("*.json"))
            headers += 300_000 * sum(p.suffix == ".gguf" for p in files)  # read in pieces of 256 KiB
            before = read()
            sdquant.detect(path)
            assert read() - before < headers + 100_000 < data


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = (
    "torch",
    "diffusers",
    "transformers",
    "safetensors",
    "bitsandbytes",
    "optimum",
    "nncf",
    "sdnq",
    "gradio",
    "numpy",
)


@pytest.fixture(scope="module")
def lone_files(sd: Path, saved: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Without the configs that folders have beside them; all but the first have them inside."""
    folder = tmp_path_factory.mktemp("lone")
    files = [sd / "unet" / WEIGHTS, saved("qint4") / "unet" / WEIGHTS, saved("q8_0") / "unet" / "model.gguf"]
    for number, file in enumerate(files):
        shutil.copy(file, folder / f"{number}{file.suffix}")
    return sorted(folder.iterdir())


def test_no_library_is_imported(lone_files: list[Path]) -> None:
    """By ComfyUI, which has models of its own. A folder is held against its model, whose library is imported."""
    code = (
        "import sys\n"
        "from sdquant.models.detection import read_headers, suffix_hint\n"
        f"for path in {[str(path) for path in lone_files]!r}:\n"
        "    read_headers(path, find_classes=False).to_dict()\n"
        "    suffix_hint(path)\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    assert _python(code).strip() == ""


def test_nor_by_the_command(lone_files: list[Path]) -> None:
    code = (
        "import sys, contextlib, io\n"
        "from sdquant.cli import main\n"
        f"for path in {[str(path) for path in lone_files[:1]]!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        assert main(['inspect', path]) == 0 and main(['inspect', '--json', path]) == 0\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    assert _python(code).strip() == ""


def test_the_command_prints_what_was_detected(saved: Callable[..., Path], capsys: Any) -> None:
    from sdquant.cli import main

    assert main(["inspect", "--json", str(saved("nf4"))]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {key: values[key] for key in FIELDS} == {
        key: value for key, value in sdquant.detect(saved("nf4")).to_dict().items() if key in FIELDS
    }


@pytest.mark.parametrize("name", sdquant.demo.MODELS)
def test_bundled_model_is_named_where_its_name_is_no_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line takes the name; Python takes paths."""
    monkeypatch.chdir(tmp_path)
    for path in (name, Path(name)):
        with pytest.raises(MissingComponentError) as error:
            sdquant.load_model(path, progress=False)
        assert f"sdquant.demo.path({name!r})" in error.value.fix
    with pytest.raises(MissingComponentError) as error:
        sdquant.detect("digits")
    assert error.value.fix == "Check the path"
