"""Generate the images of a config, and write them next to the config."""

from __future__ import annotations

import dataclasses
import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SettingsError
from ...utils.atomic_write import whole_file
from ...utils.version import __version__
from .loading import shards_of
from .to_request import request_of, require_command, size_of

if TYPE_CHECKING:
    from ...planning import Request
    from .config import RunConfig
    from .topology import Shards


@dataclass(frozen=True, kw_only=True)
class GeneratedImages:
    """Files written, and the shards used.

    Attributes:
        pictures: paths, in the order of the seeds.
        config: path of the config, every key of the command in it.
        shards: resolved from the topology keys.
    """

    pictures: tuple[str, ...]
    seeds: tuple[int, ...]
    config: str
    shards: Shards
    seconds_loading: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


def draw_config(config: RunConfig, folder: Path, *, progress: bool = False) -> GeneratedImages | None:
    """Load the model, draw, and write `<seed>.png` for each seed and `generate.yml` into a folder.

    Nothing is written before all images are generated. With torchrun only the first process generates; the others
    compute their share of the weight ranges, if these are computed in parts, and return None.

    Raises:
        SdquantError: as `load_model` and `draw`; or a key that this pipeline has no use for.
    """
    from ...models import draw
    from ...utils import images as pictures

    require_command(config, "generate")
    width, height = size_of(config)
    shards = shards_of(config)
    pipe = _loaded(request_of(config, progress=progress), shards)
    if pipe is None:
        return None
    if config.guidance_scale is not None and "guidance_scale" not in inspect.signature(type(pipe).__call__).parameters:
        raise SettingsError(
            f"Cannot use guidance_scale={config.guidance_scale:g}",
            f"{type(pipe).__name__} has no guidance_scale",
            "Leave it out",
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
    config_path = folder / f"{config.command}.yml"
    save(config, config_path, shards)
    return GeneratedImages(
        pictures=tuple(map(str, paths)),
        seeds=seeds,
        config=str(config_path),
        shards=shards,
        seconds_loading=pipe.sdquant.seconds,
    )


def _loaded(request: Request, shards: Shards) -> Any:
    """Load the model; return it in the first process, and None in the others.

    The others load it too if ranges are computed in parts, since each needs the weights of its part. With a cache they
    do not: cached weights already have their ranges.
    """
    from ...compat import hardware
    from ...loading import cache_of, load
    from ...rules import sharded
    from ...utils.distributed import ALONE, processes, rank

    in_parts = request.rules is not None and shards.parts > 1
    together = in_parts and cache_of(request) is None
    if rank() > 0 and not together:
        return None
    device = (request.device or hardware.default_device(hardware.probe())) if together else ""
    with (
        processes(device) if together else nullcontext(ALONE) as ranks,
        sharded(shards.parts if in_parts else 1, ranks),
    ):
        model = load(request)
        ranks.barrier()  # an error of one is one of all
    return model if ranks.first else None


def save(config: RunConfig, path: Path, shards: Shards) -> None:
    """Write a config atomically: the keys of its command, with the resolved topology in a comment.

    Raises:
        DiskSpaceError, ConflictError, SettingsError: as `atomic_write.whole_file`.
    """
    head = (
        f"# sdquant {__version__}, {config.command}; num_slices {shards.num_slices} ({shards.found}), "
        f"shard count {shards.count}\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = (head + config.to_yaml()).encode()
    with whole_file(path, len(raw)) as file:
        file.write(raw)
