"""A short training of the shipped Stable Diffusion model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sdquant
from sdquant.training import config
from sdquant.training.run import Summary, train
from sdquant.training.settings import TrainingSettings, settings_of

if TYPE_CHECKING:
    from sdquant.training.config import RunConfig

SHORT: dict[str, Any] = {
    "pretrained_model_name_or_path": "digits-sd",
    "device": "cpu",
    "max_train_steps": 4,
    "per_device_batch_size": 2,
    "learning_rate": 1e-4,
    "sample_prompts": ["a handwritten seven"],
    "sample_steps": 1,
}
Short = Callable[..., Summary]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four digits with captions in metadata.jsonl."""
    from PIL import Image

    from sdquant.training import digits

    folder = tmp_path_factory.mktemp("data")
    half = digits.halves()[1]
    lines = []
    for number in range(4):
        Image.fromarray((half.pixels[number].reshape(8, 8) * 15).astype("uint8")).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": digits.prompt(int(half.labels[number]))}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def written(tmp_path: Path, data: Path) -> Callable[..., Path]:
    """written(**values): a config file of a short training that writes into the test's folder."""

    def write(**values: Any) -> Path:
        path = tmp_path / "short.yml"
        kept = {**SHORT, "train_data_dir": str(data), "output_dir": str(tmp_path), **values}
        path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in kept.items()))
        return path

    return write


@pytest.fixture
def asked(written: Callable[..., Path]) -> Callable[..., RunConfig]:
    """asked(**values): such a config."""
    return lambda **values: config.load(written(**values), command="train")


@pytest.fixture
def settings(asked: Callable[..., RunConfig]) -> Callable[..., TrainingSettings]:
    """settings(**values): such a training's."""
    return lambda **values: settings_of(asked(**values))


@pytest.fixture
def short(asked: Callable[..., RunConfig]) -> Short:
    """short(**values): such a training, run."""
    return lambda **values: train(asked(**values))


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same layers whose UNet has been trained to something else: its values are in another order."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("others") / "model"
    shutil.copytree(sdquant.demo.path("digits-sd"), folder)
    (weights,) = (folder / "unet").glob("*.safetensors")
    random = torch.Generator().manual_seed(0)
    state = {name: row.flatten()[torch.randperm(row.numel(), generator=random)].view_as(row)
             for name, row in load_file(weights).items()}  # fmt: skip
    save_file(state, weights, {"format": "pt"})
    return folder
