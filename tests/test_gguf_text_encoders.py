"""Text encoders in GGUF, as llama.cpp and others write them, held against transformers with the same weights."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import sdquant
from sdquant import cli
from sdquant.errors import BadFileError, MissingComponentError, UnsupportedFileError
from sdquant.nn.weights import plain, quantized

from . import layouts
from . import test_language_encoder_files as files
from .gguf_text_encoders import ARCH, File, bare, write_text, write_vision
from .test_language_encoder_files import FILES, Case, _hidden

case_of = files.case_of  # the fixture
Q8_0 = gguf.GGMLQuantizationType.Q8_0
# By case: the architecture, and what the user hears.
ROWS: dict[str, tuple[Any, str]] = {
    "umt5_xxl": (ARCH.T5ENCODER, ""),
    "qwen_3_4b": (ARCH.QWEN3, ""),
    "llava_llama3": (ARCH.LLAMA, ""),
    "mistral_3_small_flux2": (ARCH.MISTRAL3, "without its vision:"),
    "gemma_2_2b": (ARCH.GEMMA2, ""),
    "gemma_3_12B": (ARCH.GEMMA3, "without its vision:"),
}


def _compare(encoder: Any, case: Case, worth: dict[str, np.ndarray], tolerance: float) -> None:
    """Hold each weight against what it is worth, and hidden states against transformers' of the same weights."""
    read = {name: packed.spec.scheme.codec.decode(packed, torch.float32) for name, packed in quantized(encoder)}
    read |= plain(encoder)
    there = {bare(name): tensor.float().numpy() for name, tensor in read.items()}
    for name in worth.keys() & there.keys():
        assert np.array_equal(there[name], worth[name]), name
    assert worth.keys() - there.keys() <= {"lm_head.weight"}
    model = copy.deepcopy(case.model).float()
    state = {name: torch.from_numpy(worth.get(bare(name), one.numpy())) for name, one in model.state_dict().items()}
    model.load_state_dict(state)
    for mine, theirs in zip(_hidden(encoder), _hidden(model), strict=True):
        assert torch.allclose(mine, theirs, atol=tolerance)


@pytest.mark.parametrize("kind", [None, Q8_0], ids=["f32", "q8_0"])
@pytest.mark.parametrize("name", ROWS)
def test_as_transformers_has_it(
    name: str, kind: Any, case_of: Callable[[str], Case], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (arch, remark), case, file = ROWS[name], case_of(name), tmp_path / "model.gguf"
    worth = write_text(case.model, file, arch, kind)
    seen = sdquant.detect(file)
    assert (seen.component, seen.family) == ("text_encoder", FILES[name].family)
    with pytest.raises(MissingComponentError, match="base="):
        sdquant.load_model(file, progress=False)
    pipe = sdquant.load_model(case.base, parts={"text_encoder": file}, dtype="float32", progress=False)
    remarks = [record.getMessage() for record in caplog.records if record.name.startswith("sdquant")]
    assert len(remarks) == bool(remark) and all(remark in one for one in remarks)
    floats = ("lm_head", "rel")
    matrices = [key for key, one in worth.items() if one.ndim == 2 and not any(word in key for word in floats)]
    assert len(dict(quantized(pipe.text_encoder))) == (len(matrices) if kind is not None else 0)
    _compare(pipe.text_encoder, case, worth, 2e-2 if kind is not None else 1e-5)


SEEING = {"qwen_2.5_vl_7b": ARCH.QWEN2VL, "qwen_3_vl": ARCH.QWEN3VL}


@pytest.mark.parametrize("kind", [None, Q8_0], ids=["f32", "q8_0"])
@pytest.mark.parametrize("given", ["beside", "as a part", "in the folder"])
@pytest.mark.parametrize("name", SEEING)
def test_with_its_vision(name: str, given: str, kind: Any, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case, arch, base = case_of(name), SEEING[name], tmp_path / "base"
    shutil.copytree(case.base, base)
    folder = base / "text_encoder" if given == "in the folder" else tmp_path
    elsewhere = tmp_path / "elsewhere" if given == "as a part" else folder
    elsewhere.mkdir(exist_ok=True)
    file, vision = folder / "model-Q8_0.gguf", elsewhere / "mmproj-model-F16.gguf"
    worth = write_text(case.model, file, arch, kind) | write_vision(case.model, vision, arch, kind)
    if given == "in the folder":
        for one in folder.glob("*.safetensors"):
            one.unlink()
        parts: list[Path] = []
    else:
        parts = [file, vision] if given == "as a part" else [file]
    pipe = sdquant.load_model(base, parts=parts or None, dtype="float32", progress=False)
    assert bool(dict(quantized(pipe.text_encoder.model.visual))) == (kind is not None)
    _compare(pipe.text_encoder, case, worth, 2e-2 if kind is not None else 1e-5)


class TestVision:
    """Which file a language model's vision comes from."""

    def test_of_several_the_one_of_its_name(self, case_of: Callable[[str], Case], tmp_path: Path) -> None:
        """Else none of them, until one is given."""
        case, arch = case_of("qwen_2.5_vl_7b"), ARCH.QWEN2VL
        file = tmp_path / "Qwen2.5-VL-7B-Q8_0.gguf"
        write_text(case.model, file, arch, Q8_0)
        one, other = tmp_path / "mmproj-BF16.gguf", tmp_path / "mmproj-F16.gguf"
        for path in (one, other):
            write_vision(case.model, path, arch, None)
        write_vision(case_of("qwen_3_vl").model, tmp_path / "mmproj-of-another.gguf", ARCH.QWEN3VL, None)
        (tmp_path / "mmproj-broken.gguf").write_bytes(b"GGUF")
        assert any("mmproj-BF16.gguf and mmproj-F16.gguf" in line for line in sdquant.detect(file).warnings)
        (warning,) = sdquant.plan(case.base, parts=[file]).warnings
        assert "mmproj-BF16.gguf and mmproj-F16.gguf" in warning and "pass the one as a part" in warning
        assert not sdquant.plan(case.base, parts=[file, one]).warnings
        other.rename(tmp_path / "Qwen2.5-VL-7B.mmproj-Q8_0.gguf")
        seen = sdquant.detect(file)
        assert (seen.family, seen.warnings) == ("qwen2.5-vl", [])
        assert "its vision is in Qwen2.5-VL-7B.mmproj-Q8_0.gguf" in seen.evidence

    def test_without_its_other_half(self, case_of: Callable[[str], Case], tmp_path: Path) -> None:
        case, file, vision = case_of("qwen_3_vl"), tmp_path / "model.gguf", tmp_path / "away" / "mmproj.gguf"
        vision.parent.mkdir()
        write_text(case.model, file, ARCH.QWEN3VL, None)
        write_vision(case.model, vision, ARCH.QWEN3VL, None)
        with pytest.raises(MissingComponentError, match="no such GGUF file, of its width, is given with it"):
            sdquant.plan(case.base, parts=[vision])
        with pytest.raises(MissingComponentError, match="not clear of which one"):
            sdquant.plan(case.base, parts=[file, vision, vision])
        write_vision(case.model, vision, ARCH.QWEN2VL, None)  # of a kind that these tensors are not of
        with pytest.raises(BadFileError, match=r"of 'v.*' it is not known"):
            sdquant.plan(case.base, parts=[file, vision])

    @pytest.mark.parametrize("name", SEEING)
    def test_of_the_pipeline(self, name: str, case_of: Callable[[str], Case], tmp_path: Path) -> None:
        """Where the file has none, and the pipeline's folder has the weights."""
        case, file = case_of(name), tmp_path / "model.gguf"
        write_text(case.model, file, SEEING[name], Q8_0)
        plan = sdquant.plan(case.base, parts=[file])
        assert not plan.warnings and any("its vision is that of" in line for line in plan.detected.evidence)
        pipe = sdquant.load_model(case.base, parts=[file], dtype="float32", progress=False)
        mine = plain(pipe.text_encoder.model.visual)
        theirs = plain(sdquant.load_model(case.base / "text_encoder", dtype="float32", progress=False).model.visual)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
        assert dict(quantized(pipe.text_encoder))

    @pytest.mark.parametrize("given", ["as a part", "in the folder"])
    @pytest.mark.parametrize("name", SEEING)
    def test_without_any(
        self, name: str, given: str, case_of: Callable[[str], Case], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It encodes text, as the whole model does, and says so when it is shown a picture."""
        case, base = case_of(name), tmp_path / "base"
        shutil.copytree(case.base, base)
        for one in (base / "text_encoder").glob("*.safetensors"):
            one.unlink()
        file = (tmp_path if given == "as a part" else base / "text_encoder") / "model.gguf"
        worth = write_text(case.model, file, SEEING[name], Q8_0)
        parts = [file] if given == "as a part" else None
        pipe = sdquant.load_model(base, parts=parts, dtype="float32", offload="sequential", progress=False)
        (said,) = (record.getMessage() for record in caplog.records if record.name.startswith("sdquant"))
        assert "without its vision: it encodes text" in said and "mmproj" in said
        assert [said] == list(sdquant.plan(base, parts=parts).warnings)
        encoder = copy.deepcopy(sdquant.load_model(base, parts=parts, dtype="float32", progress=False).text_encoder)
        _compare(encoder, case, worth, 2e-2)
        pixels, grid = torch.zeros(4, 24), torch.tensor([[1, 2, 2]])
        for one in (pipe.text_encoder, encoder):
            with pytest.raises(MissingComponentError, match="without its vision"):
                one(input_ids=torch.tensor([[3, 17]]), pixel_values=pixels, image_grid_thw=grid)
        sdquant.save(encoder, tmp_path / "saved")
        again = sdquant.load_model(tmp_path / "saved", dtype="float32", progress=False)
        assert all(torch.equal(*pair) for pair in zip(_hidden(again), _hidden(encoder), strict=True))
        assert encoder.generate(torch.tensor([[3, 17]]), max_new_tokens=2, do_sample=False).shape[1] > 2

    def test_of_llava(self, tmp_path: Path) -> None:
        """The language model as llama.cpp's Llama, and the vision of the pipeline, or none."""
        kind = "LlavaForConditionalGeneration"
        case = files._case(files.File("HunyuanVideoImageToVideoPipeline", kind, "llama"), tmp_path / "base")
        file = tmp_path / "model.gguf"
        worth = write_text(case.model, file, ARCH.LLAMA, Q8_0)
        assert not sdquant.plan(case.base, parts=[file]).warnings
        pipe = sdquant.load_model(case.base, parts=[file], dtype="float32", progress=False)
        mine = plain(pipe.text_encoder.model.vision_tower)
        whole = sdquant.load_model(case.base / "text_encoder", dtype="float32", progress=False)
        assert mine and all(torch.equal(mine[key], one) for key, one in plain(whole.model.vision_tower).items())
        _compare(pipe.text_encoder, case, worth, 2e-2)
        (case.base / "text_encoder" / "model.safetensors").unlink()
        (said,) = sdquant.plan(case.base, parts=[file]).warnings
        assert "without its vision" in said and "use a base or a file of the whole model" in said
        blind = sdquant.load_model(case.base, parts=[file], dtype="float32", progress=False).text_encoder
        _compare(blind, case, worth, 2e-2)
        with pytest.raises(MissingComponentError, match="without its vision"):
            blind(input_ids=torch.tensor([[3]]), pixel_values=torch.zeros(1, 3, 8, 8))

    def test_in_several_types(self, case_of: Callable[[str], Case], tmp_path: Path) -> None:
        """What the model has in one tensor cannot stay quantized then."""
        case, file, vision = case_of("qwen_2.5_vl_7b"), tmp_path / "model.gguf", tmp_path / "mmproj-model.gguf"
        write_text(case.model, file, ARCH.QWEN2VL, Q8_0)
        kinds = {"attn_v": gguf.GGMLQuantizationType.Q5_0}
        write_vision(case.model, vision, ARCH.QWEN2VL, Q8_0, kinds)
        with pytest.raises(UnsupportedFileError, match=r"attn_q\.weight q8_0, v\.blk\.0\.attn_k\.weight q8_0, .* q5_0"):
            sdquant.plan(case.base, parts=[file])


@pytest.mark.parametrize("name", ["umt5_xxl", "qwen_3_4b", "mistral_3_small_flux2"])
def test_of_another_depth(name: str, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """Said before anything is read, for a file that lacks layers and for a config of another model."""
    case, file, base = case_of(name), tmp_path / "model.gguf", tmp_path / "base"
    write_text(case.model, file, ROWS[name][0], Q8_0, blocks=1)
    layers = 3 if name.startswith("mistral") else 2
    with pytest.raises(BadFileError, match=f"it has 1 layers, and the config says {layers}"):
        sdquant.plan(case.base, parts={"text_encoder": file})
    shutil.copytree(case.base, base)
    for one in (base / "text_encoder").glob("*.safetensors"):
        one.unlink()
    write_text(case.model, base / "text_encoder" / "model.gguf", ROWS[name][0], Q8_0)
    sdquant.plan(base)
    config = base / "text_encoder" / "config.json"
    values = json.loads(config.read_text())
    for table in (values, values.get("text_config", {})):
        table |= {key: 1 for key in ("num_layers", "num_hidden_layers") if key in table}
        table.pop("layer_types", None)
    config.write_text(json.dumps(values))
    with pytest.raises(BadFileError, match=f"it has {layers} layers, and the config says 1"):
        sdquant.plan(base)


def test_a_header_without_heads(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """By which the rows of q and k are ordered: ComfyUI-GGUF takes 32 and 8 for all."""
    case, file = case_of("llava_llama3"), tmp_path / "model.gguf"
    write_text(case.model, file, ARCH.LLAMA, Q8_0, heads=False)
    with pytest.raises(BadFileError, match=r"how many heads the layers have \(llama\.attention\.head_count\)"):
        sdquant.detect(file)


@pytest.mark.parametrize("wrong", ["head_count", "key_length"])
def test_a_header_with_another_number_of_heads(wrong: str, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """Which divides the rows, but makes heads of q and k of two widths, or of another than the header says."""
    case, file = case_of("llava_llama3"), tmp_path / "model.gguf"
    config = getattr(case.model.config, "text_config", case.model.config)
    heads, of_keys = config.num_attention_heads, config.num_key_value_heads

    def fields(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count(heads // 2 if wrong == "head_count" else heads)
        writer.add_head_count_kv(of_keys)
        if wrong == "key_length":
            writer.add_key_length(2 * config.hidden_size // heads)

    write_text(case.model, file, ARCH.LLAMA, Q8_0, heads=False, fields=fields)
    for ask in (sdquant.detect, sdquant.verify):
        with pytest.raises(BadFileError, match=r"the header says that they are of \d heads, each of \d+ rows"):
            ask(file)


def test_a_type_without_a_decoder(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case, file = case_of("qwen_3_4b"), tmp_path / "model.gguf"
    write_text(case.model, file, ARCH.QWEN3, None)
    data = bytearray(file.read_bytes())
    name = b"blk.0.ffn_down.weight"  # its rows are of 128, as Q1_0's blocks
    at = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and the two
    data[at : at + 4] = (41).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(UnsupportedFileError, match=r"cannot dequantize: q1_0 \(1\)"):
        sdquant.detect(file)


def test_to_another_type(case_of: Callable[[str], Case], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Under transformers' names and with its values, and not without a word on the second rounding."""
    case, file, other = case_of("llava_llama3"), tmp_path / "x.gguf", tmp_path / "y.gguf"
    worth = write_text(case.model, file, ARCH.LLAMA, Q8_0)
    assert cli.main(["inspect", str(file), "--verify"]) == 0
    assert cli.main(["quantize", str(file), str(other), "-q", "q6_k"]) == 0
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "rounded a second time" in said and "The second rounding left an SNR of" in said
    read = dict(quantized(sdquant.load_model(case.base, parts=[other], progress=False).text_encoder))
    for name, packed in read.items():
        value, wanted = packed.spec.scheme.codec.decode(packed, torch.float32), torch.from_numpy(worth[bare(name)])
        assert (value - wanted).norm() / wanted.norm() < 0.02, name


@pytest.mark.parametrize("prefix", ["", "text_encoders.clip_l.transformer."], ids=["own names", "prefixed"])
@pytest.mark.parametrize(
    ("model", "part", "family"), [("sd", "text_encoder", "clip"), ("flux", "text_encoder_2", "t5")], ids=["clip", "t5"]
)
def test_under_transformers_names(
    model: str, part: str, family: str, prefix: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """As stable-diffusion.cpp and gguf-connector write them, behind a prefix or not; CLIP has no others."""
    folder, prefix = request.getfixturevalue(model), prefix.replace("clip_l", "t5xxl") if family == "t5" else prefix
    state = layouts.weights(folder / part)
    state = layouts.clip(state) if family == "clip" else state
    file = File(tmp_path / "model.gguf", "pig" if family == "t5" else "")
    worth = {}
    for key, tensor in state.items():
        rows = tensor.ndim == 2 and tensor.shape[1] % 32 == 0
        worth[key] = file.add(prefix + key, tensor.float().numpy(), Q8_0 if rows else None)
    if family == "clip":
        file.add(f"{prefix}text_model.embeddings.position_ids", np.arange(77, dtype=np.int32)[None], None)
    file.close()
    seen = sdquant.detect(tmp_path / "model.gguf")
    assert (seen.component, seen.family, seen.quant) == ("text_encoder", family, "q8_0")
    pipe = sdquant.load_model(folder, parts=[tmp_path / "model.gguf"], dtype="float32", progress=False)
    encoder = getattr(pipe, part)
    packs = dict(quantized(encoder))
    assert packs
    read = {key: packed.spec.scheme.codec.decode(packed, torch.float32) for key, packed in packs.items()}
    read |= plain(encoder)
    there = {key.removeprefix("text_model."): value for key, value in read.items()}
    for key, value in worth.items():
        if key != "encoder.embed_tokens.weight":  # shared.weight again
            assert np.array_equal(there[key.removeprefix("text_model.")].float().numpy(), value), key


def test_several_text_encoders_in_one_file_are_refused(sd: Path, tmp_path: Path) -> None:
    state = layouts.clip(layouts.weights(sd / "text_encoder"))
    file = File(tmp_path / "model.gguf", "")
    for prefix in ("text_encoders.clip_l.transformer.", "text_encoders.clip_g.transformer."):
        for key, tensor in state.items():
            file.add(prefix + key, tensor.float().numpy(), None)
    file.close()
    with pytest.raises(UnsupportedFileError, match="all-in-one checkpoint"):
        sdquant.detect(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["gemma_3_12B", "mistral_3_small_flux2"])
def test_in_the_folder_of_a_pipeline(name: str, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """In the place of a model that sees; llama.cpp leaves out rows of tokens that Gemma 3's tokenizer has not."""
    case, base = case_of(name), tmp_path / "base"
    shutil.copytree(case.base, base)
    for one in (base / "text_encoder").glob("*.safetensors"):
        one.unlink()
    model, rows = copy.deepcopy(case.model), 150 if "gemma" in name else 160
    table = model.get_input_embeddings()
    table.weight = torch.nn.Parameter(table.weight[:rows])
    worth = write_text(model, base / "text_encoder" / "model.gguf", ROWS[name][0], Q8_0)
    assert any("without its vision" in line for line in sdquant.detect(base).warnings)
    pipe = sdquant.load_model(base, dtype="float32", progress=False)
    assert "embed_tokens.weight" in dict(quantized(pipe.text_encoder))
    there = {bare(key): one for key, one in plain(pipe.text_encoder).items()}
    there |= {bare(key): one.spec.scheme.codec.decode(one, torch.float32) for key, one in quantized(pipe.text_encoder)}
    assert there["embed_tokens.weight"].shape == (rows, 64) and pipe.text_encoder.config.vocab_size == rows
    assert worth.keys() - there.keys() <= {"lm_head.weight"}
    sdquant.save(pipe.text_encoder, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", dtype="float32", progress=False)
    for mine, theirs in zip(_hidden(again), _hidden(pipe.text_encoder), strict=True):
        assert torch.equal(mine, theirs)
