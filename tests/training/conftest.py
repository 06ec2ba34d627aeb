"""A short training of the shipped Stable Diffusion model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdquant.training.run import Summary, train
from sdquant.training.settings import Settings

SHORT: dict[str, Any] = {
    "pretrained_model_name_or_path": "digits-sd",
    "max_train_steps": 4,
    "per_device_batch_size": 2,
    "sample_prompts": ("a handwritten seven",),
    "sample_steps": 1,
    "progress": False,
}
Short = Callable[..., Summary]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four digits with captions in metadata.jsonl."""
    import json

    from PIL import Image

    from sdquant.demo import digits

    folder = tmp_path_factory.mktemp("data")
    half = digits.halves()[1]
    lines = []
    for number in range(4):
        Image.fromarray((half.pixels[number].reshape(8, 8) * 15).astype("uint8")).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": digits.prompt(int(half.labels[number]))}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def settings(tmp_path: Path, data: Path) -> Callable[..., Settings]:
    """settings(**values): of a short training that writes into the test's folder."""
    return lambda **values: Settings(**{**SHORT, "train_data_dir": str(data), "output_dir": str(tmp_path), **values})


@pytest.fixture
def short(settings: Callable[..., Settings]) -> Short:
    """short(**values): such a training, run."""
    return lambda **values: train(settings(**values))
