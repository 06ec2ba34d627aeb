"""Say what a load would do, and the bytes of it, before anything is loaded."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core import LONE
from ...errors import MissingComponentError, SettingsError
from ...rules import MixSpec
from .. import _common

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from ...planning import ComponentPlan, Peak, Plan

_log = logging.getLogger(__name__)

NAMED = 2  # weights that are named where many stay as they are; --json names all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a load, and the image size for which to predict the peak memory."""
    _common.add_request_flags(parser)
    parser.add_argument("--width", type=_common.positive, help="pixels of an image (default: the model's)")
    parser.add_argument("--height", type=_common.positive, help="pixels of an image (default: the model's)")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="of a mix: draw its formats block by block, and its curve"
    )
    _common.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, and print."""
    from ...compat import hardware
    from ...planning import meta_models, peak_memory, prepare, step_time
    from ...utils.figure import require
    from ...utils.images import SUFFIXES, save

    if args.picture is not None:
        _common.refuse_target(args.picture, SUFFIXES)
        require()
    plan = prepare(_common.request_of(args), machine := hardware.probe())
    if args.picture is not None:
        save(_picture(plan), args.picture, optimize=True)
    try:
        traced = meta_models.trace_plan(plan, width=args.width, height=args.height)
        step = step_time.step(plan, traced, machine)
        plan = dataclasses.replace(plan, peak=peak_memory.predict(plan, machine, traced=traced), foreseen=step)
    except MissingComponentError as error:  # as of a lone file without a config, of which only the tensors are known
        _log.info("cannot predict the peak memory: %s", error)
    if args.json:
        _common.print_json(plan.to_dict())
        return 0
    as_bf16 = sum(part.bytes_bf16 for part in plan.components)
    rows = [_row(part) for part in plan.components]
    rows.append(("total", "", "", "", _common.size(as_bf16), _planned(plan), f"{plan.bytes / as_bf16:.2f}"))
    print(plan.path)
    facts = (plan.family or "unknown family", f"offload {plan.offload}", f"device {plan.device}")
    print(", ".join(facts) + (f", budget {_common.size(plan.budget)}" if plan.budget is not None else ""))
    print()
    header = ("component", "quantization", "runtime", "quantized", "as bf16", "planned", "of bf16")
    print(_common.table(header, rows, left=3))
    for name, file in _files(plan):
        print(f"\n{name} is read from {file}")
    if plan.peak is not None:
        print(f"\n{_peak(plan.peak, plan.device, plan.is_least)}")
    if plan.foreseen is not None and plan.why is None and any(part.weights for part in plan.components):
        print(f"\n{step_time.said(plan.foreseen)}")
    if plan.why is not None:
        print(f"\nchosen: {plan.why}")
    for part in plan.components:
        if isinstance(part.spec, MixSpec):
            print("\n" + "\n".join(_mixed(part.name, part.spec)))
    if plan.curve is not None:
        print("\npredicted quality of the outputs, by size")
        print(_common.table(("stored as", "weights", "quality"), plan.curve.rows()))
    lines = [line for part in plan.components for line in _kept(part)]
    if lines:
        print("\nstay as they are")
        print("\n".join(lines))
    for line in plan.warnings:
        print(f"\nwarning: {line}")
    if args.picture is not None:
        print(f"\npicture: {args.picture}")
    return 0


def _picture(plan: Plan) -> Any:
    from ...evaluation import mix_sheet

    if plan.curve is None:
        raise SettingsError("Cannot draw a picture", "only a mix has one", "Add --quant auto and --size, such as 6GB")
    return mix_sheet(plan)


def _files(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield name and path of the components that are not read from the pipeline's folder."""
    folder = Path(plan.base or plan.path)
    for part in plan.components:
        if part.name != LONE and part.path is not None and not Path(part.path).is_relative_to(folder):
            yield part.name, part.path


def _peak(peak: Peak, device: str, is_least: bool) -> str:
    """Describe the peak memory on the device and its parts in words."""
    parts = [f"{_common.size(peak.weights)} of weights at once"]
    if peak.copied:
        parts.append(f"{_common.size(peak.copied)} of OpenVINO's copy of them")
    if peak.scratch:
        parts.append(f"{_common.size(peak.scratch)} for decoding them")
    if peak.activations is not None:
        most = max(peak.parts, key=lambda name: peak.parts[name] or 0)
        parts.append(f"{_common.size(peak.activations)} of activations ({most})")
    if peak.kernels:
        parts.append(f"{_common.size(peak.kernels)} of oneDNN's kernels")
    if peak.unused:
        parts.append(f"{_common.size(peak.unused)} of freed memory")
    text = f"at the most {_common.size(peak.bytes)} on {device}: {', '.join(parts)}"
    if is_least:
        text += "; more where SDNQ's dynamic selection gives weights more bits"
    if peak.activations is None:
        return f"{text}; activations come on top, which shapes alone do not tell"
    return text


def _planned(sized: ComponentPlan | Plan) -> str:
    return ("at least " if sized.is_least else "") + _common.size(sized.bytes)


def _row(part: ComponentPlan) -> tuple[str, ...]:
    done = {"keep": "as it is", "found": f"{', '.join(part.formats)}, as found"}.get(
        part.action, f"{part.spec} ({part.mode})"
    )
    return (
        part.name,
        done,
        (f"{part.runtime}, {part.compute}" if part.compute else part.runtime) if part.weights else "-",
        f"{len(part.weights)} weights" if part.weights else "products" if part.products else "-",
        _common.size(part.bytes_bf16),
        _planned(part),
        f"{part.bytes / part.bytes_bf16:.2f}",
    )


def _mixed(name: str, mix: MixSpec) -> Iterator[str]:
    """Yield lines about the weights of a mix that got most and fewest bits, and what one more step would bring."""
    rows = sorted(mix.shares, key=lambda share: (16.0 if share.spec is None else share.spec.scheme.bits, share.name))
    for title, some in (("most bits", rows[::-1][:NAMED]), ("fewest bits", rows[:NAMED])):
        yield f"{name}, {title}"
        for share in some:
            noise, after = _noise(share.noise), _noise(share.next_noise)
            more = f"; {_common.size(share.next_bytes)} more would make it {after}" if share.next_bytes else ""
            word = "as it is" if share.spec is None else str(share.spec)
            yield f"  {share.name.removesuffix('.weight')}: {word}, {noise}{more}"


def _noise(share: float) -> str:
    return "no noise" if share <= 0 else f"{-10 * math.log10(share):.0f} dB below the output"


def _kept(part: ComponentPlan) -> Iterator[str]:
    """Yield a line for each reason why weights of a component are not quantized."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, reason in part.kept.items():
        groups[reason].append(name)
    for reason, names in groups.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        yield f"  {part.name}: {', '.join(names[:NAMED])}{more}\n    {reason}"
