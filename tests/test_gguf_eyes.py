"""Visions in GGUF files of their own, of language models whose names transformers has otherwise: Gemma 3, Pixtral in
Mistral 3, and LLaVA, held against transformers with the same weights, pictures too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import sdquant
from sdquant.errors import BadFileError, MissingComponentError
from sdquant.formats import checkpoint
from sdquant.formats.gguf import vision_names
from sdquant.nn.weights import plain, quantized

from . import test_language_encoder_files as files
from .gguf_text_encoders import ARCH, bare, write_eyes, write_text

Q8_0 = gguf.GGMLQuantizationType.Q8_0
_LLAVA = files._row("LlavaForConditionalGeneration")
_LLAVA["vision_config"] = {**_LLAVA["vision_config"], "num_hidden_layers": 2}
ROWS: dict[str, tuple[Any, bool, files.File]] = {  # the architecture, whether of the old converter, and the model
    "gemma": (ARCH.GEMMA3, False, files.FILES["gemma_3_12B"]),
    "gemma, old": (ARCH.GEMMA3, True, files.FILES["gemma_3_12B"]),
    "pixtral": (ARCH.MISTRAL3, False, files.File("Flux2Pipeline", "Mistral3ForConditionalGeneration", "llama")),
    "pixtral, llama": (ARCH.LLAMA, False, files.File("Flux2Pipeline", "Mistral3ForConditionalGeneration", "llama")),
    "llava": (
        ARCH.LLAMA, True,
        files.File("HunyuanVideoImageToVideoPipeline", "LlavaForConditionalGeneration", "llama", config=_LLAVA),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], files.Case]:
    known: dict[str, files.Case] = {}

    def get(name: str) -> files.Case:
        if name not in known:
            known[name] = files._case(ROWS[name][2], tmp_path_factory.mktemp("case") / "base")
        return known[name]

    return get


def _values(model: Any) -> dict[str, np.ndarray]:
    read = {name: packed.spec.scheme.codec.decode(packed, torch.float32) for name, packed in quantized(model)}
    return {bare(name): one.float().numpy() for name, one in (read | plain(model)).items()}


def _seen(model: Any) -> torch.Tensor:
    """Return what a model makes of a picture, as it puts it among the tokens."""
    side = 32 if "Mistral3" in type(model).__name__ else 16
    pixels = torch.linspace(-1, 1, 3 * side * side).view(1, 3, side, side)
    with torch.no_grad():
        if "Gemma3" in type(model).__name__:  # which averages over more patches than so small a model has
            seen = model.model.vision_tower(pixels).last_hidden_state
            return model.model.multi_modal_projector.mm_soft_emb_norm(seen)
        sizes = {"image_sizes": torch.tensor([[side, side]])} if side == 32 else {}
        made = model.model.get_image_features(pixel_values=pixels, **sizes)
    made = getattr(made, "pooler_output", made)
    return torch.cat(list(made)) if isinstance(made, (list, tuple)) else made


@pytest.mark.parametrize(("given", "kind"), [("beside", Q8_0), ("as a part", None)])
@pytest.mark.parametrize("name", ROWS)
def test_with_its_vision(name: str, given: str, kind: Any, case_of: Any, tmp_path: Path, caplog: Any) -> None:
    (arch, legacy, _), case = ROWS[name], case_of(name)
    file, vision = tmp_path / "model.gguf", tmp_path / ("" if given == "beside" else "away") / "mmproj-F16.gguf"
    vision.parent.mkdir(exist_ok=True)
    worth = write_text(case.model, file, arch, kind) | write_eyes(case.model, vision, kind, legacy=legacy)
    parts = [file] if given == "beside" else [file, vision]
    assert not sdquant.plan(case.base, parts=parts).warnings
    encoder = sdquant.load_model(case.base, parts=parts, dtype="float32", progress=False).text_encoder
    assert type(encoder) is type(case.model)
    assert not [record for record in caplog.records if record.name.startswith("sdquant")]
    there = _values(encoder)
    assert worth.keys() - there.keys() <= {"lm_head.weight"}
    assert all(np.array_equal(there[key], worth[key]) for key in worth.keys() & there.keys())
    model = copy.deepcopy(case.model).float()
    state = {key: torch.from_numpy(worth.get(bare(key), one.numpy())) for key, one in model.state_dict().items()}
    model.load_state_dict(state)
    assert torch.allclose(_seen(encoder), _seen(model), atol=2e-2 if kind is not None else 1e-5)
    sdquant.save(encoder, tmp_path / "saved")
    assert torch.equal(_seen(sdquant.load_model(tmp_path / "saved", dtype="float32", progress=False)), _seen(encoder))


def test_of_two_models_in_one_folder(case_of: Any, tmp_path: Path) -> None:
    """ComfyUI's folder of text encoders has all: what is as wide counts."""
    case, other = case_of("llava"), case_of("pixtral")
    file = tmp_path / "llava-llama3.gguf"
    write_text(case.model, file, ARCH.LLAMA, Q8_0)
    write_eyes(case.model, tmp_path / "mmproj-llava.gguf", None, legacy=True)
    wider = copy.deepcopy(other.model)
    wider.model.multi_modal_projector.linear_2.weight = torch.nn.Parameter(torch.zeros(96, 64))
    write_eyes(wider, tmp_path / "mmproj-mistral.gguf", None)
    assert "its vision is in mmproj-llava.gguf" in sdquant.detect(file).evidence
    with pytest.raises(MissingComponentError, match="no such GGUF file, of its width"):
        sdquant.plan(case.base, parts=[file, tmp_path / "mmproj-mistral.gguf"])


def test_heads_that_no_vision_has(case_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose halves are of rows and of columns. Another number that divides so cannot be told from the right one."""
    case, file, vision = case_of("pixtral"), tmp_path / "model.gguf", tmp_path / "away.gguf"
    write_text(case.model, file, ARCH.MISTRAL3, Q8_0)
    width = case.model.config.vision_config.hidden_size
    monkeypatch.setattr(case.model.config.vision_config, "num_attention_heads", width // 2)
    write_eyes(case.model, vision, None)
    with pytest.raises(BadFileError, match=f"says that they are of {width // 2} heads"):
        sdquant.plan(case.base, parts=[file, vision])


def test_a_header_without_heads(case_of: Any, tmp_path: Path) -> None:
    case, file, vision = case_of("pixtral"), tmp_path / "model.gguf", tmp_path / "away.gguf"
    write_text(case.model, file, ARCH.MISTRAL3, Q8_0)
    write_eyes(case.model, vision, None, heads=False)
    with pytest.raises(BadFileError, match=r"clip\.vision\.attention\.head_count"):
        sdquant.plan(case.base, parts=[file, vision])
    with pytest.raises(BadFileError, match="how many heads"):
        vision_names._heads(checkpoint.single_file(vision), {"clip.vision.attention.head_count": True}, {})
