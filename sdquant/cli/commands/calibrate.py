"""Find over prompts what quality needs to know of a model, or ranges of activations; goes on where it was stopped.

Without rules and a scheme, everything is found that schemes, options and mixes can use: magnitudes and second moments
of the inputs of each layer, and how much noise in a layer changes the output of its model.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ...core import NO_OFFLOAD
from ...errors import SettingsError
from .. import _common

if TYPE_CHECKING:
    import argparse

    from ...rules import QuantizationRule
    from ...training import Calibration

log = logging.getLogger(__name__)

_FLAGS = (
    "rules", "components", "base", "device", "dtype", "offload", "budget", "allow_pickle", "parts", "variant",
    "revision", "subfolder", "token",
    "progress",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the rules, the prompts and image settings, and the output file."""
    _common.add_request_flags(parser, only=_FLAGS)
    parser.add_argument(
        "-q", "--quant", metavar="S", help="a scheme that smooths inputs, svdq-int4 or svdq-nvfp4: only what it needs"
    )
    parser.add_argument("--preset", help="a preset of rules, such as int8, instead of --rules")
    parser.add_argument("--config", metavar="CONFIG.yml", help="the config file whose preset or rules are meant")
    parser.add_argument("--prompt", action="append", default=[], metavar="PROMPT", help="what to draw (repeat)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a text file with a prompt on each line")
    parser.add_argument(
        "--count", type=_common.positive, default=1, help="images of each prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", metavar="SIZE", default="1GB",
        help="without rules and a scheme: how large the file may be (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--gradients", type=_whole, default=3, metavar="N",
        help="without rules and a scheme: steps of an image whose output gets a gradient, which takes as much memory "
        "as training; 0 for none (default: %(default)s)",
    )  # fmt: skip
    _common.add_image_flags(parser, seed_of="the first image")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("quant_stats.safetensors"), help="the ranges (default: %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Load the float model, draw, write. Under torchrun, every process draws some of the images."""
    from ... import offload
    from ...loading import load_planned
    from ...planning import prepare
    from ...rules import statistics_file
    from ...saving import model_files
    from ...training import Calibration, calibrate, prepare_models, refuse_unfollowed
    from ...utils.distributed import processes

    _common.refuse_target(args.out, (".safetensors",))
    model_files.refuse_existing(args.out, args.overwrite)
    request = _common.request_of(
        args, quant=None, rules=None, components=None, offload=NO_OFFLOAD, budget=None, config=None
    )  # all components are loaded, whichever are calibrated
    offloaded = _common.request_of(args, quant=None, config=None)  # --config is another thing here
    _common.refuse_auto(offloaded, "calibration runs the unquantized model in an explicit offload mode")
    rules, components = _rules(args)
    task = Calibration(
        model=request.path,
        rules=rules,
        prompts=(*args.prompt, *_lines(args.prompts)),
        count=args.count,
        seed=args.seed,
        steps=args.steps,
        guidance=args.guidance,
        width=args.width,
        height=args.height,
        components=components,
        quant=args.quant,
        limit=args.limit,
        gradients=args.gradients if offloaded.offload == NO_OFFLOAD else 0,
    )
    if task.for_quality and task.gradients != args.gradients:
        log.warning("no gradients with offload=%s: weights are not there when they are needed", offloaded.offload)
    plan = prepare(request)
    refuse_unfollowed(plan, task)
    with processes() as here:
        pipe = load_planned(dataclasses.replace(request, progress=request.progress and here.rank == 0), plan)
        models = prepare_models(pipe, task)
        if (mode := offloaded.offload_mode) is not None and mode.name != NO_OFFLOAD:
            pipe.sdquant.offload.remove()
            handle = offload.apply(pipe, mode, device=pipe.sdquant.plan.device, budget=offloaded.budget_bytes)
            pipe.sdquant = dataclasses.replace(pipe.sdquant, offload=handle)
        partial = args.out.with_name(f"{args.out.name}.rank{here.rank}of{here.count}.partial")
        try:
            stats = calibrate(pipe, task, models=models, partial=partial, processes=here, progress=args.progress)
        except KeyboardInterrupt:
            if partial.exists():
                log.warning("%s holds the ranges found so far: run the same command again to resume", partial)
            raise
        if here.first:
            statistics_file.write_statistics(args.out, stats, {"task": task.to_dict()})
        here.barrier()
        partial.unlink(missing_ok=True)
    if here.first:
        end = ".rows" if task.for_quality else ".count"
        _say(args, task, sorted(models), sum(name.endswith(end) for name in stats))
    return 0


def _rules(args: argparse.Namespace) -> tuple[tuple[QuantizationRule, ...], tuple[str, ...]]:
    """Return the rules of --rules, --preset (with static ranges) or --config, and the components that they are for.

    Raises:
        SettingsError: several of these and --quant are set, or the preset does not quantize activations.
    """
    from ...training import config, quantization_of

    ways = {f"--{name}": getattr(args, name) for name in ("quant", "rules", "preset", "config")}
    flags = [flag for flag, value in ways.items() if value is not None]
    if len(flags) > 1:
        why = f"{' and '.join(flags)} cannot be combined"
        raise SettingsError("Cannot calibrate", why, f"Use at most one of {', '.join(ways)}")
    components = tuple(args.components or ())
    if args.quant is not None or not flags:
        return (), components
    if args.rules is not None:
        # The whole is refused here, if it is to be.
        rules = _common.request_of(args, quant=None, offload=args.offload, config=None).rules
        assert rules is not None
        return rules, components
    words = [] if args.config else ["use_qwix_quantization=true", f"quantization={args.preset}"]
    read = config.load(args.config, [*words, f"quant_stats={args.out}"])
    return quantization_of(read).rules or (), components or tuple(read.components or ())


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"Cannot read --prompts {file}", f"it is not readable text: {error}", "Name a text file"
        ) from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _whole(text: str) -> int:
    return 0 if text.strip() == "0" else _common.positive(text)


def _say(args: argparse.Namespace, task: Calibration, components: list[str], layers: int) -> None:
    images = len(task.images)
    if args.json:
        _common.print_json({"out": str(args.out), "components": components, "layers": layers, "images": images})
        return
    what = "statistics" if task.for_quality else "ranges"
    print(f"{args.out}: {what} of {layers} layers of {' and '.join(components)}, from {images} images")
    if task.for_quality:
        print(f"Use them: sdquant quantize {args.path} OUT -q SCHEME --quant-stats {args.out}")
        return
    if args.quant is not None:
        print(f"Use them: sdquant quantize {args.path} OUT -q {args.quant} --quant-stats {args.out}")
        return
    with_rules = f"{args.path} PROMPT --rules {args.rules} --quant-stats {args.out}"
    with_config = f"{args.config or 'CONFIG.yml'} quant_stats={args.out}"
    if args.preset is not None:
        with_config += f" use_qwix_quantization=true quantization={args.preset}"
    print(f"Use them: sdquant generate {with_rules if args.rules is not None else with_config}")
