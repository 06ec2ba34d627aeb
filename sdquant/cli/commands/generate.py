"""Draw images with a model, quantized and offloaded as asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SettingsError
from ...utils.distributed import rank
from ...utils.images import SUFFIXES, save
from .. import _common, _config_form

if TYPE_CHECKING:
    import argparse

    from ...training import RunConfig

# Flags that a config has another name for.
_KEYS = {"steps": "num_inference_steps", "guidance": "guidance_scale", "out": "output_dir"}
_KEYS |= {name: name for name in ("seed", "width", "height", "count", "rules", "quant_stats")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model's flags and those of the image; or a config file."""
    _common.add_request_flags(parser)
    _common.add_drawing_flags(parser)
    parser.add_argument("-o", "--out", type=Path, default=Path("sdquant.png"), help="the image (default: %(default)s)")
    parser.add_argument("--count", type=_common.positive, default=1, help="how many images, with seeds from --seed on")
    if isinstance(parser, _config_form.ConfigParser):
        parser.use_config("generate", instead=_KEYS)


def run(args: argparse.Namespace) -> int:
    """Load, draw, write. Images are written one by one, each under its name only when it is whole."""
    from ...loading import load
    from ...models import draw

    if "config_of" in args:
        config = _config_form.read(args)
        return 0 if config is None else _run_config(config, args)
    _common.refuse_target(args.out, SUFFIXES)
    if rank() > 0:  # there is nothing to share out
        return 0
    pipe = load(_common.request_of(args))
    images = draw(
        pipe,
        [args.prompt] * args.count,
        seeds=range(args.seed, args.seed + args.count),
        steps=args.steps,
        guidance=args.guidance,
        width=args.width,
        height=args.height,
        progress=args.progress,
    )
    for number, image in enumerate(images):
        path = args.out if args.count == 1 else args.out.with_stem(f"{args.out.stem}-{args.seed + number}")
        save(image, path)
        print(path)
    return 0


def _run_config(config: RunConfig, args: argparse.Namespace) -> int:
    """Draw as a config says: images and the whole config are written to output_dir/run_name."""
    from ...training import draw_config

    if "prompt" not in config.given:
        raise SettingsError("prompt is not set", "images need a prompt", 'Set it in the file, or add prompt="a text"')
    folder = Path(config.output_dir).expanduser() / config.run_name
    _common.refuse_target(folder / "config.yml")
    result = draw_config(config, folder, progress=args.progress)
    if result is None:  # another process than the first
        return 0
    if args.json:
        _common.print_json(result.to_dict())
    else:
        print("\n".join(result.pictures))
    return 0
