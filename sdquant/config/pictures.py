"""Draw what a config says, and write it with the config beside it."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import SettingsError
from ..writing import whole_file
from .asked import request_of, size_of
from .loading import shards_of

if TYPE_CHECKING:
    from .config import Config
    from .topology import Shards


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What was written.

    Attributes:
        pictures: paths, in the order of the seeds.
        config: path of the config, every key of the command in it.
        shards: what the keys of topology came to.
    """

    pictures: tuple[str, ...]
    seeds: tuple[int, ...]
    config: str
    shards: Shards
    seconds_loading: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


def draw_config(config: Config, folder: Path, *, progress: bool = False) -> Drawn:
    """Load the model, draw, and write `<seed>.png` for each seed and `generate.yml` into a folder.

    Nothing is written before all pictures are drawn.

    Raises:
        SdquantError: as `load_model` and `draw`; or a key that this pipeline has no use for.
    """
    from .. import pictures
    from ..drawing import draw
    from ..loader import load

    width, height = size_of(config)
    shards = shards_of(config)
    pipe = load(request_of(config, progress=progress))
    if config.guidance_scale is not None and "guidance_scale" not in inspect.signature(type(pipe).__call__).parameters:
        raise SettingsError(
            f"guidance_scale={config.guidance_scale:g} was set", f"{type(pipe).__name__} has none", "Leave it out"
        )
    count = config.count or config.per_device_batch_size
    seeds = tuple(range(config.seed, config.seed + count))
    images = draw(
        pipe,
        [config.prompt] * count,
        seeds=seeds,
        steps=config.num_inference_steps,
        guidance=config.guidance_scale,
        negative=config.negative_prompt,
        width=width,
        height=height,
        batch=config.per_device_batch_size,
        progress=progress,
    )
    paths = tuple(folder / f"{seed}.png" for seed in seeds)
    for path, image in zip(paths, images, strict=True):
        pictures.save(image, path)
    written = folder / f"{config.command}.yml"
    save(config, written, shards)
    return Drawn(
        pictures=tuple(map(str, paths)),
        seeds=seeds,
        config=str(written),
        shards=shards,
        seconds_loading=pipe.sdquant.seconds,
    )


def save(config: Config, path: Path, shards: Shards) -> None:
    """Write a config, whole or not at all: the keys of its command, and what those of topology came to.

    Raises:
        DiskSpaceError, ConflictError, SettingsError: as `writing.whole_file`.
    """
    head = (
        f"# sdquant {__version__}, {config.command}; num_slices {shards.num_slices} ({shards.found}), "
        f"shard count {shards.count}\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = (head + config.to_yaml()).encode()
    with whole_file(path, len(raw)) as file:
        file.write(raw)
