"""Pictures and captions of a folder, and what is said of a bad one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image

from sdquant.errors import BadFileError, SdquantError, SettingsError
from sdquant.training.data import examples, folder

if TYPE_CHECKING:
    from sdquant.training.settings import TrainingSettings


def _picture(path: Path, size: tuple[int, int] = (8, 8), colour: tuple[int, int, int] = (255, 0, 51)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def test_captions_beside_and_listed(tmp_path: Path, data: Path) -> None:
    _picture(tmp_path / "b.png").with_suffix(".txt").write_text("a red one\n")
    _picture(tmp_path / "sub/a.jpg").with_suffix(".txt").write_text("")
    assert [row.captions for row in folder(tmp_path, "text")] == [("a red one",), ("",)]
    assert [Path(row.name).name for row in folder(data, "text")] == [f"{number}.png" for number in range(4)]
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "sub/a.jpg", "prompt": "listed"}\n\n')
    assert [row.captions for row in folder(tmp_path, "prompt")] == [("listed",)]


def test_pixels(tmp_path: Path) -> None:
    """The middle of a wide picture, -1 to 1."""
    wide = np.zeros((8, 24, 3), dtype=np.uint8)
    wide[:, 8:16] = (255, 0, 51)
    Image.fromarray(wide).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    (row,) = folder(tmp_path, "text")
    pixels = row.pixels(8)
    assert pixels.shape == (3, 8, 8) and pixels.dtype == torch.float32
    assert torch.allclose(pixels[:, 4, 4], torch.tensor([1.0, -1.0, 51 / 127.5 - 1]))
    assert row.pixels(16).shape == (3, 16, 16)


BAD: dict[str, tuple[Callable[[Path], object], type[SdquantError], str]] = {
    "empty": (lambda place: None, SettingsError, r"it contains no pictures"),
    "caption": (lambda place: _picture(place / "a.png"), BadFileError, r"a\.png.*no caption.*a\.txt"),
    "json": (lambda place: (place / "metadata.jsonl").write_text("{}\n{"), BadFileError, r"line 1.*'file_name'"),
    "column": (
        lambda place: (place / "metadata.jsonl").write_text('{"file_name": "a.png", "caption": "x"}'),
        BadFileError, r"line 1.*no string 'text'; its keys are file_name, caption",
    ),
    "missing": (
        lambda place: (place / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}'),
        BadFileError, r"line 1.*no file .*a\.png",
    ),
    "latin": (lambda place: (place / "metadata.jsonl").write_bytes(b'{"text": "\xe9"}'), BadFileError, r"not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_named(case: str, tmp_path: Path) -> None:
    make, kind, said = BAD[case]
    make(tmp_path)
    with pytest.raises(kind, match=said):
        folder(tmp_path, "text")


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    path = _picture(tmp_path / "a.png", (64, 64))
    path.write_bytes(path.read_bytes()[:60])
    path.with_suffix(".txt").write_text("x")
    (row,) = folder(tmp_path, "text")
    with pytest.raises(BadFileError, match=r"a\.png.*cannot be read as a picture"):
        row.pixels(8)


def test_no_folder(tmp_path: Path, settings: Callable[..., TrainingSettings]) -> None:
    with pytest.raises(SettingsError, match="it is not a folder"):
        examples(settings(train_data_dir=str(tmp_path / "nothing")))
    with pytest.raises(SettingsError, match="without data"):
        settings(train_data_dir="")
    with pytest.raises(SettingsError, match="both"):
        settings(dataset_name="digits")


def test_the_digits_are_those_the_shipped_models_saw(settings: Callable[..., TrainingSettings]) -> None:
    from sdquant.training import digits

    rows = examples(settings(dataset_name="digits", train_data_dir=""))
    half = digits.halves()[1]
    assert len(rows) == len(half.labels)
    assert rows[5].captions == tuple(digits.prompt(int(half.labels[5]), t) for t in range(6))
    means = rows[5].pixels(32).reshape(3, 8, 4, 8, 4).mean(dim=(2, 4))
    assert np.corrcoef(means[0].flatten().numpy(), half.pixels[5])[0, 1] > 0.98


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"learning_rate": -1}, "at least 0"),
        ({"lr_scheduler": "cosin"}, "Did you mean cosine"),
        ({"cond_dropout": 1.5}, "from 0 to 1"),
        ({"run_name": "../x"}, "one folder"),
        ({"quantization": "nf4"}, "only a LoRA"),
        ({"quantization": "int8", "use_qwix_quantization": True, "lora_rank": 4}, "network is frozen"),
        ({"guidance_min": 4.0}, "the minimum is larger than the maximum"),
    ],
)
def test_settings_that_cannot_be(
    values: dict[str, object], said: str, settings: Callable[..., TrainingSettings]
) -> None:
    with pytest.raises(SettingsError, match=said):
        settings(**values)


def test_a_picture_that_is_listed_but_gone_is_found_before_the_model_is_loaded(data: Path, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    shutil.copytree(data, place)
    (place / "2.png").unlink()
    with pytest.raises(BadFileError, match=r"line 3 of .*2\.png"):
        folder(place, "text")
